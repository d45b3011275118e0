"""The continuous adjoint with y from the stored forward solution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._steps import host_time
from ._base import Integration, Outputs, Recorded, ReplayingAdjoint
from ._reverse import ReverseOptions, ReverseSolve, solve_or_explain
from ._trajectory import Trajectory


@dataclass(frozen=True)
class InterpolatingAdjoint(ReplayingAdjoint):
    """The continuous gradient: lambda and theta_bar in reverse time along the forward solution.

        lambda' = -f_y(t, y(t))^T lambda - g c_y,
        theta_bar' = -f_theta(t, y(t))^T lambda - g c_theta,

    with y(t) the dense output of the forward steps, recomputed from the stored states (N |y|), or
    a shortened step where the method's interpolant is of lower order. Nothing is rebuilt, so stiff
    and contracting problems do no harm; not the gradient of the numerical solution.

    Parameters
    ----------
    method, rtol, atol, options, seminorm
        As in `BacksolveAdjoint`.

    References
    ----------
    Hindmarsh et al. 2005, SUNDIALS (CVODES), doi:10.1145/1089014.1089020.
    """

    method: str | None = None
    rtol: float | None = None
    atol: float | None = None
    options: Mapping[str, Any] | None = None
    seminorm: bool = False

    def __post_init__(self) -> None:
        _ = self.settings  # refuses a bad one at once

    @property
    def settings(self) -> ReverseOptions:
        """The settings of the reverse solve."""
        return ReverseOptions(self.method, self.rtol, self.atol, self.options, self.seminorm)

    def forward(self, integration: Integration, y0: Tensor):
        """Solve, keeping the states of the accepted steps."""
        outputs = Outputs(integration)
        states, times, last_size = [y0], [float(integration.times[0])], 0.0
        for step in integration.steps(y0):
            outputs.take(step)
            states.append(step.y_next)
            times.append(host_time(step.t_next))
            last_size = step.next_size
        return outputs.finish(states[-1]).tensors(), states, (times, last_size)

    def quadrature_nodes(self, integration: Integration) -> int:
        """Gauss nodes per step for the theta-gradient; 0 leaves it to the stages."""
        return 0

    def backward(self, integration: Integration, recorded: Recorded):
        """Integrate lambda from the last observation time to the first."""
        times, last_size = recorded.notes
        reverse = ReverseSolve(
            self.settings, integration, recorded, recorded.tensors[-1], last_size,
            Trajectory(integration, times, recorded.tensors), self.quadrature_nodes(integration),
        )  # fmt: skip
        return solve_or_explain(self, reverse, {})
