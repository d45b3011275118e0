"""The forward solve: Diffrax's loop over steps, with the accepted steps recorded on request.

Steps are made by `solver.step`, or by its tableau with the stages unrolled, and sized by the
controller's own `adapt_step_size`, so that the mesh is the one that any other adjoint takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from . import _diffrax, _tree
from ._steps import differentiable, explicit_step, explicit_tableau
from ._times import FIXED

PyTree = Any
RESULTS = diffrax.RESULTS


class ClosedTerm(diffrax.AbstractTerm):
    """A term whose parameters, `args` and closed-over arrays are leaves of the object itself.

    Differentiating with respect to the leaves then reaches every array that the vector field
    depends on, however it got hold of it.
    """

    field: Callable
    increment: Callable
    product: Callable
    field_increment: Callable

    def __init__(self, terms: diffrax.AbstractTerm, t, y, args):
        convert = eqx.filter_closure_convert
        self.field = convert(lambda t, y: terms.vf(t, y, args), t, y)
        self.increment = convert(lambda t0, t1: terms.contr(t0, t1), t, t)
        slope = eqx.filter_eval_shape(self.field, t, y)
        control = eqx.filter_eval_shape(self.increment, t, t)
        empty = lambda tree: jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
        self.product = convert(lambda f, c: terms.prod(f, c), empty(slope), empty(control))
        self.field_increment = convert(
            lambda t, y, c: terms.vf_prod(t, y, args, c), t, y, empty(control)
        )

    def rate(self, t, y):
        """dy/dt: the increment over a unit of time."""
        zero = jnp.zeros_like(t)
        return self.field_increment(t, y, self.increment(zero, zero + 1))

    def vf(self, t, y, args):
        return self.field(t, y)

    def contr(self, t0, t1, **kwargs):
        return self.increment(t0, t1)

    def prod(self, vf, control):
        return self.product(vf, control)

    def vf_prod(self, t, y, args, control):
        return self.field_increment(t, y, control)


class Stepper(eqx.Module):
    """The steps of a solver, everything they depend on as leaves.

    An explicit method is stepped from its tableau, as a function of y; the state carried between
    steps is f at the step's end where the method is first same as last. Every other solver is
    stepped by its own `step`, with its own state.
    """

    terms: Any
    whole: Any
    solver_type: Any = eqx.field(static=True)
    interpolation: Callable = eqx.field(static=True)

    def __init__(self, solver, terms, t, y, args, solver_state, made_jump):
        tableau = explicit_tableau(solver)
        self.interpolation = solver.interpolation_cls
        self.solver_type = type(solver)
        if tableau is not None:
            self.terms = ClosedTerm(terms, t, y, args)
            self.whole = None
        else:
            solver = differentiable(solver)

            def step(t0, t1, y, state, made_jump):
                return solver.step(terms, t0, t1, y, args, state, made_jump)

            self.terms = None
            self.whole = eqx.filter_closure_convert(step, t, t, y, solver_state, made_jump)

    @property
    def tableau(self) -> diffrax.ButcherTableau:
        return self.solver_type.tableau

    @property
    def carries(self) -> bool:
        """Whether a step needs more of its predecessor than y."""
        return self.terms is None

    def init(self, t, y, solver_state):
        """What is carried into the first step."""
        if self.terms is None:
            return solver_state
        return self.terms.vf(t, y, None) if self.tableau.fsal else None

    def __call__(self, t0, t1, y, state, made_jump):
        """One step: y1, error, dense output, state, result."""
        if self.terms is None:
            return self.whole(t0, t1, y, state, made_jump)
        terms = self.terms
        if not self.tableau.fsal:
            y1, error, dense, _ = explicit_step(self.tableau, terms, t0, t1, y, None)
            return y1, error, dense, None, RESULTS.successful
        if made_jump is not False:
            state = lax.cond(made_jump, lambda: terms.vf(t0, y, None), lambda: state)
        k0 = terms.prod(state, terms.contr(t0, t1))
        y1, error, dense, slope = explicit_step(self.tableau, terms, t0, t1, y, None, k0)
        return y1, error, dense, slope, RESULTS.successful

    def replay(self, t0, t1, y, state, made_jump):
        """The step again, to be differentiated: y1, dense output, state."""
        if self.terms is None:
            y1, _, dense, state, _ = self.whole(t0, t1, y, state, made_jump)
            return y1, dense, state
        y1, _, dense, _ = explicit_step(self.tableau, self.terms, t0, t1, y, None)
        return y1, dense, None

    def evaluate(self, t, t0, t1, dense):
        """Dense output at t in [t0, t1]."""
        return self.interpolation(t0=t0, t1=t1, **dense).evaluate(t)


class Saving(eqx.Module):
    """What is saved, and when."""

    ts: Any
    fn: Callable
    t0: bool = eqx.field(static=True)
    t1: bool = eqx.field(static=True)
    steps: int = eqx.field(static=True)

    def __init__(self, sub: diffrax.SubSaveAt, t, y, args):
        self.ts = sub.ts
        self.t0, self.t1, self.steps = sub.t0, sub.t1, sub.steps
        self.fn = eqx.filter_closure_convert(lambda t, y: sub.fn(t, y, args), t, y)


class March(eqx.Module):
    """The state of the loop over steps."""

    y: PyTree
    tprev: Any
    tnext: Any
    attempt: Any
    made_jump: Any
    solver_state: PyTree
    controller_state: PyTree
    progress: PyTree
    result: Any
    num_steps: Any
    accepted: Any
    ts_index: Any
    save_index: Any
    ts: Any
    ys: PyTree
    record: PyTree


class Step(eqx.Module):
    """One accepted step, as it is recorded: enough to make it again.

    `attempt` is where the first attempt at it would have ended.
    """

    tprev: Any
    tnext: Any
    attempt: Any
    y: PyTree
    solver_state: PyTree
    made_jump: Any
    ts_index: Any


def hundred_ulp(t):
    """The distance below which two times near t are one."""
    return 100 * jnp.finfo(jnp.result_type(t)).eps * jnp.abs(lax.stop_gradient(t))


def clip_to_end(tprev, tnext, t1, keep_step):
    """Let a step that ends within 100 ulp of t1 end there, as Diffrax does."""
    floor = t1 - hundred_ulp(t1)
    clipped = jnp.where(keep_step, t1, tprev + 0.5 * (t1 - tprev))
    return jnp.where(tnext > floor, clipped, tnext)


class Solve(eqx.Module):
    """All that the solution depends on; its floating leaves are what can be differentiated.

    Times run forward: Diffrax negates them where t1 < t0.
    """

    stepper: Stepper
    saving: Saving
    controller: diffrax.AbstractStepSizeController
    y0: PyTree
    solver_state: PyTree
    controller_state: PyTree
    t0: Any
    t1: Any
    tnext: Any


class Options(eqx.Module):
    """What a solve needs besides, and is not differentiated."""

    args: PyTree
    made_jump: Any
    progress: PyTree
    ts: Any
    ys: PyTree
    progress_meter: Any
    error_order: Any
    max_steps: int | None = eqx.field(static=True)
    throw: bool = eqx.field(static=True)


# Controllers that never report a jump, so that the flag can stay a Python bool.
_NO_JUMPS = (*FIXED, diffrax.PIDController)


def prepare(
    adjoint: str,
    *,
    args,
    terms,
    solver,
    stepsize_controller,
    event,
    saveat,
    t0,
    t1,
    max_steps,
    throw,
    init_state,
    progress_meter,
    **unused,
) -> tuple[Solve, Options]:
    """Turn the arguments of `AbstractAdjoint.loop` into a solve, or refuse them by name."""
    _diffrax.require_ode(terms, event, adjoint)
    sub = _diffrax.single_subsaveat(saveat, adjoint)
    strong = _tree.strong
    t0, t1, tnext, y0 = strong(t0), strong(t1), strong(init_state.tnext), strong(init_state.y)
    made_jump = init_state.made_jump
    if not (made_jump is False and type(stepsize_controller) in _NO_JUMPS):
        made_jump = jnp.asarray(made_jump)
    solver_state = strong(init_state.solver_state)
    stepper = Stepper(solver, terms, t0, y0, args, solver_state, made_jump)
    solve = Solve(
        stepper,
        Saving(sub, t0, y0, args),
        stepsize_controller,
        y0,
        solver_state if stepper.carries else None,
        strong(init_state.controller_state),
        t0,
        t1,
        tnext,
    )
    still = lambda tree: jtu.tree_map(  # noqa: E731
        lambda x: lax.stop_gradient(x) if eqx.is_array(x) else x, tree
    )
    options = Options(
        still(args),
        made_jump,
        strong(init_state.progress_meter_state),
        strong(init_state.save_state.ts),
        strong(init_state.save_state.ys),
        progress_meter,
        solver.error_order(terms),
        max_steps,
        throw,
    )
    return solve, options


def _first_state(solve: Solve, options: Options, record: PyTree) -> March:
    zero = jnp.int32(0)
    carried = solve.stepper.init(solve.t0, solve.y0, solve.solver_state)
    return March(
        solve.y0, solve.t0, solve.tnext, solve.tnext, options.made_jump, carried,
        solve.controller_state, options.progress, _tree.strong(RESULTS.successful),
        zero, zero, zero, zero, options.ts, options.ys, record,
    )  # fmt: skip


def march(
    solve: Solve,
    options: Options,
    *,
    capacity: int | None = None,
    keep: Callable[[Any, Step, PyTree], PyTree] | None = None,
    record: PyTree = None,
    loop: Callable = _tree.while_loop,
) -> March:
    """Step from t0 to t1.

    Parameters
    ----------
    solve, options
        From `prepare`.
    capacity : int, optional
        Most accepted steps; beyond it the solve stops.
    keep : callable, optional
        `keep(n, step, record) -> record`, called with accepted step n before it is taken.
    record : pytree, optional
        What `keep` starts from.
    loop : callable, optional
        `loop(more, body, start)`: the loop over attempted steps, whose state is a `March`.

    Returns
    -------
    March
        The last state; `result` tells how the solve ended.
    """
    stepper, controller, saving = solve.stepper, solve.controller, solve.saving
    t0, t1, max_steps = solve.t0, solve.t1, options.max_steps
    start = _first_state(solve, options, record)

    def save(m: March, t, y, index, pred):
        ts = m.ts.at[index].set(jnp.where(pred, t, m.ts[index]))
        out = saving.fn(t, y)
        ys = jtu.tree_map(lambda s, v: s.at[index].set(jnp.where(pred, v, s[index])), m.ys, out)
        return eqx.tree_at(lambda m: (m.ts, m.ys), m, (ts, ys))

    if saving.t0:
        start = save(start, t0, start.y, 0, True)
        start = eqx.tree_at(lambda m: m.save_index, start, jnp.int32(1))

    def more(m: March):
        go = (m.tprev < t1) & (m.result == RESULTS.successful)
        if max_steps is not None:
            go = go & (m.num_steps < max_steps)
        if capacity is not None:
            go = go & (m.accepted < capacity)
        return go

    def body(old: March) -> March:
        m = old
        y1, error, dense, solver_state, solver_result = stepper(
            m.tprev, m.tnext, m.y, m.solver_state, m.made_jump
        )
        # A step into a region where f is not a number is rejected.
        error = jtu.tree_map(lambda x: jnp.where(jnp.isnan(x), jnp.inf, x), error)
        kept, tprev, tnext, made_jump, controller_state, controller_result = (
            controller.adapt_step_size(
                m.tprev,
                m.tnext,
                m.y,
                y1,
                options.args,
                error,
                options.error_order,
                m.controller_state,
            )
        )
        tprev = jnp.minimum(tprev, t1)
        tnext = clip_to_end(tprev, tnext, t1, kept)
        record = m.record
        if keep is not None:
            # A rejected attempt is overwritten by the next one.
            step = Step(m.tprev, m.tnext, m.attempt, m.y, m.solver_state, m.made_jump, m.ts_index)
            record = keep(m.accepted, step, record)
        accepted = m.accepted + jnp.where(kept, 1, 0)
        if kept is True:
            made_jump = m.made_jump if made_jump is False and m.made_jump is False else made_jump
            y, state = y1, solver_state
        else:
            y, state = _tree.where(kept, y1, m.y), _tree.where(kept, solver_state, m.solver_state)
            if not (made_jump is False and m.made_jump is False):
                made_jump = jnp.where(kept, made_jump, m.made_jump)
            solver_result = RESULTS.where(kept, solver_result, RESULTS.successful)
        result = RESULTS.where(m.result == RESULTS.successful, solver_result, m.result)
        result = RESULTS.where(result == RESULTS.successful, controller_result, result)

        m = March(
            y, tprev, tnext, jnp.where(kept, tnext, m.attempt), made_jump, state, controller_state,
            options.progress_meter.step(m.progress, (tprev - t0) / (t1 - t0)),
            result, m.num_steps + 1, accepted, m.ts_index, m.save_index, m.ts, m.ys, record,
        )  # fmt: skip
        if saving.ts is not None:
            m = save_ts(m, kept, old.tprev, old.tnext, dense)
        if saving.steps:
            due = kept & (accepted % saving.steps == 0)
            m = save(m, tprev, y, m.save_index, due)
            m = eqx.tree_at(lambda m: m.save_index, m, m.save_index + jnp.where(due, 1, 0))
        return m

    def save_ts(m: March, kept, tprev, tnext, dense) -> March:
        count = len(saving.ts)

        def waiting(m: March):
            due = saving.ts[jnp.minimum(m.ts_index, count - 1)] <= tnext
            return kept & (m.ts_index < count) & due

        def one(m: March):
            t = saving.ts[m.ts_index]
            y = stepper.evaluate(t, tprev, tnext, dense)
            m = save(m, t, y, m.save_index, True)
            return eqx.tree_at(
                lambda m: (m.ts_index, m.save_index), m, (m.ts_index + 1, m.save_index + 1)
            )

        return _tree.while_loop(waiting, one, m)

    end = loop(more, body, start)
    if saving.ts is not None:
        # Without a step, every time asked for is t0 = t1.
        trivial = t0 == t1
        first, last = int(saving.t0), int(saving.t0) + len(saving.ts)
        out = saving.fn(t0, end.y)
        ys = jtu.tree_map(
            lambda s, v: s.at[first:last].set(jnp.where(trivial, v[None], s[first:last])),
            end.ys,
            out,
        )
        ts = end.ts.at[first:last].set(jnp.where(trivial, t0, end.ts[first:last]))
        index = jnp.where(trivial, last, end.save_index)
        end = eqx.tree_at(lambda m: (m.ts, m.ys, m.save_index), end, (ts, ys, index))
    if saving.t1 and saving.steps != 1:
        due = True if saving.steps == 0 else end.accepted % saving.steps != 0
        end = save(end, end.tprev, end.y, end.save_index, due)
        end = eqx.tree_at(lambda m: m.save_index, end, end.save_index + jnp.where(due, 1, 0))
    unfinished = (end.tprev < t1) & (end.result == RESULTS.successful)
    result = RESULTS.where(unfinished, RESULTS.max_steps_reached, end.result)
    return eqx.tree_at(lambda m: m.result, end, result)


_HIDDEN = lambda m: (m.ts, m.ys, m.record)  # noqa: E731


def leave(end: March) -> tuple[PyTree, tuple[Any, PyTree]]:
    """The end of a solve as a `custom_vjp` can return it, and what was saved, apart."""
    bare = eqx.tree_at(_HIDDEN, end, (None, None, None), is_leaf=lambda x: x is None)
    return _tree.as_floats(bare), (end.ts, end.ys)


def restore(end: PyTree, solve: Solve, options: Options) -> March:
    """The end of a solve outside the `custom_vjp`, with its integers; not differentiable."""
    like = eqx.filter_eval_shape(_first_state, solve, options, None)
    like = eqx.tree_at(_HIDDEN, like, (None, None, None), is_leaf=lambda x: x is None)
    return _tree.undo_floats(end, like)
