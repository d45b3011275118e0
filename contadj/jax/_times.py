"""How the steps' ends move with t0, t1 and dt0: one rule per step-size controller.

The steps that a controller accepted are held fixed in number and in their ratios, as Diffrax holds
them fixed by not differentiating the controller's factors:

- `ConstantStepSize`: t_n = t0 + (t1 - t0) n / N, but the first step, which ends at t0 + dt0.
- `StepTo`: the given times.
- `PIDController`: each step is a constant times the one before; the last ends at t1.
- `ClipStepSizeController`: as the controller inside, but steps that end at a `step_ts` or a
  `jump_ts` move with it.
"""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp

from . import _tree

PyTree = Any


class PaddedMesh(diffrax.StepTo):
    """Steps to given times, `count` of them, the last one repeated to fill the array.

    One compilation then serves every number of steps.
    """

    count: Any

    def __init__(self, ts, count):
        self.ts, self.count = ts, count

    def wrap(self, direction):
        return self

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        return self.ts[1], 2


FIXED = (diffrax.ConstantStepSize, diffrax.StepTo, PaddedMesh)


def number_of_steps(controller: Any, controller_state: PyTree) -> Any:
    """How many steps a controller will take, where that is known beforehand; else None."""
    if type(controller) is PaddedMesh:
        return controller.count
    if type(controller) is diffrax.StepTo:
        return jnp.int32(len(controller.ts) - 1)
    if type(controller) is diffrax.ConstantStepSize:
        return controller_state[1].astype(jnp.int32)
    return None


class MeshCotangent(eqx.Module):
    """Cotangents of what the mesh depends on, and of the steps not yet visited.

    `at_tnext` is due to the end of the step before, `shrink` to its length.
    """

    t0: Any
    t1: Any
    tnext: Any
    controller: PyTree
    controller_state: PyTree
    at_tnext: Any
    shrink: Any

    def __init__(self, solve):
        zero = jnp.zeros_like(solve.t0)
        self.t0 = self.t1 = self.tnext = self.at_tnext = self.shrink = zero
        self.controller = _tree.zeros(solve.controller)
        self.controller_state = _tree.zeros(solve.controller_state)


def require_rule(controller: diffrax.AbstractStepSizeController, adjoint: str) -> None:
    """Refuse a controller whose mesh moves in an unknown way."""
    inner = controller
    if type(inner) is diffrax.ClipStepSizeController and inner.store_rejected_steps is None:
        inner = inner.controller
    if type(inner) not in (*FIXED, diffrax.PIDController):
        raise NotImplementedError(
            f"`adjoint=contadj.jax.{adjoint}()` does not know how the steps of "
            f"`stepsize_controller={type(controller).__name__}(...)` move with t0, t1 or dt0, "
            "which are being differentiated; wrap them in `jax.lax.stop_gradient`, or use "
            "`adjoint=contadj.jax.DirectAdjoint()`"
        )


def pull_step(solve, n, step, before, d_tprev, d_tnext, mesh: MeshCotangent) -> MeshCotangent:
    """Pass on the cotangents of step n's two ends.

    Parameters
    ----------
    solve : Solve
    n : int array
        Number of the accepted step.
    step, before : Step
        The step, and the one before it (anything where n = 0).
    d_tprev, d_tnext : scalar
        Cotangents of its ends, those through later steps excluded.
    mesh : MeshCotangent
        What the later steps have left.
    """
    controller = solve.controller
    end = d_tnext + mesh.at_tnext + mesh.shrink
    begin = d_tprev - mesh.shrink
    first = n == 0
    at_t1 = step.tnext == solve.t1
    zero = jnp.zeros_like(end)
    mesh = eqx.tree_at(lambda m: (m.at_tnext, m.shrink), mesh, (zero, zero))

    if type(controller) is diffrax.ConstantStepSize:
        # Its state: steps done, number of steps, t0, t1.
        share = (n + 1) / solve.controller_state[1].astype(end.dtype)
        inside = jnp.where(first | at_t1, 0, end)
        state = list(mesh.controller_state)
        state[2] = state[2] + inside * (1 - share)
        state[3] = state[3] + inside * share
        mesh = eqx.tree_at(lambda m: m.controller_state, mesh, tuple(state))
        return _finish(mesh, first, begin, jnp.where(first, end, 0), jnp.where(
            first | ~at_t1, 0, end
        ))  # fmt: skip
    if isinstance(controller, diffrax.StepTo):
        inside = jnp.where(first | at_t1, 0, end)
        mesh = eqx.tree_at(
            lambda m: m.controller.ts, mesh, mesh.controller.ts.at[n + 1].add(inside)
        )
        return _finish(mesh, first, begin, jnp.where(first, end, 0), jnp.where(
            first | ~at_t1, 0, end
        ))  # fmt: skip

    # The step is a constant times its first attempt, if attempts were rejected.
    whole = step.attempt - step.tprev
    kept = (step.tnext - step.tprev) / jnp.where(whole == 0, 1, whole)
    begin, end = begin + end * (1 - kept), end * kept
    # Where the first attempt ended: at t1, at a given time, or freely. That of the first step was
    # decided outside.
    pinned = (step.attempt == solve.t1) & ~first
    mesh = eqx.tree_at(lambda m: m.t1, mesh, mesh.t1 + jnp.where(pinned, end, 0))
    inner: Any = controller
    if type(controller) is diffrax.ClipStepSizeController:
        inner = controller.controller
        for name in ("step_ts", "jump_ts"):
            times = getattr(controller, name)
            if times is None:
                continue
            # A step to a jump ends one floating-point number before it.
            ends = jnp.nextafter(times, -jnp.inf) if name == "jump_ts" else times
            hit = (ends == step.attempt) & ~pinned & ~first
            moved = getattr(mesh.controller, name) + jnp.where(hit, end, 0)
            mesh = eqx.tree_at(lambda m, name=name: getattr(m.controller, name), mesh, moved)
            pinned = pinned | jnp.any(hit)
    # A free attempt: a constant times the step before.
    length = before.tnext - before.tprev
    ratio = whole / jnp.where(length == 0, 1, length)
    if inner.dtmax is not None:
        ratio = jnp.where(whole >= inner.dtmax * (1 - 1e-12), 0, ratio)
    free = jnp.where(pinned | first, 0, end)
    mesh = eqx.tree_at(lambda m: m.shrink, mesh, free * ratio)
    return _finish(mesh, first, begin + free, jnp.where(first, end, 0), zero)


def _finish(mesh: MeshCotangent, first, begin, d_first_end, d_t1) -> MeshCotangent:
    """The start of a step is the end of the one before, and of the first it is t0."""
    return eqx.tree_at(
        lambda m: (m.t0, m.t1, m.tnext, m.at_tnext),
        mesh,
        (
            mesh.t0 + jnp.where(first, begin, 0),
            mesh.t1 + d_t1,
            mesh.tnext + d_first_end,
            jnp.where(first, 0, begin),
        ),
    )
