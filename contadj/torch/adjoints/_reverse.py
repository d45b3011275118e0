"""The adjoint ODE in reverse time: its vector field, the theta-gradient beside it, its solve.

Three adjoints share it. They differ in where y comes from (rebuilt, or the forward solution) and in
how the theta-gradient is integrated (with the weights of the method, or by Gauss quadrature).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tableaus import TABLEAUS, get_tableau
from .. import _torchdiffeq
from .._compile import CompiledRungeKutta
from .._errors import SolveError
from .._field import VectorField, pull
from .._implicit import (
    Factors,
    ImplicitRungeKutta,
    check_solved,
    jacobian,
    newton_options,
    stepper,
)
from .._mesh import Mesh
from .._options import parse_options
from .._steps import RungeKutta, Step, StepControl, StepError, adaptive_steps, combine, time_like
from ._base import Integration, Recorded, accumulate, fixed_steps, stage_times


@dataclass(frozen=True)
class ReverseOptions:
    """The settings of a reverse solve; None takes those of the forward solve."""

    method: str | None
    rtol: float | None
    atol: float | None
    options: Mapping[str, Any] | None
    seminorm: bool

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in (*TABLEAUS, *_torchdiffeq.METHODS):
            raise ValueError(
                f"`method` must be one of {', '.join(TABLEAUS)}, or one of torchdiffeq's for its "
                f"engine; got {self.method!r}"
            )
        for argument in ("rtol", "atol"):
            value = getattr(self, argument)
            if value is not None and not value >= 0.0:
                raise ValueError(f"`{argument}` must be non-negative, got {value!r}")

    def solver(self, integration: Integration) -> tuple[RungeKutta, Mesh | StepControl]:
        """The method, and its mesh or its step-size control."""
        forward = integration.mesh
        method = integration.method
        if self.method is not None or self.options is not None:
            tableau = method.tableau if self.method is None else get_tableau(self.method)
            options = {**newton_options(method), **(self.options or {})}
            method = stepper(tableau, options, integration.f.layout)
        tolerances_given = self.rtol is not None or self.atol is not None
        if self.options is None and isinstance(forward, Mesh) and not tolerances_given:
            return method, forward
        drive = integration.f.drive
        defaults = forward if isinstance(forward, StepControl) else StepControl()
        given = {"rtol": self.rtol, "atol": self.atol}
        tolerances = {name: value for name, value in given.items() if value is not None}
        defaults = replace(defaults, step_t=(), jump_t=(), **tolerances)
        times = integration.times[::-1].copy()
        mesh = parse_options(method.tableau.name, self.options, times, defaults)
        if isinstance(mesh, StepControl) and mesh.norm == "sample":
            raise ValueError(
                "`options` of an adjoint take norm 'batch' or a callable: with norm='sample' in "
                "those of the solve the reverse one takes each sample's own steps"
            )
        if isinstance(mesh, Mesh) and drive is not None:
            mesh = drive.on_knots(mesh, "mesh" in (self.options or {}))
        return method, mesh


class AdjointSystem:
    """The adjoint ODE, and the theta-gradient as a quadrature beside it.

    The state is (y, lambda) stacked where y is rebuilt, lambda alone where `solution` gives y. The
    weights of the quadrature are those of the method, so it equals carrying theta_bar as a state,
    without a parameter-sized vector in every stage.

    Parameters
    ----------
    integration : Integration
    params : tuple of Tensor
        What the quadrature is over; empty where it is done elsewhere.
    cotangent : scalar Tensor, optional
        g, that of the running cost.
    error_wanted : bool
        Also integrate the embedded error of the quadrature.
    may_reject : bool
        A step that was tried may be rejected: its share of the quadrature waits for acceptance.
    solution : callable, optional
        y(t), t a float.
    """

    def __init__(
        self,
        integration: Integration,
        params: tuple[Tensor, ...],
        cotangent: Tensor | None,
        error_wanted: bool,
        may_reject: bool,
        solution: Callable[[float], Tensor] | None = None,
    ):
        self._integration = integration
        self.params = params
        self._cost_cotangent = cotangent
        self.solution = solution
        self._error_wanted, self._may_reject = error_wanted, may_reject
        none: list[Tensor | None] = [None] * len(params)
        self.totals, self.pending, self.pending_error = list(none), list(none), list(none)
        self._first = self._last = none
        self._accepted, self.reuses = True, False
        self._stage = -1

    @property
    def field(self) -> VectorField:
        """f(t, y)."""
        return self._integration.f

    @property
    def knots(self) -> tuple[float, ...]:
        """Step times of a control."""
        return self.field.knots

    @property
    def jumps(self) -> frozenset[float]:
        """Times at which f jumps."""
        return self.field.jumps

    def enter(self, t: float, t_next: float) -> None:
        """The next evaluations belong to the step from t to t_next."""
        self.field.enter(t, t_next)

    @property
    def rebuilds(self) -> bool:
        """Whether y is part of the state."""
        return self.solution is None

    def begin(self, method: RungeKutta, h: float, reused: bool) -> None:
        """A step of size h is about to be tried; its first stage may be known already."""
        self._weights = [-h * weight for weight in method.tableau.b.tolist()]
        self._error_weights = None
        if self._error_wanted and method.tableau.embedded is not None:
            self._error_weights = (-h * (method.tableau.b - method.tableau.embedded)).tolist()
        self._stage = 0
        self.reuses = self._may_reject or method.fsal
        self.pending = [None] * len(self.params) if self._may_reject else self.totals
        self.pending_error = [None] * len(self.params)
        if reused:
            # After an accepted step it is that step's last stage, after a rejected one its first.
            self.add(self._last if self._accepted else self._first)
        self._accepted = False

    def accept(self) -> None:
        """The step tried last was accepted."""
        if self.pending is not self.totals:
            accumulate(self.totals, self.pending)
        self._accepted = True
        self._stage = -1

    def add(self, integrands: list[Tensor | None]) -> None:
        """The theta-integrand at the next stage."""
        i = self._stage
        if self.reuses:
            self._last = integrands
            if i == 0:
                self._first = integrands
        if weight := self._weights[i]:
            accumulate(self.pending, integrands, weight)
        if self._error_weights is not None and (weight := self._error_weights[i]):
            accumulate(self.pending_error, integrands, weight)
        self._stage += 1

    def __call__(self, t: Tensor, z: Tensor) -> Tensor:
        """The derivative of the state."""
        if self.solution is not None:
            return self.rates(t, self.solution(self._time(t)), z)[1].neg()
        slope, back = self.rates(t, *z.unbind())
        return torch.stack([slope, back.neg()])

    def rates(self, t: Tensor, y: Tensor, adjoint: Tensor) -> tuple[Tensor, Tensor]:
        """f(t, y) and f_y^T lambda + g c_y; the theta-gradient gets the share of the stage."""
        slope, (back, *integrands) = self.pull(t, y, adjoint, self.params)
        if self._stage >= 0:
            self.add(integrands)
        return slope, torch.zeros_like(slope) if back is None else back

    def _time(self, t: Tensor) -> float:
        """The stage's time in float64: the tensor beside a float32 state has lost digits."""
        if self._stage < 0:
            return float(t)
        return self.stage_time(self._stage)

    stage_time: Callable[[int], float]

    def pull(
        self, t: Tensor, y: Tensor, adjoint: Tensor, params: tuple[Tensor, ...], with_y: bool = True
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """f(t, y), and f_y^T lambda + g c_y, then f_theta^T lambda + g c_theta."""
        compiled = self._integration.method
        if isinstance(compiled, CompiledRungeKutta) and params and with_y:
            return compiled.pull_field(self._integration.f, t, y, adjoint)
        y, outs = self.record(t, y)
        return outs[0].detach(), self.pull_back(outs, adjoint, (y, *params) if with_y else params)

    def record(self, t: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """y as a leaf, and f(t, y) and c(t, y) with their graph."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.record(t, y)
        integration = self._integration
        y = y.detach().requires_grad_()
        outs = [integration.f(t, y)]
        if self._cost_cotangent is not None and integration.running_cost is not None:
            outs.append(integration.running_cost(t, y))
        return y, outs

    def pull_back(
        self,
        outs: Sequence[Tensor],
        adjoint: Tensor,
        inputs: Sequence[Tensor],
        keep: bool = False,
    ) -> Sequence[Tensor | None]:
        """The vector-Jacobian product of what was recorded with (lambda, g)."""
        return pull(outs, [adjoint, self._cost_cotangent], inputs, retain_graph=keep)


class AdjointMethod(RungeKutta):
    """A Runge-Kutta step of the adjoint system: it announces each attempt."""

    def take(self, f, t, t_next, y, *, times=None, first=None, last=False):  # type: ignore[override]
        """Take one step."""
        system: AdjointSystem = f  # type: ignore[assignment]
        assert isinstance(t, float) and isinstance(t_next, float)
        h = t_next - t
        system.begin(self, h, reused=first is not None)
        if not system.rebuilds:
            system.stage_time = lambda i: (
                float(t + self.nodes[i] * h) if self.nodes[i] != 1 else t_next
            )
            return super().take(f, t, t_next, y, times=times, first=first, last=last)
        _, times = self.size_and_times(t, t_next, y, times)
        system.enter(t, t_next)
        # Stacked, each stage would cost two copies and a change of sign.
        state, adjoint = y.unbind()
        slopes, backs = [], []
        if first is not None:
            slopes, backs = [first[0]], [-first[1]]
        count = len(self._rows) - self.fsal
        with torch.enable_grad():  # once for all stages: it takes as long as an addition
            for i in range(len(slopes), count):
                row = self._rows[i]
                stage = combine(state, h, row, slopes), combine(adjoint, -h, row, backs)
                slope, back = system.rates(times[i], *stage)
                slopes.append(slope)
                backs.append(back)
            ends = combine(state, h, self._b, slopes), combine(adjoint, -h, self._b, backs)
            if self.fsal and last:
                slope, back = system.rates(times[count], *ends)
                slopes.append(slope)
                backs.append(back)
        kept = []
        if system.reuses:
            kept = [torch.stack([k, -back]) for k, back in zip(slopes, backs, strict=True)]
        return Step(t, t_next, y, torch.stack(ends), kept, [], times)


class ImplicitAdjointMethod(ImplicitRungeKutta):
    """An implicit step of the adjoint system.

    y does not depend on lambda and is solved for first; then lambda is linear,

        l_i = -f_y(Y_i)^T (lambda + h sum_j a_ij l_j) - g c_y(Y_i).
    """

    def take(self, f, t, t_next, y, *, times=None, first=None, last=False):  # type: ignore[override]
        """Take one step."""
        system: AdjointSystem = f  # type: ignore[assignment]
        h, times = self.size_and_times(t, t_next, y, times)
        assert isinstance(h, float) and isinstance(t, float) and isinstance(t_next, float)
        system.begin(self, h, reused=False)
        system.enter(t, t_next)
        if system.rebuilds:
            known = None if first is None else first[0]
            inner = super().take(system.field, t, t_next, y[0], times=times, first=known)
            states, adjoint = inner.stages, y[1]
        else:
            solution = system.solution
            assert solution is not None
            states = [solution(t_next if c == 1 else t + float(c) * h) for c in self.nodes]
            adjoint = y
        back: list[Tensor] = []
        for block in self._blocks:
            back.extend(self._adjoint_slopes(system, block, times, states, adjoint, h, back))
        slopes = back
        if system.rebuilds:
            slopes = [torch.stack(pair) for pair in zip(inner.slopes, back, strict=True)]
        step = Step(t, t_next, y, y, slopes, [], times)
        step.y_next = combine(y, h, self._b, slopes)
        return step

    def _adjoint_slopes(self, system, block, times, states, adjoint, h, back) -> list[Tensor]:
        """The l_i of a block of stages; the theta-gradient gets their share."""
        bases = [combine(adjoint, h, self._known(i, block), back) for i in block]
        recorded = [system.record(times[i], states[i]) for i in block]
        implicit = len(block) > 1 or self.tableau.a[block[0], block[0]] != 0.0
        if implicit:
            right = torch.stack([
                _or_zero(system.pull_back(outs, base, (leaf,), keep=True)[0], base).neg()
                for (leaf, outs), base in zip(recorded, bases, strict=True)
            ])  # fmt: skip
            samples = self.newton.samples
            jacobians = [jacobian(outs[0], leaf, samples).mT for leaf, outs in recorded]
            factors = Factors(self.block_matrix(block, -h, jacobians))
            found = self.block_states(factors.solve(self.block_vectors(right)), block, bases[0])
            bases = [
                combine(base, h, self._unknown(i, block), found.unbind())
                for i, base in zip(block, bases, strict=True)
            ]
        slopes = []
        for (leaf, outs), stage in zip(recorded, bases, strict=True):
            grads = system.pull_back(outs, stage, (leaf, *system.params))
            system.add(grads[1:])
            slopes.append(_or_zero(grads[0], stage).neg())
        if not implicit:
            return slopes
        check_solved(torch.stack(slopes) - found, factors.norm * found.abs().sum())
        return list(found.unbind())


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def adjoint_method(method: RungeKutta) -> AdjointMethod | ImplicitAdjointMethod:
    """The same method for the adjoint system."""
    if isinstance(method, ImplicitRungeKutta):
        return ImplicitAdjointMethod(method.tableau, method.newton)
    return AdjointMethod(method.tableau)


@dataclass(frozen=True)
class AdjointControl(StepControl):
    """Error control of the adjoint system: the largest of the norms of its parts."""

    system: AdjointSystem | None = None
    seminorm: bool = False

    @staticmethod
    def of(control: StepControl, system: AdjointSystem, seminorm: bool) -> AdjointControl:
        """The control of a forward solve, for the adjoint system."""
        values = {entry.name: getattr(control, entry.name) for entry in fields(StepControl)}
        return AdjointControl(**values, system=system, seminorm=seminorm)

    def _parts(self, z: Tensor) -> Sequence[Tensor]:
        assert self.system is not None
        return z.unbind() if self.system.rebuilds else (z,)

    def error_norm(self, error: Tensor, y: Tensor, y_next: Tensor) -> Tensor:
        """Norm of the scaled error; at most 1 for an acceptable step."""
        parts = [
            StepControl.error_norm(self, *part)
            for part in zip(self._parts(error), self._parts(y), self._parts(y_next), strict=True)
        ]
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
        pairs = zip(self._parts(value), self._parts(y), strict=True)
        return torch.stack([StepControl.scaled_norm(self, *pair) for pair in pairs]).max()


class ReverseSolve:
    """One reverse-time solve of the adjoint ODE, from the last observation time to the first.

    Parameters
    ----------
    settings : ReverseOptions
    integration : Integration
    recorded : Recorded
    y : Tensor
        The state at the end.
    first_step : float, optional
        Size of the first reverse step, where error control chooses the next ones.
    solution : callable, optional
        y(t); without it y is rebuilt.
    quadrature : int
        Number of Gauss nodes per step for the theta-gradient; 0 uses the stages of the method.
    """

    def __init__(
        self,
        settings: ReverseOptions,
        integration: Integration,
        recorded: Recorded,
        y: Tensor,
        first_step: float | None = None,
        solution: Callable[[float], Tensor] | None = None,
        quadrature: int = 0,
    ):
        self.integration = integration
        self._cotangents = cotangents = recorded.cotangents
        self._params = params = recorded.params
        self._y = y
        self._adjoint = torch.zeros_like(y)
        self._like_t = recorded.t if recorded.t.requires_grad else None
        self._time_grads = torch.zeros(len(integration.times), dtype=torch.float64)
        method, self._mesh = settings.solver(integration)
        self._method = adjoint_method(method)
        adaptive = isinstance(self._mesh, StepControl)
        self._gauss = gauss_nodes(quadrature) if quadrature else None
        self.system = AdjointSystem(
            integration,
            () if quadrature else params,
            cotangents.cost,
            adaptive and not settings.seminorm,
            adaptive,
            solution,
        )
        self._totals: list[Tensor | None] = [None] * len(params)
        self._solution = solution
        self._control = None
        if isinstance(self._mesh, StepControl):
            self._control = AdjointControl.of(self._mesh, self.system, settings.seminorm)
        self._size = first_step or None
        self.reversal_error = torch.zeros((), dtype=torch.float64, device=y.device)

    def run(self, pieces: Mapping[float, Tensor]):
        """Integrate to the first observation time.

        Parameters
        ----------
        pieces : mapping of float to Tensor
            Stored states by time, where the rebuilt y is compared and set back.

        Returns
        -------
        dL/dy0, dL/dt or None, dL/dparams

        Raises
        ------
        StepError
            If error control cannot go on.
        """
        times = self.integration.times
        index = {float(time): i for i, time in enumerate(times)}
        sign = self.integration.direction
        stops = sorted({*index, *pieces}, key=lambda s: -sign * s)
        self._jump(len(times) - 1)
        for start, end in pairwise(stops):
            self._integrate(start, end)
            if end in pieces:
                if self.system.rebuilds:
                    drift = torch.linalg.vector_norm(self._y - pieces[end]).double()
                    # maximum keeps NaN.
                    self.reversal_error = torch.maximum(self.reversal_error, drift)
                self._y = pieces[end].detach()
            elif self._solution is not None:
                self._y = self._solution(end)
            if end in index:
                if index[end] == 0 and self._like_t is not None:
                    self._time_grads[0] -= self._along(0, self._adjoint) + self._cost_rate(0)
                self._jump(index[end])
        grad_t = None if self._like_t is None else self._time_grads.to(self._like_t)
        if self.system.totals:
            accumulate(self._totals, self.system.totals)
        return self._adjoint, grad_t, self._totals

    def _integrate(self, start: float, end: float) -> None:
        stats = self.integration.stats
        z = self._adjoint
        if self.system.rebuilds:
            z = torch.stack([self._y, z])
            del self._y, self._adjoint  # they would lie beside those of the whole piece
        if self._runs_compiled():
            z = self._integrate_compiled(start, end, z)
            steps = iter(())
        elif self._control is not None:
            control = replace(self._control, first_step=self._size or self._control.first_step)
            steps = adaptive_steps(
                self._method, control, self.system, start, end, z, None, self._count_rejected
            )
        else:
            steps = fixed_steps(self._method, self._mesh_between(start, end), self.system, z)
        for step in steps:
            self.system.accept()
            if self._gauss is not None:
                self._add_quadrature(step)
            stats.backward_steps_accepted += 1
            self._size = step.next_size
            z = step.y_next
        if self.system.rebuilds:
            self._y, self._adjoint = z.unbind()
        else:
            self._adjoint = z

    def _runs_compiled(self) -> bool:
        """Whether whole steps of the adjoint system are compiled."""
        compiled = self.integration.method
        return (
            isinstance(compiled, CompiledRungeKutta)
            and self._method.tableau is compiled.tableau
            and self._control is None
            and self.system.rebuilds
            and bool(self.system.params)
        )

    def _integrate_compiled(self, start: float, end: float, z: Tensor) -> Tensor:
        compiled, system = self.integration.method, self.system
        assert isinstance(compiled, CompiledRungeKutta)
        mesh = self._mesh_between(start, end)
        table = stage_times(compiled, mesh, z)
        sizes = torch.as_tensor(np.diff(mesh), dtype=table.dtype, device=table.device)
        n = 0
        while n < len(sizes):
            count = compiled.block if len(sizes) - n >= compiled.block else 1
            steps = slice(n, n + count)
            z, totals = compiled.adjoint_steps(
                system.field, table[steps], sizes[steps], z, system.totals
            )
            system.totals[:] = totals
            n += count
        self.integration.stats.backward_steps_accepted += n
        return z

    def _add_quadrature(self, step: Step) -> None:
        """theta_bar += int (f_theta^T lambda + g c_theta) over the step, by Gauss quadrature."""
        assert self._gauss is not None and self._solution is not None
        start, end = step.t, step.t_next
        assert isinstance(start, float) and isinstance(end, float)
        h = end - start
        for x, weight in zip(*self._gauss, strict=True):
            t = start + x * h
            with torch.no_grad():
                adjoint = self._method.evaluate(self.system, step, t)
                y = self._solution(t)
            _, grads = self.system.pull(time_like(t, y), y, adjoint, self._params, with_y=False)
            accumulate(self._totals, grads, -h * weight)

    def _count_rejected(self) -> None:
        self.integration.stats.backward_steps_rejected += 1

    def _mesh_between(self, start: float, end: float) -> np.ndarray:
        """The reverse step times from start to end, both included."""
        assert isinstance(self._mesh, Mesh)
        times = self._mesh.times
        low, high = sorted((start, end))
        inner = times[(times > low) & (times < high)]
        whole = np.concatenate([[low], np.sort(inner), [high]])
        return whole if start < end else whole[::-1].copy()

    def _jump(self, i: int) -> None:
        """lambda jumps by dC/dy(t_i); the observation time moves along f."""
        integration = self.integration
        cotangent = self._cotangents.of_observations(integration, [i])
        if cotangent is not None:
            jump = cotangent[0] if integration.loss is None else self._loss_jump(i, cotangent)
            self._adjoint = self._adjoint + jump
            if self._like_t is not None and i > 0:
                self._time_grads[i] += self._along(i, jump)
        if self._like_t is not None and i == len(integration.times) - 1:
            self._time_grads[i] += self._cost_rate(i)

    def _loss_jump(self, i: int, cotangent: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self._y.detach().requires_grad_()
            leaf = torch.tensor(float(self.integration.times[i]), dtype=torch.float64)
            times: Any = None
            if self._like_t is not None:
                times = {i: leaf.requires_grad_()}
            value = self.integration.losses([i], y[None], times)
        if not value.requires_grad:
            return torch.zeros_like(y)
        inputs = (y, *(() if times is None else (leaf,)), *self._params)
        grads = pull([value], [cotangent], inputs)
        jump = grads.pop(0)
        if times is not None:
            grad = grads.pop(0)
            self._time_grads[i] += 0.0 if grad is None else grad
        accumulate(self._totals, grads)
        return torch.zeros_like(y) if jump is None else jump

    def _along(self, i: int, cotangent: Tensor) -> Tensor:
        """Re <cotangent, f(t_i, y)>."""
        self._enter_beside(i)
        with torch.no_grad():
            time = time_like(float(self.integration.times[i]), self._y)
            slope = self.integration.f(time, self._y)
        return (cotangent.conj() * slope).sum().real.double().cpu()

    def _enter_beside(self, i: int) -> None:
        """The solution goes on after an observation but the last."""
        times = self.integration.times
        toward = times[i + 1] if i + 1 < len(times) else times[i - 1]
        self.integration.f.enter_beside(float(times[i]), float(toward))

    def _cost_rate(self, i: int) -> Tensor | float:
        integration = self.integration
        if integration.running_cost is None or self._cotangents.cost is None:
            return 0.0
        self._enter_beside(i)
        with torch.no_grad():
            time = time_like(float(integration.times[i]), self._y)
            rate = integration.running_cost(time, self._y)
        return (self._cotangents.cost * rate).double().cpu()


def gauss_nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]; exact to degree 2 count - 1."""
    x, w = np.polynomial.legendre.leggauss(count)
    return (x + 1) / 2, w / 2


def solve_or_explain(adjoint: Any, reverse: ReverseSolve, pieces: Mapping[float, Tensor]):
    """Run a reverse solve; a failure of error control becomes a `SolveError`."""
    try:
        return reverse.run(pieces)
    except StepError as failure:
        raise SolveError(
            f"the reverse-time solve of {type(adjoint).__name__} cannot go on: {failure}; "
            "CheckpointAdjoint() needs no reverse-time solve",
            reverse.integration.stats,
        ) from None
