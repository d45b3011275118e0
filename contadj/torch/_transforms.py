"""Solves inside torch.func transforms: which adjoint serves there, and a backsolve made for them.

Inside `torch.func.grad` or `vmap` the graph belongs to the transform. Recorded operations can be
differentiated as they are; a backward pass of one's own must itself be made of torch.func calls,
and sees only the tensors that were handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import vjp

from ..tableaus import Tableau
from ._mesh import Mesh, Times
from ._steps import RungeKutta, StepControl, combine, nonzero
from .adjoints import Adjoint, BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint

Field = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]


def transformable(adjoint: Adjoint, mesh: Mesh | StepControl, tableau: Tableau) -> Adjoint:
    """The adjoint that serves inside torch.func.grad, vmap and their like.

    The gradient of `CheckpointAdjoint` is computed there as `DirectAdjoint` does, in its memory.

    Raises
    ------
    ValueError
        For an adaptive mesh, an implicit method, or an adjoint that does not serve.
    """
    if not tableau.explicit:
        raise ValueError(
            f"`method` = {tableau.name!r} solves equations until they converge, which torch.func "
            "transforms do not serve: use an explicit method, or torch.autograd"
        )
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "inside torch.func transforms the mesh must be fixed: give options={'num_steps': ...}; "
            "a batch in one adaptive solve is what options={'norm': 'sample'} is for"
        )
    if isinstance(adjoint, CheckpointAdjoint):
        return DirectAdjoint()
    if isinstance(adjoint, BacksolveAdjoint):
        if adjoint != BacksolveAdjoint():
            raise ValueError(
                "inside torch.func transforms BacksolveAdjoint() takes no settings: it steps the "
                "forward mesh backward with the same method"
            )
        return adjoint
    if not isinstance(adjoint, DirectAdjoint):
        raise ValueError(
            f"{type(adjoint).__name__} does not serve inside torch.func transforms: use "
            "CheckpointAdjoint(), DirectAdjoint() or BacksolveAdjoint()"
        )
    return adjoint


class TransformedBacksolve:
    """`BacksolveAdjoint` on a fixed mesh, differentiable by torch.func transforms.

    Parameters
    ----------
    field : callable
        f(t, y, params), pure: every tensor it depends on is an argument.
    method : RungeKutta
    mesh : (N + 1,) array
        Step times.
    times : (T,) array
        Observation times, all of them step times.

    Raises
    ------
    ValueError
        If an observation time is no step time.
    """

    def __init__(self, field: Field, method: RungeKutta, mesh: Times, times: Times):
        self._field, self._method = field, method
        self._points = mesh.tolist()
        self._rows = [nonzero(row) for row in method.tableau.a]
        missing = sorted(set(times.tolist()) - set(self._points))
        if missing:
            raise ValueError(
                "inside torch.func transforms the observation times of BacksolveAdjoint must be "
                f"step times; {missing[0]} is not: give options={{'num_steps': ...}}"
            )
        self._observed = [self._points.index(time) for time in times.tolist()]

    def __call__(self, y0: Tensor, params: Sequence[Tensor]) -> Tensor:
        """The states at the observation times, (T, *state)."""
        return _Backsolve.apply(self, y0, *params)

    def forward(self, y: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Solve."""
        observed, ys = set(self._observed), [y]
        for n, (t, t_next) in enumerate(pairwise(self._points)):
            y = self._method.take(lambda t, y: self._field(t, y, params), t, t_next, y).y_next
            if n + 1 in observed:
                ys.append(y)
        return torch.stack(ys)

    def backward(
        self, ys: Tensor, params: Sequence[Tensor], grad_ys: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Integrate (y, lambda, theta_bar) in reverse time; lambda jumps at the observations."""
        adjoint = grad_ys[-1]
        totals = [torch.zeros_like(param) for param in params]
        for i in range(len(self._observed) - 1, 0, -1):
            y = ys[i]
            for n in range(self._observed[i], self._observed[i - 1], -1):
                start, end = self._points[n], self._points[n - 1]
                y, adjoint, totals = self._step(start, end, y, adjoint, totals, params)
            adjoint = adjoint + grad_ys[i - 1]
        return adjoint, totals

    def _step(self, start, end, y, adjoint, totals, params):
        h, b = end - start, self._method.tableau.b
        slopes: list[Tensor] = []
        adjoint_slopes: list[Tensor] = []
        times = self._method.stage_times(start, end, y).unbind()
        for i in range(self._method.tableau.evaluations):
            stage = combine(y, h, self._rows[i], slopes)
            stage_adjoint = combine(adjoint, h, self._rows[i], adjoint_slopes)
            slope, pull = vjp(  # pyright: ignore
                lambda y, *params, t=times[i]: self._field(t, y, params), stage, *params
            )
            back, *grads = pull(stage_adjoint)
            slopes.append(slope)
            adjoint_slopes.append(-back)
            totals = [
                total - h * float(b[i]) * grad for total, grad in zip(totals, grads, strict=True)
            ]
        weights = nonzero(b)
        return combine(y, h, weights, slopes), combine(adjoint, h, weights, adjoint_slopes), totals


class _Backsolve(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(solve, y0, *params):  # type: ignore[override]
        return solve.forward(y0, params)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[override]
        ctx.solve = inputs[0]
        ctx.save_for_backward(output, *inputs[2:])

    @staticmethod
    def backward(ctx, grad_ys):  # type: ignore[override]
        ys, *params = ctx.saved_tensors
        adjoint, totals = ctx.solve.backward(ys, params, grad_ys)
        return None, adjoint, *totals
