"""The discrete gradient from stored states: each step recomputed once and pulled back."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .. import _diffrax, _tree
from .._forward import Options, Solve, Step, leave, march, prepare, restore
from .._times import MeshCotangent, pull_step, require_rule

PyTree = Any


class CheckpointAdjoint(diffrax.AbstractAdjoint):
    """The discrete gradient, exact, keeping states and no activations.

    The forward solve keeps (t_n, y_n) of each accepted step. The backward sweep walks that frozen
    mesh once: it makes step n again and pulls the cotangents back through it,

        lambda_n = (dy_{n+1}/dy_n)^T lambda_{n+1} + (observations in the step),
        theta-bar += (dy_{n+1}/dtheta)^T lambda_{n+1}.

    Time follows the steps taken; memory is `capacity` states.

    Gradients with respect to t0, t1 and the times of `SaveAt(ts=...)` are those of the numerical
    solution, its mesh moving as the step-size controller moves it.

    Parameters
    ----------
    capacity : int, optional
        Room for accepted steps; `max_steps` where None. Buffers have a fixed size under `jax.jit`,
        so that a capacity near the number of steps taken saves memory and the time to clear it. A
        solve that needs more fails.
    """

    capacity: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.capacity is not None and (
            not isinstance(self.capacity, int) or self.capacity < 1
        ):
            raise ValueError(f"`capacity` must be None or an int of at least 1, got {self.capacity!r}")

    def loop(self, *, init_state, **kwargs):
        solve, options = prepare("CheckpointAdjoint", init_state=init_state, **kwargs)
        capacity = options.max_steps if self.capacity is None else self.capacity
        if capacity is None:
            raise ValueError(
                "`adjoint=contadj.jax.CheckpointAdjoint()` needs room for the steps: give "
                "`max_steps`, or `CheckpointAdjoint(capacity=...)`"
            )
        if options.max_steps is not None:
            capacity = min(capacity, options.max_steps)
        end, buffers = _solve(solve, options=options, capacity=capacity)
        return _diffrax.finished(init_state, restore(end, solve, options), buffers), {}


def _forward(solve: Solve, options: Options, capacity: int | None):
    if capacity is None:
        return march(solve, options)
    start = Step(
        solve.t0, solve.tnext, solve.tnext, solve.y0,
        solve.solver_state if solve.stepper.carries else None,
        None if options.made_jump is False or not solve.stepper.carries else options.made_jump,
        jnp.int32(0),
    )  # fmt: skip

    def keep(n, step: Step, record):
        if not solve.stepper.carries:
            step = eqx.tree_at(
                lambda s: (s.solver_state, s.made_jump), step, (None, None),
                is_leaf=lambda x: x is None,
            )  # fmt: skip
        elif options.made_jump is False:
            step = eqx.tree_at(lambda s: s.made_jump, step, None)
        return _tree.write(record, n, step)

    return march(
        solve, options, capacity=capacity, keep=keep, record=_tree.buffer(capacity, start)
    )


@eqx.filter_custom_vjp
def _solve(solve: Solve, *, options: Options, capacity: int):
    return leave(march(solve, options, capacity=capacity))


@_solve.def_fwd
def _solve_fwd(perturbed, solve: Solve, *, options: Options, capacity: int):
    end = _forward(solve, options, capacity)
    return leave(end), (end.record, end.accepted, end.ts_index, end.save_index)


@_solve.def_bwd
def _solve_bwd(residuals, cotangents, perturbed, solve: Solve, *, options, capacity):
    record, count, ts_index, _ = residuals
    _, (g_ts, g_ys) = cotangents
    moving = any(
        jtu.tree_leaves(
            (perturbed.t0, perturbed.t1, perturbed.tnext, perturbed.controller_state)
        )
    ) or any(jtu.tree_leaves(perturbed.controller))
    if moving:
        require_rule(solve.controller, "CheckpointAdjoint")
    return _sweep(solve, options, record, count, ts_index, g_ts, g_ys, perturbed, moving)


def _sweep(solve, options, record, count, ts_index, g_ts, g_ys, perturbed, moving):
    stepper, saving = solve.stepper, solve.saving
    # Only what is asked for is differentiated: constants among the leaves cost nothing.
    functions = (stepper, saving.fn)
    active, fixed = eqx.partition(functions, (perturbed.stepper, perturbed.saving.fn))
    g_ys = _tree.materialise(g_ys, options.ys)
    g_ts = jnp.zeros_like(options.ts) if g_ts is None else g_ts
    first = int(saving.t0)

    def saved(active, t, y):
        return eqx.combine(active, fixed)[1](t, y)

    def pull_saved(index, t, y):
        """Cotangents of (functions, t, y) from output `index`."""
        _, pull = _tree.vjp(saved, active, t, y)
        d_active, d_t, d_y = pull(_tree.read(g_ys, index))
        return d_active, g_ts[index] + (0 if d_t is None else d_t), d_y

    zero_y = _tree.zeros(solve.y0)
    sums = _tree.zeros(active)
    mesh = MeshCotangent(solve) if moving else None
    d_saved = None if saving.ts is None else jnp.zeros_like(saving.ts)
    adjoint = zero_y
    at_end = jnp.zeros_like(solve.t0)

    # The end: SaveAt(t1=True), and times asked for that no step reached (t0 = t1).
    last = _tree.read(record, jnp.maximum(count - 1, 0))
    if saving.t1 and saving.steps != 1:
        trivial = solve.t0 == solve.t1
        index = first + jnp.where(trivial, 0 if saving.ts is None else len(saving.ts), ts_index)
        if saving.steps:
            index = index + count // saving.steps
        pred = True if saving.steps == 0 else count % saving.steps != 0
        y_end, t_end = _end_state(stepper, last, solve, count)
        d_active, d_t, d_y = pull_saved(index, t_end, y_end)
        scale = jnp.where(pred, 1, 0)
        sums, adjoint = jtu.tree_map(
            lambda x: x * scale.astype(x.dtype), (_tree.add(sums, d_active), _tree.add(adjoint, d_y))
        )
        at_end = at_end + d_t * scale
    if saving.ts is not None:

        def trivial_one(j, carry):
            sums, adjoint = carry
            d_active, _, d_y = pull_saved(first + j, solve.t0, solve.y0)
            return _tree.add(sums, d_active), _tree.add(adjoint, d_y)

        asked = jnp.where(solve.t0 == solve.t1, len(saving.ts), 0)
        sums, adjoint = lax.fori_loop(0, asked, trivial_one, (sums, adjoint))

    d_state = None
    if stepper.carries:
        d_state = _tree.zeros(solve.solver_state)

    def body(k, carry):
        sums, adjoint, d_state, mesh, d_saved, seen, at_end = carry
        n = count - 1 - k
        step: Step = _tree.read(record, n)
        made_jump = options.made_jump if step.made_jump is None else step.made_jump
        if not stepper.carries:
            made_jump = False

        if saving.steps:
            due = (n + 1) % saving.steps == 0

        def again(active, tprev, tnext, y, state):
            y1, dense, state = eqx.combine(active, fixed)[0].replay(
                tprev, tnext, y, state, made_jump
            )
            return y1, None if saving.ts is None else dense, state

        (y1, dense, _), pull = _tree.vjp(
            again, active, step.tprev, step.tnext, step.y, step.solver_state
        )
        d_tnext = at_end
        if saving.steps:
            index = first + seen + (n + 1) // saving.steps - 1
            d_active, d_t, d_y = pull_saved(index, step.tnext, y1)
            one = jnp.where(due, 1, 0)
            scaled = jtu.tree_map(lambda x: x * one.astype(x.dtype), (d_active, d_y, d_t))
            sums, adjoint = _tree.add(sums, scaled[0]), _tree.add(adjoint, scaled[1])
            d_tnext = d_tnext + scaled[2]
        d_tprev = jnp.zeros_like(step.tprev)
        d_dense = None
        if saving.ts is not None:
            offset = first + (n // saving.steps if saving.steps else 0)

            def at(active, t, tprev, tnext, dense):
                stepper, fn = eqx.combine(active, fixed)
                return fn(t, stepper.evaluate(t, tprev, tnext, dense))

            def one_output(i, inner):
                sums, d_tprev, d_tnext, d_dense, d_saved = inner
                j = seen - 1 - i
                _, pull_out = _tree.vjp(
                    at, active, saving.ts[j], step.tprev, step.tnext, dense
                )
                d_active, d_t, d_a, d_b, d_k = pull_out(_tree.read(g_ys, offset + j))
                d_saved = d_saved.at[j].add(g_ts[offset + j] + d_t)
                return (
                    _tree.add(sums, d_active), d_tprev + d_a, d_tnext + d_b,
                    _tree.add(d_dense, d_k), d_saved,
                )  # fmt: skip

            start = (sums, d_tprev, d_tnext, _tree.zeros(dense), d_saved)
            sums, d_tprev, d_tnext, d_dense, d_saved = lax.fori_loop(
                0, seen - step.ts_index, one_output, start
            )
        d_active, d_a, d_b, d_y, d_state = pull((adjoint, d_dense, d_state))
        sums = _tree.add(sums, d_active)
        if mesh is not None:
            before: Step = _tree.read(record, jnp.maximum(n - 1, 0))
            mesh = pull_step(solve, n, step, before, d_tprev + d_a, d_tnext + d_b, mesh)
        return sums, d_y, d_state, mesh, d_saved, step.ts_index, jnp.zeros_like(at_end)

    start = (sums, adjoint, d_state, mesh, d_saved, ts_index, at_end)
    sums, adjoint, d_state, mesh, d_saved, _, at_start = lax.fori_loop(0, count, body, start)
    d_t0 = at_start
    if saving.t0:
        d_active, d_t, d_y = pull_saved(0, solve.t0, solve.y0)
        sums, adjoint, d_t0 = _tree.add(sums, d_active), _tree.add(adjoint, d_y), d_t0 + d_t

    d_stepper, d_fn = sums
    gradient = eqx.tree_at(
        lambda s: (s.stepper, s.saving.fn, s.saving.ts, s.y0, s.solver_state),
        eqx.filter(solve, lambda x: False),
        (d_stepper, d_fn, d_saved, adjoint, d_state),
        is_leaf=lambda x: x is None,
    )
    if mesh is not None:
        gradient = eqx.tree_at(
            lambda s: (s.controller, s.controller_state, s.t0, s.t1, s.tnext),
            gradient,
            (mesh.controller, mesh.controller_state, mesh.t0 + d_t0, mesh.t1, mesh.tnext),
            is_leaf=lambda x: x is None,
        )
    return gradient


def _end_state(stepper, last: Step, solve: Solve, count):
    """y and t after the last step, made again."""
    made_jump = False if last.made_jump is None else last.made_jump
    y, _, _ = stepper.replay(last.tprev, last.tnext, last.y, last.solver_state, made_jump)
    return _tree.where(count > 0, y, solve.y0), jnp.where(count > 0, last.tnext, solve.t0)
