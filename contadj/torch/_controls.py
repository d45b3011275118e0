"""A control u(t) with values on a grid of knots, as a differentiable input of a solve."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor

from ._mesh import Mesh
from ._steps import product

KINDS = ("hold", "linear", "cubic")


class Control:
    """u(t) from values on knots: held, joined by straight lines, or by a cubic spline.

    Passed as `control=` to `odeint` and `solve`, which then call `func(t, y, u)` (and
    `running_cost(t, y, u)`). Every knot is the end of a step, so that the method keeps its order,
    and a step uses the piece it lies in up to both its ends: u of "hold" jumps at a knot, and the
    step before it still sees the old value. The step times are held fixed when the observation
    times move.

    Parameters
    ----------
    times : (K,) array or tensor
        The knots, strictly increasing.
    values : (K - 1, *shape) tensor for "hold", (K, *shape) otherwise
        u_i on [t_i, t_{i+1}), or u at the knots; gradients reach it whatever the adjoint.
    kind : "hold", "linear" or "cubic"
        Zero-order hold, linear interpolation, or the not-a-knot cubic spline (twice continuously
        differentiable).

    Raises
    ------
    TypeError
        If `values` is no floating-point tensor, or `times` needs a gradient.
    ValueError
        If `times` do not increase, or `values` are not one per piece or knot.

    References
    ----------
    de Boor, A Practical Guide to Splines, rev. ed. (2001), on the cubic spline.
    """

    def __init__(
        self,
        times: ArrayLike | Float[Tensor, " knots"],
        values: Float[Tensor, " values *control"],
        kind: str = "linear",
    ):
        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}")
        if isinstance(times, Tensor):
            if times.requires_grad:
                raise TypeError(
                    "`times` of a control has no gradient: the knots are step times, held fixed; "
                    "pass times.detach()"
                )
            times = times.cpu().double().numpy()
        knots = np.array(times, dtype=np.float64)
        if knots.ndim != 1 or knots.size < 2 or not np.all(np.diff(knots) > 0):
            raise ValueError(
                f"`times` of a control must be two knots or more, strictly increasing, got {times}"
            )
        if not isinstance(values, Tensor) or not (
            values.is_floating_point() or values.is_complex()
        ):
            came = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"`values` must be a floating-point tensor, got {came}")
        count = len(knots) - (kind == "hold")
        if values.ndim < 1 or values.shape[0] != count:
            per = "piece between knots" if kind == "hold" else "knot"
            raise ValueError(
                f"`values` must have one entry per {per}, {count} for {len(knots)} knots and "
                f"kind={kind!r}, got shape {tuple(values.shape)}"
            )
        self.times: NDArray[np.float64] = knots
        self.values = values
        self.kind = kind
        self._knots = knots.tolist()
        self._slopes: Tensor | None = None
        if kind == "cubic":
            # The slopes of the spline at its knots are linear in the values.
            slopes = CubicSpline(knots, np.eye(count)).derivative()(knots)
            self._slopes = torch.as_tensor(slopes, dtype=values.dtype, device=values.device)

    def __call__(self, t: float | Float[Tensor, ""]) -> Float[Tensor, "*control"]:
        """u at one time, of the later piece at a knot; differentiable in t too.

        Raises
        ------
        ValueError
            If t lies outside the knots.
        """
        time = t.item() if isinstance(t, Tensor) else float(t)
        first, last = self._knots[0], self._knots[-1]
        if not first <= time <= last:
            raise ValueError(f"the control is given on [{first}, {last}], not at t = {time}")
        return self.on_piece(t, self.piece(time))

    def piece(self, time: float) -> int:
        """The piece [t_i, t_{i+1}) that a time lies in; the first or the last one outside."""
        return min(max(bisect_right(self._knots, time) - 1, 0), len(self._knots) - 2)

    def on_piece(self, t: float | Tensor, i: int) -> Tensor:
        """u(t) by the formula of piece i."""
        values = self.values
        if self.kind == "hold":
            return values[i]
        start, size = self._knots[i], self._knots[i + 1] - self._knots[i]
        x = (t - start) / size
        if isinstance(x, Tensor):
            x = x.to(values.device, values.real.dtype)
        if self.kind == "linear":
            return values[i] + x * (values[i + 1] - values[i])
        assert self._slopes is not None
        # Hermite's polynomial from the values and slopes at both ends.
        lift = size * x * (1 - x)
        row = lift * (1 - x) * self._slopes[i] - lift * x * self._slopes[i + 1]
        rise = x * x * (3 - 2 * x)
        bend = product(row, values)
        return values[i] + rise * (values[i + 1] - values[i]) + bend


class Drive:
    """A control during one solve: its knots as step times, and the piece of the current step.

    Parameters
    ----------
    control : Control
    times : (T,) array
        The observation times.

    Raises
    ------
    ValueError
        If the knots do not span the observation times.
    """

    def __init__(self, control: Any, times: NDArray[np.float64]):
        if not isinstance(control, Control):
            raise TypeError(
                "`control` must be a Control(times, values, kind), got "
                f"{type(control).__name__}; a function u(t) can be called inside `func`"
            )
        low, high = float(min(times[0], times[-1])), float(max(times[0], times[-1]))
        knots = control.times
        near = 1e-9 * float(np.diff(knots).min())
        if knots[0] > low + near or knots[-1] < high - near:
            raise ValueError(
                f"`control` is given on [{knots[0]}, {knots[-1]}] and the solve runs over "
                f"[{low}, {high}]: add knots"
            )
        inner = knots[(knots > low + near) & (knots < high - near)].copy()
        # A knot that equals an observation time up to rounding is it.
        for i, knot in enumerate(inner):
            nearest = times[int(np.argmin(np.abs(times - knot)))]
            if abs(nearest - knot) < near:
                inner[i] = nearest
        self.control = control
        self.knots = inner
        self.jumps = frozenset(inner.tolist()) if control.kind == "hold" else frozenset()
        self.piece = 0

    def enter(self, t: float, t_next: float) -> None:
        """The next evaluations belong to the step from t to t_next."""
        self.piece = self.control.piece(0.5 * (t + t_next))

    def enter_beside(self, t: float, toward: float) -> None:
        """The next evaluations are limits at t, from the side of `toward`."""
        sign = 1.0 if toward > t else -1.0
        ahead = [knot for knot in self.knots.tolist() if sign * (knot - t) > 0]
        nearest = min(ahead, key=lambda knot: sign * knot) if ahead else toward
        self.enter(t, toward if sign * toward < sign * nearest else nearest)

    def on_knots(self, mesh: Mesh, given: bool) -> Mesh:
        """A mesh with all knots among its step times, which do not move with the others.

        Raises
        ------
        ValueError
            If the step times were given one by one and a knot is not among them.
        """
        times = mesh.times.copy()
        missing = []
        for knot in self.knots:
            n = int(np.argmin(np.abs(times - knot)))
            gap = float(np.abs(np.diff(times[max(n - 1, 0) : n + 2])).min())
            # Equal up to rounding is equal.
            if abs(times[n] - knot) < 1e-9 * gap:
                times[n] = knot
            else:
                missing.append(knot)
        if missing and given:
            raise ValueError(
                f"`mesh` must have the knots of `control` among its step times; {missing[0]} is "
                "not (add it, or give step_size or num_steps, to which knots are added)"
            )
        whole = np.sort(np.concatenate([times, missing]))
        return Mesh(whole if mesh.times[-1] > mesh.times[0] else whole[::-1].copy())

    def __call__(self, t: Tensor) -> Tensor:
        """u(t) on the current step."""
        return self.control.on_piece(t, self.piece)
