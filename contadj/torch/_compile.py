"""Compiled steps: one Runge-Kutta step, and its vector-Jacobian product, as single functions.

A step of a small model costs more in dispatch than in arithmetic. `torch.compile` turns all stages
of a step, and all of their vector-Jacobian products, into one call each; a small model takes
several steps in a call. An adaptive solve then tries steps ahead of the decision about them: the
sizes in `attempts` only guess what `adaptive_steps` will ask for, which takes nothing else.
Compilation takes 10 to 60 seconds, once per module, method, shape and dtype.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from ..tableaus import Tableau, get_tableau
from ._field import StateLayout, VectorField
from ._mesh import Times
from ._steps import (
    Attempt,
    RungeKutta,
    Step,
    StepControl,
    dense_output,
    first_size,
    next_size,
    real_dtype,
    replay_evidence,
)

Params = dict[str, Tensor]

# Steps per call, and the entries of state and parameters up to which that pays: above, arithmetic
# costs more than calls, and the attempts beyond the end of a solve are wasted.
BLOCK = 4
SMALL = 2**16

# What f was seen to do when it was watched holds for every call of the same trace: the guards of a
# trace cover all that decides which tensors f uses and which of them need a gradient.
_traces = itertools.count()
_watched: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _new_trace() -> int:
    """The number of a trace: a constant in its compiled code."""
    return next(_traces)


class UnwatchedTraceError(Exception):
    """The steps ran another trace of f than those that were watched."""


def was_watched(func: Any) -> bool:
    """Whether a trace of func was watched, and needed nothing that is not in its compiled code."""
    return isinstance(func, nn.Module) and func in _watched


def named_params(named: Mapping[str, Tensor], params: Sequence[Tensor]) -> Params | None:
    """The parameters by their names in the module, None if one of them is not there."""
    names = {id(param): name for name, param in named.items()}
    if any(id(param) not in names for param in params):
        return None
    return {names[id(param)]: param for param in params}


def _compile(function: Callable[..., Any], small: bool = False) -> Callable[..., Any]:
    # Each module and shape is a specialisation of its own; the default limit is eight of them.
    more = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        more["recompile_limit"] = 128
    options: dict[str, Any] = {} if torch.cuda.is_available() else {"cpp_wrapper": True}
    if small and not torch.cuda.is_available():
        # The product of a row and a matrix as a loop of its own, fused with what is around it.
        options["post_grad_fusion_options"] = {"decompose_mm_pass": {}}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options, **more)


def _call(func: Any, layout: StateLayout | None, params: Params, t: Tensor, y: Tensor) -> Tensor:
    tree = y if layout is None else layout.unflatten(y)
    slope = (
        functional_call(func, params, (t, tree)) if isinstance(func, nn.Module) else func(t, tree)
    )
    return slope if layout is None else layout.flatten(slope)


def _stage_times(nodes: Sequence[float], t: Tensor, t_next: Tensor, y: Tensor) -> list[Tensor]:
    return [(t_next if c == 1.0 else t + c * (t_next - t)).to(y.real.dtype) for c in nodes]


def _dense(
    interpolant: Sequence[Sequence[float]], t: Tensor, t_next: Tensor, y: Tensor,
    slopes: Sequence[Tensor], observed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which observation times lie in a step, its end excluded, and the dense output at them."""
    h = t_next - t
    direction = torch.sign(h)
    inside = (direction * (observed - t) >= 0.0) & (direction * (t_next - observed) > 0.0)
    x = torch.where(inside, (observed - t) / h, 0.0)
    column = (-1, *[1] * y.ndim)
    state = y.expand(len(observed), *y.shape)
    for row, slope in zip(interpolant, slopes, strict=False):
        weight = torch.zeros_like(x)
        for coefficient in row[::-1]:
            weight = (weight + coefficient) * x
        state = state + (h * weight).to(y.dtype).view(column) * slope
    return inside.view(column), state


def _weighted(y: Tensor, h: Tensor, weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    total = None
    for weight, slope in zip(weights, slopes, strict=False):
        if weight != 0.0:
            total = weight * slope if total is None else total + weight * slope
    return y if total is None else y + h * total


class _Attempts(NamedTuple):
    """Attempts in a row: (t, t_next, error, size) of each, y and the slopes, y_next.

    `observed` are the states at the observation times that an accepted one reached, (P, *state);
    with them only the first and the last slope are there.
    """

    numbers: list[list[float]]
    rows: Tensor
    ends: Tensor
    observed: Tensor | None


class _Kernels(NamedTuple):
    step: Callable[..., Any]
    attempts: Callable[..., Any]
    pull_back: Callable[..., Any]
    adjoint_steps: Callable[..., Any]


@torch.compiler.assume_constant_result
def _coefficients(name: str) -> tuple:
    """a, b, the nodes, the error weights and the dense output; constants, which nobody guards."""
    tableau = get_tableau(name)
    error = [] if tableau.embedded is None else (tableau.b - tableau.embedded).tolist()
    return (
        tableau.a.tolist(), tableau.b.tolist(), tableau.c.tolist(), error,
        dense_output(tableau)[0].tolist(),
    )  # fmt: skip


@cache
def _kernels(name: str, small: bool) -> _Kernels:
    """The compiled functions of a method."""
    tableau = get_tableau(name)
    count, fsal = tableau.evaluations, tableau.first_same_as_last

    def step(func, layout, params, times, h, y, first):
        (a, b, *_), slopes = _coefficients(name), []
        for i in range(count):
            if i == 0 and first is not None:
                slopes.append(first)
            else:
                stage = _weighted(y, h, a[i], slopes)
                slopes.append(_call(func, layout, params, times[i], stage))
        return _weighted(y, h, b, slopes), slopes

    def single(func, layout, params, times, h, y, first, last):
        following, slopes = step(func, layout, params, times, h, y, first)
        if last:
            slopes.append(_call(func, layout, params, times[count], following))
        return following, torch.stack(slopes)

    def attempts(func, layout, params, number, tolerances, numbers, y, first, observed):
        (
            t, size, before, rejected, stop, smallest, largest, safety, most, least, rtol, atol
        ) = numbers.unbind()  # fmt: skip
        if tolerances is None:
            tolerances = rtol.to(y.real.dtype), atol.to(y.real.dtype)
        control = StepControl(
            *tolerances, min_step=smallest, max_step=largest, safety=safety, ifactor=most,
            dfactor=least,
        )  # fmt: skip
        if fsal and first is None:
            field = partial(_call, func, layout, params)
            first = field(t.to(y.real.dtype), y)
            # No size yet: the solve begins.
            start = first_size(control, tableau.order, field, t, stop, y, first)
            size = torch.where(torch.isnan(size), start, size).clamp(smallest, largest)
        *_, nodes, e, interpolant = _coefficients(name)
        direction, rejected = torch.sign(stop - t), rejected > 0.0
        found, rows, ends, seen = [], [], [], None
        for _ in range(number):
            left = (stop - t).abs()
            lands = 1.01 * size >= left
            planned = torch.where(lands, left, size)
            t_next = torch.where(lands, stop, t + direction * planned)
            h, times = (t_next - t).to(y.real.dtype), _stage_times(nodes, t, t_next, y)
            following, slopes = step(func, layout, params, times, h, y, first)
            if fsal:
                slopes.append(_call(func, layout, params, times[count], following))
            wrong = _weighted(torch.zeros_like(y), h, e, slopes)
            error = control.error_norm(wrong, y, following).double()
            found.append(torch.stack([t, t_next, error, size]))
            # Who observes by the dense output of a single step needs all slopes.
            rows.append(torch.stack([y, *(slopes if observed is None else slopes[::count])]))
            ends.append(following)
            accepted, size, before = next_size(
                control, tableau, error, before, planned, size, lands, rejected
            )
            if observed is not None:
                inside, states = _dense(interpolant, t, t_next, y, slopes, observed)
                seen = torch.where(inside & accepted, states, 0.0 if seen is None else seen)
            rejected = ~accepted
            t = torch.where(accepted, t_next, t)
            y = torch.where(accepted, following, y)
            first = torch.where(accepted, slopes[-1], slopes[0]) if fsal else None
        return torch.stack(found), torch.stack(rows), torch.stack(ends), seen, _new_trace()

    def pull_back(
        func, layout, params, points, y, expected, adjoint, totals, slope_cotangents, observations,
        dense,
    ):  # fmt: skip
        *_, nodes, _, interpolant = _coefficients(name)
        points = points.unbind()
        wanted = 0 if slope_cotangents is None else len(slope_cotangents)
        if observations is not None and dense:
            wanted = len(interpolant)

        def forward(y, params):
            first, seen, slopes = None, None, []
            for t, t_next in itertools.pairwise(points):
                h, times = (t_next - t).to(y.real.dtype), _stage_times(nodes, t, t_next, y)
                following, slopes = step(func, layout, params, times, h, y, first)
                if wanted > count:
                    # The slope at the end of a step is the first one of the next.
                    first = _call(func, layout, params, t_next.to(y.real.dtype), following)
                    slopes.append(first)
                if observations is not None:
                    inside, states = _dense(
                        interpolant, t, t_next, y, slopes if dense else (), observations[0]
                    )
                    states = torch.where(inside, states, 0.0)
                    seen = states if seen is None else seen + states
                y = following
            if seen is None and wanted:
                seen = torch.stack(slopes[:wanted])
            return (y,) if seen is None else (y, seen)

        (following, *_), pull = vjp(forward, y, params)  # pyright: ignore
        cotangent = slope_cotangents if observations is None else observations[1]
        grad_y, grad_params = pull((adjoint,) if cotangent is None else (adjoint, cotangent))
        if totals is not None:
            grad_params = {name: totals[name] + grad for name, grad in grad_params.items()}
        return replay_evidence(y, following, expected), grad_y, grad_params

    def adjoint_steps(func, layout, params, times, sizes, z, totals):
        a, b, *_ = _coefficients(name)
        for n, h in enumerate(sizes.unbind()):
            slopes, sums = [], totals
            for i in range(count):
                y, adjoint = _weighted(z, h, a[i], slopes).unbind()
                field = partial(_field, func, layout, times[n][i])
                slope, pull = vjp(field, y, params)  # pyright: ignore
                grad_y, grads = pull(adjoint)
                slopes.append(torch.stack([slope, -grad_y]))
                if b[i] != 0.0:
                    sums = {name: sums[name] - h * b[i] * grad for name, grad in grads.items()}
            z, totals = _weighted(z, h, b, slopes), sums
        return z, totals

    return _Kernels(
        *(_compile(kernel, small) for kernel in (single, attempts, pull_back, adjoint_steps))
    )


def _field(func, layout, t, y, params):
    return _call(func, layout, params, t, y)


@_compile
def _pull_field(func, layout, params, t, y, adjoint):
    slope, pull = vjp(partial(_field, func, layout, t), y, params)  # pyright: ignore
    grad_y, grad_params = pull(adjoint)
    return slope, grad_y, grad_params


class CompiledRungeKutta(RungeKutta):
    """An explicit Runge-Kutta method whose steps run as compiled functions.

    Small problems, where a call costs more than its arithmetic, take `BLOCK` steps in one call.
    Where a graph is recorded, or times are differentiated, it steps as `RungeKutta` does.

    Parameters
    ----------
    tableau : Tableau
        An explicit method.
    func : nn.Module or callable
        The vector field; a module if gradients with respect to parameters are wanted.
    layout : StateLayout
    params : dict of str to Tensor
        The parameters that gradients are wanted for, by their names in the module.
    y : Tensor
        The state, for its shape.
    times : (T,) array, optional
        Observation times that a block of steps observes itself, where that pays.
    trusted : bool
        Nobody watched f in this solve: raise `UnwatchedTraceError` before the first step unless the
        trace was watched in an earlier one.
    """

    def __init__(
        self,
        tableau: Tableau,
        func: Any,
        layout: StateLayout,
        params: Params,
        y: Tensor,
        times: Times | None = None,
        trusted: bool = False,
    ):
        super().__init__(tableau)
        self.trace: int | None = None
        self._trusted = trusted
        # A layout that does nothing would only be guarded.
        self._func, self._layout = func, None if layout.single else layout
        self._names = list(params)
        self._params = {name: param.detach() for name, param in params.items()}
        small = y.numel() + sum(param.numel() for param in params.values()) <= SMALL
        self.observed: Tensor | None = None
        if small and times is not None:
            # One compiled function for all numbers of times up to the next power of two.
            length = 1 << (len(times) - 1).bit_length()
            if length * y.numel() <= SMALL:
                padded = np.full(length, np.nan)
                padded[: len(times)] = times
                self.observed = torch.from_numpy(padded).to(y.device)
        self.block = BLOCK if small and (times is None or self.observed is not None) else 1
        self._kernels = _kernels(tableau.name, small)

    def take(
        self,
        f: Callable[[Tensor, Tensor], Tensor],
        t: float | Tensor,
        t_next: float | Tensor,
        y: Tensor,
        *,
        times: Tensor | Sequence[Tensor] | None = None,
        first: Tensor | None = None,
        last: bool = False,
    ) -> Step:
        """Take one step."""
        if torch.is_grad_enabled() or isinstance(t, Tensor) or isinstance(t_next, Tensor):
            return super().take(f, t, t_next, y, times=times, first=first, last=last)
        row = times if isinstance(times, Tensor) else self.stage_times(t, t_next, y)
        h = torch.tensor(t_next - t, dtype=real_dtype(y), device=y.device)
        y_next, slopes = self._kernels.step(
            self._func, self._layout, self._params, row, h, y, first, last and self.fsal
        )
        if isinstance(f, VectorField):
            f.evaluations += len(slopes) - (first is not None)
        return Step(t, t_next, y, y_next, list(slopes.unbind()), [], row)

    def begin(
        self,
        f: VectorField,
        control: StepControl,
        t: float,
        stop: float,
        y: Tensor,
        first: Tensor | None,
    ) -> tuple[float, Tensor | None, Iterator[Step]]:
        """The size of the first step, and the attempts that follow, in one call."""
        if not self.fsal or not self._serves(control):
            return super().begin(f, control, t, stop, y, first)
        f.evaluations += 1
        attempt = Attempt(t, float("nan"), float("nan"), stop, 1.0, False)
        found = self._try(control, attempt, y, None)
        return found.numbers[0][3], first, self._guesses(f, stop, found, first is not None)

    def attempts(
        self,
        f: VectorField,
        control: StepControl,
        attempt: Attempt,
        y: Tensor,
        first: Tensor | None,
    ) -> Iterator[Step]:
        """Attempts in a row, computed in one call."""
        if not self._serves(control):
            return super().attempts(f, control, attempt, y, first)
        # Where a call costs more than f, one compiled function serves: it evaluates f itself.
        found = self._try(control, attempt, y, None if self.block > 1 else first)
        return self._guesses(f, attempt.stop, found, first is not None)

    def _serves(self, control: StepControl) -> bool:
        return not torch.is_grad_enabled() and control.norm == "batch"

    def _try(
        self, control: StepControl, attempt: Attempt, y: Tensor, first: Tensor | None
    ) -> _Attempts:
        bounds = control.rtol, control.atol
        tolerances = None
        if any(isinstance(bound, Tensor) for bound in bounds):
            tolerances = tuple(
                torch.as_tensor(bound, dtype=real_dtype(y), device=y.device) for bound in bounds
            )
            bounds = 0.0, 0.0
        numbers = [
            attempt.t, attempt.size, attempt.error_before, attempt.rejected, attempt.stop,
            control.min_step, control.max_step, control.safety, control.ifactor, control.dfactor,
            *bounds,
        ]  # fmt: skip
        found, *tensors, trace = self._kernels.attempts(
            self._func, self._layout, self._params, self.block, tolerances,
            torch.tensor(numbers, dtype=torch.float64, device=y.device), y,
            first if self.fsal else None,
            self.observed if self.fsal and self.interpolates else None,
        )  # fmt: skip
        self._check_trace(trace)
        return _Attempts(found.tolist(), *tensors)

    def _check_trace(self, trace: int) -> None:
        if self.trace is None and self._trusted and trace not in _watched[self._func]:
            raise UnwatchedTraceError
        self.trace = trace

    def keep_watched(self) -> None:
        """From now on, solves that run the trace that this one ran need not watch f."""
        # An unwatched call must not write to buffers.
        if self.trace is not None and next(self._func.buffers(), None) is None:
            _watched.setdefault(self._func, set()).add(self.trace)

    def _guesses(
        self, f: VectorField, stop: float, found: _Attempts, known: bool
    ) -> Iterator[Step]:
        """The attempts up to `stop`; an evaluation counts when its attempt is asked for.

        `known` says whether f at the start of the first one is known, and counted, already.
        """
        parts, width = found.rows.flatten(0, 1).unbind(), found.rows.shape[1]
        f.evaluations += self.fsal and not known
        for place, (y_next, (t, t_next, error, _)) in enumerate(
            zip(found.ends.unbind(), found.numbers, strict=True)
        ):
            if place and t == stop:
                return
            f.evaluations += self.tableau.evaluations - (known and not self.fsal)
            known = not error <= 1.0
            start, *slopes = parts[place * width : (place + 1) * width]
            yield Step(
                t, t_next, start, y_next, slopes, [], (), error_norm=error, observed=found.observed
            )

    def pull_back(
        self,
        f: VectorField,
        points: Tensor,
        y: Tensor,
        expected: Tensor,
        adjoint: Tensor,
        totals: Sequence[Tensor] | None,
        *,
        slope_cotangents: Tensor | None = None,
        observations: tuple[Tensor, Tensor] | None = None,
        dense: bool = False,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The vector-Jacobian product of steps in a row.

        Parameters
        ----------
        f : VectorField
            Counts the evaluations.
        points : (steps + 1,) Tensor
            The step times, float64.
        y : Tensor
            The state at the start of the first step.
        expected : Tensor
            The state that the forward pass had at the end of the last step.
        adjoint : Tensor
            dL/dy at the end of the last step.
        totals : sequence of Tensor, optional
            Parameter gradients so far.
        slope_cotangents : (slopes, *state) Tensor, optional
            dL/d(slopes) of a single step, f at its end included where the dense output takes it.
        observations : tuple of Tensor, optional
            The observation times (P,) and dL/dy there (P, *state); those outside the steps do not
            count.
        dense : bool
            Whether an observation lies between step times.

        Returns
        -------
        the `replay_evidence`, dL/dy at the start, and the parameter gradients with these steps'
        added
        """
        sums = None if totals is None else dict(zip(self._names, totals, strict=True))
        evidence, grad_y, grads = self._kernels.pull_back(
            self._func, self._layout, self._params, points, y, expected, adjoint, sums,
            slope_cotangents, observations, dense,
        )  # fmt: skip
        ends = dense or slope_cotangents is not None
        f.evaluations += (len(points) - 1) * self.tableau.evaluations + (
            ends and self._interpolant_stages > self.tableau.evaluations
        )
        return evidence, grad_y, [grads[name] for name in self._names]

    def adjoint_steps(
        self,
        f: VectorField,
        times: Tensor,
        sizes: Tensor,
        z: Tensor,
        totals: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor]]:
        """Steps of the adjoint ODE in a row.

        Parameters
        ----------
        f : VectorField
            Counts the evaluations.
        times : (steps, s) Tensor
            The stage times.
        sizes : (steps,) Tensor
        z : (2, *state) Tensor
            y and the adjoint.
        totals : sequence of Tensor, optional
            Parameter gradients so far.

        Returns
        -------
        z at the end, and the parameter gradients with these steps' added
        """
        sums = {
            name: torch.zeros_like(param) if total is None else total
            for (name, param), total in zip(self._params.items(), totals, strict=True)
        }
        f.evaluations += len(times) * self.tableau.evaluations
        z, sums = self._kernels.adjoint_steps(
            self._func, self._layout, self._params, times, sizes, z, sums
        )
        return z, [sums[name] for name in self._names]

    def pull_field(
        self, f: VectorField, t: Tensor, y: Tensor, adjoint: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """f(t, y), and its vector-Jacobian product: dL/dy, then the parameters'."""
        f.evaluations += 1
        slope, grad_y, grads = _pull_field(self._func, self._layout, self._params, t, y, adjoint)
        return slope, [grad_y, *(grads[name] for name in self._names)]
