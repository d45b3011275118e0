"""Implicit methods and implicit_step: orders, symplectic pairs, the implicit function theorem."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contadj import TABLEAUS
from contadj.jax import CheckpointAdjoint, builtin_problem, get_solver, implicit_step
from contadj.jax._study import gradient_function

IMPLICIT = [name for name, tableau in TABLEAUS.items() if not tableau.explicit]
# Steps of the pair at which the order shows; order 5 and above is at round-off soon after.
PAIRS = {"gl6": (8, 16), "radauIIA5": (16, 32), "gl4": (32, 64)}


@pytest.mark.parametrize("method", IMPLICIT)
def test_the_discrete_gradient_and_lambda_converge_at_the_order_of_the_method(method):
    problem = builtin_problem("nonaut")
    pair = PAIRS.get(method, (64, 128))
    run = gradient_function(problem, method=method, adjoint="DirectAdjoint", max_steps=pair[1])
    gradients, adjoints = [], []
    for n in pair:
        got = run(n)
        want = np.stack([problem.adjoint(t) for t in got.mesh])
        gradients.append(np.linalg.norm(got.gradient.vector - problem.gradient.vector))
        adjoints.append(np.max(np.abs(got.adjoint - want)))
    tolerance = 0.15 if TABLEAUS[method].order < 5 else 0.4
    for errors in (gradients, adjoints):
        order = np.log2(errors[0] / errors[1])
        assert order == pytest.approx(TABLEAUS[method].order, abs=tolerance)


@pytest.mark.parametrize("method", ["implicit_midpoint", "gl4", "gl6"])
def test_symplectic_and_symmetric_methods_have_no_gap(method):
    # Discretise-then-optimise is optimise-then-discretise (Sanz-Serna 2016).
    discrete, continuous = (
        gradient_function(builtin_problem("pend"), method=method, adjoint=a, max_steps=8)(8)
        for a in ("DirectAdjoint", "BacksolveAdjoint")
    )
    scale = np.linalg.norm(discrete.gradient.vector)
    gap = np.linalg.norm(discrete.gradient.vector - continuous.gradient.vector)
    assert gap < 1e-13 * scale
    assert continuous.reversal_error < 1e-14
    np.testing.assert_allclose(discrete.adjoint, continuous.adjoint, atol=1e-13 * scale)


@pytest.mark.parametrize("adjoint", ["DirectAdjoint", "CheckpointAdjoint"])
def test_evaluations_that_a_root_finder_makes_are_not_counted_rather_than_none_at_all(adjoint):
    run = gradient_function(builtin_problem("lin"), method="gl4", adjoint=adjoint, max_steps=2)
    assert (run(2).f_evaluations_forward, run(2).f_evaluations_backward) == (None, None)


def test_the_trapezoid_rule_retraces_the_state_but_has_a_gap_of_order_two():
    gaps = []
    for n in (32, 64):
        discrete, continuous = (
            gradient_function(builtin_problem("pend"), method="trapezoid", adjoint=a, max_steps=n)(
                n
            )
            for a in ("DirectAdjoint", "BacksolveAdjoint")
        )
        assert continuous.reversal_error < 1e-14
        gaps.append(np.linalg.norm(discrete.gradient.vector - continuous.gradient.vector))
    assert np.log2(gaps[0] / gaps[1]) == pytest.approx(2, abs=0.1)


def test_an_implicit_tableau_goes_into_diffeqsolve_with_an_exact_adjoint():
    # The linear test problem: R(-a h)^N, with gl4's stability function.
    def value(a):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * y), get_solver("gl4"), 0.0, 1.0, 0.1,
            jnp.asarray([1.0]), a, adjoint=CheckpointAdjoint(), max_steps=16,
        ).ys[0, 0]  # fmt: skip

    def exact(a):
        z = -0.1 * a
        return ((1 + z / 2 + z**2 / 12) / (1 - z / 2 + z**2 / 12)) ** 10

    got, want = jax.value_and_grad(value)(0.7), jax.value_and_grad(exact)(0.7)
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_an_implicit_step_has_the_derivatives_of_the_implicit_function_theorem():
    # x^3 + a x = b: dx/da = -x / (3 x^2 + a), dx/db = 1 / (3 x^2 + a)
    b = jnp.asarray(2.0)

    def root(a, b):
        return implicit_step(lambda x, a: x**3 + a * x - b, jnp.asarray(1.0), a)

    a = jnp.asarray(0.7)
    x = root(a, b)
    np.testing.assert_allclose(x**3 + a * x, b, rtol=1e-15)
    slope = 1 / (3 * x**2 + a)
    np.testing.assert_allclose(jax.grad(root, (0, 1))(a, b), (-x * slope, slope), rtol=1e-14)
    # d2x/db2 = -6 x (dx/db)^3, forward over reverse and reverse over reverse
    for second in (jax.jacfwd(jax.grad(root, 1), 1), jax.grad(jax.grad(root, 1), 1)):
        np.testing.assert_allclose(second(a, b), -6 * x * slope**3, rtol=1e-13)


def test_an_implicit_step_in_float32_goes_to_its_rounding():
    x = implicit_step(lambda x: x**2 - 2, jnp.float32(1.0))
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, np.sqrt(2), rtol=2e-7)


def test_an_implicit_step_that_does_not_converge_raises():
    with pytest.raises(Exception, match=r"maximum number of (solver )?steps|diverged|nonlinear"):
        implicit_step(lambda x: x**2 + 1, jnp.asarray(0.3), max_iterations=20)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"guess": 1}, TypeError, "`guess`"),
        ({"residual": lambda x: (x, x)}, TypeError, "`residual`"),
        ({"max_iterations": 0}, ValueError, "`max_iterations`"),
        ({"rtol": -1.0}, ValueError, "`rtol`"),
    ],
)
def test_a_wrong_argument_of_an_implicit_step_raises_and_is_named(arguments, error, message):
    arguments = {"residual": lambda x: x - 1.0, "guess": 0.0} | arguments
    with pytest.raises(error, match=message):
        implicit_step(**arguments)
