"""The discrete gradient of an algebraically reversible coupling, in O(1) memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from ...reversal import check_reversal
from .. import _diffrax, _tree
from .._forward import (
    RESULTS,
    ClosedTerm,
    Options,
    Step,
    leave,
    march,
    prepare,
    restore,
)
from .._reverse_only import reverse_only
from .._steps import explicit_step, explicit_tableau
from ._replay import split, sweep
from ._reversal import Reversal, relative_size

PyTree = Any


class ReversibleAdjoint(diffrax.AbstractAdjoint):
    """The discrete gradient of a reversible coupling around the solver, exact, in O(1) memory.

    The solve is not the solver's own: with Psi_h(t, z) the increment of its step, and z_0 = y_0,

        y_{n+1} = l y_n + (1 - l) z_n + Psi_h(t_n, z_n),
        z_{n+1} = z_n - Psi_{-h}(t_{n+1}, y_{n+1}),

    which keeps the order of a method of even order and can be undone step by step. Undoing it
    amplifies round-off by about l^(-N), so that l must go to 1 with the number of steps N; the
    distance of the y_0 that is reached from the one given is the reversal error, in the statistics
    of `value_grad_and_stats`. The stability region is narrow: where y and z drift apart by more
    than a quarter of their size, the gradient is reported as worthless too. Beside the states, the
    step times are kept. Dense output is the cubic Hermite polynomial.

    Parameters
    ----------
    coupling : float
        l in (0, 1]; 0.99 for up to about 1,000 steps in double precision, 0.999 for 10,000.
    capacity : int, optional
        Room for step times; `max_steps` where None.
    reversal_tolerance : float
        Reversal error above which the gradient is reported as worthless; float("inf") reports
        nothing, nor that y and z drift apart.
    on_reversal : "warn" or "raise"
        What happens then: a `ReversalWarning`, under `jax.jit` too; or an error, which is nan in
        the gradient with `diffeqsolve(..., throw=False)`.

    References
    ----------
    McCallum & Foster (2024), arXiv:2410.11648.
    """

    coupling: float = eqx.field(static=True, default=0.99)
    capacity: int | None = eqx.field(static=True, default=None)
    reversal_tolerance: float = eqx.field(static=True, default=1e-3)
    on_reversal: str = eqx.field(static=True, default="warn")
    probe: Any = None

    def __check_init__(self):
        if not (isinstance(self.coupling, (int, float)) and 0 < self.coupling <= 1):
            raise ValueError(f"`coupling` must be a float in (0, 1], got {self.coupling!r}")
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity < 1):
            raise ValueError(
                f"`capacity` must be None or an int of at least 1, got {self.capacity!r}"
            )

        check_reversal(self.reversal_tolerance, self.on_reversal)

    def loop(self, *, init_state, solver, **kwargs):
        if explicit_tableau(solver) is None:
            raise NotImplementedError(
                "`adjoint=contadj.jax.ReversibleAdjoint()` couples explicit Runge-Kutta solvers, "
                f"got {type(solver).__name__}; use one of those (contadj.jax.get_solver(...)), or "
                "`adjoint=contadj.jax.CheckpointAdjoint(snapshots=...)`"
            )
        solve, options = prepare(
            "ReversibleAdjoint", init_state=init_state, solver=solver, **kwargs
        )
        capacity = options.max_steps if self.capacity is None else self.capacity
        if capacity is None:
            raise ValueError(
                "`adjoint=contadj.jax.ReversibleAdjoint()` needs room for the step times: give "
                "`max_steps`, or `ReversibleAdjoint(capacity=...)`"
            )
        pair = eqx.tree_at(
            lambda s: (s.stepper, s.saving.fn, s.y0),
            solve,
            (
                _Coupled(solve.stepper.terms, type(solver), float(self.coupling)),
                _First(solve.saving.fn),
                (solve.y0, solve.y0),
            ),
        )
        reversal = Reversal(self.reversal_tolerance, self.on_reversal)
        inputs = reverse_only((pair, self.probe), "ReversibleAdjoint")
        end, buffers = _solve(inputs, options=options, capacity=capacity, reversal=reversal)
        end = restore(end, pair, options)
        end = eqx.tree_at(lambda m: m.y, end, end.y[0])
        return _diffrax.finished(init_state, end, buffers), {}


class _First(eqx.Module):
    """What is saved of a pair is saved of its first state."""

    fn: Callable

    def __call__(self, t, pair):
        return self.fn(t, pair[0])


class _Coupled(eqx.Module):
    """The coupled step of a pair (y, z), in the shape of a `Stepper`."""

    terms: ClosedTerm
    solver_type: Any = eqx.field(static=True)
    coupling: float = eqx.field(static=True)

    carries = False

    def init(self, t, pair, solver_state):
        return None

    def increment(self, t0, t1, y):
        """Psi(y), its error estimate and its first stage."""
        y1, error, dense, _ = explicit_step(self.solver_type.tableau, self.terms, t0, t1, y, None)
        first = jtu.tree_map(lambda k: k[0], dense["k"])
        return jtu.tree_map(jnp.subtract, y1, y), error, first

    def replay(self, t0, t1, pair, state, made_jump):
        pair, dense, _ = self._step(t0, t1, pair)
        return pair, dense, None

    def __call__(self, t0, t1, pair, state, made_jump):
        pair, dense, error = self._step(t0, t1, pair)
        return pair, error, dense, None, RESULTS.successful

    def _step(self, t0, t1, pair):
        y, z = pair
        keep = self.coupling
        gain, error, first = self.increment(t0, t1, z)
        y1 = jtu.tree_map(lambda y, z, g: keep * y + (1 - keep) * z + g, y, z, gain)
        loss, back_error, last = self.increment(t1, t0, y1)
        z1 = jtu.tree_map(jnp.subtract, z, loss)
        last = jtu.tree_map(jnp.negative, last)
        dense = {"y0": y, "y1": y1, "k0": first, "k1": last}
        return (y1, z1), dense, None if error is None else (error, back_error)

    def undo(self, t0, t1, pair):
        """The pair at t0, from the pair at t1."""
        y1, z1 = pair
        keep = self.coupling
        loss, _, _ = self.increment(t1, t0, y1)
        z = jtu.tree_map(jnp.add, z1, loss)
        gain, _, _ = self.increment(t0, t1, z)
        y = jtu.tree_map(lambda y1, z, g: (y1 - (1 - keep) * z - g) / keep, y1, z, gain)
        return y, z

    def evaluate(self, t, t0, t1, dense):
        hermite = diffrax.ThirdOrderHermitePolynomialInterpolation(t0=t0, t1=t1, **dense)
        return hermite.evaluate(t), None


@eqx.filter_custom_vjp
def _solve(inputs, *, options: Options, capacity: int, reversal: Reversal):
    return leave(march(inputs[0], options, capacity=capacity))


@_solve.def_fwd
def _solve_fwd(perturbed, inputs, *, options: Options, capacity: int, reversal: Reversal):
    solve, _ = inputs
    example = Step(
        solve.t0, solve.tnext, solve.tnext, solve.y0, None, options.made_jump, jnp.int32(0)
    )
    record = _tree.buffer(capacity, split(solve, options, example)[0])

    def keep(n, step, kept):
        record, *sizes = kept
        sizes = jtu.tree_map(jnp.maximum, sizes, _sizes(step.y))
        return _tree.write(record, n, split(solve, options, step)[0]), *sizes

    kept = record, *_sizes(solve.y0)
    end = march(solve, options, capacity=capacity, keep=keep, record=kept)
    record, *sizes = end.record
    sizes = jtu.tree_map(jnp.maximum, sizes, _sizes(end.y))
    return leave(end), (record, sizes, end.accepted, end.ts_index, end.y, end.tprev)


def _sizes(pair):
    """The norm of y, and of its distance from z."""
    return [_tree.norm(pair[0]), _tree.norm(jtu.tree_map(jnp.subtract, *pair))]


@_solve.def_bwd
def _solve_bwd(residuals, cotangents, perturbed, inputs, *, options, capacity, reversal):
    solve, probe = inputs
    record, (largest, apart), *end = residuals
    count, _, last, _ = end
    rebuilt = []

    def visit(pull_back, start):
        def body(k, carry):
            n = count - 1 - k
            pair, inner = carry
            step: Step = _tree.read(record, n)
            pair = solve.stepper.undo(step.tprev, step.tnext, pair)
            return pair, pull_back(n, (pair, None), inner)

        pair, carry = lax.fori_loop(0, count, body, (last, start))
        rebuilt.append(pair)
        return carry

    gradient = sweep(
        "ReversibleAdjoint", solve, options, record, end, cotangents, perturbed[0], visit
    )
    gone = [
        jtu.tree_map(jnp.subtract, part, y0) for part, y0 in zip(rebuilt[0], solve.y0, strict=True)
    ]
    error = relative_size(jnp.maximum(*map(_tree.norm, gone)), largest)
    gradient = reversal.report(gradient, error, "a `coupling` closer to 1", options.throw)
    gradient = reversal.report_apart(gradient, relative_size(apart, largest), options.throw)
    gradient = _tree.reversed_once(gradient, "ReversibleAdjoint")
    if probe is None:
        return gradient, None
    stages = solve.stepper.solver_type.tableau.num_stages
    # Two increments undo a step, two more make it again.
    stats = (count, 0, 4 * stages * count, error)
    return gradient, jnp.stack([jnp.asarray(x, probe.dtype) for x in stats])
