"""What every adjoint shares: the forward solve, its outputs, and the seam to autograd."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...reversal import ReversalWarning, reversal_message
from .._errors import SolveError, SolveStats
from .._field import VectorField, autocast_state, same_context
from .._mesh import Mesh, Times
from .._steps import (
    RungeKutta,
    Step,
    StepControl,
    StepError,
    adaptive_steps,
    host_time,
    time_like,
)


@dataclass(eq=False)
class Integration:
    """One forward solve: everything an adjoint needs but the tensors it differentiates.

    Parameters
    ----------
    f : VectorField
        On flat states.
    method : RungeKutta
    mesh : Mesh or StepControl
        Given step times, or how to choose them.
    times : (T,) array
        Observation times, float64, strictly monotone.
    running_cost : callable, optional
        c(t, y), a scalar tensor; on flat states.
    loss : callable, optional
        loss(i, t_i, y_i), a scalar tensor; on flat states. With it the states are not kept.
    stats : SolveStats
    first : Tensor, optional
        f(t_0, y_0), where it is known already.
    buffers : list of Tensor
        Buffers that f writes to.
    """

    f: VectorField
    method: RungeKutta
    mesh: Mesh | StepControl
    times: Times
    running_cost: Callable[[Tensor, Tensor], Tensor] | None
    loss: Callable[[int, Tensor, Tensor], Tensor] | None
    stats: SolveStats
    first: Tensor | None = None
    buffers: list[Tensor] = field(default_factory=list)
    autocast: dict[str, tuple[bool, torch.dtype]] = field(default_factory=dict)

    @property
    def direction(self) -> float:
        """1 for increasing times, -1 for decreasing ones."""
        return 1.0 if self.times[-1] > self.times[0] else -1.0

    def steps(self, y: Tensor) -> Iterator[Step]:
        """Accepted steps from y at the first observation time to the last one.

        Raises
        ------
        SolveError
            If an adaptive solve cannot go on.
        """
        stats, before = self.stats, self.f.evaluations - (self.first is not None)
        first, self.first = self.first, None
        try:
            if isinstance(self.mesh, Mesh):
                steps = fixed_steps(self.method, self.mesh.times, self.f, y, first)
            else:
                steps = adaptive_steps(
                    self.method, self.mesh, self.f, float(self.times[0]), float(self.times[-1]), y,
                    first, self._count_rejected,
                )  # fmt: skip
            for step in steps:
                stats.steps_accepted += 1
                yield step
        except StepError as failure:
            raise SolveError(
                f"{failure} ({stats.steps_accepted} steps accepted, {stats.steps_rejected} "
                f"rejected, {self.f.evaluations - before} f evaluations)",
                stats,
            ) from None
        finally:
            stats.f_evaluations_forward = self.f.evaluations - before

    def _count_rejected(self) -> None:
        self.stats.steps_rejected += 1

    def observed(self, t: float, t_next: float) -> range:
        """Indices of the observation times in [t, t_next)."""
        sign, keys = self.direction, self._keys
        low = bisect_left(keys, sign * t)
        return range(low, bisect_left(keys, sign * t_next, low))

    @cached_property
    def _keys(self) -> list[float]:
        return (self.direction * self.times).tolist()

    def observe(self, step: Step, indices: range, t: Tensor | None = None) -> Tensor:
        """The states at observation times inside a step, its start included, (m, *state).

        With `t`, the observation times as a tensor, the result is differentiable with respect to
        them; an observation on a step time follows the solution there, dy/dt = f.
        """
        first, rest = None, list(indices)
        if self.times[rest[0]] == host_time(step.t):
            i = rest.pop(0)
            first = step.state
            if t is not None:
                slope = self.method.start_slope(self.f, step)
                first = first + time_like(t[i] - step.t, first) * slope
        if t is None:
            inside = self.times[rest].tolist() if rest else []
            many = self.method.evaluate_many(self.f, step, inside) if rest else None
        else:
            many = (
                torch.stack([self.method.evaluate(self.f, step, t[i]) for i in rest])
                if rest
                else None
            )
        if first is None:
            assert many is not None
            return many
        return first[None] if many is None else torch.cat([first[None], many])

    def losses(self, indices: Sequence[int], states: Tensor, t: Tensor | None = None) -> Tensor:
        """Sum of the loss over observations, a scalar."""
        assert self.loss is not None
        total = None
        for row, i in enumerate(indices):
            time = time_like(float(self.times[i]) if t is None else t[i], states)
            value = self.loss(i, time, states[row])
            total = value if total is None else total + value
        assert total is not None
        return total

    @contextlib.contextmanager
    def again(self, params: Sequence[Tensor] | None):
        """The context in which f must be evaluated a second time, for the gradients of `params`."""
        with same_context(self.autocast, self.buffers), self.f.watching(params):
            yield


def fixed_steps(
    method: RungeKutta,
    times: Times,
    f: Callable[[Tensor, Tensor], Tensor],
    y: Tensor,
    first: Tensor | None = None,
) -> Iterator[Step]:
    """Steps over given step times, without reading anything back from the device.

    A step has its stages until the next one is asked for.
    """
    table = stage_times(method, times, y)
    last = len(times) - 2
    jumps = getattr(f, "jumps", ())
    for n, (t, t_next) in enumerate(zip(times[:-1].tolist(), times[1:].tolist(), strict=True)):
        step = method.take(
            f, t, t_next, y, times=table[n], first=first, last=method.fsal and n < last
        )
        yield step
        y = step.y_next
        carried = method.fsal and n < last and t_next not in jumps
        first = step.slopes[-1] if carried else None
        step.release()


def check_replay(integration: Integration, evidence: Tensor, dtype: torch.dtype) -> None:
    """A step taken again must give the state that the forward pass stored.

    Parameters
    ----------
    integration : Integration
    evidence : (3,) Tensor
        As `replay_evidence` gives it.
    dtype : torch.dtype
        Of the state.

    Raises
    ------
    SolveError
        If it does not: f is another function now.
    """
    eps = torch.finfo(dtype).eps
    # Two evaluations may round differently (other kernels): f by a small part of itself, the sum
    # y + h f by a few units in the last place. A changed f differs by more.
    coarse = [torch.finfo(dtype).eps for enabled, dtype in integration.autocast.values() if enabled]
    part = max([min(1e4 * eps, 1e-2), *(4 * coarser for coarser in coarse)])
    size, increment, difference = evidence.tolist()
    if difference > 4 * eps * size + part * increment + 1e-30:
        raise _changed(integration, f"the last step gives another state (by {difference:.1e})")


def check_slope(integration: Integration, t: float, y: Tensor, expected: Tensor) -> None:
    """f(t, y) must have the value that the forward pass saw.

    Raises
    ------
    SolveError
        If it does not: f is another function now.
    """
    if not expected.numel():
        return
    integration.f.enter_beside(t, float(integration.times[1]))
    with torch.no_grad():
        difference = (integration.f(time_like(t, y), y) - expected).abs().max()
    rounding = min(1e4 * torch.finfo(expected.dtype).eps, 1e-2) * expected.abs().max() + 1e-30
    if bool(difference > rounding):
        evidence = f"f at t = {t:.8g} has another value (by {float(difference):.1e})"
        raise _changed(integration, evidence)


def _changed(integration: Integration, evidence: str) -> SolveError:
    return SolveError(
        f"`func` is not the function it was in the forward pass: {evidence}. Something that f "
        "reads changed in between: an attribute, a counter, a parameter, or random numbers",
        integration.stats,
    )


def time_leaf(value: float) -> Tensor:
    """A time that a gradient is wanted for."""
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def stage_times(method: RungeKutta, times: Times, y: Tensor) -> Tensor:
    """The stage times t_n + c_i h_n of all steps, (N, s), beside y; one transfer."""
    return method.stage_times(times[:-1], times[1:], y)


@dataclass(eq=False)
class Outputs:
    """What a solve returns: states or the loss at the observation times, and the running cost."""

    integration: Integration
    ys: list[Tensor] = field(default_factory=list)
    cost: Tensor | None = None
    loss: Tensor | None = None
    _observed: Tensor | None = None  # by the steps computed together that came last

    def take(self, step: Step, t: Tensor | None = None) -> None:
        """Collect what one step contributes."""
        integration = self.integration
        if step.observed is not None:
            if step.observed is not self._observed:
                self._join(step)
            return
        indices = integration.observed(host_time(step.t), host_time(step.t_next))
        if indices:
            self.add(indices, integration.observe(step, indices, t), t)
        if integration.running_cost is not None:
            part = integration.method.quadrature(integration.running_cost, step)
            self.cost = part if self.cost is None else self.cost + part

    def _join(self, step: Step) -> None:
        """Collect what steps computed together observed: all that lies at or after their start."""
        self._observed = step.observed
        assert step.observed is not None
        start = self.integration.observed(host_time(step.t), host_time(step.t_next)).start
        last = len(self.integration.times) - 1
        ys = step.observed[start:last]
        self.ys = [torch.cat([before[:start], ys]) for before in self.ys] or [ys]

    def finish(self, y: Tensor, t: Tensor | None = None) -> Outputs:
        """Collect the observation at the last time."""
        self.add([len(self.integration.times) - 1], y[None], t)
        return self

    def add(self, indices: Sequence[int], states: Tensor, t: Tensor | None) -> None:
        """Collect observations."""
        if self.integration.loss is None:
            self.ys.append(states)
        else:
            value = self.integration.losses(indices, states, t)
            self.loss = value if self.loss is None else self.loss + value

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(ys (T, *state) or None, cost or None, loss or None)."""
        return (torch.cat(self.ys) if self.ys else None), self.cost, self.loss


@dataclass(eq=False)
class Cotangents:
    """dL/d(outputs) of a solve: of the states at the observation times, the cost and the loss."""

    ys: Tensor | None
    cost: Tensor | None
    loss: Tensor | None

    def of_observations(self, integration: Integration, indices: Sequence[int]) -> Tensor | None:
        """The cotangent of what the observations contribute, None if nothing depends on them."""
        if integration.loss is not None:
            return self.loss
        return None if self.ys is None else self.ys[indices[0] : indices[-1] + 1]


@dataclass(eq=False)
class Recorded:
    """What a backward pass starts from.

    Parameters
    ----------
    y0, t : Tensor
        As `Adjoint.solve` got them.
    params : tuple of Tensor
    tensors : list of Tensor
    notes : object
        What the forward pass kept besides the tensors.
    cotangents : Cotangents
    """

    y0: Tensor
    t: Tensor
    params: tuple[Tensor, ...]
    tensors: list[Tensor]
    notes: Any
    cotangents: Cotangents


class Adjoint(ABC):
    """A way to compute the gradient of a solve. Subclasses are frozen dataclasses."""

    @abstractmethod
    def solve(
        self, integration: Integration, y0: Tensor, t: Tensor, params: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Solve so that (ys, cost, loss) are differentiable in y0, t and params."""


class ReplayingAdjoint(Adjoint):
    """An adjoint with a backward pass of its own, that evaluates f again."""

    def solve(
        self, integration: Integration, y0: Tensor, t: Tensor, params: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Solve without a graph; autograd calls `backward`."""
        integration.autocast = autocast_state(y0.device)
        return _Solve.apply(self, integration, y0, t, *params)

    @abstractmethod
    def forward(
        self, integration: Integration, y0: Tensor
    ) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None], list[Tensor], Any]:
        """Solve without a graph.

        Returns
        -------
        outputs : (ys, cost, loss)
        tensors : list of Tensor
            What the backward pass needs.
        notes : object
            What else it needs, without tensors.
        """

    @abstractmethod
    def backward(
        self, integration: Integration, recorded: Recorded
    ) -> tuple[Tensor | None, Tensor | None, Sequence[Tensor | None]]:
        """Return dL/dy0, dL/dt (None unless t needs it) and dL/dparams."""

    def differentiable_backward(self, integration: Integration, recorded: Recorded) -> Any:
        """The backward pass as a differentiable function; refused unless overridden."""
        raise NotImplementedError(
            f"{type(self).__name__} has no second derivative: its backward pass is not recorded; "
            "use CheckpointAdjoint() or DirectAdjoint() with create_graph=True"
        )


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, adjoint, integration, y0, t, *params):  # type: ignore[override]
        outputs, tensors, notes = adjoint.forward(integration, y0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y0, t, *params, *tensors)
        ctx.adjoint, ctx.integration, ctx.notes, ctx.count = (
            adjoint, integration, notes, len(params),
        )  # fmt: skip
        return outputs

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        y0, t, *rest = ctx.saved_tensors
        params, tensors = tuple(rest[: ctx.count]), rest[ctx.count :]
        adjoint, integration = ctx.adjoint, ctx.integration
        if all(grad is None for grad in grads):
            return (None,) * (4 + ctx.count)
        run = adjoint.differentiable_backward if torch.is_grad_enabled() else adjoint.backward
        before = integration.f.evaluations
        recorded = Recorded(y0, t, params, tensors, ctx.notes, Cotangents(*grads))
        with integration.again(params):
            grad_y0, grad_t, grad_params = run(integration, recorded)
        integration.stats.f_evaluations_backward = integration.f.evaluations - before
        return (None, None, grad_y0, grad_t, *grad_params)


def report_reversal(
    stats: SolveStats,
    drift: Tensor,
    scale: Tensor,
    tolerance: float,
    on_reversal: str,
    remedy: str,
) -> None:
    """Record the reversal error, and warn or raise where it is above the tolerance."""
    stats.reversal_error = error = relative_size(drift, scale)
    if error <= tolerance or tolerance == float("inf"):
        return
    warn_or_raise(stats, reversal_message(error, tolerance, remedy), on_reversal)


def relative_size(part: Tensor, scale: Tensor) -> float:
    """part / scale, or part itself where the scale is zero."""
    return float(part / scale) if float(scale) > 0 else float(part)


def warn_or_raise(stats: SolveStats, message: str, on_reversal: str) -> None:
    """Say that a gradient may be worthless."""
    if on_reversal == "raise":
        raise SolveError(message, stats)
    warnings.warn(message, ReversalWarning, stacklevel=3)


def accumulate(totals: list, parts: Sequence[Tensor | None], scale: float = 1.0) -> None:
    """totals += scale * parts, where a total or a part may be None."""
    add_to, added = [], []
    for i, part in enumerate(parts):
        if part is None:
            continue
        if totals[i] is None:
            totals[i] = part * scale if scale != 1.0 else part.clone()
        else:
            add_to.append(totals[i])
            added.append(part)
    if add_to:
        torch._foreach_add_(add_to, added, alpha=scale)  # pyright: ignore[reportPrivateImportUsage]
