"""The torchdiffeq engine: forward and reverse-time solves by its public `odeint` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torchdiffeq
from torch import Tensor

from ._errors import SolveError, SolveStats
from ._field import VectorField, autocast_state, pull, same_context
from ._mesh import Mesh, Times
from ._options import FIXED, fixed_mesh, unknown_option
from ._steps import time_like

if TYPE_CHECKING:
    from .adjoints import Adjoint

FIXED_GRID = (
    "euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams",
)  # fmt: skip
ADAPTIVE = ("adaptive_heun", "fehlberg2", "bosh3", "dopri5", "dopri8")
METHODS = (*FIXED_GRID, *ADAPTIVE, "scipy_solver")
# Their steps use slopes of earlier steps that are no functions of y_n: past ones of the Adams
# methods, and a last stage that was not evaluated at y_n.
CARRYING = ("explicit_adams", "implicit_adams", "adaptive_heun", "fehlberg2")
_ADAPTIVE_OPTIONS = (
    "first_step", "max_num_steps", "norm", "min_step", "max_step", "step_t", "jump_t", "safety",
    "ifactor", "dfactor", "dtype",
)  # fmt: skip
_OPTIONS = {
    **dict.fromkeys(FIXED_GRID, (*FIXED, "perturb", "interp")),
    **dict.fromkeys(ADAPTIVE, (*FIXED, *_ADAPTIVE_OPTIONS)),
    "explicit_adams": (*FIXED, "perturb", "interp", "max_order"),
    "implicit_adams": (*FIXED, "perturb", "interp", "max_order", "max_iters"),
    "scipy_solver": ("solver",),
}


_GIVES_UP = ("underflow in dt", "max_num_steps exceeded", "non-finite values in state")


def engine_options(
    method: str, options: Mapping[str, Any] | None, times: Times, t: Tensor
) -> tuple[dict[str, Any], Mesh | None]:
    """torchdiffeq's options for a method, and the mesh if it is fixed.

    A fixed mesh is handed to a fixed-grid method as its `grid_constructor`, and to an adaptive one
    as `step_t` with a first and least step beyond its largest gap, so that every step is cut to it.

    Raises
    ------
    ValueError
        For an option that the method does not take, or a fixed-grid method without a mesh.
    """
    options = dict(options or {})
    for name in options:
        if name not in _OPTIONS[method]:
            raise unknown_option(name, _OPTIONS[method])
    if options.get("norm") == "batch":
        del options["norm"]
    if options.get("norm") == "sample":
        raise ValueError("`norm` = 'sample' needs engine='contadj'; torchdiffeq takes a callable")
    mesh = fixed_mesh(options, times)
    rest = {name: value for name, value in options.items() if name not in FIXED}
    if mesh is None:
        if method in FIXED_GRID:
            raise ValueError(
                f"`method` = {method!r} takes fixed steps: give options={{'num_steps': ...}} (per "
                "interval of t), {'step_size': ...} or {'mesh': ...}"
            )
        return rest, None
    if method in FIXED_GRID:
        points = mesh.differentiable(t).to(t.device)
        return {
            "interp": "cubic",
            **rest,
            "grid_constructor": lambda func, y0, t: points.to(t),
        }, mesh
    # Longer than any gap: torchdiffeq misses an entry of step_t that a step meets exactly.
    gap = 1.5 * float(np.max(np.abs(np.diff(mesh.times))))
    steps = torch.from_numpy(mesh.times[1:].copy())
    return {**rest, "step_t": steps, "first_step": gap, "min_step": gap}, mesh


def integrate(
    f: Callable[..., Any],
    y0: Any,
    t: Tensor,
    method: str,
    tolerances: Mapping[str, Any],
    options: Mapping[str, Any] | None,
) -> Any:
    """`torchdiffeq.odeint` with checked options."""
    times = t.detach().cpu().double().numpy()
    translated, _ = engine_options(method, options, times, t)
    first = y0 if isinstance(y0, Tensor) else y0[0]
    try:
        return torchdiffeq.odeint(
            f, y0, t.to(first.device), method=method, options=translated, **tolerances
        )
    except AssertionError as error:
        if not any(reason in str(error) for reason in _GIVES_UP):
            raise  # f's own
        raise SolveError(f"torchdiffeq cannot go on: {error}", SolveStats()) from error


def solve(
    f: VectorField,
    y0: Tensor,
    t: Tensor,
    times: Times,
    method: str,
    tolerances: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    adjoint: Adjoint,
    params: tuple[Tensor, ...],
    running_cost: Callable[..., Tensor] | None,
    loss: Callable[..., Tensor] | None,
    stats: SolveStats,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Solve through torchdiffeq, with `DirectAdjoint` or `BacksolveAdjoint`."""
    from ._solve import _complete_params, _costs
    from .adjoints import BacksolveAdjoint, DirectAdjoint

    if running_cost is not None:
        running_cost = partial(f.watched, "running_cost", running_cost)
    if isinstance(adjoint, DirectAdjoint):
        if method == "scipy_solver" and torch.is_grad_enabled():
            raise ValueError(
                "`method` = 'scipy_solver' leaves no graph: use BacksolveAdjoint(method=...) with "
                "it, or torch.no_grad()"
            )
        forward = _Forward(f, method, tolerances, options, running_cost)
        ys, cost = forward(y0, t.to(y0.device))
    elif isinstance(adjoint, BacksolveAdjoint):
        if y0.is_complex():
            raise TypeError("complex states with BacksolveAdjoint need engine='contadj'")
        if adjoint.restart_every is not None:
            raise ValueError("`restart_every` needs engine='contadj'")
        forward = _Forward(f, method, tolerances, options, running_cost)
        buffers: list[Tensor] = []
        if torch.is_grad_enabled():
            _, probe = f.probe(time_like(times[0], y0), y0, params, _costs(running_cost))
            params = _complete_params(params, probe, adjoint, explicit=False)
            buffers = probe.written_buffers
        again = partial(same_context, autocast_state(y0.device), buffers)
        needed = tuple(param for param in params if param.requires_grad)
        ys, cost = _Backsolve.apply(adjoint, forward, times, stats, again, y0, t, *needed)
    else:
        raise ValueError(
            f"engine='torchdiffeq' serves DirectAdjoint and BacksolveAdjoint, got "
            f"{type(adjoint).__name__}: use engine='contadj'"
        )
    stats.f_evaluations_forward = f.evaluations
    if not bool(torch.isfinite(ys.detach()).all()):
        first = int(torch.isfinite(ys.detach().flatten(1)).all(1).logical_not().nonzero()[0])
        raise SolveError(
            f"the state is not finite at t[{first}] = {times[first]:.8g}: `func` is not finite "
            "before it, or the step is too large",
            stats,
        )
    if loss is None:
        return ys, cost, None
    total = sum(loss(i, time_like(t[i], ys), ys[i]) for i in range(len(times)))
    assert isinstance(total, Tensor)
    return None, cost, total


class _Forward:
    """The forward solve; a running cost is carried as a state outside the error norm."""

    def __init__(self, f, method, tolerances, options, running_cost):
        self.f, self.method, self.tolerances = f, method, tolerances
        self.options, self.running_cost = options, running_cost

    def __call__(self, y0: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.running_cost is None:
            ys = integrate(self.f, y0, t, self.method, self.tolerances, self.options)
            return ys, None
        running_cost = self.running_cost
        options = dict(self.options or {})
        if self.method in ADAPTIVE and not any(name in options for name in FIXED):
            norm = options.get("norm")
            options["norm"] = lambda z: (norm or _rms)(z[0])

        def with_cost(t: Tensor, z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.f(t, z[0]), running_cost(t, z[0]).reshape(1)

        start = (y0, y0.new_zeros(1))
        ys, costs = integrate(with_cost, start, t, self.method, self._wide(y0), options)
        return ys, costs[-1, 0]

    def _wide(self, y0: Tensor) -> dict[str, Any]:
        """Tolerances as a tuple over (y, cost) where they are per component."""
        return {
            name: value if isinstance(value, float) else (value.expand(y0.shape), value.new_ones(1))
            for name, value in self.tolerances.items()
        }


def _rms(y: Tensor) -> Tensor:
    return y.abs().square().mean().sqrt()


class _Backsolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, adjoint, forward, times, stats, again, y0, t, *params):  # type: ignore[override]
        ys, cost = forward(y0, t.to(y0.device))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ys, t, *params)
        ctx.adjoint, ctx.problem, ctx.times, ctx.stats = adjoint, forward, times, stats
        ctx.again = again
        return ys, cost

    @staticmethod
    def backward(ctx, grad_ys, grad_cost):  # type: ignore[override]
        from .adjoints._base import report_reversal

        if torch.is_grad_enabled():
            raise NotImplementedError(
                "BacksolveAdjoint has no second derivative; use DirectAdjoint()"
            )
        ys, t, *params = ctx.saved_tensors
        reverse = _Reverse(ctx.adjoint, ctx.problem, ctx.times, params, grad_cost)
        evaluations = ctx.problem.f.evaluations
        with ctx.again(), ctx.problem.f.watching(params):
            results = reverse.run(ys, grad_ys, t)
        ctx.stats.f_evaluations_backward = ctx.problem.f.evaluations - evaluations
        report_reversal(
            ctx.stats,
            torch.tensor(reverse.error),
            torch.tensor(1.0),
            ctx.adjoint.reversal_tolerance,
            ctx.adjoint.on_reversal,
            "more observation times, where the state is set back",
        )
        return (None, None, None, None, None, *results)


class _Reverse:
    """The adjoint ODE in reverse time, one torchdiffeq solve per interval of t."""

    def __init__(self, adjoint, problem: _Forward, times: Times, params, grad_cost):
        self.problem, self.times, self.params, self.grad_cost = problem, times, params, grad_cost
        self.method = adjoint.method or problem.method
        self.tolerances = {
            "rtol": adjoint.rtol
            if adjoint.rtol is not None
            else _largest(problem.tolerances["rtol"]),
            "atol": adjoint.atol
            if adjoint.atol is not None
            else _largest(problem.tolerances["atol"]),
        }
        options = dict(problem.options or {}) if adjoint.options is None else dict(adjoint.options)
        source = times if adjoint.options is None else times[::-1].copy()
        self.mesh = fixed_mesh(options, source)
        self.options = {k: v for k, v in options.items() if k not in (*FIXED, "norm", "step_t")}
        if adjoint.options is None and adjoint.method not in (None, problem.method):
            self.options = {}
        if self.method in ADAPTIVE and self.mesh is None and adjoint.seminorm:
            self.options["norm"] = lambda z: torch.stack([_rms(z[0]), _rms(z[1])]).max()
        self.error = 0.0

    def field(self, t: Tensor, z: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """(f, -f_y^T lambda - g c_y, -f_theta^T lambda - g c_theta)."""
        with torch.enable_grad():
            y = z[0].detach().requires_grad_()
            slope = self.problem.f(t, y)
            outs, cots = [slope], [z[1]]
            if self.problem.running_cost is not None and self.grad_cost is not None:
                outs.append(self.problem.running_cost(t, y))
                cots.append(self.grad_cost)
        wanted = (y, *self.params)
        grads = pull(outs, cots, wanted)
        back = [
            torch.zeros_like(x) if g is None else -g for g, x in zip(grads, wanted, strict=True)
        ]
        return (slope.detach(), *back)

    def run(self, ys: Tensor, grad_ys: Tensor | None, t: Tensor):
        """dL/dy0, dL/dt, dL/dparams."""
        times, f = self.times, self.problem.f
        bars = [torch.zeros_like(param) for param in self.params]
        adjoint = torch.zeros_like(ys[0])
        time_grads = torch.zeros(len(times), dtype=torch.float64)
        scale = float(torch.linalg.vector_norm(ys.flatten(1), dim=1).max()) or 1.0
        for i in range(len(times) - 1, -1, -1):
            if t.requires_grad and i == 0:
                time_grads[0] = -self._rate(0, ys, adjoint, f, cost=True)
            if grad_ys is not None:
                if t.requires_grad and i > 0:
                    time_grads[i] = self._rate(i, ys, grad_ys[i], f, cost=False)
                adjoint = adjoint + grad_ys[i]
            if t.requires_grad and i == len(times) - 1:
                time_grads[i] += self._cost_rate(i, ys)
            if i == 0:
                break
            z = self._piece(i, (ys[i], adjoint, *bars))
            drift = float(torch.linalg.vector_norm(z[0] - ys[i - 1])) / scale
            self.error = drift if not drift <= self.error else self.error
            adjoint, bars = z[1], list(z[2:])
        grad_t = time_grads.to(t) if t.requires_grad else None
        return adjoint, grad_t, *bars

    def _piece(self, i: int, z: tuple[Tensor, ...]) -> list[Tensor]:
        start, end = self.times[i], self.times[i - 1]
        options = dict(self.options)
        if self.mesh is not None:
            low, high = sorted((start, end))
            inner = np.sort(self.mesh.times[(self.mesh.times > low) & (self.mesh.times < high)])
            points = np.concatenate([[low], inner, [high]])
            options["mesh"] = points if start < end else points[::-1].copy()
        t = torch.tensor([start, end], dtype=torch.float64)
        path = integrate(self.field, z, t, self.method, self.tolerances, options)
        return [part[-1] for part in path]

    def _rate(self, i: int, ys: Tensor, cotangent: Tensor, f: VectorField, cost: bool) -> float:
        slope = f(time_like(self.times[i], ys), ys[i])
        rate = float((cotangent * slope).sum())
        return rate + (self._cost_rate(i, ys) if cost else 0.0)

    def _cost_rate(self, i: int, ys: Tensor) -> float:
        if self.problem.running_cost is None or self.grad_cost is None:
            return 0.0
        rate = self.problem.running_cost(time_like(self.times[i], ys), ys[i])
        return float(self.grad_cost * rate)


def _largest(tolerance: float | Tensor) -> float:
    """One number for the adjoint, whose parameters have no components of the state."""
    return float(tolerance.max()) if isinstance(tolerance, Tensor) else tolerance
