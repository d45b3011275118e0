"""Backpropagation through the operations of the solver."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .._mesh import Mesh
from ._base import Adjoint, Integration, Outputs


@dataclass(frozen=True)
class DirectAdjoint(Adjoint):
    """The discrete gradient by backpropagation through every operation (BPTT).

    Exact for the numerical solution; memory grows with the activations of every step. Step sizes
    chosen by error control are constants: the mesh is frozen (Alexe & Sandu 2009,
    doi:10.1016/j.apnum.2009.05.005, on why).
    """

    def solve(
        self, integration: Integration, y0: Tensor, t: Tensor, params: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Solve with a graph."""
        outputs = Outputs(integration)
        y = y0
        if t.requires_grad and torch.is_grad_enabled():
            return self._with_times(integration, y0, t)
        for step in integration.steps(y):
            outputs.take(step)
            y = step.y_next
        return outputs.finish(y).tensors()

    @staticmethod
    def _with_times(integration: Integration, y0: Tensor, t: Tensor):
        if not isinstance(integration.mesh, Mesh):
            with torch.no_grad():
                ends = [step.t_next for step in integration.steps(y0)]
            integration.mesh = Mesh.found(integration.times[0], ends)
        integration.first = None
        outputs = Outputs(integration)
        before = integration.f.evaluations
        observation_times = t.to("cpu", torch.float64)
        times = integration.mesh.differentiable(t).unbind()
        y = y0
        for start, end in pairwise(times):
            step = integration.method.take(integration.f, start, end, y)
            outputs.take(step, observation_times)
            y = step.y_next
        stats = integration.stats
        stats.steps_accepted = len(times) - 1
        stats.f_evaluations_forward += integration.f.evaluations - before
        return outputs.finish(y, observation_times).tensors()
