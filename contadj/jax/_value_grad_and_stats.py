"""A value, its gradient, and the statistics of the backward pass behind it."""

from __future__ import annotations

from collections.abc import Callable

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class BackwardStats(eqx.Module):
    """What the backward pass of a solve did; sums over the solves, where there are several.

    Parameters
    ----------
    accepted, rejected : scalar
        Steps of the backward solve, or steps that were made again.
    f_evaluations : scalar
        Evaluations of the vector field, each followed by its vector-Jacobian product where the
        gradient needs one; nan for solvers whose count varies.
    reversal_error : scalar
        max over the pieces of the backward solve of |y rebuilt - y stored| / max_n |y_n|; zero
        where y is not rebuilt.
    """

    accepted: Float[Array, ""]
    rejected: Float[Array, ""]
    f_evaluations: Float[Array, ""]
    reversal_error: Float[Array, ""]


def value_grad_and_stats(
    fn: Callable[..., Float[Array, ""]], adjoint: diffrax.AbstractAdjoint
) -> Callable[..., tuple[Float[Array, ""], PyTree, BackwardStats]]:
    """Turn a scalar function of a solve into one that also returns its gradient and statistics.

    The statistics leave the backward pass as the cotangent of an input that the adjoint carries,
    since a vector-Jacobian product has no other way out; they work under `jax.jit` and `jax.vmap`.

    Parameters
    ----------
    fn : callable
        `fn(x, *args, adjoint) -> scalar`, which hands `adjoint` to `diffrax.diffeqsolve`.
    adjoint : diffrax.AbstractAdjoint
        A CheckpointAdjoint, ReversibleAdjoint, BacksolveAdjoint, InterpolatingAdjoint or
        GaussAdjoint.

    Returns
    -------
    callable
        `(x, *args) -> (value, gradient, stats)`; the gradient is that in x.

    Raises
    ------
    TypeError
        If the adjoint keeps no statistics.
    """
    if not hasattr(adjoint, "probe"):
        raise TypeError(
            f"`adjoint` {type(adjoint).__name__} keeps no statistics of its backward pass; use "
            "CheckpointAdjoint, ReversibleAdjoint or BacksolveAdjoint of contadj.jax"
        )

    def run(x, *args):
        def value(inputs):
            x, probe = inputs
            probed = eqx.tree_at(lambda a: a.probe, adjoint, probe, is_leaf=lambda v: v is None)
            return fn(x, *args, adjoint=probed)

        probe = jnp.zeros(4)
        out, (gradient, stats) = eqx.filter_value_and_grad(value)((x, probe))
        return out, gradient, BackwardStats(*stats)

    return run
