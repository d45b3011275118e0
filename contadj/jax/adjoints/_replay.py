"""The sweep back through the accepted steps that every discrete adjoint makes.

Adjoints differ in where they get the state at the start of a step from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .. import _tree
from .._forward import Options, Solve, Step
from .._times import MeshCotangent, pull_step, require_rule

PyTree = Any


def split(solve: Solve, options: Options, step: Step) -> tuple[Step, PyTree]:
    """A step without its state, and the state: y, and the solver's own where it has one."""
    carried = step.solver_state if solve.stepper.carries else None
    jump = None if options.made_jump is False else step.made_jump
    bare = Step(step.tprev, step.tnext, step.attempt, None, None, jump, step.ts_index)
    return bare, (step.y, carried)


def jumped(step: Step):
    """The flag that a recorded step was made with."""
    return False if step.made_jump is None else step.made_jump


def sweep(
    adjoint_name: str,
    solve: Solve,
    options: Options,
    record: Step,
    end,
    cotangents,
    perturbed: PyTree,
    visit: Callable,
) -> Solve:
    """Pull the cotangents of what was saved back through the accepted steps.

    Parameters
    ----------
    adjoint_name : str
        For refusals.
    solve, options
        From `prepare`.
    record : Step
        The accepted steps without their states, in buffers.
    end : tuple
        How many there are, the times of `SaveAt(ts=...)` reached, and the last y and t.
    cotangents : pytree
        Of the outputs of `leave`.
    perturbed : Solve of bool
        Which leaves are being differentiated.
    visit : callable
        `visit(pull_back, start)` calls `carry = pull_back(n, state_n, carry)` from the last step
        to the first and returns the carry; `entries(i)` besides reads the record of step i, where
        it is not to be read from `record`.

    Returns
    -------
    Solve
        The cotangents of `solve`.
    """
    count, ts_index, y_end, t_end = end
    _, (g_ts, g_ys) = cotangents
    moving = any(
        jtu.tree_leaves(
            (
                perturbed.t0,
                perturbed.t1,
                perturbed.tnext,
                perturbed.controller,
                perturbed.controller_state,
            )
        )
    )
    if moving:
        require_rule(solve.controller, adjoint_name)
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

    def only(condition, tree):
        # A choice, not a product: the cotangent of an output that was not saved may be nan.
        return jtu.tree_map(lambda x: jnp.where(condition, x, 0), tree)

    # XLA on CPU wakes a second thread where more than eight operations can start at once, which
    # takes longer than a small solve: these zeros wait until the forward solve is done.
    sums, adjoint = _tree.zeros((active, solve.y0), after=count)
    mesh = MeshCotangent(solve) if moving else None
    d_saved = jnp.zeros_like(saving.ts) if perturbed.saving.ts else None
    at_end = jnp.zeros_like(solve.t0)

    # The end: SaveAt(t1=True), and times asked for that no step reached (t0 = t1).
    if saving.t1 and saving.steps != 1:
        trivial = solve.t0 == solve.t1
        index = first + jnp.where(trivial, 0 if saving.ts is None else len(saving.ts), ts_index)
        if saving.steps:
            index = index + count // saving.steps
        pred = True if saving.steps == 0 else count % saving.steps != 0
        d_active, d_t, d_y = pull_saved(index, t_end, y_end)
        d_active, d_t, d_y = only(pred, (d_active, d_t, d_y))
        sums, adjoint, at_end = _tree.add(sums, d_active), _tree.add(adjoint, d_y), at_end + d_t
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

    def pull_back(n, stored, carry, entries=lambda i: _tree.read(record, i)):
        sums, adjoint, d_state, mesh, d_saved, seen, at_end = carry
        step: Step = entries(n)
        y, state = stored
        due = False
        if saving.steps:
            due = (n + 1) % saving.steps == 0

        def again(active, tprev, tnext, y, state):
            y1, dense, state = eqx.combine(active, fixed)[0].replay(
                tprev, tnext, y, state, jumped(step)
            )
            return y1, None if saving.ts is None else dense, state

        (y1, dense, _), pull = _tree.vjp(again, active, step.tprev, step.tnext, y, state)
        d_tnext = at_end
        if saving.steps:
            index = first + seen + (n + 1) // saving.steps - 1
            d_active, d_t, d_y = pull_saved(index, step.tnext, y1)
            d_active, d_t, d_y = only(due, (d_active, d_t, d_y))
            sums, adjoint, d_tnext = (
                _tree.add(sums, d_active),
                _tree.add(adjoint, d_y),
                d_tnext + d_t,
            )
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
                _, pull_out = _tree.vjp(at, active, saving.ts[j], step.tprev, step.tnext, dense)
                d_active, d_t, d_a, d_b, d_k = pull_out(_tree.read(g_ys, offset + j))
                if d_saved is not None:
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
            before: Step = entries(jnp.maximum(n - 1, 0))
            mesh = pull_step(solve, n, step, before, d_tprev + d_a, d_tnext + d_b, mesh)
        return sums, d_y, d_state, mesh, d_saved, step.ts_index, jnp.zeros_like(at_end)

    start = (sums, adjoint, d_state, mesh, d_saved, ts_index, at_end)
    sums, adjoint, d_state, mesh, d_saved, _, at_start = visit(pull_back, start)
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
