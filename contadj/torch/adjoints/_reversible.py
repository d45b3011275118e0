"""The discrete gradient of an algebraically reversible coupling, in O(1) memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...reversal import COUPLING_TOLERANCE, check_reversal, coupling_message
from .._field import pull
from .._mesh import Mesh
from .._steps import (
    RungeKutta,
    Step,
    StepControl,
    host_time,
)
from ._base import (
    Integration,
    Outputs,
    Recorded,
    ReplayingAdjoint,
    accumulate,
    relative_size,
    report_reversal,
    time_leaf,
    warn_or_raise,
)


@dataclass(frozen=True)
class ReversibleAdjoint(ReplayingAdjoint):
    """The discrete gradient of a reversible coupling around the method, exact, in O(1) memory.

    The solve is not the method's own: with Psi_h(z) = Phi_h(z) - z and z_0 = y_0,

        y_{n+1} = l y_n + (1 - l) z_n + Psi_h(z_n),   z_{n+1} = z_n - Psi_{-h}(y_{n+1}),

    which keeps the order of a method of even order and can be undone step by step. Undoing it
    amplifies round-off by about l^(-N): the reversal error is measured, and l must go to 1 with the
    number of steps N. The stability region is narrow: where y and z drift apart by more than a
    quarter of their size, the gradient is reported as worthless too.

    Parameters
    ----------
    coupling : float
        l in (0, 1]; 0.99 for up to about 1,000 steps in double precision, 0.999 for 10,000.
    reversal_tolerance : float
        Reversal error above which the gradient is reported as worthless; float("inf") reports
        nothing, nor that y and z drift apart.
    on_reversal : "warn" or "raise"
        What happens then: a `ReversalWarning`, or a `SolveError`.

    References
    ----------
    McCallum & Foster 2024, Efficient, accurate and stable gradients for neural ODEs,
    arXiv:2410.11648.
    """

    coupling: float = 0.99
    reversal_tolerance: float = 1e-3
    on_reversal: str = "warn"

    def __post_init__(self) -> None:
        check_reversal(self.reversal_tolerance, self.on_reversal)
        if not 0.0 < self.coupling <= 1.0:
            raise ValueError(f"`coupling` must be in (0, 1], got {self.coupling!r}")

    def forward(self, integration: Integration, y0: Tensor):
        """Solve, keeping the last pair of states and the step times."""
        coupled = self._coupled(integration, y0)
        outputs = Outputs(coupled)
        pair = torch.stack([y0, y0])
        scale = torch.linalg.vector_norm(y0)
        apart = torch.zeros_like(scale)
        ends: list[float] = []
        for step in coupled.steps(pair):
            outputs.take(step)
            pair = step.y_next
            scale = torch.maximum(scale, torch.linalg.vector_norm(pair[0]))
            apart = torch.maximum(apart, torch.linalg.vector_norm(pair[0] - pair[1]))
            ends.append(host_time(step.t_next))
        mesh = integration.mesh
        if not isinstance(mesh, Mesh):
            mesh = Mesh.found(integration.times[0], ends)
        return outputs.finish(pair[0]).tensors(), [pair, scale, apart], mesh

    def _coupled(self, integration: Integration, y0: Tensor) -> Integration:
        """The integration of the pair."""
        mesh = integration.mesh
        method = CoupledMethod(integration.method.tableau, self.coupling)
        if isinstance(mesh, StepControl):
            size = mesh.first_step
            if size is None:
                start, end = float(integration.times[0]), float(integration.times[-1])
                size, *_ = integration.method.begin(
                    integration.f, mesh, start, end, y0, integration.first
                )
            mesh = _PairControl.of(mesh, size)
        return replace(integration, method=method, mesh=mesh)

    def backward(self, integration: Integration, recorded: Recorded):
        """Undo the steps one by one and pull back through each."""
        pair, scale, apart = recorded.tensors
        coupled = CoupledMethod(integration.method.tableau, self.coupling)
        integration = replace(integration, method=coupled, mesh=recorded.notes)
        start, result = _Sweep(coupled, integration, recorded).run(pair)
        ends = [torch.linalg.vector_norm(part - recorded.y0) for part in start.unbind()]
        drift = torch.maximum(*ends)
        report_reversal(
            integration.stats,
            drift,
            scale,
            self.reversal_tolerance,
            self.on_reversal,
            "a `coupling` closer to 1",
        )
        distance = relative_size(apart, scale)
        if not distance <= COUPLING_TOLERANCE and self.reversal_tolerance != float("inf"):
            warn_or_raise(integration.stats, coupling_message(distance), self.on_reversal)
        return result


@dataclass(slots=True)
class CoupledStep(Step):
    """A step of the pair (y, z) stacked; `inner` is the method's own step from z."""

    inner: Step | None = None

    def release(self) -> None:
        """Let go of y, the stages and the inner step."""
        Step.release(self)
        self.inner = None

    @property
    def state(self) -> Tensor:
        """The state that is observed."""
        return self.y[0]


class CoupledMethod(RungeKutta):
    """The coupled step as a method for the pair (y, z) stacked."""

    def __init__(self, tableau, coupling: float):
        super().__init__(tableau)
        self.coupling = coupling
        self._first_same_as_last, self.fsal = self.fsal, False

    def _inner(self, f, t, t_next, y, **more) -> Step:
        self.fsal = self._first_same_as_last
        try:
            return super().take(f, t, t_next, y, **more)
        finally:
            self.fsal = False

    def take(self, f, t, t_next, y, *, times=None, first=None, last=False):  # type: ignore[override]
        """Take one coupled step."""
        inner = self._inner(f, t, t_next, y[1], times=times, first=first, last=last)
        upper = self.upper(y[0], y[1], inner)
        lower = y[1] - (self._inner(f, t_next, t, upper).y_next - upper)
        following = torch.stack([upper, lower])
        return CoupledStep(
            t, t_next, y, following, inner.slopes, inner.stages, inner.times, inner=inner
        )

    def upper(self, y: Tensor, z: Tensor, inner: Step) -> Tensor:
        """l y + (1 - l) z + Psi_h(z)."""
        return self.coupling * y + (1.0 - self.coupling) * z + (inner.y_next - z)

    def error(self, step: Step) -> Tensor:
        """The method's own error estimate, from z."""
        assert isinstance(step, CoupledStep) and step.inner is not None
        error = super().error(step.inner)
        return torch.stack([error, error])

    def evaluate(self, f, step: Step, t: float | Tensor) -> Tensor:
        """y inside a step: l y + (1 - l) z + the increment of the method's dense output."""
        assert isinstance(step, CoupledStep) and step.inner is not None
        inner = step.inner
        if self.interpolates:
            inside = super().evaluate(f, inner, t)
        else:
            inside = self._inner(f, inner.t, t, inner.y, first=inner.slopes[0]).y_next
        y, z = step.y.unbind()
        return self.coupling * y + (1.0 - self.coupling) * z + (inside - z)

    def evaluate_many(self, f, step: Step, t: Sequence[float]) -> Tensor:
        """y at several times inside a step, (len(t), *state)."""
        return torch.stack([self.evaluate(f, step, time) for time in t])


class _PairControl(StepControl):
    """Error control of the pair: that of y, so that a batch norm sees the batch."""

    @staticmethod
    def of(control: StepControl, size: float) -> _PairControl:
        values = {entry.name: getattr(control, entry.name) for entry in fields(StepControl)}
        return _PairControl(**{**values, "first_step": size})

    def error_norm(self, error: Tensor, y: Tensor, y_next: Tensor) -> Tensor:
        """Norm of the scaled error; at most 1 for an acceptable step."""
        return super().error_norm(error[0], y[0], y_next[0])


class _Sweep:
    """The steps undone, and the adjoint recursion of the pair."""

    def __init__(self, coupled: CoupledMethod, integration: Integration, recorded: Recorded):
        self.coupled, self.integration, self.mesh = coupled, integration, recorded.notes
        self.params, self.cotangents = recorded.params, recorded.cotangents
        self.t = recorded.t if recorded.t.requires_grad else None
        self.param_grads: list[Tensor | None] = [None] * len(self.params)
        self.time_grads = torch.zeros(len(self.mesh.times), dtype=torch.float64)
        self.observation_grads = torch.zeros(len(integration.times), dtype=torch.float64)
        self.adjoint_y = self.adjoint_z = torch.zeros(())

    def run(self, pair: Tensor):
        """The pair at the start, and dL/dy0, dL/dt, dL/dparams."""
        y, z = pair.unbind()
        self.adjoint_y, self.adjoint_z = torch.zeros_like(y), torch.zeros_like(z)
        self._last_observation(y)
        times = self.mesh.times.tolist()
        for n in range(len(times) - 2, -1, -1):
            y, z = self._undo(n, times[n], times[n + 1], y, z)
        grad_t = None
        if self.t is not None:
            grad_t = self.mesh.pullback(self.t, self.time_grads, self.observation_grads)
        return torch.stack([y, z]), (self.adjoint_y + self.adjoint_z, grad_t, self.param_grads)

    def _grad(self, outs: Sequence[Tensor], cots: Sequence[Tensor], inputs: Sequence[Tensor]):
        """Vector-Jacobian products; parameter gradients are added up, the others returned."""
        grads = pull(outs, cots, (*inputs, *self.params))
        accumulate(self.param_grads, grads[len(inputs) :])
        return grads[: len(inputs)]

    def _last_observation(self, y: Tensor) -> None:
        last = len(self.integration.times) - 1
        cotangent = self.cotangents.of_observations(self.integration, [last])
        if cotangent is None:
            return
        if self.integration.loss is None:
            self.adjoint_y = self.adjoint_y + cotangent[0]
            return
        with torch.enable_grad():
            leaf_y = y.detach().requires_grad_()
            time = time_leaf(float(self.integration.times[last]))
            times: Any = None if self.t is None else {last: time}
            value = self.integration.losses([last], leaf_y[None], times)
        grad, grad_time = self._grad([value], [cotangent], [leaf_y, time])
        self.adjoint_y = self.adjoint_y + _or_zero(grad)
        self.observation_grads[last] += _or_zero(grad_time)

    def _undo(self, n: int, start: float, end: float, upper: Tensor, lower: Tensor):
        """(y_n, z_n) from (y_{n+1}, z_{n+1}), and the adjoints likewise."""
        coupled, integration, f = self.coupled, self.integration, self.integration.f
        wanted = self.t is not None
        ends: list[Any] = [time_leaf(start), time_leaf(end)] if wanted else [start, end]
        leaves = ends if wanted else []
        with torch.enable_grad():
            leaf = upper.detach().requires_grad_()
            back = coupled._inner(f, ends[1], ends[0], leaf).y_next - leaf
        z = lower + back.detach()
        grads = self._grad([back], [-self.adjoint_z], [leaf, *leaves])
        total = self.adjoint_y + _or_zero(grads[0])
        self._add_times(n, grads[1:])
        indices = integration.observed(start, end)
        with torch.enable_grad():
            leaf_z = z.detach().requires_grad_()
            inner = coupled._inner(f, ends[0], ends[1], leaf_z, last=bool(indices))
            forth = inner.y_next - leaf_z
            with torch.no_grad():
                y = (upper - (1.0 - coupled.coupling) * z - forth) / coupled.coupling
            leaf_y = y.detach().requires_grad_()
            outs, cots = [forth], [total]
            if integration.running_cost is not None and self.cotangents.cost is not None:
                outs.append(coupled.quadrature(integration.running_cost, inner))
                cots.append(self.cotangents.cost)
            cotangent = self.cotangents.of_observations(integration, indices) if indices else None
            observed: dict[int, Tensor] = {}
            if cotangent is not None:
                if wanted:
                    observed = {i: time_leaf(float(integration.times[i])) for i in indices}
                times: Any = observed if wanted else None
                pair = torch.stack([leaf_y, leaf_z])
                step = CoupledStep(
                    ends[0], ends[1], pair, pair, inner.slopes, inner.stages, inner.times,
                    inner=inner,
                )  # fmt: skip
                states = integration.observe(step, indices, times)
                if integration.loss is not None:
                    states = integration.losses(indices, states, times)
                outs.append(states)
                cots.append(cotangent)
        grads = self._grad(outs, cots, [leaf_y, leaf_z, *leaves, *observed.values()])
        self.adjoint_y = coupled.coupling * total + _or_zero(grads[0])
        self.adjoint_z = self.adjoint_z + (1.0 - coupled.coupling) * total + _or_zero(grads[1])
        self._add_times(n, grads[2 : 2 + len(leaves)])
        for i, grad in zip(observed, grads[2 + len(leaves) :], strict=True):
            self.observation_grads[i] += _or_zero(grad)
        return y, z

    def _add_times(self, n: int, grads: Sequence[Tensor | None]) -> None:
        for k, grad in enumerate(grads):
            self.time_grads[n + k] += _or_zero(grad)


def _or_zero(grad: Tensor | None) -> Tensor | float:
    return 0.0 if grad is None else grad
