"""Solvers made from the shared tableaus, against Diffrax's own of the same coefficients."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

from contadj import TABLEAUS
from contadj.jax import get_solver
from contadj.jax._steps import evaluations, fresh_step

EXPLICIT = [name for name, tableau in TABLEAUS.items() if tableau.explicit]
TWINS = {
    "euler": diffrax.Euler, "midpoint": diffrax.Midpoint, "heun2": diffrax.Heun,
    "ralston": diffrax.Ralston, "bosh3": diffrax.Bosh3, "tsit5": diffrax.Tsit5,
    "dopri5": diffrax.Dopri5, "dopri8": diffrax.Dopri8,
}  # fmt: skip
Y0 = jnp.array([1.0, 0.5])


def field(t, y, args):
    return jnp.stack([jnp.cos(t) * y[1] + 0.3, -jnp.sin(y[0]) * t])


TERM = diffrax.ODETerm(field)


def solve(solver, **more):
    arguments = {"dt0": 0.1, "saveat": diffrax.SaveAt(t1=True)} | more
    return diffrax.diffeqsolve(TERM, solver, 0.0, 2.0, y0=Y0, **arguments)


@pytest.mark.parametrize("name", TWINS)
def test_a_tableau_steps_as_diffrax_does_with_the_same_coefficients(name):
    # 40 ulp: twenty steps, sums taken in another order; dopri8's coefficients go up to 50.
    got, want = solve(get_solver(name)).ys, solve(TWINS[name]()).ys
    np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("name", ["bosh3", "tsit5", "dopri5", "dopri8"])
def test_dense_output_is_that_of_diffrax(name):
    saveat = diffrax.SaveAt(ts=jnp.array([0.033, 0.97, 1.999]))
    got, want = (solve(s, saveat=saveat).ys for s in (get_solver(name), TWINS[name]()))
    np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("name", ["bosh3", "tsit5", "dopri5", "dopri8"])
def test_step_size_control_takes_the_steps_that_diffrax_takes(name):
    more = {"stepsize_controller": diffrax.PIDController(1e-6, 1e-9), "dt0": None}
    got, want = solve(get_solver(name), **more), solve(TWINS[name](), **more)
    assert got.stats["num_steps"] == want.stats["num_steps"]
    np.testing.assert_allclose(got.ys, want.ys, rtol=1e-11)


@pytest.mark.parametrize("name", ["heun2", "rk4", "rk4_classic", "heun3", "midpoint", "ralston"])
def test_methods_without_an_interpolant_have_cubic_dense_output(name):
    # Inside one step of size h the error is that of the method or of the cubic, O(h^4).
    errors = []
    for h in (0.2, 0.1):
        saveat = diffrax.SaveAt(ts=jnp.array([0.37 * h]))
        got, exact = (
            diffrax.diffeqsolve(TERM, solver, 0.0, h, dt, Y0, saveat=saveat).ys
            for solver, dt in ((get_solver(name), h), (diffrax.Dopri8(), h / 20))
        )
        errors.append(float(jnp.linalg.norm(got - exact)))
    assert np.log2(errors[0] / errors[1]) > min(4, TABLEAUS[name].order + 1) - 0.5


@pytest.mark.parametrize("name", ["euler", "heun3", "rk4", "rk4_classic"])
def test_a_method_without_an_error_estimate_refuses_step_size_control(name):
    with pytest.raises(RuntimeError, match="does not provide error estimates"):
        solve(get_solver(name), stepsize_controller=diffrax.PIDController(1e-6, 1e-9))


@pytest.mark.parametrize("name", EXPLICIT)
def test_the_unrolled_step_is_the_step_of_the_solver(name):
    solver = get_solver(name)
    y = Y0
    for n in range(3):
        t0, t1 = 0.1 * n, 0.1 * (n + 1)
        got = fresh_step(solver)(TERM, t0, t1, y, None)
        state = solver.init(TERM, t0, t1, y, None)
        want = solver.step(TERM, t0, t1, y, None, state, made_jump=False)[0]
        np.testing.assert_allclose(got, want, rtol=4e-15)
        y = got


def test_the_step_of_an_implicit_solver_is_differentiated_as_a_function_of_y_alone():
    solver = diffrax.Kvaerno3(root_finder=optimistix.Newton(rtol=1e-13, atol=1e-13))
    term = diffrax.ODETerm(lambda t, y, a: -a * y)
    step = fresh_step(solver)

    def value(y, a):
        return step(term, 0.0, 0.1, y, a)[0]

    # A linear problem: the step is multiplication by the stability function R(-0.1 a).
    y, a = jnp.array([2.0]), jnp.asarray(3.0)
    d_y, d_a = jax.grad(value, argnums=(0, 1))(y, a)
    np.testing.assert_allclose(d_y[0], value(y, a) / 2.0, rtol=1e-12)
    h = 1e-5
    np.testing.assert_allclose(d_a, (value(y, a + h) - value(y, a - h)) / (2 * h), rtol=1e-9)


@pytest.mark.parametrize("name", EXPLICIT)
def test_the_number_of_evaluations_of_a_step_is_counted_right(name):
    calls = []

    def counted(t, y, args):
        calls.append(1)
        return -y

    def step(y):
        return fresh_step(get_solver(name))(diffrax.ODETerm(counted), 0.0, 0.1, y, None)

    compiled = jax.make_jaxpr(step)(Y0)
    assert compiled is not None
    # Every stage is traced once; the one that only dense output or the error need is not used.
    tableau = get_solver(name).tableau
    assert len(calls) == tableau.num_stages
    assert evaluations(get_solver(name)) == TABLEAUS[name].evaluations


def test_a_diffrax_solver_is_found_by_the_name_of_its_class():
    assert isinstance(get_solver("Kvaerno5"), diffrax.Kvaerno5)


@pytest.mark.parametrize("name", ["tsit6", "AbstractSolver", "diffeqsolve", "HalfSolver", 5, None])
def test_an_unknown_method_raises_with_the_names_there_are(name):
    with pytest.raises(ValueError, match="`method`"):
        get_solver(name)
