"""ForwardSensitivity and the statistics of the backward pass."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contadj.jax import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    ReversibleAdjoint,
    value_grad_and_stats,
)
from contadj.jax._revolve import fewest_steps


def value(x, adjoint, steps=16, ts=(0.25, 1.0), **more):
    y0, a, t1 = x
    arguments = {"dt0": t1 / steps, "max_steps": steps} | more
    return jnp.sum(jnp.sin(diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, a: -a * y * jnp.cos(t)), diffrax.Tsit5(), 0.0, t1, y0=y0,
        args=a, adjoint=adjoint, saveat=diffrax.SaveAt(ts=jnp.asarray(ts)), **arguments,
    ).ys))  # fmt: skip


POINT = (jnp.array([1.0, 2.0]), jnp.asarray(0.8), jnp.asarray(1.0))


def test_forward_sensitivities_are_backpropagation_through_the_solve():
    got, want = (jax.grad(value)(POINT, a) for a in (ForwardSensitivity(), DirectAdjoint()))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-13, atol=1e-14)
    _, along = jax.jvp(lambda x: value(x, ForwardSensitivity()), (POINT,), (POINT,))
    slope = sum(jnp.sum(w * x) for w, x in zip(want, POINT, strict=True))
    np.testing.assert_allclose(along, slope, rtol=1e-13)


def test_forward_sensitivities_need_no_bound_on_the_number_of_steps():
    more = {"max_steps": None, "dt0": None, "ts": (0.5,),
            "stepsize_controller": diffrax.PIDController(1e-9, 1e-9)}  # fmt: skip
    d_y0, d_a, _ = jax.grad(value)(POINT, ForwardSensitivity(), **more)
    decay, growth = np.exp(-0.8 * np.sin(0.5)), -np.sin(0.5)
    y = np.array([1.0, 2.0]) * decay
    np.testing.assert_allclose(d_y0, np.cos(y) * decay, rtol=1e-7)
    np.testing.assert_allclose(d_a, np.sum(np.cos(y) * y * growth), rtol=1e-7)


@pytest.mark.filterwarnings("ignore:Complex dtype support")
def test_forward_sensitivities_refuse_complex_states():
    y0 = jnp.array([1.0 + 1j])
    with pytest.raises(NotImplementedError, match=r"complex.*CheckpointAdjoint"):
        jax.grad(lambda y0: jnp.abs(value((y0, 0.8, 1.0), ForwardSensitivity())))(y0)


@pytest.mark.parametrize(
    ("adjoint", "steps", "evaluations"),
    [
        (CheckpointAdjoint(), 16, 7 * 16),
        (CheckpointAdjoint(snapshots=3), "binomial", None),
        (ReversibleAdjoint(), 16, 4 * 7 * 16),
        # 6 per step; f afresh at the start and after the jump at 0.25.
        (BacksolveAdjoint(), 16, 6 * 16 + 2),
    ],
    ids=["checkpoint", "snapshots", "reversible", "backsolve"],
)
def test_the_statistics_of_the_backward_pass_count_its_steps_and_evaluations(
    adjoint, steps, evaluations
):
    out, gradient, stats = jax.jit(value_grad_and_stats(value, adjoint))(POINT)
    if steps == "binomial":
        # The first sweep has made the first descent of the binomial schedule.
        assert 16 < stats.accepted <= 16 + fewest_steps(16, 3)
    else:
        assert (stats.accepted, stats.rejected) == (steps, 0)
        assert stats.f_evaluations == evaluations
    rebuilds = isinstance(adjoint, (BacksolveAdjoint, ReversibleAdjoint))
    assert (0 < stats.reversal_error < 1e-8) if rebuilds else stats.reversal_error == 0
    np.testing.assert_allclose(out, value(POINT, adjoint), rtol=1e-14)
    for g, w in zip(gradient, jax.grad(value)(POINT, adjoint), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-13, atol=1e-14)


def test_the_statistics_of_a_batch_come_one_by_one():
    def one(a):
        controller = diffrax.PIDController(1e-6, 1e-6)
        fn = lambda a, adjoint: value(  # noqa: E731
            (POINT[0], a, 1.0), adjoint, dt0=None, max_steps=64, stepsize_controller=controller
        )
        return value_grad_and_stats(fn, BacksolveAdjoint(reversal_tolerance=np.inf))(a)[2]

    stats = jax.vmap(one)(jnp.array([0.1, 20.0]))
    assert stats.accepted[1] > 2 * stats.accepted[0]
    assert stats.reversal_error[1] > stats.reversal_error[0]


def test_an_adjoint_without_statistics_is_refused():
    with pytest.raises(TypeError, match="`adjoint` DirectAdjoint keeps no statistics"):
        value_grad_and_stats(value, DirectAdjoint())
