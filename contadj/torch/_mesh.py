"""The mesh of a fixed-step solve, and how it moves with the times the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Mesh:
    """Step times, and their derivative with respect to the observation times.

    Parameters
    ----------
    times : (N + 1,) array
        The step times, float64, from the first to the last observation time.
    weights : pair of ((N + 1,) int array, (N + 1,) float array), optional
        Step time n moves as (1 - w_n) t[i_n] + w_n t[i_n + 1]. None: the inner step times are held
        fixed and the ends follow the first and the last observation time.
    shifts : bool
        The inner step times move with the first observation time.
    """

    times: Times
    weights: tuple[NDArray[np.int64], Times] | None = None
    shifts: bool = False

    def differentiable(self, t: Tensor) -> Tensor:
        """The step times as a float64 host tensor that is differentiable with respect to t."""
        t = t.to("cpu", torch.float64)
        if self.weights is not None:
            left, weight = (torch.from_numpy(array) for array in self.weights)
            right = torch.clamp(left + 1, max=len(t) - 1)
            return t[left] + weight * (t[right] - t[left])
        moves = torch.zeros(2, len(self.times), dtype=torch.float64)
        moves[0, : -1 if self.shifts else 1] = 1.0
        moves[1, -1] = 1.0
        ends = t[[0, -1]]
        return torch.from_numpy(self.times) + (ends - ends.detach()) @ moves

    def pullback(self, t: Tensor, grad_times: Tensor, grad_observations: Tensor) -> Tensor:
        """dL/dt from dL/d(step times) and dL/d(observation times)."""
        with torch.enable_grad():
            leaf = t.detach().requires_grad_()
            moved = self.differentiable(leaf)
        (grad,) = torch.autograd.grad(moved, leaf, grad_times)
        return grad + grad_observations.to(grad)

    @staticmethod
    def found(t0: float, ends: Sequence[float | Tensor]) -> Mesh:
        """The mesh that error control took, frozen."""
        return Mesh(np.array([t0, *map(float, ends)], dtype=np.float64))


def equal_steps(t: Times, num_steps: int) -> Mesh:
    """`num_steps` equal steps in each interval of t; the mesh scales with t."""
    if isinstance(num_steps, bool) or not isinstance(num_steps, int | np.integer) or num_steps < 1:
        raise ValueError(f"`num_steps` must be a positive integer, got {num_steps!r}")
    intervals = len(t) - 1
    left = np.repeat(np.arange(intervals), num_steps)
    weight = np.tile(np.arange(num_steps) / num_steps, intervals)
    times = t[left] + weight * (t[left + 1] - t[left])
    return Mesh(np.append(times, t[-1]), (np.append(left, intervals), np.append(weight, 0.0)))


def constant_steps(t: Times, step_size: float) -> Mesh:
    """Steps of one size from t[0]; the last one is shortened to end on t[-1]."""
    if not (np.isfinite(step_size) and step_size > 0):
        raise ValueError(f"`step_size` must be positive and finite, got {step_size!r}")
    span = t[-1] - t[0]
    ratio = abs(span) / step_size
    # A span that is a whole number of steps up to rounding has no shortened step.
    count = max(
        1, round(ratio) if abs(ratio - round(ratio)) < 1e-9 * ratio else int(np.ceil(ratio))
    )
    times = t[0] + np.sign(span) * step_size * np.arange(count + 1)
    times[-1] = t[-1]
    _snap(times, t)
    return Mesh(times, shifts=True)


def _snap(times: Times, t: Times) -> None:
    """An observation that equals a step time up to rounding is one."""
    sign, inner = np.sign(t[-1] - t[0]), t[1:-1]
    right = np.clip(np.searchsorted(sign * times, sign * inner), 1, len(times) - 1)
    gap = np.abs(times[right] - times[right - 1])
    nearest = np.where(
        np.abs(times[right] - inner) < np.abs(times[right - 1] - inner), right, right - 1
    )
    same = np.abs(times[nearest] - inner) < 1e-9 * gap
    times[nearest[same]] = inner[same]


def given_steps(t: Times, mesh: ArrayLike) -> Mesh:
    """The user's own step times, held fixed but for their ends."""
    times = np.array(mesh, dtype=np.float64)
    direction = np.sign(t[-1] - t[0])
    if times.ndim != 1 or times.size < 2 or np.any(direction * np.diff(times) <= 0):
        raise ValueError("`mesh` must be step times, strictly monotone in the direction of `t`")
    scale = np.max(np.abs(t))
    if abs(times[0] - t[0]) > 1e-12 * scale or abs(times[-1] - t[-1]) > 1e-12 * scale:
        raise ValueError(
            f"`mesh` must start at t[0] = {t[0]} and end at t[-1] = {t[-1]}, got {times[0]} and "
            f"{times[-1]}"
        )
    times[0], times[-1] = t[0], t[-1]
    _snap(times, t)
    return Mesh(times)
