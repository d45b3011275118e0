"""The discrete gradient by forward sensitivities."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.flatten_util import ravel_pytree

from .. import _diffrax
from .._forward import Options, Solve, leave, march, prepare, restore

PyTree = Any


class ForwardSensitivity(diffrax.AbstractAdjoint):
    """The discrete gradient in forward mode: dy/dp runs along with y, for p few numbers.

        S' = f_y S + f_p,   S = dy/dp,

    each step differentiated together with the step of y. Time and memory are proportional to the
    number of scalars differentiated, y0, parameters and times together, and no step is kept: the
    choice for few of them, or for steps without number. Both `jax.grad` and `jax.jvp` work, once.
    """

    def loop(self, *, init_state, **kwargs):
        solve, options = prepare("ForwardSensitivity", init_state=init_state, **kwargs)
        end, buffers = _solve(solve, options=options)
        end = restore(end, solve, options)
        return _diffrax.finished(init_state, end, buffers, solve.stepper.carries), {}


@eqx.filter_custom_jvp
def _solve(solve: Solve, *, options: Options):
    return leave(march(solve, options))


@_solve.def_jvp
def _solve_jvp(primals, tangents, *, options: Options):
    (solve,), (moved,) = primals, tangents
    active = jtu.tree_map(
        lambda x, v: None if v is None else x, solve, moved, is_leaf=lambda x: x is None
    )
    fixed = jtu.tree_map(
        lambda x, v: x if v is None else None, solve, moved, is_leaf=lambda x: x is None
    )
    if any(jnp.iscomplexobj(x) for x in jtu.tree_leaves(active)):
        raise NotImplementedError(
            "`adjoint=contadj.jax.ForwardSensitivity()` does not serve complex states or "
            "parameters; use `adjoint=contadj.jax.CheckpointAdjoint()`"
        )
    point, unravel = ravel_pytree(active)

    def run(point):
        out = leave(march(eqx.combine(unravel(point), fixed), options))
        inexact, rest = eqx.partition(out, eqx.is_inexact_array)
        return inexact, rest

    def along(direction):
        inexact, tangent, rest = jax.jvp(run, (point,), (direction,), has_aux=True)
        return (inexact, rest), tangent

    # The sensitivities first, then their product with the tangents: linear, so that it can be
    # transposed, which the loop over steps cannot.
    (inexact, rest), sensitivities = jax.vmap(along, out_axes=(None, 0))(jnp.eye(point.size))
    weights = ravel_pytree(eqx.filter(moved, eqx.is_array))[0]
    tangent = jtu.tree_map(
        lambda s: jnp.tensordot(weights.astype(s.dtype), s, axes=1), sensitivities
    )
    return eqx.combine(inexact, rest), tangent
