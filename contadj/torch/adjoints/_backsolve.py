"""The continuous adjoint: y, lambda and the theta-gradient integrated together in reverse time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tableaus import get_tableau
from .._errors import ReversalWarning, SolveError
from .._mesh import Mesh
from .._options import parse_options
from .._steps import RungeKutta, StepControl, StepError, adaptive_steps, host_time, time_like
from ._base import Cotangents, Integration, Outputs, ReplayingAdjoint, fixed_steps
from ._checkpoint import accumulate


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
        if self.on_reversal not in ("warn", "raise"):
            raise ValueError(f"`on_reversal` must be 'warn' or 'raise', got {self.on_reversal!r}")
        every = self.restart_every
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise ValueError(f"`restart_every` must be None or a positive integer, got {every!r}")

    def forward(self, integration: Integration, y0: Tensor):
        """Solve, keeping the states at the observation times only."""
        outputs = Outputs(integration)
        y, scale, last_size = y0, torch.linalg.vector_norm(y0), 0.0
        stored: dict[float, Tensor] = {}
        for n, step in enumerate(integration.steps(y0)):
            if self.restart_every is not None and n and n % self.restart_every == 0:
                stored[host_time(step.t)] = step.y
            outputs.take(step)
            y = step.y_next
            scale = torch.maximum(scale, torch.linalg.vector_norm(y))
            last_size = step.next_size
        results = outputs.finish(y).tensors()
        tensors = [y, scale, *stored.values()]
        if results[0] is not None:
            tensors.append(results[0])
        return results, tensors, (list(stored), last_size)

    def backward(
        self,
        integration: Integration,
        tensors: Sequence[Tensor],
        notes: Any,
        y0: Tensor,
        t: Tensor,
        params: tuple[Tensor, ...],
        cotangents: Cotangents,
    ):
        """Integrate the adjoint ODE from the last observation time to the first."""
        stored_times, last_size = notes
        y_end, scale = tensors[:2]
        pieces = dict(zip(stored_times, tensors[2:], strict=False))
        if integration.loss is None:
            pieces.update(zip(integration.times.tolist(), tensors[-1], strict=True))
        pieces[float(integration.times[0])] = y0
        reverse = _ReverseSolve(self, integration, y_end, params, t, cotangents, last_size)
        try:
            result = reverse.run(pieces)
        except StepError as failure:
            raise SolveError(
                f"the reverse-time solve of {type(self).__name__} cannot go on: {failure}; "
                "CheckpointAdjoint() needs no reverse-time solve",
                integration.stats,
            ) from None
        error = float(reverse.reversal_error / scale) if float(scale) > 0 else 0.0
        integration.stats.reversal_error = error
        if not error <= self.reversal_tolerance:
            message = (
                f"the state rebuilt in reverse time is off by {error:.1e} of its size (more than "
                f"`reversal_tolerance` = {self.reversal_tolerance:.1e}): the gradient may be "
                "worthless. Use CheckpointAdjoint(), or BacksolveAdjoint(restart_every=...) with "
                "fewer steps between restarts, or smaller steps"
            )
            if self.on_reversal == "raise":
                raise SolveError(message, integration.stats)
            warnings.warn(message, ReversalWarning, stacklevel=2)
        return result

    def reverse_solver(self, integration: Integration) -> tuple[RungeKutta, Any]:
        """The method of the reverse solve, and its mesh options or its step-size control."""
        method = self.method or integration.method.tableau.name
        forward = integration.mesh
        if self.options is None and isinstance(forward, Mesh) and self.method is None:
            return integration.method, None
        options = self.options
        if options is None and isinstance(forward, Mesh):
            return RungeKutta(get_tableau(method)), None
        defaults = forward if isinstance(forward, StepControl) else StepControl()
        tolerances = {
            name: value
            for name, value in (("rtol", self.rtol), ("atol", self.atol))
            if value is not None
        }
        mesh = parse_options(
            method,
            options,
            integration.times[::-1].copy(),
            replace(defaults, step_t=(), jump_t=(), **tolerances),
        )
        return RungeKutta(get_tableau(method)), mesh


class _Augmented:
    """(y, lambda) stacked, its vector field, and the theta-gradient as a quadrature beside it.

    The weights of the quadrature are those of the method, so it equals carrying theta_bar as a
    state, without a parameter-sized vector in every stage.
    """

    def __init__(
        self,
        integration: Integration,
        params: tuple[Tensor, ...],
        cotangent: Tensor | None,
        error_wanted: bool,
    ):
        self._integration = integration
        self._params = params
        self._cost_cotangent = cotangent
        self.totals: list[Tensor | None] = [None] * len(params)
        self.pending: list[Tensor | None] = [None] * len(params)
        self.pending_error: list[Tensor | None] = [None] * len(params)
        self._carried: Sequence[Tensor | None] = ()
        self._stage = -1
        self._error_wanted = error_wanted

    def begin(self, method: RungeKutta, h: float, reused: bool) -> None:
        """A step of size h is about to be tried; its first stage may be known already."""
        self._b = method.tableau.b
        self._e = None
        if self._error_wanted and method.tableau.embedded is not None:
            self._e = method.tableau.b - method.tableau.embedded
        self._h = h
        self._stage = 0
        self.pending = [None] * len(self._params)
        self.pending_error = [None] * len(self._params)
        if reused:
            self._add(self._carried)

    def accept(self) -> None:
        """The step tried last was accepted."""
        accumulate(self.totals, self.pending)
        self._stage = -1

    def _add(self, integrands: Sequence[Tensor | None]) -> None:
        i = self._stage
        if self._b[i] != 0.0:
            accumulate(self.pending, integrands, -self._h * float(self._b[i]))
        if self._e is not None and self._e[i] != 0.0:
            accumulate(self.pending_error, integrands, -self._h * float(self._e[i]))
        self._stage += 1

    def __call__(self, t: Tensor, z: Tensor) -> Tensor:
        integration = self._integration
        with torch.enable_grad():
            y = z[0].detach().requires_grad_()
            slope = integration.f(t, y)
            outs, cots = [slope], [z[1]]
            if integration.running_cost is not None and self._cost_cotangent is not None:
                outs.append(integration.running_cost(t, y))
                cots.append(self._cost_cotangent)
        pairs = [(out, cot) for out, cot in zip(outs, cots, strict=True) if out.requires_grad]
        if not pairs:
            return torch.stack([slope.detach(), torch.zeros_like(slope)])
        grads = torch.autograd.grad(
            [out for out, _ in pairs], (y, *self._params), [cot for _, cot in pairs],
            allow_unused=True,
        )  # fmt: skip
        if self._stage >= 0:
            self._carried = grads[1:]
            self._add(grads[1:])
        back = torch.zeros_like(slope) if grads[0] is None else grads[0].neg()
        return torch.stack([slope.detach(), back])


class _AugmentedMethod(RungeKutta):
    """A Runge-Kutta step of the augmented system: it announces each attempt."""

    def take(self, f, t, t_next, y, **more):  # type: ignore[override]
        """Take one step."""
        f.begin(self, t_next - t, reused=more.get("first") is not None)
        return super().take(f, t, t_next, y, **more)


@dataclass(frozen=True)
class _AugmentedControl(StepControl):
    """Error control of the augmented system: the largest of the norms of its parts."""

    system: _Augmented | None = None
    seminorm: bool = False

    def error_norm(self, error: Tensor, y: Tensor, y_next: Tensor) -> Tensor:
        """Norm of the scaled error; at most 1 for an acceptable step."""
        parts = [StepControl.error_norm(self, error[i], y[i], y_next[i]) for i in (0, 1)]
        assert self.system is not None
        if not self.seminorm:
            squares, count = [], 0
            for total, part, wrong in zip(
                self.system.totals, self.system.pending, self.system.pending_error, strict=True
            ):
                if wrong is None or part is None:
                    continue
                # Per-component tolerances are those of the state; parameters take their largest.
                atol, rtol = (
                    float(x.max()) if isinstance(x, Tensor) else x for x in (self.atol, self.rtol)
                )
                size = part.abs() if total is None else torch.maximum(total.abs(), part.abs())
                squares.append((wrong / (atol + rtol * size)).abs().square().sum())
                count += wrong.numel()
            if count:
                parts.append((torch.stack(squares).sum() / count).sqrt())
        return torch.stack([part.double() for part in parts]).max()

    def scaled_norm(self, value: Tensor, y: Tensor) -> Tensor:
        """Norm of a value scaled by the tolerances at y."""
        return torch.maximum(*(StepControl.scaled_norm(self, value[i], y[i]) for i in (0, 1)))


class _ReverseSolve:
    """One reverse-time solve, piece by piece."""

    def __init__(
        self,
        adjoint: BacksolveAdjoint,
        integration: Integration,
        y: Tensor,
        params: tuple[Tensor, ...],
        t: Tensor,
        cotangents: Cotangents,
        last_size: float,
    ):
        self.integration = integration
        self.cotangents = cotangents
        self.params = params
        self.y = y
        self.adjoint = torch.zeros_like(y)
        self.times_wanted = t.requires_grad
        self.time_grads = torch.zeros(len(integration.times), dtype=torch.float64)
        self.like_t = t
        method, self.mesh = adjoint.reverse_solver(integration)
        self.method = _AugmentedMethod(method.tableau)
        control = self.mesh if isinstance(self.mesh, StepControl) else None
        self.system = _Augmented(
            integration, params, cotangents.cost, control is not None and not adjoint.seminorm
        )
        self.control = None
        if control is not None:
            values = {name: getattr(control, name) for name in control.__dataclass_fields__}
            self.control = _AugmentedControl(
                **values, system=self.system, seminorm=adjoint.seminorm
            )
        self.size = last_size or None
        self.rejected = 0
        self.reversal_error = torch.zeros((), dtype=torch.float64, device=y.device)

    def run(self, pieces: dict[float, Tensor]):
        """Integrate from the end to the start; `pieces` are the stored states by time."""
        integration = self.integration
        times = integration.times
        index = {float(time): i for i, time in enumerate(times)}
        sign = integration.direction
        stops = sorted({*index, *pieces}, key=lambda s: -sign * s)
        self._jump(len(times) - 1)
        for start, end in pairwise(stops):
            self._integrate(start, end)
            if end in pieces:
                drift = torch.linalg.vector_norm(self.y - pieces[end]).double()
                # NaN must not be lost by the maximum.
                self.reversal_error = torch.maximum(self.reversal_error, drift)
                self.y = pieces[end].detach()
            if end in index:
                if index[end] == 0:
                    self._initial_time()
                self._jump(index[end])
        integration.stats.backward_steps_rejected = self.rejected
        grad_t = None
        if self.times_wanted:
            grad_t = self.time_grads.to(self.like_t)
        return self.adjoint, grad_t, self.system.totals

    def _integrate(self, start: float, end: float) -> None:
        z = torch.stack([self.y, self.adjoint])
        if self.control is not None:
            control = replace(self.control, first_step=self.control.first_step or self.size)
            steps = adaptive_steps(
                self.method, control, self.system, start, end, z, None, self._reject
            )
        else:
            steps = fixed_steps(self.method, self._mesh_between(start, end), self.system, z)
        for step in steps:
            self.system.accept()
            self.integration.stats.backward_steps_accepted += 1
            self.size = step.next_size
            z = step.y_next
        self.y, self.adjoint = z[0], z[1]

    def _reject(self) -> None:
        self.rejected += 1

    def _mesh_between(self, start: float, end: float) -> np.ndarray:
        """The reverse step times from start to end, both included."""
        mesh = self.integration.mesh if self.mesh is None else self.mesh
        assert isinstance(mesh, Mesh)
        low, high = sorted((start, end))
        inner = mesh.times[(mesh.times > low) & (mesh.times < high)]
        times = np.concatenate([[low], np.sort(inner), [high]])
        return times if start < end else times[::-1].copy()

    def _jump(self, i: int) -> None:
        """lambda jumps by dC/dy(t_i); the observation time moves along f."""
        integration = self.integration
        cotangent = self.cotangents.of_observations(integration, [i])
        if cotangent is None:
            return
        if integration.loss is None:
            jump = cotangent[0]
        else:
            with torch.enable_grad():
                y = self.y.detach().requires_grad_()
                leaf = torch.tensor(
                    float(integration.times[i]), dtype=torch.float64, requires_grad=True
                )
                times: Any = {i: leaf} if self.times_wanted else None
                value = integration.losses([i], y[None], times)
            jump = torch.zeros_like(y)
            if value.requires_grad:
                inputs = (y, leaf, *self.params)
                grads = torch.autograd.grad(value, inputs, cotangent, allow_unused=True)
                jump = jump if grads[0] is None else grads[0]
                if grads[1] is not None:
                    self.time_grads[i] += grads[1]
                accumulate(self.system.totals, grads[2:])
        self.adjoint = self.adjoint + jump
        if self.times_wanted and i > 0:
            self.time_grads[i] += self._along(i, jump)
            if i == len(integration.times) - 1:
                self.time_grads[i] += self._cost_rate(i)

    def _initial_time(self) -> None:
        """dL/dt_0 = -lambda(t_0)^T f - c, the observation at t_0 not counted."""
        if self.times_wanted:
            self.time_grads[0] -= self._along(0, self.adjoint) + self._cost_rate(0)

    def _along(self, i: int, cotangent: Tensor) -> Tensor:
        """Re <cotangent, f(t_i, y)>."""
        with torch.no_grad():
            slope = self.integration.f(time_like(float(self.integration.times[i]), self.y), self.y)
        return (cotangent.conj() * slope).sum().real.double().cpu()

    def _cost_rate(self, i: int) -> Tensor | float:
        integration = self.integration
        if integration.running_cost is None or self.cotangents.cost is None:
            return 0.0
        with torch.no_grad():
            rate = integration.running_cost(time_like(float(integration.times[i]), self.y), self.y)
        return (self.cotangents.cost * rate).double().cpu()
