"""Compiled steps: one Runge-Kutta step, and its vector-Jacobian product, as single functions.

A step of a small model costs more in dispatch than in arithmetic. `torch.compile` turns all stages
of a step, and all of their vector-Jacobian products, into one call each. Compilation takes 10 to 60
seconds, once per module, method, shape and dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from ..tableaus import Tableau, get_tableau
from ._field import StateLayout, VectorField
from ._steps import RungeKutta, Step, real_dtype

Params = dict[str, Tensor]


def named_params(func: Any, params: Sequence[Tensor]) -> Params | None:
    """The parameters by their names in the module, None if one of them is not there."""
    names: dict[int, str] = {}
    if isinstance(func, nn.Module):
        names = {id(param): name for name, param in func.named_parameters()}
    if any(id(param) not in names for param in params):
        return None
    return {names[id(param)]: param for param in params}


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # Each module and shape is a specialisation of its own; the default limit is eight of them.
    more = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        more["recompile_limit"] = 128
    options: dict[str, Any] = {} if torch.cuda.is_available() else {"cpp_wrapper": True}
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


@cache
def _kernels(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled step of a method, and the compiled vector-Jacobian product of it."""
    tableau = get_tableau(name)
    a, b = tableau.a.tolist(), tableau.b.tolist()
    e = None if tableau.embedded is None else (tableau.b - tableau.embedded).tolist()
    count, stage_count = tableau.evaluations, tableau.stages

    def step(func, layout, params, times, h, y, first, last):
        slopes = []
        for i in range(count):
            if i == 0 and first is not None:
                slopes.append(first)
            else:
                stage = _weighted(y, h, a[i], slopes)
                slopes.append(_call(func, layout, params, times[i], stage))
        following = _weighted(y, h, b, slopes)
        if last:
            end = times[count] if count < stage_count else times[0] + h
            slopes.append(_call(func, layout, params, end, following))
        if e is None or not last:
            return following, torch.stack(slopes), None
        return following, torch.stack(slopes), _weighted(torch.zeros_like(y), h, e, slopes)

    def pull_back(func, layout, params, times, h, y, adjoint, slope_cotangents, totals):
        last = slope_cotangents is not None

        def forward(y, params):
            return step(func, layout, params, times, h, y, None, last)[:2]

        (following, slopes), pull = vjp(forward, y, params)  # pyright: ignore
        cotangents = torch.zeros_like(slopes) if slope_cotangents is None else slope_cotangents
        grad_y, grad_params = pull((adjoint, cotangents))
        if totals is not None:
            grad_params = {name: totals[name] + grad for name, grad in grad_params.items()}
        return following, grad_y, grad_params

    return _compile(step), _compile(pull_back)


@_compile
def _pull_field(func, layout, params, t, y, adjoint):
    def field(y, params):
        return _call(func, layout, params, t, y)

    slope, pull = vjp(field, y, params)  # pyright: ignore
    grad_y, grad_params = pull(adjoint)
    return slope, grad_y, grad_params


class CompiledRungeKutta(RungeKutta):
    """An explicit Runge-Kutta step that runs as one compiled function.

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
    """

    def __init__(self, tableau: Tableau, func: Any, layout: StateLayout, params: Params):
        super().__init__(tableau)
        self._func, self._layout = func, layout
        self._names = list(params)
        self._params = {name: param.detach() for name, param in params.items()}
        self._step, self._pull_back = _kernels(tableau.name)

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
        y_next, slopes, error = self._step(
            self._func, self._layout, self._params, row, _size(t, t_next, y), y, first,
            last and self.fsal,
        )  # fmt: skip
        if isinstance(f, VectorField):
            f.evaluations += len(slopes) - (first is not None)
        return Step(t, t_next, y, y_next, list(slopes.unbind()), [], row, error=error)

    def pull_back(
        self,
        f: VectorField,
        t: float,
        t_next: float,
        times: Tensor,
        y: Tensor,
        adjoint: Tensor,
        slope_cotangents: Tensor | None,
        totals: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The vector-Jacobian product of a step.

        Parameters
        ----------
        f : VectorField
            Counts the evaluations.
        t, t_next : float
        times : (s,) Tensor
            The stage times.
        y, adjoint : Tensor
            The state at t, and dL/dy_next.
        slope_cotangents : (stages, *state) Tensor, optional
            dL/d(slopes), f at the end of the step included.
        totals : sequence of Tensor, optional
            Parameter gradients so far.

        Returns
        -------
        y_next, dL/dy, and the parameter gradients with this step's added
        """
        sums = None if totals is None else dict(zip(self._names, totals, strict=True))
        y_next, grad_y, grads = self._pull_back(
            self._func, self._layout, self._params, times, _size(t, t_next, y), y, adjoint,
            slope_cotangents, sums,
        )  # fmt: skip
        f.evaluations += self.tableau.evaluations + (slope_cotangents is not None)
        return y_next, grad_y, [grads[name] for name in self._names]

    def pull_field(
        self, f: VectorField, t: Tensor, y: Tensor, adjoint: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """f(t, y), and its vector-Jacobian product: dL/dy, then the parameters'."""
        f.evaluations += 1
        slope, grad_y, grads = _pull_field(self._func, self._layout, self._params, t, y, adjoint)
        return slope, [grad_y, *(grads[name] for name in self._names)]


def _size(t: float, t_next: float, y: Tensor) -> Tensor:
    return torch.tensor(t_next - t, dtype=real_dtype(y), device=y.device)
