"""ReversibleAdjoint: the coupled scheme written out here, its memory, its reversal error."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contadj.jax import ReversalWarning, ReversibleAdjoint, get_solver, value_grad_and_stats


def field(t, y, a):
    return jnp.stack([a * y[1] * jnp.cos(t), -jnp.sin(y[0])])


def solved(x, steps, adjoint, **more):
    y0, a, t1 = x
    arguments = {"dt0": t1 / steps, "max_steps": steps} | more
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field), get_solver("rk4_classic"), 0.0, t1, y0=y0, args=a, adjoint=adjoint,
        **arguments,
    ).ys  # fmt: skip


def by_hand(x, steps, coupling):
    """The coupling around the textbook Runge-Kutta step, differentiated by JAX alone."""
    y0, a, t1 = x
    h = t1 / steps

    def gain(t, h, y):
        k1 = field(t, y, a)
        k2 = field(t + h / 2, y + h / 2 * k1, a)
        k3 = field(t + h / 2, y + h / 2 * k2, a)
        k4 = field(t + h, y + h * k3, a)
        return h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def body(pair, n):
        y, z = pair
        y1 = coupling * y + (1 - coupling) * z + gain(n * h, h, z)
        return (y1, z - gain((n + 1) * h, -h, y1)), None

    (y, _), _ = jax.lax.scan(body, (y0, y0), jnp.arange(steps))
    return jnp.sum(y**2)


POINT = (jnp.array([1.0, 0.5]), jnp.asarray(0.9), jnp.asarray(2.0))


@pytest.mark.parametrize("coupling", [0.99, 1.0])
def test_the_gradient_is_that_of_the_coupled_scheme_to_rounding(coupling):
    value = lambda x: jnp.sum(solved(x, 64, ReversibleAdjoint(coupling)) ** 2)  # noqa: E731
    got, want = jax.value_and_grad(value)(POINT), jax.value_and_grad(by_hand)(POINT, 64, coupling)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
    for g, w in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12)


def test_with_step_size_control_and_observations_it_converges_to_the_exact_gradient():
    # y' = -a t y: closed form. The Hermite output between steps is cubic, 1e-6 at steps of 0.05.
    ts = jnp.array([0.3, 0.8, 1.5])

    def value(y0, a):
        return jnp.sum(diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * t * y), diffrax.Dopri5(), 0.0, 1.5, None, y0, a,
            adjoint=ReversibleAdjoint(0.999), max_steps=512, saveat=diffrax.SaveAt(ts=ts),
            stepsize_controller=diffrax.PIDController(1e-9, 1e-9),
        ).ys)  # fmt: skip

    def exact(y0, a):
        return jnp.sum(y0 * jnp.exp(-a * ts**2 / 2))

    got, want = jax.grad(value, (0, 1))(1.2, 0.7), jax.grad(exact, (0, 1))(1.2, 0.7)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_gradient_works_under_vmap():
    value = lambda y0: jnp.sum(solved((y0, 0.9, 2.0), 16, ReversibleAdjoint()) ** 2)  # noqa: E731
    y0 = jnp.array([[1.0, 0.5], [0.2, -0.3]])
    got = jax.vmap(jax.grad(value))(y0)
    want = [jax.grad(by_hand)((y, 0.9, 2.0), 16, 0.99)[0] for y in y0]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_the_reversal_error_grows_as_round_off_over_l_to_the_n():
    def reversal(steps, coupling):
        fn = lambda x, adjoint: jnp.sum(solved(x, steps, adjoint))  # noqa: E731
        adjoint = ReversibleAdjoint(coupling, reversal_tolerance=np.inf)
        run = jax.jit(value_grad_and_stats(fn, adjoint))
        return float(run(POINT)[2].reversal_error)

    # 1e-16 * 0.99^-1000 = 2e-12, and 1e-16 * 0.99^-3000 = 1e-3.
    assert reversal(1_000, 0.99) < 1e-9
    assert 1e-6 < reversal(3_000, 0.99) < 1
    assert reversal(3_000, 0.999) < 1e-11


def test_memory_does_not_grow_with_the_number_of_steps():
    def temporary_bytes(steps):
        def value(y0):
            return jnp.sum(diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: -0.1 * jnp.sin(y)), diffrax.Heun(), 0.0, 1.0,
                1.0 / steps, y0, adjoint=ReversibleAdjoint(0.999), max_steps=steps,
            ).ys)  # fmt: skip

        y0 = jax.ShapeDtypeStruct((131_072,), jnp.float64)
        compiled = jax.jit(jax.grad(value)).lower(y0).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(10_000) / temporary_bytes(100) < 1.05


def test_a_reversal_error_above_the_tolerance_is_warned_of_with_its_remedy():
    def run(coupling):
        adjoint = ReversibleAdjoint(coupling)
        jax.block_until_ready(jax.grad(lambda x: jnp.sum(solved(x, 512, adjoint)))(POINT))
        jax.effects_barrier()

    run(0.99)
    with pytest.warns(ReversalWarning, match="`coupling` closer to 1"):
        run(0.5)


@pytest.mark.filterwarnings("error::contadj.jax.ReversalWarning")
def test_a_solution_that_is_zero_throughout_is_reversed_without_a_warning():
    def total(y0, adjoint):
        return jnp.sum(solved((y0, *POINT[1:]), 8, adjoint))

    run = jax.jit(value_grad_and_stats(total, ReversibleAdjoint()))
    _, gradient, stats = run(jnp.zeros(2))
    jax.effects_barrier()
    # The system is odd in y, so the central difference is exact up to O(step^2).
    step = 1e-5
    ahead, behind = (
        total(jnp.array([sign * step, 0.0]), ReversibleAdjoint()) for sign in (1.0, -1.0)
    )
    np.testing.assert_allclose(gradient[0], (ahead - behind) / (2 * step), rtol=1e-9)
    assert stats.reversal_error == 0.0


@pytest.mark.parametrize("coupling", [0, -0.1, 1.01, "near one"])
def test_a_coupling_outside_its_range_raises(coupling):
    with pytest.raises(ValueError, match="`coupling`"):
        ReversibleAdjoint(coupling)


def test_an_implicit_solver_is_refused_with_what_to_use():
    with pytest.raises(NotImplementedError, match=r"explicit Runge-Kutta.*CheckpointAdjoint"):
        diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.ImplicitEuler(), 0.0, 1.0, 0.1, POINT[0], 0.9,
            adjoint=ReversibleAdjoint(), stepsize_controller=diffrax.PIDController(1e-3, 1e-3),
        )  # fmt: skip


def stiff(steps):
    """The gradient of slow_fast with K = 20 by the coupling around rk4_classic."""

    def value(K):
        term = diffrax.ODETerm(
            lambda t, y, K: jnp.stack([-K * (y[0] - jnp.cos(y[1])), -y[1] + y[0]])
        )
        ys = diffrax.diffeqsolve(
            term, get_solver("rk4_classic"), 0.0, 1.0, 1 / steps, jnp.array([2.0, 1.0]), K,
            adjoint=ReversibleAdjoint(), max_steps=steps,
        ).ys  # fmt: skip
        return (ys[0, 1] - 1) ** 2

    gradient = jax.jit(jax.grad(value))(20.0)
    jax.effects_barrier()
    return gradient


def test_a_coupling_that_is_unstable_on_a_stiff_problem_is_warned_about():
    with pytest.warns(ReversalWarning, match="two states of the reversible coupling are apart"):
        stiff(128)


def test_a_coupling_on_a_stiff_problem_is_not_warned_about_where_the_steps_are_small():
    assert np.isfinite(stiff(512))  # a warning is an error here
