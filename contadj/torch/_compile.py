"""Compiled steps: one Runge-Kutta step, and its vector-Jacobian product, as single functions.

A step of a small model costs more in dispatch than in arithmetic. `torch.compile` turns all stages
of a step, and all of their vector-Jacobian products, into one call each; a small model takes
several steps in a call. An adaptive solve then tries steps ahead of the decision about them: the
sizes in `attempts` only guess what `adaptive_steps` will ask for, which takes nothing else.
Compilation takes 10 to 60 seconds, once per module, method, shape and dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from ..tableaus import Tableau, get_tableau
from ._field import StateLayout, VectorField
from ._steps import (
    Attempt,
    RungeKutta,
    Step,
    StepControl,
    first_size,
    next_size,
    real_dtype,
    replay_evidence,
    time_like,
)

Params = dict[str, Tensor]

# Steps per call, and the entries of state and parameters up to which that pays: above, arithmetic
# costs more than calls, and the attempts beyond the end of a solve are wasted.
BLOCK = 4
SMALL = 2**16


def named_params(func: Any, params: Sequence[Tensor]) -> Params | None:
    """The parameters by their names in the module, None if one of them is not there."""
    own = func.named_parameters() if isinstance(func, nn.Module) and params else ()
    names = {id(param): name for name, param in own}
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


def _call(func: Any, layout: StateLayout, params: Params, t: Tensor, y: Tensor) -> Tensor:
    tree = layout.unflatten(y)
    if isinstance(func, nn.Module):
        return layout.flatten(functional_call(func, params, (t, tree)))
    return layout.flatten(func(t, tree))


def _weighted(y: Tensor, h: Tensor, weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    total = None
    for weight, slope in zip(weights, slopes, strict=False):
        if weight != 0.0:
            total = weight * slope if total is None else total + weight * slope
    return y if total is None else y + h * total


class _Kernels(NamedTuple):
    step: Callable[..., Any]
    attempts: Callable[..., Any]
    pull_back: Callable[..., Any]
    adjoint_steps: Callable[..., Any]


@cache
def _kernels(name: str, small: bool) -> _Kernels:
    """The compiled functions of a method."""
    tableau = get_tableau(name)
    a, b, nodes = tableau.a.tolist(), tableau.b.tolist(), tableau.c.tolist()
    count, fsal = tableau.evaluations, tableau.first_same_as_last
    e = [] if tableau.embedded is None else (tableau.b - tableau.embedded).tolist()

    def step(func, layout, params, times, h, y, first):
        slopes = []
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

    def attempts(func, layout, params, number, tolerances, numbers, y, first):
        (
            t, size, before, rejected, stop, smallest, largest, safety, most, least, rtol, atol
        ) = numbers.unbind()  # fmt: skip
        if tolerances is None:
            tolerances = rtol.to(y.real.dtype), atol.to(y.real.dtype)
        control = StepControl(
            *tolerances, min_step=smallest, max_step=largest, safety=safety, ifactor=most,
            dfactor=least,
        )  # fmt: skip
        if fsal:
            # No size yet: the solve begins.
            start = first_size(
                control, tableau.order, partial(_call, func, layout, params), t, stop, y, first
            )
            size = torch.where(torch.isnan(size), start, size)
            size = size.clamp(smallest, largest)
        direction, rejected = torch.sign(stop - t), rejected > 0.0
        found, rows, ends = [], [], []
        for _ in range(number):
            left = (stop - t).abs()
            lands = 1.01 * size >= left
            planned = torch.where(lands, left, size)
            t_next = torch.where(lands, stop, t + direction * planned)
            h = t_next - t
            times = [(t_next if c == 1.0 else t + c * h).to(y.real.dtype) for c in nodes]
            h = h.to(y.real.dtype)
            following, slopes = step(func, layout, params, times, h, y, first)
            if fsal:
                slopes.append(_call(func, layout, params, times[count], following))
            wrong = _weighted(torch.zeros_like(y), h, e, slopes)
            error = control.error_norm(wrong, y, following).double()
            found.append(torch.stack([t, t_next, error, size]))
            rows.append(torch.stack([y, *slopes]))
            ends.append(following)
            accepted, size, before = next_size(
                control, tableau, error, before, planned, size, lands, rejected
            )
            rejected = ~accepted
            t = torch.where(accepted, t_next, t)
            y = torch.where(accepted, following, y)
            first = torch.where(accepted, slopes[-1], slopes[0]) if fsal else None
        return torch.stack(found), torch.stack(rows), torch.stack(ends)

    def pull_back(func, layout, params, times, sizes, y, expected, adjoint, cotangents, totals):
        slopes_wanted = cotangents.shape[1] > 1

        def forward(y, params):
            rows, first = [], None
            for n, h in enumerate(sizes.unbind()):
                following, slopes = step(func, layout, params, times[n], h, y, first)
                if slopes_wanted:
                    # The slope at the end of a step is the first one of the next.
                    end = times[n][0] + h if n + 1 == len(sizes) else times[n + 1][0]
                    first = _call(func, layout, params, end, following)
                    slopes.append(first)
                rows.append(torch.stack([y, *slopes] if slopes_wanted else [y]))
                y = following
            return y, torch.stack(rows)

        (following, _), pull = vjp(forward, y, params)  # pyright: ignore
        grad_y, grad_params = pull((adjoint, cotangents))
        if totals is not None:
            grad_params = {name: totals[name] + grad for name, grad in grad_params.items()}
        return replay_evidence(y, following, expected), grad_y, grad_params

    def adjoint_steps(func, layout, params, times, sizes, z, totals):
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
    size : int
        Number of entries of the state.
    """

    def __init__(self, tableau: Tableau, func: Any, layout: StateLayout, params: Params, size: int):
        super().__init__(tableau)
        self._func, self._layout = func, layout
        self._names = list(params)
        self._params = {name: param.detach() for name, param in params.items()}
        small = size + sum(param.numel() for param in params.values()) <= SMALL
        self.block = BLOCK if small else 1
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
        slope: Tensor,
    ) -> tuple[float, Iterator[Step]]:
        """The size of the first step, and the attempts that follow, in one call."""
        if not self.fsal or not self._serves(control):
            return super().begin(f, control, t, stop, y, slope)
        f.evaluations += 1
        attempt = Attempt(t, float("nan"), float("nan"), stop, 1.0, False)
        found, rows, ends = self._try(control, attempt, y, slope)
        return found[0][3], self._guesses(f, stop, found, rows, ends, False)

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
        if self.fsal and first is None:
            first = f(time_like(attempt.t, y), y)
        found = self._try(control, attempt, y, first)
        return self._guesses(f, attempt.stop, *found, first is not None)

    def _serves(self, control: StepControl) -> bool:
        return not torch.is_grad_enabled() and control.norm == "batch"

    def _try(
        self, control: StepControl, attempt: Attempt, y: Tensor, first: Tensor | None
    ) -> tuple[list[list[float]], Tensor, Tensor]:
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
        found, rows, ends = self._kernels.attempts(
            self._func, self._layout, self._params, self.block, tolerances,
            torch.tensor(numbers, dtype=torch.float64, device=y.device), y,
            first if self.fsal else None,
        )  # fmt: skip
        return found.tolist(), rows, ends

    def _guesses(
        self,
        f: VectorField,
        stop: float,
        found: list[list[float]],
        rows: Tensor,
        ends: Tensor,
        known: bool,
    ) -> Iterator[Step]:
        """The attempts up to `stop`; an evaluation counts when its attempt is asked for."""
        block = rows if self.fsal and self.interpolates else None
        parts, width = rows.flatten(0, 1).unbind(), rows.shape[1]
        for place, (y_next, (t, t_next, error, _)) in enumerate(
            zip(ends.unbind(), found, strict=True)
        ):
            if place and t == stop:
                return
            f.evaluations += self.tableau.evaluations - (known and not self.fsal)
            known = not error <= 1.0
            start, *slopes = parts[place * width : (place + 1) * width]
            yield Step(
                t, t_next, start, y_next, slopes, [], (), error_norm=error, block=block,
                place=place,
            )  # fmt: skip

    def pull_back(
        self,
        f: VectorField,
        times: Tensor,
        sizes: Tensor,
        y: Tensor,
        expected: Tensor,
        adjoint: Tensor,
        cotangents: Tensor,
        totals: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The vector-Jacobian product of steps in a row.

        Parameters
        ----------
        f : VectorField
            Counts the evaluations.
        times : (steps, s) Tensor
            The stage times.
        sizes : (steps,) Tensor
        y : Tensor
            The state at the start of the first step.
        expected : Tensor
            The state that the forward pass had at the end of the last step.
        adjoint : Tensor
            dL/dy at the end of the last step.
        cotangents : (steps, 1 + slopes, *state) or (steps, 1, *state) Tensor
            dL/dy at the start of each step and dL/d(slopes), f at its end included.
        totals : sequence of Tensor, optional
            Parameter gradients so far.

        Returns
        -------
        the `replay_evidence`, dL/dy at the start, and the parameter gradients with these steps'
        added
        """
        sums = None if totals is None else dict(zip(self._names, totals, strict=True))
        evidence, grad_y, grads = self._kernels.pull_back(
            self._func, self._layout, self._params, times, sizes, y, expected, adjoint, cotangents,
            sums,
        )  # fmt: skip
        f.evaluations += len(times) * self.tableau.evaluations + (cotangents.shape[1] > 1)
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
