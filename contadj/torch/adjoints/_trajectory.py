"""The forward solution as a function of time, from the states at the mesh."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from .._steps import Step, replay_evidence
from ._base import Integration, check_replay


class Trajectory:
    """y(t) by the dense output of the step that t lies in, recomputed when it is entered.

    Where the method has no interpolant of its own order, y(t) is reached by a shortened step of the
    method from the step time before it.

    Parameters
    ----------
    integration : Integration
    times : sequence of float
        The step times of the forward solve.
    states : sequence of Tensor
        The states there.
    """

    def __init__(self, integration: Integration, times: Sequence[float], states: Sequence[Tensor]):
        self._integration = integration
        self._times = list(times)
        self._states = states
        self._sign = integration.direction
        self._keys = [self._sign * time for time in self._times]
        self._at = {time: n for n, time in enumerate(self._times)}
        self._entered: tuple[int, Step] | None = None
        with torch.no_grad():
            last = self._enter(len(states) - 2)
            evidence = replay_evidence(last.y, last.y_next, states[-1])
            check_replay(integration, evidence, last.y.dtype)

    def __call__(self, t: float) -> Tensor:
        """The state at a time of the interval."""
        n = self._at.get(t)
        if n is not None:
            return self._states[n]
        n = bisect_right(self._keys, self._sign * t) - 1
        n = min(max(n, 0), len(self._times) - 2)
        with torch.no_grad(), self._integration.f.elsewhere():
            step = self._enter(n)
            return self._integration.method.evaluate(self._integration.f, step, t)

    def _enter(self, n: int) -> Step:
        """Step n, taken again unless it is the one in work."""
        if self._entered is None or self._entered[0] != n:
            step = self._integration.method.take(
                self._integration.f, self._times[n], self._times[n + 1], self._states[n], last=True
            )
            self._entered = n, step
        return self._entered[1]
