"""The continuous gradient with y from the stored forward solution."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from .. import _tree
from .._forward import RESULTS, Options, Step, clip_to_end, leave, march
from .._steps import evaluations, explicit_step, explicit_tableau
from ._continuous import (
    Backward,
    ContinuousAdjoint,
    as_probe,
    backward_controller,
    pair,
    saved_times,
)
from ._replay import jumped, split

PyTree = Any


class InterpolatingAdjoint(ContinuousAdjoint):
    """The continuous gradient with y taken from the forward solution, not rebuilt.

        lambda' = -f_y(t, y(t))^T lambda,   theta-bar' = -f_theta(t, y(t))^T lambda

    are integrated from the last observation back to t0; lambda jumps by dL/dy(t_i) at each
    observation. The forward solve keeps y_n at its accepted steps; between them y(t) is the
    solver's own dense output, made again when the backward solve enters the step. Backward steps
    end at the forward ones, where that polynomial changes, and have their own error control where
    the forward solve is adaptive.

    Parameters
    ----------
    method, rtol, atol, seminorm, max_steps
        As in `BacksolveAdjoint`.
    """

    def solve(self, inputs, *, options: Options, backward: Backward):
        if options.max_steps is None:
            raise ValueError(
                f"`adjoint=contadj.jax.{type(self).__name__}()` keeps the states of all steps, and "
                "needs `max_steps` for that; give it, or use `BacksolveAdjoint()`"
            )
        return _solve(inputs, options=options, backward=backward, nodes=self.nodes(backward))

    def nodes(self, backward: Backward):
        """Gauss nodes per step, or None where theta-bar is part of the backward solve."""
        return None


@eqx.filter_custom_vjp
def _solve(inputs, *, options: Options, backward: Backward, nodes: int | None):
    return leave(march(inputs[0], options))


@_solve.def_fwd
def _solve_fwd(perturbed, inputs, *, options: Options, backward: Backward, nodes):
    solve = inputs[0]
    example = Step(
        solve.t0, solve.tnext, solve.tnext, solve.y0, solve.solver_state, options.made_jump,
        jnp.int32(0),
    )  # fmt: skip
    capacity: Any = options.max_steps
    record = _tree.buffer(capacity, split(solve, options, example))

    def keep(n, step, record):
        return _tree.write(record, n, split(solve, options, step))

    end = march(solve, options, capacity=capacity, keep=keep, record=record)
    return leave(end), (end.record, end.accepted, end.ts, end.ys, end.save_index)


class _Reverse(eqx.Module):
    """State of the backward loop, in s = -t, inside forward step `interval`."""

    s: Any
    length: Any
    state: PyTree
    sums: PyTree
    controller_state: PyTree
    waiting: Any
    interval: Any
    dense: PyTree
    result: Any
    num_steps: Any
    accepted: Any
    d_ts: Any


@_solve.def_bwd
def _solve_bwd(residuals, cotangents, perturbed, inputs, *, options, backward, nodes):
    solve, field, probe = inputs
    _, (g_ts, g_ys) = cotangents
    record, count, ts, ys, saved = residuals
    stepper, first = solve.stepper, int(solve.saving.t0)
    g_ys = _tree.materialise(g_ys, ys)
    g_ts = jnp.zeros_like(ts) if g_ts is None else g_ts
    moving = any(jtu.tree_leaves((perturbed[0].t0, perturbed[0].t1, perturbed[0].saving.ts)))
    if getattr(perturbed[0].controller, "jump_ts", None):
        raise NotImplementedError(
            "`jump_ts` gets its gradient from contadj.jax.BacksolveAdjoint() or CheckpointAdjoint()"
        )
    active, fixed = eqx.partition(field, perturbed[1])
    controller = backward_controller(solve, backward)
    solver = backward.solver
    s1 = -solve.t0

    def forward_step(n) -> Step:
        return _tree.read(record[0], jnp.maximum(n, 0))

    def dense_output(n):
        step, (y, state) = _tree.read(record, jnp.maximum(n, 0))
        return stepper.replay(step.tprev, step.tnext, y, state, jumped(step))[1]

    def y_at(t, n, dense):
        step = forward_step(n)
        return stepper.evaluate(t, step.tprev, step.tnext, dense)

    def pulled(t, adjoint, n, dense):
        """f_theta^T lambda and f_y^T lambda at time t."""
        y = y_at(t, n, dense)
        _, pull = _tree.vjp(lambda a, y: eqx.combine(a, fixed).rate(t, y), active, y)
        d_active, d_y = pull(adjoint)
        return _tree.materialise(d_active, active), d_y

    def terms_in(n, dense):
        def slope(s, state, args):
            d_active, d_y = pulled(-s, state[0], n, dense)
            return (d_y, d_active if nodes is None else None)

        return diffrax.ODETerm(slope)

    def attempt(r: _Reverse, snext):
        terms = terms_in(r.interval, r.dense)
        tableau = explicit_tableau(solver)
        if tableau is not None:
            state, error, dense, _ = explicit_step(tableau, terms, r.s, snext, r.state, None)
            return state, error, dense, RESULTS.successful
        start = solver.init(terms, r.s, snext, r.state, None)
        state, error, dense, _, result = solver.step(
            terms, r.s, snext, r.state, None, start, made_jump=False
        )
        return state, error, dense, result

    def quadrature(r: _Reverse, snext, dense):
        """int f_theta^T lambda over the step, lambda from its dense output."""
        points, weights = np.polynomial.legendre.leggauss(nodes)
        local = solver.interpolation_cls(t0=r.s, t1=snext, **dense)
        total = r.sums
        # Python's floats: NumPy's are float64 and would make a float32 solve double.
        for x, w in zip(points.tolist(), weights.tolist(), strict=True):
            s = r.s + (snext - r.s) * (1 + x) / 2
            d_active, _ = pulled(-s, local.evaluate(s)[0], r.interval, r.dense)
            weight = (snext - r.s) * w / 2
            total = jtu.tree_map(lambda a, d, weight=weight: a + weight * d, total, d_active)
        return total

    def observation(waiting):
        return jnp.where(waiting >= first, -ts[jnp.maximum(waiting, 0)], s1)

    def absorb(s, adjoint, waiting, d_ts):
        def more(carry):
            return (carry[1] >= first) & (observation(carry[1]) <= s)

        def one(carry):
            adjoint, waiting, d_ts = carry
            jump = _tree.read(g_ys, waiting)
            if moving:
                rate = field.rate(ts[waiting], _tree.read(ys, waiting))
                d_ts = d_ts.at[waiting].set(g_ts[waiting] + pair(jump, rate))
            return _tree.add(adjoint, jump), waiting - 1, d_ts

        return lax.while_loop(more, one, (adjoint, waiting, d_ts))

    last = jnp.maximum(saved - 1, first)
    begin = jnp.where(saved > first, ts[jnp.minimum(last, ts.shape[0] - 1)], solve.t0)
    s0 = -begin
    adjoint, waiting, d_ts = absorb(
        s0, _tree.zeros(solve.y0), saved.astype(jnp.int32) - 1, jnp.zeros_like(ts)
    )
    interval = lax.while_loop(
        lambda n: (n > 0) & (forward_step(n).tprev >= begin), lambda n: n - 1, count - 1
    )
    sums = _tree.zeros(active)
    state = (adjoint, sums if nodes is None else None)
    dense = dense_output(interval)

    def stop(r_interval, waiting):
        return jnp.minimum(-forward_step(r_interval).tprev, observation(waiting))

    zero = jnp.int32(0)
    length, controller_state = s1 - s0, None
    if controller is not None:
        snext, controller_state = controller.init(
            terms_in(interval, dense), s0, s1, state, None, None, solver.func,
            solver.error_order(terms_in(interval, dense)),
        )  # fmt: skip
        length, controller_state = snext - s0, _tree.strong(controller_state)
    start = _Reverse(
        s0, length, state, sums if nodes is not None else None, controller_state, waiting,
        interval, dense, _tree.strong(RESULTS.successful), zero, zero, d_ts,
    )  # fmt: skip

    def more(r: _Reverse):
        go = (r.s < s1) & (r.result == RESULTS.successful)
        if controller is None or backward.max_steps is None:
            return go
        # Forward steps and observations may cost a step each.
        return go & (r.num_steps < backward.max_steps + len(ts) + count)

    def body(r: _Reverse) -> _Reverse:
        here = stop(r.interval, r.waiting)
        snext = here if controller is None else clip_to_end(r.s, r.s + r.length, here, True)
        state, error, dense, result = attempt(r, snext)
        sums = r.sums if nodes is None else quadrature(r, snext, dense)
        if controller is None:
            kept, s, length, controller_state = True, snext, r.length, None
        else:
            error = jtu.tree_map(lambda x: jnp.where(jnp.isnan(x), jnp.inf, x), error)
            order = solver.error_order(terms_in(r.interval, r.dense))
            kept, s, proposed, _, controller_state, controller_result = controller.adapt_step_size(
                r.s, snext, r.state, state, None, error, order, r.controller_state
            )
            length = proposed - s
            s = jnp.minimum(s, here)
            state, sums = _tree.where(kept, state, r.state), _tree.where(kept, sums, r.sums)
            # A step shortened to meet a stop does not shorten the next one.
            length = jnp.where(kept & (s >= here), jnp.maximum(length, r.length), length)
            result = RESULTS.where(kept, result, RESULTS.successful)
            result = RESULTS.where(result == RESULTS.successful, controller_result, result)
        arrived = kept & (s >= here)
        adjoint, waiting, d_ts = absorb(s, state[0], r.waiting, r.d_ts)
        enter = arrived & (s >= -forward_step(r.interval).tprev) & (r.interval > 0)
        interval = jnp.where(enter, r.interval - 1, r.interval)
        # The next step's own end, which a jump of f separates from this one's start.
        s = jnp.where(enter, jnp.minimum(-forward_step(interval).tnext, s), s)
        dense = lax.cond(enter, lambda: dense_output(interval), lambda: r.dense)
        result = RESULTS.where(r.result == RESULTS.successful, result, r.result)
        return _Reverse(
            s, length, (adjoint, state[1]), sums, controller_state, waiting, interval, dense,
            result, r.num_steps + 1, r.accepted + jnp.where(kept, 1, 0), d_ts,
        )  # fmt: skip

    end = _tree.while_loop(more, body, start)
    adjoint, sums = end.state[0], end.state[1] if nodes is None else end.sums
    reached = (end.s >= s1) & (end.result == RESULTS.successful)
    d_t0 = -pair(adjoint, field.rate(solve.t0, solve.y0)) if moving else None
    if solve.saving.t0:
        adjoint = _tree.add(adjoint, _tree.read(g_ys, 0))
        d_t0 = None if d_t0 is None else d_t0 + g_ts[0]
    found = (adjoint, sums, end.d_ts, d_t0)
    # A gradient from a backward solve that did not reach t0 is no gradient.
    found = jtu.tree_map(lambda x: jnp.where(reached, x, jnp.nan), found)
    if options.throw:
        found = eqx.error_if(
            found,
            lax.stop_gradient(jnp.where(reached, 0.0, 1.0)) > 0,
            "the backward solve of contadj.jax.InterpolatingAdjoint or GaussAdjoint did not reach "
            "t0: raise its `max_steps`, or loosen its `rtol` and `atol`",
        )
    adjoint, sums, d_ts, d_t0 = found
    per_step = evaluations(solver)
    per_step = jnp.nan if per_step is None else per_step + (nodes or 0)
    stats = (end.accepted, end.num_steps - end.accepted, end.num_steps * per_step, 0)
    gradient = saved_times(solve, adjoint, d_ts, d_t0, saved, moving)
    name = "InterpolatingAdjoint" if nodes is None else "GaussAdjoint"
    gradient, sums = _tree.reversed_once((gradient, sums), name)
    return gradient, sums, as_probe(stats, probe)
