"""Rollouts with actions and costs, and their adjoint sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..checkpointing import OfflineSnapshots, check_count, walk_back
from . import _tree
from ._field import graph_leaves

Step = Callable[[int, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class RolloutGradient:
    """The value of a rollout's cost and all its derivatives.

    Parameters
    ----------
    adjoints : like the state, leading axis H + 1
        lambda_t = dJ/dz_t, everything after t recomputed from z_t and the cost at t included.
    actions : like the actions, leading axis H
        dJ/da_t.
    params : like the parameters
        dJ/dtheta.
    z0 : like the state
        dJ/dz_0 = lambda_0.
    cost : scalar Tensor
        J.
    """

    adjoints: Any
    actions: Any
    params: Any
    z0: Any
    cost: Float[Tensor, ""]


class _Rollout:
    """A checked rollout on lists of leaves."""

    def __init__(self, step, z0, actions, params, stage_cost, terminal_cost, snapshots):
        if not callable(step):
            raise TypeError(f"`step` must be callable, got {step!r}")
        for argument, function in (("stage_cost", stage_cost), ("terminal_cost", terminal_cost)):
            if function is not None and not callable(function):
                raise TypeError(f"`{argument}` must be callable or None, got {function!r}")
        check_count("snapshots", snapshots)
        self.step, self.stage_cost, self.terminal_cost = step, stage_cost, terminal_cost
        self.snapshots = snapshots
        self.z0, self._z = _leaves("z0", z0)
        self.actions, self._a = _leaves("actions", actions)
        self.params, self._p = _leaves("params", params)
        for leaf in self.z0:
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(
                    f"`z0` must hold floating-point tensors, got {leaf.dtype}; cast it, or move "
                    "counters to the index `i` that `step` receives"
                )
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in self.actions}
        if len(lengths) != 1 or None in lengths:
            raise ValueError(
                "`actions` must hold tensors that share a leading axis, one entry per step; got "
                f"leading axes {sorted(map(str, lengths)) or 'of no tensor at all'} (pass "
                "torch.arange(H) if the step takes no action)"
            )
        self.horizon: int = self.actions[0].shape[0]

    def action(self, i: int, leaves: Sequence[Tensor] | None = None) -> Any:
        """a[i]."""
        return self._a([leaf[i] for leaf in (self.actions if leaves is None else leaves)])

    def advance(self, i: int, z: Sequence[Tensor], a: Any, p: Sequence[Tensor]) -> list[Tensor]:
        """The leaves of z[i + 1]."""
        new = _tree.flatten(self.step(i, self._z(z), a, self._p(p)))[0]
        got = [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in new]
        if got != [(x.shape, x.dtype) for x in z]:
            raise TypeError(
                "`step` must return the structure, shapes and dtypes of `z0`, "
                f"{[(tuple(x.shape), x.dtype) for x in z]}, got {got}"
            )
        return new

    def paid(self, i: int, z: Sequence[Tensor], a: Any, p: Sequence[Tensor]) -> Tensor | None:
        """The stage cost at i."""
        if self.stage_cost is None:
            return None
        return _scalar("stage_cost", self.stage_cost(i, self._z(z), a, self._p(p)))

    def end(self, z: Sequence[Tensor], p: Sequence[Tensor]) -> Tensor | None:
        """The terminal cost."""
        if self.terminal_cost is None:
            return None
        return _scalar("terminal_cost", self.terminal_cost(self._z(z), self._p(p)))

    def state(self, leaves: Sequence[Tensor]) -> Any:
        """The structure of the state around leaves."""
        return self._z(leaves)

    def run(self, z, actions, params, states: list | None):
        """Cost and final state; every state is appended to `states`."""
        cost = torch.zeros((), dtype=z[0].real.dtype, device=z[0].device)
        for i in range(self.horizon):
            if states is not None:
                states.append(z)
            a = self.action(i, actions)
            paid = self.paid(i, z, a, params)
            cost = cost if paid is None else cost + paid
            z = self.advance(i, z, a, params)
        if states is not None:
            states.append(z)
        paid = self.end(z, params)
        return (cost if paid is None else cost + paid), z


def _leaves(argument: str, tree: Any):
    leaves, unflatten = _tree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"`{argument}` must hold tensors, got {type(leaf).__name__}")
    return leaves, unflatten


def _scalar(argument: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        came = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"`{argument}` must return one real floating-point scalar, got {came}")
    return value.reshape(())


def _leaf(x: Tensor) -> Tensor:
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x


class _Sweep:
    """lambda_t = c_z + F_t^T lambda_{t+1}, and the gradients it yields on the way."""

    def __init__(self, r: _Rollout, actions, params, g_cost: Tensor, keep_adjoints: bool):
        self.r, self.g_cost = r, g_cost
        self.params = [_leaf(p) for p in params]
        self.actions = actions
        self.d_params: list[Tensor | None] = [None] * len(params)
        self.d_actions = [torch.zeros_like(a) for a in actions]
        self.adjoints: list[list[Tensor]] | None = [] if keep_adjoints else None
        self.checked: tuple[Tensor, ...] | None = None

    def start(self, z) -> None:
        """lambda_H."""
        with torch.enable_grad():
            z = [_leaf(x) for x in z]
            paid = self.r.end(z, self.params)
        self.adjoint = [torch.zeros_like(x) for x in z]
        self._pull([] if paid is None else [paid], [self.g_cost], z, [])

    def reverse(self, i: int, z) -> None:
        """lambda_i from lambda_{i+1}, given z_i."""
        with torch.enable_grad():
            z = [_leaf(x) for x in z]
            a = [_leaf(x[i]) for x in self.actions]
            following = self.r.advance(i, z, self.r._a(a), self.params)
            paid = self.r.paid(i, z, self.r._a(a), self.params)
        outs, cots = list(following), list(self.adjoint)
        if paid is not None:
            outs.append(paid)
            cots.append(self.g_cost)
        self.adjoint = [torch.zeros_like(x) for x in z]
        for total, part in zip(self.d_actions, self._pull(outs, cots, z, a), strict=True):
            if part is not None:
                total[i] = part

    def _pull(self, outs, cots, z, a):
        pairs = [(out, cot) for out, cot in zip(outs, cots, strict=False) if out.requires_grad]
        inputs = [*z, *a, *self.params]
        wanted = [x for x in inputs if x.requires_grad]
        grads: list[Tensor | None] = [None] * len(inputs)
        if pairs:
            if self.checked is not None:
                _refuse_hidden([out for out, _ in pairs], wanted)
            found = iter(
                torch.autograd.grad(
                    [out for out, _ in pairs], wanted, [cot for _, cot in pairs], allow_unused=True
                )
            )
            grads = [next(found) if x.requires_grad else None for x in inputs]
        self.adjoint = [
            old if new is None else old + new
            for old, new in zip(self.adjoint, grads[: len(z)], strict=True)
        ]
        for k, part in enumerate(grads[len(z) + len(a) :]):
            if part is not None:
                total = self.d_params[k]
                self.d_params[k] = part.clone() if total is None else total.add_(part)
        if self.adjoints is not None:
            self.adjoints.append(self.adjoint)
        return grads[len(z) : len(z) + len(a)]

    def advance(self, z, n0: int, n1: int):
        """Repeat steps n0, ..., n1 - 1 without a graph."""
        with torch.no_grad():
            for i in range(n0, n1):
                z = self.r.advance(i, z, self.r.action(i, self.actions), self.params)
        return z

    def gradients(self):
        """(actions, params) with zeros where nothing depends on a leaf."""
        params = [
            torch.zeros_like(p) if d is None and p.requires_grad else d
            for p, d in zip(self.params, self.d_params, strict=True)
        ]
        return self.d_actions, params


def _refuse_hidden(outs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    for out in outs:
        leaves, *_ = graph_leaves(out, None, known)
        if leaves:
            raise ValueError(
                f"`step` or a cost uses a tensor of shape {tuple(leaves[0].shape)} that needs a "
                "gradient and is not in `params`: put it there, or leave `snapshots` out"
            )


def _store(r: _Rollout, z, actions, params):
    """Run forward without a graph; return cost, final state and how to walk back."""
    if r.snapshots is None or r.horizon == 0:
        states: list = []
        cost, z = r.run(z, actions, params, states)
        return cost, z, states, None
    store = OfflineSnapshots(r.horizon, r.snapshots)
    total = [torch.zeros((), dtype=z[0].real.dtype, device=z[0].device)]

    def advance(z, n0: int, n1: int):
        for i in range(n0, n1):
            a = r.action(i, actions)
            paid = r.paid(i, z, a, params)
            if paid is not None:
                total[0] = total[0] + paid
            z = r.advance(i, z, a, params)
        return z

    z = store.forward(z, advance)
    paid = r.end(z, params)
    return (total[0] if paid is None else total[0] + paid), z, None, store


def _walk_back(sweep: _Sweep, z, states, store) -> None:
    sweep.start(z)
    if store is not None:
        store.backward(sweep.advance, sweep.reverse)
        return
    for i in range(sweep.r.horizon - 1, -1, -1):
        sweep.reverse(i, states[i])


class _CheckpointedRollout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, *leaves):  # type: ignore[override]
        z, actions, params = _split(r, leaves)
        cost, z, _, store = _store(r, list(z), actions, params)
        ctx.save_for_backward(*leaves, *z)
        ctx.r, ctx.store = r, store
        return cost, *z

    @staticmethod
    def backward(ctx, g_cost, *g_z):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a rollout with `snapshots` has no second derivative; leave `snapshots` out"
            )
        r, store = ctx.r, ctx.store
        count = len(r.z0)
        leaves, z = ctx.saved_tensors[:-count], ctx.saved_tensors[-count:]
        start, actions, params = _split(r, leaves)
        sweep = _Sweep(r, actions, params, g_cost, keep_adjoints=False)
        sweep.checked = ()
        sweep.start(z)
        sweep.adjoint = [x + g for x, g in zip(sweep.adjoint, g_z, strict=True)]
        walk_back(store, start, sweep.advance, sweep.reverse)
        d_actions, d_params = sweep.gradients()
        return None, *sweep.adjoint, *d_actions, *d_params


def _split(r: _Rollout, leaves):
    n, m = len(r.z0), len(r.actions)
    return list(leaves[:n]), list(leaves[n : n + m]), list(leaves[n + m :])


def rollout(
    step: Step,
    z0: Float[Tensor, "*state"] | Any,
    actions: Float[Tensor, " horizon *action"] | Any,
    params: Any,
    *,
    stage_cost: Callable[..., Float[Tensor, ""]] | None = None,
    terminal_cost: Callable[..., Float[Tensor, ""]] | None = None,
    snapshots: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " horizon+1 *state"] | Any]:
    """Run z[i+1] = step(i, z[i], a[i], params) and add up its cost.

        J = sum_i stage_cost(i, z[i], a[i], params) + terminal_cost(z[H], params)

    Parameters
    ----------
    step : callable
        `step(i, z, a, params)`, returning the structure of z; i is an int.
    z0 : tensor or nest of floating-point tensors
        The first state.
    actions : tensor or nest of tensors, leading axis H
        One action per step.
    params : tensor or nest of tensors
    stage_cost : callable, optional
        `stage_cost(i, z, a, params)`, a real scalar.
    terminal_cost : callable, optional
        `terminal_cost(z, params)`, a real scalar.
    snapshots : int, optional
        Keep this many states for the backward pass and repeat steps with the binomial schedule.
        None records the graph of every step.

    Returns
    -------
    cost : scalar Tensor
        J, differentiable in z0, actions and params.
    states : like the state, leading axis H + 1
        z_0, ..., z_H; with `snapshots` only the final state z_H, without the leading axis.

    Raises
    ------
    TypeError
        If `step` does not return the structure, shapes and dtypes of `z0`, if `z0` is not
        floating point, or if a cost is not a real scalar.
    ValueError
        If the actions do not share a leading axis, if `snapshots` is less than 1, or, with
        snapshots and in the backward pass, if `step` uses a tensor that needs a gradient and is not
        in `params`.
    """
    r = _Rollout(step, z0, actions, params, stage_cost, terminal_cost, snapshots)
    if snapshots is None or r.horizon == 0:
        states: list = []
        cost, _ = r.run(r.z0, r.actions, r.params, states)
        return cost, r.state([torch.stack(column) for column in zip(*states, strict=True)])
    cost, *z = _CheckpointedRollout.apply(r, *r.z0, *r.actions, *r.params)
    return cost, r.state(z)


def rollout_adjoint(
    step: Step,
    z0: Float[Tensor, "*state"] | Any,
    actions: Float[Tensor, " horizon *action"] | Any,
    params: Any,
    *,
    stage_cost: Callable[..., Float[Tensor, ""]] | None = None,
    terminal_cost: Callable[..., Float[Tensor, ""]] | None = None,
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
    r = _Rollout(step, z0, actions, params, stage_cost, terminal_cost, snapshots)
    with torch.no_grad():
        cost, z, states, store = _store(r, r.z0, r.actions, r.params)
    sweep = _Sweep(r, r.actions, r.params, torch.ones_like(cost), keep_adjoints=True)
    _walk_back(sweep, z, states, store)
    assert sweep.adjoints is not None
    adjoints = [torch.stack(column) for column in zip(*sweep.adjoints[::-1], strict=True)]
    d_actions, d_params = sweep.gradients()
    return RolloutGradient(
        r.state(adjoints), r._a(d_actions), r._p(d_params), r.state(sweep.adjoint), cost
    )
