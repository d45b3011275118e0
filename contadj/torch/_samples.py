"""Step sizes of their own for the samples of a batch.

Sample b takes its own accepted steps [t_{n,b}, t_{n,b} + h_{n,b}], found by error control of its
own while all samples go on in lockstep. In the step number s as the independent variable its
solution obeys, on step n,

    dy_b/ds = h_{n,b} f(t_{n,b} + (s - n) h_{n,b}, y_b),   n <= s <= n + 1,

so that every adjoint sees one fixed mesh, s = 0, 1, ..., N, and a vector field driven by
(t_n, h_n). A sample that needs fewer steps than others between two observations rests: its h is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _tree
from ._controls import Control, Drive
from ._errors import SolveError, SolveStats
from ._field import StateLayout
from ._mesh import Mesh, Times
from ._steps import RungeKutta, StepControl, first_size, next_size, real_dtype


@dataclass(frozen=True, eq=False)
class SampleMesh:
    """The accepted steps of every sample, frozen.

    Parameters
    ----------
    starts, sizes : (N, B) Tensor, float64
        Where each sample's steps start, and their signed sizes; zero where it rests.
    ends : (T,) array
        The number of steps taken at each observation time.
    evaluations : int
        Evaluations of f, on the whole batch, that finding them took.
    """

    starts: Tensor
    sizes: Tensor
    ends: Times
    evaluations: int

    @property
    def mesh(self) -> Mesh:
        """The steps in the variable s."""
        return Mesh(np.arange(len(self.sizes) + 1, dtype=np.float64))

    def drive(self, y: Tensor) -> Drive:
        """What the driven vector field sees on step n: t_n, h_n and n, (3, B)."""
        numbers = torch.arange(len(self.sizes), dtype=torch.float64, device=y.device)
        rows = torch.stack([self.starts, self.sizes, numbers[:, None].expand_as(self.sizes)], dim=1)
        return Drive(Control(self.mesh.times, rows.to(real_dtype(y)), "hold"), self.ends)


def driven(func: Callable[..., Any], s: Tensor, y: Any, step: Tensor) -> Any:
    """dy/ds = h f(t + (s - n) h, y) with (t, h, n) = step, sample by sample."""
    start, size, number = step
    slopes = by_sample(func, start + (s - number) * size, y)
    return _tree.tree_map(lambda k: k * size.reshape(-1, *[1] * (k.ndim - 1)), slopes)


def by_sample(func: Callable[..., Any], t: Tensor, y: Any) -> Any:
    """f(t_b, y_b) for times (B,) and a state (B, ...); f sees batches of one and a scalar time."""
    if not len(t):
        return func(t.new_zeros(()), y)
    leaves, unflatten = _tree.flatten(y)

    def alone(t: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        slopes = func(t, unflatten([part[None] for part in parts]))
        return tuple(slope.squeeze(0) for slope in _tree.flatten(slopes)[0])

    return unflatten(list(torch.vmap(alone)(t, *leaves)))


def find_sample_mesh(
    func: Callable[..., Any],
    layout: StateLayout,
    method: RungeKutta,
    control: StepControl,
    times: Times,
    y0: Tensor,
    stats: SolveStats,
) -> SampleMesh:
    """Find the steps of every sample, without a graph.

    Parameters
    ----------
    func : callable
        The user's f(t, y) on the nested state, each leaf (B, ...).
    layout : StateLayout
    method : RungeKutta
        An explicit method with an embedded one.
    control : StepControl
        Tolerances and limits, which hold for each sample.
    times : (T,) array
        Observation times; every sample ends a step on each.
    y0 : Tensor
        Flat state.
    stats : SolveStats
        Gets the attempts in which a sample was rejected.

    Raises
    ------
    ValueError
        If the leaves of the state have no common first axis, or f mixes samples.
    SolveError
        If a sample cannot go on; says which, where and why.
    """
    shapes = layout.shapes
    if any(len(shape) == 0 or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            "`norm` = 'sample' needs the samples along the first axis of every leaf of `y0`, got "
            f"shapes {[tuple(shape) for shape in shapes]}"
        )
    with torch.no_grad():
        return _Finder(func, layout, method, control, times, stats).run(y0.detach())


class _Finder:
    """All samples step in lockstep on rows (B, D), each by the rules of `adaptive_steps`."""

    def __init__(
        self,
        func: Callable[..., Any],
        layout: StateLayout,
        method: RungeKutta,
        control: StepControl,
        times: Times,
        stats: SolveStats,
    ):
        self.func, self.layout, self.method, self.control = func, layout, method, control
        self.times, self.stats = times, stats
        self.batch = layout.shapes[0][0]
        self.direction = 1.0 if times[-1] > times[0] else -1.0
        self.evaluations = 0

    def rows(self, tree: Any) -> Tensor:
        leaves = _tree.flatten(tree)[0]
        return torch.cat([leaf.reshape(self.batch, leaf.shape[1:].numel()) for leaf in leaves], 1)

    def nested(self, rows: Tensor) -> Any:
        sizes = [shape[1:].numel() for shape in self.layout.shapes]
        parts = rows.split(sizes, dim=1)
        flat = [p.reshape(shape) for p, shape in zip(parts, self.layout.shapes, strict=True)]
        if self.layout.single:
            return flat[0]
        return self.layout.unflatten(torch.cat([part.reshape(-1) for part in flat]))

    def f(self, t: Tensor, rows: Tensor) -> Tensor:
        self.evaluations += 1
        return self.rows(by_sample(self.func, t.to(real_dtype(rows)), self.nested(rows)))

    def tolerance(self, value: float | Tensor, y0: Tensor) -> float | Tensor:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        return self.rows(self.layout.unflatten(value.expand_as(y0)))

    def run(self, y0: Tensor) -> SampleMesh:
        y = self.rows(self.layout.unflatten(y0))
        self.control = replace(
            self.control, norm=_norm_of_rows, rtol=self.tolerance(self.control.rtol, y0),
            atol=self.tolerance(self.control.atol, y0),
        )  # fmt: skip
        t = torch.full((self.batch,), self.times[0], dtype=torch.float64, device=y.device)
        slope = self.f(t, y)
        self._check_independent(y0, slope)
        stops = {*self.control.step_t, *self.control.jump_t}
        inner = [s for s in stops if min(self.times) < s < max(self.times)]
        points = sorted({*self.times[1:].tolist(), *inner}, key=lambda s: self.direction * s)
        size = self._first_size(y, slope, t, points[0])
        state = _Samples(t, y, slope, size, torch.ones_like(t), torch.zeros_like(t).bool())
        starts, sizes, ends = [], [], [0]
        observed = set(self.times[1:].tolist())
        self.attempts = 0
        for point in points:
            before, taken = self._reach(state, point)
            starts.append(before)
            sizes.append(taken)
            if point in self.control.jump_t:
                state.slope = self.f(state.t, state.y)
            if point in observed:
                ends.append(sum(len(rows) for rows in sizes))
        return SampleMesh(
            torch.cat(starts), torch.cat(sizes), np.array(ends, dtype=np.float64), self.evaluations
        )

    def _check_independent(self, y0: Tensor, slope: Tensor) -> None:
        """f must give a sample alone what it gives it in the batch."""
        whole = self.func(
            torch.tensor(self.times[0], dtype=real_dtype(y0), device=y0.device),
            self.layout.unflatten(y0),
        )
        whole, eps = self.rows(whole), torch.finfo(slope.dtype).eps
        if whole.numel() and bool((whole - slope).abs().max() > 1e4 * eps * slope.abs().max()):
            raise ValueError(
                "`norm` = 'sample' needs a `func` that treats each sample alone; this one gives a "
                "sample another slope in the batch (a mean over it, batch norm): use norm='batch'"
            )

    def _first_size(self, y: Tensor, slope: Tensor, t: Tensor, stop: float) -> Tensor:
        """The size of the first step of each sample."""
        control = self.control
        if control.first_step is not None:
            size = torch.full_like(t, control.first_step)
        else:
            size = first_size(
                control, self.method.tableau.order, lambda t, y: self.f(t[:, 0], y), t[:, None],
                torch.full_like(t, stop)[:, None], y, slope,
            )[:, 0]  # fmt: skip
        return size.clamp(control.min_step, control.max_step)

    def _reach(self, state: _Samples, stop: float) -> tuple[Tensor, Tensor]:
        """Bring every sample to a stop; return the starts and sizes of its steps, (n, B)."""
        starts, sizes, moved = [state.t], [torch.zeros_like(state.t)], []
        while bool((state.t != stop).any()):
            before = state.t
            accepted = self._attempt(state, stop)
            starts.append(before)
            sizes.append(torch.where(accepted, state.t - before, 0.0))
            moved.append(accepted)
        if not moved:
            return starts[0][None], sizes[0][None]
        starts, sizes, accepted = (
            torch.stack(starts[1:]),
            torch.stack(sizes[1:]),
            torch.stack(moved),
        )
        # Accepted steps first, in their order; what is left over rests at the stop.
        order = torch.argsort((~accepted).to(torch.int8), dim=0, stable=True)
        count = int(accepted.sum(dim=0).max())
        sizes = sizes.gather(0, order)[:count]
        starts = starts.gather(0, order)[:count]
        return torch.where(sizes == 0.0, stop, starts), sizes

    def _attempt(self, state: _Samples, stop: float) -> Tensor:
        """One attempt of every sample that is not at the stop; return which were accepted."""
        control = self.control
        active = state.t != stop
        if self.attempts == control.max_num_steps:
            self._fail(active, state, f"`max_num_steps` = {control.max_num_steps} steps were tried")
        self.attempts += 1
        left = (stop - state.t).abs()
        lands = 1.01 * state.size >= left
        h = torch.where(lands, left, state.size)
        t_next = torch.where(lands, stop, state.t + self.direction * h)
        spacing = 4 * np.finfo(np.float64).eps * max(abs(self.times[0]), abs(self.times[-1]))
        stuck = active & ((t_next == state.t) | ((h < spacing) & ~lands))
        if bool(stuck.any()):
            self._fail(stuck, state, "the step size fell below the spacing of times")
        real = real_dtype(state.y)
        signed = torch.where(active, self.direction * h, 0.0)
        nodes = self.method.nodes
        stage_times = [t_next if c == 1.0 else state.t + c * signed for c in nodes]
        column = signed.to(real)[:, None]
        step = self.method.take(
            self.f, torch.zeros_like(column), column, state.y, times=stage_times,
            first=state.slope, last=True,
        )  # fmt: skip
        error = control.error_norm(self.method.error(step), state.y, step.y_next)[:, 0]
        finite = torch.isfinite(error)
        hopeless = active & ~finite & (h < 1e-13 * torch.maximum(state.t.abs(), left))
        hopeless |= active & ~torch.isfinite(state.slope).all(dim=1)
        if bool(hopeless.any()):
            self._fail(hopeless, state, "f is not finite")
        accepted, size, last_error = next_size(
            control, self.method.tableau, error, state.error, h, state.size, lands, state.rejected
        )
        accepted, rejected = active & accepted, active & ~accepted
        self.stats.steps_rejected += int(rejected.any())
        state.size = torch.where(active, size, state.size)
        state.error = torch.where(active, last_error, state.error)
        state.rejected = torch.where(active, rejected, state.rejected)
        state.t = torch.where(accepted, t_next, state.t)
        if self.method.fsal:
            slope = step.slopes[-1]
        else:
            slope = self.f(state.t, torch.where(accepted[:, None], step.y_next, state.y))
        state.slope = torch.where(accepted[:, None], slope, state.slope)
        state.y = torch.where(accepted[:, None], step.y_next, state.y)
        return accepted

    def _fail(self, which: Tensor, state: _Samples, reason: str) -> None:
        b = int(which.nonzero()[0])
        raise SolveError(
            f"sample {b}: {reason} at t = {float(state.t[b]):.8g} of {self.times[-1]:.8g} (step "
            f"size {float(state.size[b]):.1e}); use larger tolerances, or norm='batch' with an "
            "implicit method if the problem is stiff",
            self.stats,
        )


def _norm_of_rows(scaled: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return norm.double() / max(scaled.shape[1], 1) ** 0.5


@dataclass
class _Samples:
    """Where the samples are: time, state (B, D), slope there, next size, last error, rejected."""

    t: Tensor
    y: Tensor
    slope: Tensor
    size: Tensor
    error: Tensor
    rejected: Tensor


def on_samples(func: Callable[..., Any]) -> Callable[..., Any]:
    """The driven vector field of a user's f; its modules can be found in it."""
    return functools.partial(driven, func)
