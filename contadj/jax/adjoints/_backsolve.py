"""The continuous gradient by the adjoint ODE in reverse time, y rebuilt on the way."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from ...reversal import check_reversal
from .. import _tree
from .._forward import RESULTS, Options, Solve, Stepper, clip_to_end, hundred_ulp, leave, march
from .._times import number_of_steps
from ._continuous import (
    Backward,
    ContinuousAdjoint,
    as_probe,
    backward_controller,
    pair,
    saved_times,
)
from ._reversal import Reversal, relative_size

PyTree = Any


class BacksolveAdjoint(ContinuousAdjoint):
    """The continuous gradient in O(1) memory: the adjoint ODE, solved in reverse time.

    From the last observation back to t0,

        y' = f(t, y),   lambda' = -f_y^T lambda,   theta-bar' = -f_theta^T lambda,

    are integrated together; at an observation time lambda jumps by dL/dy(t_i) and y is set back to
    the state that was saved there. The time of an observation has the gradient
    (dL/dy_i)^T f(t_i, y_i), and t0 has -lambda(t0)^T f(t0, y0).

    A solve with fixed steps (`ConstantStepSize`, `StepTo`) is retraced on the same mesh, an
    adaptive one with its own error control, which an observation does not restart.

    Rebuilding y backward amplifies errors where the solution contracts. The distance between the y
    that was rebuilt and the y that was saved is the reversal error, in the statistics of
    `value_grad_and_stats`, relative to the largest y of the forward solve.

    Parameters
    ----------
    method : str or diffrax.AbstractSolver, optional
        Method of the backward solve; that of the forward solve where None.
    rtol, atol : float, optional
        Tolerances of the backward solve; those of the forward solve where None. Given for a solve
        with fixed steps, both, they make the backward solve adaptive.
    seminorm : bool
        Leave theta-bar out of the error control: it is a quadrature, which feeds back on nothing.
    max_steps : int, optional
        Most attempted steps of the backward solve; that of the forward solve where None.
    restart_every : int, optional
        Store y every so many forward steps and set it back there; takes room for
        `max_steps / restart_every` states.
    reversal_tolerance : float
        Reversal error above which the gradient is reported as worthless.
    on_reversal : "warn" or "raise"
        What happens then: a `ReversalWarning`, under `jax.jit` too; or an error, which is nan in
        the gradient with `diffeqsolve(..., throw=False)`.

    References
    ----------
    Chen, Rubanova, Bettencourt & Duvenaud (2018), arXiv:1806.07366; seminorm: Kidger, Chen & Lyons
    (2021), arXiv:2009.09457.
    """

    restart_every: int | None = eqx.field(static=True, default=None)
    reversal_tolerance: float = eqx.field(static=True, default=1e-3)
    on_reversal: str = eqx.field(static=True, default="warn")

    def __check_init__(self):
        if self.restart_every is not None and (
            type(self.restart_every) is not int or self.restart_every < 1
        ):
            raise ValueError(
                f"`restart_every` must be None or an int of at least 1, got {self.restart_every!r}"
            )
        check_reversal(self.reversal_tolerance, self.on_reversal)

    def solve(self, inputs, *, options: Options, backward: Backward):
        if self.restart_every is not None and options.max_steps is None:
            raise ValueError(
                "`BacksolveAdjoint(restart_every=...)` stores states, and needs `max_steps` for "
                "that; give it, or leave `restart_every` out"
            )
        reversal = Reversal(self.reversal_tolerance, self.on_reversal)
        return _solve(
            inputs, options=options, backward=backward, every=self.restart_every, reversal=reversal
        )


class _Restarts(eqx.Module):
    """Times and states of every so many forward steps, `count` of them, in buffers."""

    t: Any
    y: PyTree
    count: Any


@eqx.filter_custom_vjp
def _solve(inputs, *, options: Options, backward: Backward, every: int | None, reversal: Reversal):
    return leave(march(inputs[0], options))


@_solve.def_fwd
def _solve_fwd(
    perturbed, inputs, *, options: Options, backward: Backward, every: int | None,
    reversal: Reversal,
):  # fmt: skip
    solve = inputs[0]
    buffers = None
    if every is not None:
        most: Any = options.max_steps
        buffers = _tree.buffer(max(1, (most - 1) // every), (solve.t0, solve.y0))

    def keep(n, step, record):
        largest, buffers = record
        largest = jnp.maximum(largest, size(step.y))
        if every is None:
            return largest, None
        due = (n > 0) & (n % every == 0)
        buffers = lax.cond(
            due,
            lambda r: _tree.write(r, n // every - 1, (step.tprev, step.y)),
            lambda r: r,
            buffers,
        )
        return largest, buffers

    def size(y):
        return _tree.norm(lax.stop_gradient(y))

    end = march(solve, options, keep=keep, record=(size(solve.y0), buffers))
    largest, restarts = end.record
    largest = jnp.maximum(largest, size(end.y))
    if every is not None:
        times, states = restarts
        restarts = _Restarts(times, states, jnp.maximum(end.accepted - 1, 0) // every)
    return leave(end), (end.ts, end.ys, end.save_index, restarts, largest)


@_solve.def_bwd
def _solve_bwd(residuals, cotangents, perturbed, inputs, *, options, backward, every, reversal):
    solve, field, probe = inputs
    _, (g_ts, g_ys) = cotangents
    ts, ys, saved, restarts, largest = residuals
    g_ys = _tree.materialise(g_ys, ys)
    g_ts = jnp.zeros_like(ts) if g_ts is None else g_ts
    moving = any(jtu.tree_leaves((perturbed[0].t0, perturbed[0].t1, perturbed[0].saving.ts)))
    jumping = bool(getattr(perturbed[0].controller, "jump_ts", None))
    active, fixed = eqx.partition(field, perturbed[1])
    *found, reached, stats = _retrace(
        solve, options, backward, active, fixed, ts, ys, g_ts, g_ys, saved, restarts, largest,
        moving, jumping,
    )  # fmt: skip
    adjoint, d_active, d_ts, d_t0, d_jumps = reversal.report(
        found, jnp.where(reached, stats[-1], 0),
        "BacksolveAdjoint(restart_every=...) with fewer steps between restarts",
        options.throw,
    )  # fmt: skip
    gradient = saved_times(solve, adjoint, d_ts, d_t0, saved, moving)
    if jumping:
        gradient = eqx.tree_at(
            lambda s: s.controller.jump_ts, gradient, d_jumps, is_leaf=lambda x: x is None
        )
    gradient, d_active = _tree.reversed_once((gradient, d_active), "BacksolveAdjoint")
    return gradient, d_active, as_probe(stats, probe)


def _mesh_point(solve: Solve, i):
    """t_i of a fixed forward mesh, 0 < i < N."""
    if isinstance(solve.controller, diffrax.StepTo):
        return solve.controller.ts[i]
    _, number, begin, end = solve.controller_state
    # The expression that ConstantStepSize steps by; its first step ends at t0 + dt0.
    share = i.astype(begin.dtype) / number.astype(begin.dtype)
    return jnp.where(i == 1, solve.tnext, begin + (end - begin) * share)


class _Reverse(eqx.Module):
    """State of the backward loop, in s = -t. `length` is the step proposed before clipping."""

    s: Any
    snext: Any
    length: Any
    state: PyTree
    made_jump: Any
    solver_state: PyTree
    controller_state: PyTree
    waiting: Any
    restart: Any
    interval: Any
    result: Any
    num_steps: Any
    accepted: Any
    evaluations: Any
    reversal: Any
    d_ts: Any
    d_jumps: Any


def _retrace(
    solve, options, backward, active, fixed, ts, ys, g_ts, g_ys, saved, restarts, largest, moving,
    jumping,
):  # fmt: skip
    first = int(solve.saving.t0)
    t0 = solve.t0

    def slope(t, y):
        return eqx.combine(active, fixed).rate(t, y)

    def augmented(s, state, args):
        y, adjoint, _ = state

        def f(active, y):
            return eqx.combine(active, fixed).rate(-s, y)

        value, pull = _tree.vjp(f, active, y)
        d_active, d_y = pull(adjoint)
        d_active = _tree.materialise(d_active, active)
        return jtu.tree_map(jnp.negative, value), d_y, d_active

    terms = diffrax.ODETerm(augmented)
    solver = backward.solver
    jump_ts: Any = getattr(solve.controller, "jump_ts", None)
    controller = backward_controller(solve, backward)
    order = solver.error_order(terms)

    last = jnp.maximum(saved - 1, first)
    any_saved = saved > first
    begin = jnp.where(any_saved, ts[jnp.minimum(last, ts.shape[0] - 1)], t0)
    y = _tree.where(any_saved, _tree.read(ys, last), solve.y0)
    s0, s1 = -begin, -t0
    state = (y, _tree.zeros(solve.y0), _tree.zeros(active))

    def observation(waiting):
        return jnp.where(waiting >= first, -ts[jnp.maximum(waiting, 0)], s1)

    def stored(restart):
        return jnp.where(restart >= 0, -restarts.t[jnp.maximum(restart, 0)], s1)

    def stop(waiting, restart):
        """Where the backward solve must stop next: an observation, a stored state, or t0."""
        here = observation(waiting)
        return here if restarts is None else jnp.minimum(here, stored(restart))

    def set_back(s, state, restart, reversal):
        """y is set back where s has reached a stored state."""
        if restarts is None:
            return state, restart, reversal
        y, *rest = state
        hit = (restart >= 0) & (stored(restart) <= s)
        there = _tree.read(restarts.y, jnp.maximum(restart, 0))
        gone = _tree.norm(jtu.tree_map(jnp.subtract, y, there))
        reversal = jnp.maximum(reversal, jnp.where(hit, gone, 0))
        return (_tree.where(hit, there, y), *rest), restart - hit, reversal

    def absorb(s, state, waiting, reversal, d_ts):
        """lambda jumps, and y is set back, at the observations that s has reached."""

        def more(carry):
            _, waiting, _, _ = carry
            return (waiting >= first) & (observation(waiting) <= s)

        def one(carry):
            (y, adjoint, sums), waiting, reversal, d_ts = carry
            there, jump = _tree.read(ys, waiting), _tree.read(g_ys, waiting)
            gone = jtu.tree_map(jnp.subtract, y, there)
            reversal = jnp.maximum(reversal, _tree.norm(gone))
            if moving:
                rate = pair(jump, slope(ts[waiting], there))
                d_ts = d_ts.at[waiting].set(g_ts[waiting] + rate)
            adjoint = _tree.add(adjoint, jump)
            return (there, adjoint, sums), waiting - 1, reversal, d_ts

        return lax.while_loop(more, one, (state, waiting, reversal, d_ts))

    zero = jnp.int32(0)
    reversal = jnp.zeros((), jnp.finfo(jnp.result_type(*jtu.tree_leaves(solve.y0))).dtype)
    state, waiting, reversal, d_ts = absorb(
        s0, state, saved.astype(jnp.int32) - 1, reversal, jnp.zeros_like(ts)
    )
    restart = zero
    if restarts is not None:
        # States stored after the last observation are of no use.
        restart = lax.while_loop(
            lambda k: (k >= 0) & (restarts.t[jnp.maximum(k, 0)] >= begin),
            lambda k: k - 1,
            jnp.int32(restarts.count - 1),
        )

    def passed(s, interval):
        """Skip the points of the fixed mesh that s has reached, to rounding."""
        near = s + hundred_ulp(s)
        return lax.while_loop(
            lambda i: (i >= 1) & (-_mesh_point(solve, i) <= near), lambda i: i - 1, interval
        )

    def mesh_target(interval):
        return jnp.where(interval >= 1, -_mesh_point(solve, jnp.maximum(interval, 1)), s1)

    if controller is None:
        number = number_of_steps(solve.controller, solve.controller_state)
        interval = passed(s0, number - 1)
        snext = mesh_target(interval)
        controller_state, made_jump = None, jnp.asarray(False)
    else:
        interval = zero
        snext, controller_state = controller.init(
            terms, s0, s1, state, None, None, solver.func, order
        )
        controller_state, made_jump = _tree.strong(controller_state), jnp.asarray(False)
    length = snext - s0
    snext = clip_to_end(s0, snext, stop(waiting, restart), True)
    solver_state = _tree.strong(solver.init(terms, s0, snext, state, None))
    stepper = Stepper(solver, terms, s0, state, None, solver_state, made_jump)
    # Evaluations per attempt: a first-same-as-last stage is carried over, but not over a jump.
    tableau = None if stepper.carries else stepper.tableau
    fsal = tableau is not None and tableau.fsal
    per_step = jnp.nan if tableau is None else tableau.num_stages - int(fsal)
    count = jnp.asarray(float(fsal), jnp.result_type(s0))
    start = _Reverse(
        s0, snext, length, state, made_jump, stepper.init(s0, state, solver_state),
        controller_state, waiting, restart, interval, _tree.strong(RESULTS.successful), zero, zero,
        count, reversal, d_ts, jnp.zeros_like(jump_ts) if jumping else None,
    )  # fmt: skip

    def across(s_before, s, state, d_jumps):
        """Moving a discontinuity at T changes the cost by lambda^T (f(T-) - f(T+))."""
        hit = (s_before < -jump_ts) & (s > -jump_ts)
        t = jump_ts[jnp.argmax(hit)]
        y, adjoint, _ = state

        def rate():
            before, after = (slope(jnp.nextafter(t, far), y) for far in (-jnp.inf, jnp.inf))
            return pair(adjoint, jtu.tree_map(jnp.subtract, before, after))

        return d_jumps + jnp.where(hit, lax.cond(jnp.any(hit), rate, lambda: 0 * t), 0)

    def more(r: _Reverse):
        go = (r.s < s1) & (r.result == RESULTS.successful)
        if controller is None or backward.max_steps is None:
            return go  # a fixed mesh ends by itself
        # An observation may cost a step of its own, and so may a stored state.
        most = backward.max_steps + len(ts) + (0 if restarts is None else restarts.count)
        return go & (r.num_steps < most)

    def body(r: _Reverse) -> _Reverse:
        state, error, _, solver_state, result = stepper(
            r.s, r.snext, r.state, r.solver_state, r.made_jump
        )
        if controller is None:
            kept, s, interval = True, r.snext, passed(r.snext, r.interval)
            length, made_jump, controller_state = mesh_target(interval) - s, False, None
            controller_result = RESULTS.successful
        else:
            error = jtu.tree_map(lambda x: jnp.where(jnp.isnan(x), jnp.inf, x), error)
            kept, s, snext, made_jump, controller_state, controller_result = (
                controller.adapt_step_size(
                    r.s, r.snext, r.state, state, None, error, order, r.controller_state
                )
            )
            length, interval = snext - s, r.interval
            result = RESULTS.where(kept, result, RESULTS.successful)
        here = stop(r.waiting, r.restart)
        s = jnp.minimum(s, here)
        arrived = kept & (s >= here)
        if controller is not None:
            # A step shortened to meet an observation does not shorten the next one.
            length = jnp.where(arrived, jnp.maximum(length, r.length), length)
            state = _tree.where(kept, state, r.state)
            solver_state = _tree.where(kept, solver_state, r.solver_state)
            made_jump = jnp.where(kept, made_jump, r.made_jump)
        d_jumps = r.d_jumps
        if jumping:
            d_jumps = across(r.s, jnp.where(kept, s, r.s), state, d_jumps)
        state, waiting, reversal, d_ts = absorb(s, state, r.waiting, r.reversal, r.d_ts)
        state, restart, reversal = set_back(s, state, r.restart, reversal)
        made_jump = made_jump | (waiting < r.waiting) | (restart < r.restart)
        snext = clip_to_end(s, s + length, stop(waiting, restart), True)
        result = RESULTS.where(r.result == RESULTS.successful, result, r.result)
        result = RESULTS.where(result == RESULTS.successful, controller_result, result)
        return _Reverse(
            s, snext, length, state, made_jump, solver_state, controller_state, waiting, restart,
            interval, result, r.num_steps + 1, r.accepted + jnp.where(kept, 1, 0),
            r.evaluations + per_step + jnp.where(r.made_jump, int(fsal), 0),
            reversal, d_ts, d_jumps,
        )  # fmt: skip

    end = _tree.while_loop(more, body, start)
    y, adjoint, sums = end.state
    reversal = jnp.maximum(end.reversal, _tree.norm(jtu.tree_map(jnp.subtract, y, solve.y0)))
    reversal = relative_size(reversal, largest)
    reached = (end.s >= s1) & (end.result == RESULTS.successful)
    d_t0 = None
    if moving:
        d_t0 = -pair(adjoint, slope(t0, solve.y0))
    if solve.saving.t0:
        adjoint = _tree.add(adjoint, _tree.read(g_ys, 0))
        if d_t0 is not None:
            d_t0 = d_t0 + g_ts[0]
    rejected = end.num_steps - end.accepted
    stats = (end.accepted, rejected, end.evaluations, reversal)
    found = (adjoint, sums, end.d_ts, d_t0, end.d_jumps)
    # A gradient from a backward solve that did not reach t0 is no gradient.
    found = jtu.tree_map(lambda x: jnp.where(reached, x, jnp.nan), found)
    if options.throw:
        failed = lax.stop_gradient(jnp.where(reached, 0.0, 1.0)) > 0
        found = eqx.error_if(
            found,
            failed,
            "the backward solve of contadj.jax.BacksolveAdjoint did not reach t0: raise "
            "`BacksolveAdjoint(max_steps=...)`, loosen its `rtol` and `atol`, or use "
            "CheckpointAdjoint, which does not rebuild y",
        )
    return *found, reached, stats
