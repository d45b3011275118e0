"""The continuous adjoint: y, lambda and the theta-gradient integrated together in reverse time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checkpointing import check_count
from ...reversal import check_reversal
from .._steps import host_time
from ._base import (
    Integration,
    Outputs,
    Recorded,
    ReplayingAdjoint,
    check_slope,
    report_reversal,
)
from ._reverse import ReverseOptions, ReverseSolve, solve_or_explain


@dataclass(frozen=True)
class BacksolveAdjoint(ReplayingAdjoint):
    """The continuous gradient: the adjoint ODE in reverse time, with y rebuilt on the way.

    From t_1 to t_0, with g the cotangent of the running cost,

        y' = f,   lambda' = -f_y^T lambda - g c_y,   theta_bar' = -f_theta^T lambda - g c_theta,

    and lambda jumps by dC/dy(t_i) at each observation time. y is set to the stored state at the
    observation times where states are returned. O(1) memory; not the gradient of the numerical
    solution, and worthless where rebuilding y is unstable: the reversal error says so.

    Parameters
    ----------
    method : str, optional
        Method of the reverse solve; the forward one by default.
    rtol, atol : float, optional
        Tolerances of an adaptive reverse solve; the forward ones by default.
    options : mapping, optional
        Mesh or step-size control of the reverse solve, as in `odeint`; by default the forward mesh
        reversed, or the same control.
    seminorm : bool
        Leave theta_bar out of the error norm (Kidger, Chen & Lyons 2021, arXiv:2009.09457).
    restart_every : int, optional
        Store y every so many forward steps and restart it from there.
    reversal_tolerance : float
        Reversal error above which the gradient is reported as worthless.
    on_reversal : "warn" or "raise"
        What happens then: a `ReversalWarning`, or a `SolveError`.

    References
    ----------
    Chen, Rubanova, Bettencourt & Duvenaud 2018, arXiv:1806.07366.
    """

    method: str | None = None
    rtol: float | None = None
    atol: float | None = None
    options: Mapping[str, Any] | None = None
    seminorm: bool = False
    restart_every: int | None = None
    reversal_tolerance: float = 1e-3
    on_reversal: str = "warn"

    def __post_init__(self) -> None:
        _ = self.settings  # refuses a bad one at once
        check_reversal(self.reversal_tolerance, self.on_reversal)
        check_count("restart_every", self.restart_every)

    @property
    def settings(self) -> ReverseOptions:
        """The settings of the reverse solve."""
        return ReverseOptions(self.method, self.rtol, self.atol, self.options, self.seminorm)

    def forward(self, integration: Integration, y0: Tensor):
        """Solve, keeping the states at the observation times only."""
        outputs = Outputs(integration)
        slope = integration.first
        y, scale, last_size = y0, torch.linalg.vector_norm(y0), 0.0
        stored: dict[float, Tensor] = {}
        for n, step in enumerate(integration.steps(y0)):
            if self.restart_every is not None and n and n % self.restart_every == 0:
                stored[host_time(step.t)] = step.y
            if slope is None and integration.method.tableau.explicit:
                slope = step.slopes[0]
            outputs.take(step)
            y = step.y_next
            scale = torch.maximum(scale, torch.linalg.vector_norm(y))
            last_size = step.next_size
        results = outputs.finish(y).tensors()
        tensors = [y, scale, *stored.values()]
        if results[0] is not None:
            tensors.append(results[0])
        if slope is not None:
            tensors.append(slope)
        return results, tensors, (list(stored), last_size, slope is not None)

    def backward(self, integration: Integration, recorded: Recorded):
        """Integrate the adjoint ODE from the last observation time to the first."""
        stored_times, last_size, watched = recorded.notes
        tensors = recorded.tensors
        if watched:
            *tensors, slope = tensors
            check_slope(integration, float(integration.times[0]), recorded.y0, slope)
        y_end, scale = tensors[:2]
        pieces = dict(zip(stored_times, tensors[2:], strict=False))
        if integration.loss is None:
            pieces.update(zip(integration.times.tolist(), tensors[-1], strict=True))
        pieces[float(integration.times[0])] = recorded.y0
        reverse = ReverseSolve(self.settings, integration, recorded, y_end, last_size)
        result = solve_or_explain(self, reverse, pieces)
        report_reversal(
            integration.stats,
            reverse.reversal_error,
            scale,
            self.reversal_tolerance,
            self.on_reversal,
            "BacksolveAdjoint(restart_every=...) with fewer steps between restarts",
        )
        return result
