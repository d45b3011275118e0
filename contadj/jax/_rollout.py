"""Rollouts with actions and costs, and their adjoint sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, PyTree

from . import _tree
from ._revolve import Schedule, reverse

State = PyTree
Step = Callable[[Any, State, PyTree, PyTree], State]


class RolloutGradient(eqx.Module):
    """The value of a rollout's cost and all its derivatives.

    Parameters
    ----------
    adjoints : pytree like the state, leading axis H + 1
        lambda_t = dJ/dz_t, everything after t recomputed from z_t and the cost at t included.
    actions : pytree like the actions, leading axis H
        dJ/da_t.
    params : pytree like the parameters
        dJ/dtheta.
    z0 : pytree like the state
        dJ/dz_0 = lambda_0.
    cost : scalar
        J.
    """

    adjoints: PyTree
    actions: PyTree
    params: PyTree
    z0: PyTree
    cost: Float[Array, ""]


class _Rollout(eqx.Module):
    """The functions of a rollout, with the arrays that they close over as leaves."""

    step: Callable
    stage_cost: Callable | None
    terminal_cost: Callable | None
    horizon: int = eqx.field(static=True)
    snapshots: int | None = eqx.field(static=True)

    def stage(self, i, z, a, params):
        """Next state, and the cost paid at i."""
        cost = None if self.stage_cost is None else self.stage_cost(i, z, a, params)
        return self.step(i, z, a, params), cost

    def end(self, z, params):
        return None if self.terminal_cost is None else self.terminal_cost(z, params)


def _signature(tree: PyTree) -> tuple:
    leaves, structure = jtu.tree_flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _require_scalar(argument: str, value: PyTree) -> None:
    leaves = jtu.tree_leaves(value)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not jnp.issubdtype(leaves[0].dtype, jnp.floating)
    ):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves) or "nothing"
        raise TypeError(f"`{argument}` must return one real floating-point scalar, got {got}")


def _prepare(step, z0, actions, params, stage_cost, terminal_cost, snapshots):
    """Check the arguments; return the rollout and the arguments as arrays."""
    arrays = lambda tree: jtu.tree_map(  # noqa: E731
        # With its dtype given, a Python float becomes an array that keeps its dtype.
        lambda x: jnp.asarray(x, jnp.result_type(x)) if eqx.is_array_like(x) else x,
        tree,
    )
    z0, actions, params = arrays(z0), arrays(actions), arrays(params)
    lengths = {jnp.shape(x)[0] if jnp.ndim(x) else None for x in jtu.tree_leaves(actions)}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            "`actions` must hold arrays that share a leading axis, one entry per step; got "
            f"leading axes {sorted(map(str, lengths)) or 'of no array at all'} "
            "(pass e.g. jnp.arange(H) if the step takes no action)"
        )
    horizon = next(iter(jtu.tree_leaves(actions))).shape[0]
    for argument, function in (("stage_cost", stage_cost), ("terminal_cost", terminal_cost)):
        if function is not None and not callable(function):
            raise TypeError(f"`{argument}` must be callable or None, got {function!r}")
    if not callable(step):
        raise TypeError(f"`step` must be callable, got {step!r}")
    if snapshots is not None and (not isinstance(snapshots, int) or snapshots < 1):
        raise ValueError(f"`snapshots` must be None or an int of at least 1, got {snapshots!r}")
    for x in jtu.tree_leaves(z0):
        if not eqx.is_inexact_array(x):
            raise TypeError(
                f"`z0` must hold floating-point arrays, got {jnp.result_type(x)}; cast it, or move "
                "counters to the index `i` that `step` receives"
            )

    action = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), actions)
    example = (
        jnp.int32(0),
        z0,
        jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), action),
        params,
    )
    out = eqx.filter_eval_shape(step, *example)
    if _signature(out) != _signature(z0):
        raise TypeError(
            f"`step` must return the structure, shapes and dtypes of `z0`, {eqx.tree_pformat(z0)}; "
            f"got {eqx.tree_pformat(out)}"
        )
    convert = eqx.filter_closure_convert
    if stage_cost is not None:
        _require_scalar("stage_cost", eqx.filter_eval_shape(stage_cost, *example))
        stage_cost = convert(stage_cost, *example)
    if terminal_cost is not None:
        _require_scalar("terminal_cost", eqx.filter_eval_shape(terminal_cost, z0, params))
        terminal_cost = convert(terminal_cost, z0, params)
    if snapshots is not None:
        snapshots = min(snapshots, max(horizon, 1))
    functions = _Rollout(convert(step, *example), stage_cost, terminal_cost, horizon, snapshots)
    return functions, z0, actions, params


def _forward(functions: _Rollout, z0, actions, params):
    """Cost, states z_0, ..., z_H, and what the backward sweep needs of them."""
    zero = jnp.zeros((), jnp.finfo(jnp.result_type(*jtu.tree_leaves(z0))).dtype)
    if functions.snapshots is None:
        indices = stored = None
    else:
        schedule = Schedule(max(functions.horizon, 1), functions.snapshots)
        indices, _ = schedule.first_sweep(jnp.int32(functions.horizon))
        stored = _tree.write(_tree.buffer(functions.snapshots, z0), 0, z0)

    def body(carry, x):
        z, cost, stored, slot = carry
        i, a = x
        if indices is not None:
            hit = indices[jnp.minimum(slot, len(indices) - 1)] == i
            stored = lax.cond(
                hit & (slot < len(indices)),
                lambda s: _tree.write(s, slot, z),
                lambda s: s,
                stored,
            )
            slot = slot + jnp.where(hit, 1, 0)
        following, paid = functions.stage(i, z, a, params)
        cost = cost if paid is None else cost + paid
        return (following, cost, stored, slot), z

    steps = jnp.arange(functions.horizon, dtype=jnp.int32)
    (z, cost, stored, _), states = lax.scan(
        body, (z0, zero, stored, jnp.int32(1)), (steps, actions)
    )
    paid = functions.end(z, params)
    cost = cost if paid is None else cost + paid
    states = jtu.tree_map(lambda x, last: jnp.concatenate([x, last[None]]), states, z)
    kept = states if indices is None else (indices, jnp.sum(indices >= 0), stored, z)
    return cost, states, kept


def _sweep(functions: _Rollout, actions, params, kept, g_cost, g_states, keep_adjoints):
    """The adjoint sweep: lambda_t = c_z + F_t^T lambda_{t+1}, and the cotangents it yields.

    `g_cost` scales the cost; `g_states` (or None) is a cotangent of the states.
    """
    horizon = functions.horizon
    last = kept[3] if functions.snapshots is not None else _tree.read(kept, horizon)
    _, pull = _tree.vjp(lambda f, z, p: f.end(z, p), functions, last, params)
    d_functions, adjoint, d_params = pull(None if functions.terminal_cost is None else g_cost)
    adjoint = _tree.materialise(adjoint, last)

    def visited(i, adjoint):
        return adjoint if g_states is None else _tree.add(adjoint, _tree.read(g_states, i))

    adjoint = visited(horizon, adjoint)

    def one(i, z, a, adjoint, sums):
        _, pull = _tree.vjp(lambda f, z, a, p: f.stage(i, z, a, p), functions, z, a, params)
        paid = None if functions.stage_cost is None else g_cost
        d_f, adjoint, d_action, d_p = pull((adjoint, paid))
        return visited(i, adjoint), d_action, _tree.add(sums, (d_f, d_p))

    sums = _tree.materialise((d_functions, d_params), eqx.filter((functions, params), eqx.is_array))
    if functions.snapshots is None:

        def body(carry, x):
            adjoint, sums = carry
            i, z, a = x
            adjoint, d_action, sums = one(i, z, a, adjoint, sums)
            return (adjoint, sums), (d_action, adjoint if keep_adjoints else None)

        steps = jnp.arange(horizon, dtype=jnp.int32)
        before = jtu.tree_map(lambda x: x[:-1], kept)
        (first, sums), (d_actions, adjoints) = lax.scan(
            body, (adjoint, sums), (steps, before, actions), reverse=True
        )
        if keep_adjoints:
            adjoints = jtu.tree_map(
                lambda x, end: jnp.concatenate([x, end[None]]), adjoints, adjoint
            )
    else:
        indices, count, stored, _ = kept

        def pull_back(i, z, carry):
            adjoint, sums, d_actions, adjoints = carry
            adjoint, d_action, sums = one(i, z, _tree.read(actions, i), adjoint, sums)
            d_actions = _tree.write(d_actions, i, d_action)
            if keep_adjoints:
                adjoints = _tree.write(adjoints, i, adjoint)
            return adjoint, sums, d_actions, adjoints

        def advance(i, z):
            return functions.step(i, z, _tree.read(actions, i), params)

        adjoints = None
        if keep_adjoints:
            adjoints = _tree.write(_tree.buffer(horizon + 1, last), horizon, adjoint)
        (first, sums, d_actions, adjoints), _ = reverse(
            Schedule(max(horizon, 1), functions.snapshots),
            jnp.int32(horizon), indices, count, stored, advance, pull_back,
            (adjoint, sums, _tree.zeros(actions), adjoints),
        )  # fmt: skip
    d_functions, d_params = sums
    return d_functions, first, d_actions, d_params, adjoints


@eqx.filter_custom_vjp
def _solve(arguments):
    cost, states, _ = _forward(*arguments)
    return cost, states


@_solve.def_fwd
def _solve_fwd(perturbed, arguments):
    cost, states, kept = _forward(*arguments)
    return (cost, states), kept


@_solve.def_bwd
def _solve_bwd(kept, cotangents, perturbed, arguments):
    functions, _, actions, params = arguments
    g_cost, g_states = cotangents
    if all(x is None for x in jtu.tree_leaves(g_states, is_leaf=lambda x: x is None)):
        g_states = None
    g_cost = jnp.zeros(()) if g_cost is None else g_cost
    d_functions, d_z0, d_actions, d_params, _ = _sweep(
        functions, actions, params, kept, g_cost, g_states, keep_adjoints=False
    )
    return d_functions, d_z0, d_actions, d_params


def rollout(
    step: Step,
    z0: State,
    actions: PyTree,
    params: PyTree,
    *,
    stage_cost: Callable[..., Float[Array, ""]] | None = None,
    terminal_cost: Callable[..., Float[Array, ""]] | None = None,
    snapshots: int | None = None,
) -> tuple[Float[Array, ""], State]:
    """Run z[i+1] = step(i, z[i], a[i], params) and add up its cost.

        J = sum_i stage_cost(i, z[i], a[i], params) + terminal_cost(z[H], params)

    Reverse-mode differentiation (`jax.grad`, and `jax.jvp` of it) runs the adjoint sweep of
    `rollout_adjoint`: the states are kept, never the activations of a step.

    Parameters
    ----------
    step : callable
        `step(i, z, a, params)`, returning the structure of z; i is an int32 scalar. It may close
        over arrays, and gradients reach those too.
    z0 : pytree of floating-point arrays
        The first state.
    actions : pytree of arrays, leading axis H
        One action per step.
    params : pytree of arrays
    stage_cost : callable, optional
        `stage_cost(i, z, a, params)`, a real scalar.
    terminal_cost : callable, optional
        `terminal_cost(z, params)`, a real scalar.
    snapshots : int, optional
        Keep this many states for the backward sweep and recompute the others, as few times as
        possible; None keeps all H. The states returned are then the only array of length H, and
        under `jax.jit` they cost nothing where they are not used.

    Returns
    -------
    cost : scalar
        J.
    states : pytree like the state, leading axis H + 1
        z_0, ..., z_H.

    Raises
    ------
    TypeError
        If `step` does not return the structure, shapes and dtypes of `z0`, if `z0` is not
        floating point, or if a cost is not a real scalar.
    ValueError
        If the actions do not share a leading axis, or `snapshots` is less than 1.
    """
    arguments = _prepare(step, z0, actions, params, stage_cost, terminal_cost, snapshots)
    return _solve(arguments)


def rollout_adjoint(
    step: Step,
    z0: State,
    actions: PyTree,
    params: PyTree,
    *,
    stage_cost: Callable[..., Float[Array, ""]] | None = None,
    terminal_cost: Callable[..., Float[Array, ""]] | None = None,
    snapshots: int | None = None,
) -> RolloutGradient:
    """Differentiate a rollout's cost in one backward sweep of vector-Jacobian products.

        lambda_H = dc_H/dz,   lambda_t = dc_t/dz + F_t^T lambda_{t+1},
        dJ/da_t = dc_t/da + G_t^T lambda_{t+1},   dJ/dtheta = sum_t (dc_t/dtheta + ...)

    with F_t, G_t the derivatives of the step in z and a. No Jacobian is formed; the cost does not
    depend on the number of parameters.

    Parameters
    ----------
    step, z0, actions, params, stage_cost, terminal_cost, snapshots
        As in `rollout`.

    Returns
    -------
    RolloutGradient

    Raises
    ------
    TypeError, ValueError
        As in `rollout`.
    """
    arguments = _prepare(step, z0, actions, params, stage_cost, terminal_cost, snapshots)
    functions, z0, actions, params = arguments
    cost, _, kept = _forward(*arguments)
    _, d_z0, d_actions, d_params, adjoints = _sweep(
        functions, actions, params, kept, jnp.ones_like(cost), None, keep_adjoints=True
    )
    return RolloutGradient(adjoints, d_actions, d_params, d_z0, cost)
