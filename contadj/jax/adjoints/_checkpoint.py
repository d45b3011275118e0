"""The discrete gradient from stored states: each step recomputed once and pulled back."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .. import _diffrax, _tree
from .._forward import March, Options, Solve, Step, leave, march, prepare, restore
from .._reverse_only import reverse_only
from .._revolve import Schedule, reverse
from .._times import number_of_steps
from ._replay import jumped, split, sweep

PyTree = Any


class CheckpointAdjoint(diffrax.AbstractAdjoint):
    """The discrete gradient, exact, keeping states and no activations.

    The forward solve keeps (t_n, y_n) of each accepted step. The backward sweep walks that frozen
    mesh once: it makes step n again and pulls the cotangents back through it,

        lambda_n = (dy_{n+1}/dy_n)^T lambda_{n+1} + (observations in the step),
        theta-bar += (dy_{n+1}/dtheta)^T lambda_{n+1}.

    Time follows the steps taken; memory is `capacity` states, or K states with `snapshots=K`: the
    others are then recomputed from the nearest one, as few times as can be where the number of
    steps is known beforehand (`ConstantStepSize`, `StepTo`), from evenly spaced snapshots where
    it is not.

    Gradients with respect to t0, t1 and the times of `SaveAt(ts=...)` are those of the numerical
    solution, its mesh moving as the step-size controller moves it.

    Parameters
    ----------
    snapshots : int, optional
        Number of states kept; None keeps all.
    capacity : int, optional
        Room for accepted steps; `max_steps` where None. Buffers have a fixed size under `jax.jit`,
        so that a capacity near the number of steps taken saves memory and the time to clear it. A
        solve that needs more fails. With snapshots, only the step times take room.

    References
    ----------
    Griewank & Walther, Algorithm 799: Revolve (2000), doi:10.1145/347837.347846.
    """

    snapshots: int | None = eqx.field(static=True, default=None)
    capacity: int | None = eqx.field(static=True, default=None)
    probe: Any = None

    def __check_init__(self):
        for name in ("snapshots", "capacity"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"`{name}` must be None or an int of at least 1, got {value!r}")

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
        snapshots = None if self.snapshots is None else min(self.snapshots, capacity)
        room = _Room(capacity, snapshots)
        inputs = reverse_only((solve, self.probe), "CheckpointAdjoint")
        end, buffers = _solve(inputs, options=options, room=room)
        end = restore(end, solve, options)
        if options.throw and (options.max_steps is None or capacity < options.max_steps):
            exceeded = (end.accepted == capacity) & (
                end.result == diffrax.RESULTS.max_steps_reached
            )
            end = eqx.error_if(
                end,
                exceeded,
                f"the solve needs more than the {capacity} accepted steps that `contadj.jax."
                "CheckpointAdjoint(capacity=...)` has room for; raise `capacity`",
            )
        return _diffrax.finished(init_state, end, buffers, solve.stepper.carries), {}


class _Room(eqx.Module):
    """Room for accepted steps, and for states if these are fewer."""

    capacity: int = eqx.field(static=True)
    snapshots: int | None = eqx.field(static=True)


class _Record(eqx.Module):
    """What the forward solve leaves for the backward sweep.

    `mesh` holds every accepted step without its state; `states` all the states, or the snapshots
    with `indices` their step numbers. With an unknown number of steps they are `stride` apart.
    All the states of a small problem are written and read a `stretch` of steps at a time.
    """

    mesh: Step
    states: PyTree
    indices: Any
    stride: Any
    stretch: int | None = eqx.field(static=True, default=None)


def _recorded(solve: Solve, options: Options, room: _Room) -> tuple[March, _Record]:
    """The forward solve, its accepted steps recorded."""
    example = Step(
        solve.t0, solve.tnext, solve.tnext, solve.y0, solve.solver_state, options.made_jump,
        jnp.int32(0),
    )  # fmt: skip
    bare, state = split(solve, options, example)
    slots = room.snapshots
    if slots is None:
        return _all_recorded(solve, options, room.capacity, (bare, state))
    mesh = _tree.buffer(room.capacity, bare)
    number = number_of_steps(solve.controller, solve.controller_state)
    indices = None
    if number is not None:
        number = jnp.minimum(number, room.capacity)
        indices, _ = Schedule(room.capacity, slots).first_sweep(number)
    start = _Record(mesh, _tree.buffer(slots, state), indices, jnp.int32(1))

    def keep(n, step: Step, record: _Record):
        bare, state = split(solve, options, step)
        mesh = _tree.write(record.mesh, n, bare)
        states, stride = record.states, record.stride
        if record.indices is not None:
            hit = record.indices == n
            slot, due = jnp.argmax(hit), jnp.any(hit)
        else:
            # Full: drop every other snapshot and space the next ones twice as far.
            full = n == slots * stride

            def thin(states, last=slots - 1):
                chosen = jnp.minimum(2 * jnp.arange(last + 1), last)
                return jtu.tree_map(lambda x: x[chosen], states)

            if slots > 1:
                states = lax.cond(full, thin, lambda states: states, states)
            stride = jnp.where(full, 2 * stride, stride)
            slot, due = n // stride, n % stride == 0
            due = due & (slot < slots)
        states = lax.cond(due, lambda s: _tree.write(s, slot, state), lambda s: s, states)
        return _Record(mesh, states, record.indices, stride)

    end = march(solve, options, capacity=room.capacity, keep=keep, record=start)
    return end, end.record


# XLA on CPU runs the body of a loop in order, without a queue of ready operations and the threads
# that it wakes, where no buffer in it takes more than this many bytes.
_SMALL = 512


def _stretch(capacity: int, entry: PyTree) -> int | None:
    """How many steps a loop over small states makes between visits to the whole record.

    None where the record is small itself, or a state is not.
    """
    size = max(x.size * x.dtype.itemsize for x in jtu.tree_leaves(entry))
    # Backward, a stretch is read with the step before it.
    length = _SMALL // size - 1
    return length if length >= 8 and capacity * size > _SMALL else None


def _all_recorded(solve: Solve, options: Options, capacity: int, entry) -> tuple[March, _Record]:
    """The forward solve, every accepted step recorded with its state."""
    length = _stretch(capacity, entry)

    def keep(n, step: Step, record):
        first, rows = record
        return first, _tree.write(rows, n - first, split(solve, options, step))

    if length is None:
        record = (0, _tree.buffer(capacity, entry))
        end = march(solve, options, capacity=capacity, keep=keep, record=record)
        mesh, states = end.record[1]
        return end, _Record(mesh, states, None, None)

    def loop(more, body, start: March) -> March:
        def stretch(m: March) -> March:
            whole, first, until = m.record, m.accepted, m.num_steps + length
            m = eqx.tree_at(lambda m: m.record, m, (first, _tree.buffer(length, entry)))
            m = _tree.while_loop(lambda m: more(m) & (m.num_steps < until), body, m)
            # Rows beyond the steps that were accepted are written over by the next stretch.
            put = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, first, 0)  # noqa: E731
            return eqx.tree_at(lambda m: m.record, m, jtu.tree_map(put, whole, m.record[1]))

        return _tree.while_loop(more, stretch, start)

    record = _tree.buffer(capacity + length, entry)
    end = march(solve, options, capacity=capacity, keep=keep, record=record, loop=loop)
    mesh, states = end.record
    return end, _Record(mesh, states, None, None, length)


def _all_visited(record: _Record, count, pull_back, start):
    """Pull back through the steps of `_all_recorded`, from the last to the first."""
    length = record.stretch

    def visit(last, number, rows, first, carry):
        """Pull back through `number` steps before step `last`; row 0 is that of step `first`."""
        mesh, states = rows

        def entries(i):
            return _tree.read(mesh, i - first)

        def body(k, carry):
            n = last - 1 - k
            return pull_back(n, _tree.read(states, n - first), carry, entries)

        return lax.fori_loop(0, number, body, carry)

    rows = record.mesh, record.states
    if length is None:
        return visit(count, count, rows, 0, start)

    def stretch(j, carry):
        last = count - j * length
        # One row more, of the step before.
        first = jnp.maximum(last - length - 1, 0)
        part = jtu.tree_map(lambda x: lax.dynamic_slice_in_dim(x, first, length + 1), rows)
        return visit(last, jnp.minimum(last, length), part, first, carry)

    return lax.fori_loop(0, (count + length - 1) // length, stretch, start)


@eqx.filter_custom_vjp
def _solve(inputs, *, options: Options, room: _Room):
    return leave(march(inputs[0], options, capacity=room.capacity))


@_solve.def_fwd
def _solve_fwd(perturbed, inputs, *, options: Options, room: _Room):
    end, record = _recorded(inputs[0], options, room)
    return leave(end), (record, end.accepted, end.ts_index, end.y, end.tprev)


@_solve.def_bwd
def _solve_bwd(residuals, cotangents, perturbed, inputs, *, options, room):
    solve, probe = inputs
    again = []
    record, *end = residuals
    count = end[0]

    def visit(pull_back, start):
        if room.snapshots is None:
            return _all_visited(record, count, pull_back, start)

        def advance(n, stored):
            step: Step = _tree.read(record.mesh, n)
            y, _, state = solve.stepper.replay(step.tprev, step.tnext, *stored, jumped(step))
            return _tree.strong((y, state))

        indices = record.indices
        if indices is None:
            numbers = jnp.arange(room.snapshots, dtype=jnp.int32) * record.stride
            indices = jnp.where(numbers < count, numbers, -1)
        # A solve that stopped early has not got to its later snapshots.
        indices = jnp.where(indices < count, indices, -1)
        schedule = Schedule(room.capacity, room.snapshots)
        used = jnp.sum(indices >= 0)
        carry, advanced = reverse(
            schedule, count, indices, used, record.states, advance, pull_back, start
        )
        again.append(advanced)
        return carry

    gradient = sweep(
        "CheckpointAdjoint", solve, options, record.mesh, end, cotangents, perturbed[0], visit
    )
    gradient = _tree.reversed_once(gradient, "CheckpointAdjoint")
    if probe is None:
        return gradient, None
    made = count + (again[0] if again else 0)
    per_step = jnp.nan if solve.stepper.carries else solve.stepper.tableau.num_stages
    stats = (made, 0, made * per_step, 0)
    return gradient, jnp.stack([jnp.asarray(x, probe.dtype) for x in stats])
