"""Gradients of a problem on a given mesh, as the step-size study asks for them."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..adjoints import parse_adjoint
from ..convergence import CONTINUOUS, DISCRETE, Measurement
from ..multistep import METHODS as WITH_HISTORY
from ..multistep import MULTISTEP
from ..problems import Gradient, GradientProblem
from ..tableaus import TABLEAUS, get_tableau
from . import _multistep, _torchdiffeq, _tree
from ._errors import SolveError
from ._field import StateLayout
from ._implicit import stepper
from ._memory import peak_live_bytes
from ._problems import builtin_problem
from ._rollout import rollout_adjoint
from ._solve import ENGINES, solve
from .adjoints import (
    Adjoint,
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
)

__all__ = [
    "ENGINES",
    "adjoints",
    "builtin_problem",
    "describe_device",
    "gradient_function",
    "methods",
    "versions",
]

# The study reports the reversal error in its records; a warning would say it twice.
_ADJOINTS: dict[str, Callable[..., Adjoint]] = {
    "DirectAdjoint": DirectAdjoint,
    "CheckpointAdjoint": CheckpointAdjoint,
    "ReversibleAdjoint": partial(ReversibleAdjoint, coupling=0.999, reversal_tolerance=math.inf),
    "BacksolveAdjoint": partial(BacksolveAdjoint, reversal_tolerance=math.inf),
    "InterpolatingAdjoint": InterpolatingAdjoint,
    "GaussAdjoint": GaussAdjoint,
    "ForwardSensitivity": ForwardSensitivity,
}
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def methods(engine: str | None = None) -> tuple[str, ...]:
    """Names of the methods that the engine steps on a given mesh."""
    _check("engine", engine or ENGINES[0], ENGINES)
    if engine == "torchdiffeq":
        return tuple(name for name in _torchdiffeq.METHODS if name != "scipy_solver")
    return (*TABLEAUS, *WITH_HISTORY)


def adjoints() -> tuple[str, ...]:
    """Names of the adjoints that the study can measure."""
    return tuple(_ADJOINTS)


def versions() -> dict[str, str]:
    """Versions of the libraries that the numbers depend on."""
    return {name: version(name) for name in ("torch", "torchdiffeq")}


def describe_device(device: str) -> str:
    """Describe a device.

    Parameters
    ----------
    device : str
        "cpu", "cuda" or "cuda:1" for instance.

    Raises
    ------
    ValueError
        If there is no such device.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(
            f"`device` {device!r} is not there for PyTorch; it has {', '.join(have)}"
        ) from None
    return torch.cuda.get_device_name(found) if found.type == "cuda" else str(found)


def _check(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"`{argument}` must be one of {', '.join(known)}; got {value!r}")


class _Tensors:
    """A problem's arrays as tensors, and its functions on them."""

    def __init__(self, problem: GradientProblem, dtype: torch.dtype, device: torch.device):
        self._problem = problem

        def as_tensor(leaf: Any) -> Any:
            if isinstance(leaf, int) and not isinstance(leaf, bool):
                raise TypeError(
                    f"problem {problem.name!r}: `params` holds the integer {leaf}, which has no "
                    f"gradient; write {leaf}.0, or an integer array if none is wanted"
                )
            tensor = torch.as_tensor(leaf)
            if not tensor.is_floating_point():
                return tensor.to(device)
            return tensor.detach().to(device, dtype, copy=True).requires_grad_()

        for leaf in _tree.flatten(problem.y0)[0]:
            kind = torch.as_tensor(leaf).dtype
            if not kind.is_floating_point:
                raise TypeError(
                    f"problem {problem.name!r}: `y0` must be floating point, got {kind}; write 1.0 "
                    "for 1"
                )
        self.y0 = _tree.tree_map(as_tensor, problem.y0)
        self._modules = {}
        self.params = self._own(problem.params, as_tensor, dtype, device)
        self.f = self._own(problem.f, lambda f: f, dtype, device)
        parts, self._rebuild = _tree.flatten(self.y0)
        self._shapes = [part.shape for part in parts]
        leaves = [leaf for leaf in _tree.tensors(self.params) if leaf.requires_grad]
        for module in self._modules.values():
            named = sorted(module.named_parameters())
            leaves += [param for _, param in named if param.requires_grad]
        self.leaves = leaves

    def _own(self, tree: Any, otherwise: Callable, dtype: torch.dtype, device: torch.device) -> Any:
        """Copies of modules in the study's dtype; one copy of each."""

        def take(leaf: Any) -> Any:
            if isinstance(leaf, nn.Module):
                if id(leaf) not in self._modules:
                    self._modules[id(leaf)] = copy.deepcopy(leaf).to(device, dtype)
                return self._modules[id(leaf)]
            return otherwise(leaf)

        return _tree.tree_map(take, tree)

    def field(self, t: Tensor, y: Any) -> Any:
        """f(t, y, p)."""
        return self.f(t, y, self.params)

    def flatten(self, y: Any) -> Tensor:
        """A state as one vector."""
        return torch.cat([leaf.reshape(-1) for leaf in _tree.tensors(y)])

    def unflatten(self, flat: Tensor) -> Any:
        """The inverse of `flatten`."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return self._rebuild([
            part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)
        ])  # fmt: skip

    def flat_field(self, t: Tensor, y: Tensor) -> Tensor:
        """f on vectors."""
        return self.flatten(self.field(t, self.unflatten(y)))

    def flat_cost(self, t: Tensor, y: Tensor) -> Tensor:
        """The running cost on vectors, (1,)."""
        assert self.running_cost is not None
        return self.running_cost(t, self.unflatten(y)).reshape(1)

    def with_cost(self, t: Tensor, z: Tensor) -> Tensor:
        """The right-hand side of (y, integral of the running cost), if the problem has one."""
        if self.running_cost is None:
            return self.flat_field(t, z)
        return torch.cat([self.flat_field(t, z[:-1]), self.flat_cost(t, z[:-1])])

    @property
    def running_cost(self) -> Callable[[Tensor, Any], Tensor] | None:
        """c(t, y), if the problem has one."""
        cost = self._problem.running_cost
        return None if cost is None else lambda t, y: cost(t, y, self.params)

    def end(self, y: Any) -> Tensor | float:
        """The terminal cost."""
        cost = self._problem.terminal_cost
        return 0.0 if cost is None else cost(y, self.params)

    def observation(self, i: int, t: float, y: Any) -> Tensor:
        """The cost of observation i."""
        assert self._problem.observation_cost is not None
        like = _tree.tensors(y)[0]
        time = torch.as_tensor(t, dtype=like.dtype, device=like.device)
        return self._problem.observation_cost(i, time, y, self.params)


def gradient_function(
    problem: GradientProblem,
    *,
    method: str,
    adjoint: str,
    engine: str | None = None,
    dtype: str = "float64",
    device: str = "cpu",
    max_steps: int | None = None,
    costs: bool = False,
) -> Callable[[int], Measurement]:
    """Return a function from the number of steps to one measured gradient.

    Parameters
    ----------
    problem : GradientProblem
        Written in PyTorch.
    method : str
        One of `methods(engine)`.
    adjoint : str
        One of `adjoints()`, with options where it has some (`contadj.adjoints`); DirectAdjoint or
        BacksolveAdjoint for a method with a history.
    engine : "contadj" or "torchdiffeq"
    dtype : "float64", "float32", "float16" or "bfloat16"
    device : str
        "cpu", "cuda", "cuda:1", ...
    max_steps : int, optional
        Not needed here; the JAX backend compiles for it.
    costs : bool
        Whether to measure what the gradient costs a user: its peak bytes, by computing it once
        more, and its time after that; then without `adjoint`.

    Returns
    -------
    callable
        `measure(num_steps) -> Measurement`, `num_steps` equal steps between neighbouring
        breakpoints of the problem. `adjoint` of the measurement is there for `DirectAdjoint`, by a
        rollout whose step is one step of the method; a method with a history starts afresh at the
        breakpoints.

    Raises
    ------
    ValueError
        If the problem is written in another framework, or a name is unknown, or the device is
        absent.
    TypeError
        If y0 is not floating point, or f or a cost does not return what it must.
    FloatingPointError
        On a call, if the solution stops being finite; the message has the step and its time.
    """
    if problem.framework != "torch":
        raise ValueError(
            f"problem {problem.name!r} is written in {problem.framework}: run it on the backend "
            f"{problem.framework!r}, or write its `f` in PyTorch"
        )
    engine = engine or ENGINES[0]
    _check("method", method, methods(engine))
    name, settings = parse_adjoint(adjoint)
    made = _ADJOINTS[name](**settings)
    _check("dtype", dtype, tuple(_DTYPES))
    describe_device(device)
    tensors = _Tensors(problem, _DTYPES[dtype], torch.device(device))
    points = problem.breakpoints
    times = problem.observation_times or ()
    where = [points.index(t) for t in times]
    if method in WITH_HISTORY:
        return _with_history(problem, tensors, method, adjoint)

    def gradient(mesh: np.ndarray):
        solution = solve(
            tensors.field,
            tensors.y0,
            torch.tensor(points, dtype=torch.float64),
            method=method,
            options={"mesh": mesh},
            adjoint=made,
            params=tensors.leaves,
            engine=engine,
            running_cost=tensors.running_cost,
        )

        def state(i: int) -> Any:
            return _tree.tree_map(lambda y: y[i], solution.ys)

        cost = tensors.end(state(-1)) + (0.0 if solution.cost is None else solution.cost)
        for i, (t, k) in enumerate(zip(times, where, strict=True)):
            cost = cost + tensors.observation(i, t, state(k))
        assert isinstance(cost, Tensor)
        inputs = [*_tree.tensors(tensors.y0), *tensors.leaves]
        grads = torch.autograd.grad(cost, inputs, allow_unused=True)
        full = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
        return solution.stats, cost, full

    def measure(num_steps: int) -> Measurement:
        mesh = problem.mesh(num_steps)
        try:
            peak = peak_live_bytes(lambda: gradient(mesh), device)[1] if costs else None
            start = time.perf_counter()
            stats, cost, grads = gradient(mesh)
            value = float(cost.detach())
            seconds = time.perf_counter() - start
            along = None
            if adjoint == DISCRETE and not costs:
                observed = {k * num_steps: i for i, k in enumerate(where)}
                if engine == "torchdiffeq" and method in _torchdiffeq.CARRYING:
                    along = _adjoint_of_solve(tensors, method, mesh, points, observed)
                else:
                    along = _adjoint_along(tensors, engine, method, mesh, observed)
        except SolveError as error:
            raise FloatingPointError(f"problem {problem.name!r}: {error}") from error
        count = len(_tree.tensors(tensors.y0))
        return Measurement(
            Gradient(value, _flat(grads[:count]), _flat(grads[count:])),
            mesh,
            along,
            stats.f_evaluations_forward,
            stats.f_evaluations_backward,
            stats.reversal_error,
            seconds,
            peak_bytes=peak,
        )

    return measure


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    if not tensors:
        return np.zeros(0)
    return torch.cat([x.detach().double().reshape(-1).cpu() for x in tensors]).numpy()


def _adjoint_along(
    tensors: _Tensors, engine: str, method: str, mesh: np.ndarray, observed: dict[int, int]
) -> np.ndarray:
    """lambda_n = dL/dy_n at every step, (M + 1, n): the adjoint sweep of a rollout of steps."""
    last = len(mesh) - 1
    running_cost = tensors.running_cost
    take = _one_step(tensors, engine, method)

    def step(n: int, z: Any, a: Tensor, p: Any) -> Any:
        y, paid = z
        y, cost = take(float(mesh[n]), float(mesh[n + 1]), y)
        return y, paid if cost is None else paid + cost

    def observation(n: int, y: Any) -> Tensor | None:
        i = observed.get(n)
        return None if i is None else tensors.observation(i, float(mesh[n]), y)

    def stage_cost(n: int, z: Any, a: Tensor, p: Any) -> Tensor:
        cost = observation(n, z[0])
        return z[1].new_zeros(()) if cost is None else cost

    def terminal_cost(z: Any, p: Any) -> Tensor:
        y, paid = z
        total = paid.sum() + tensors.end(y)
        cost = observation(last, y)
        return total if cost is None else total + cost

    like = _tree.tensors(tensors.y0)[0]
    start = tensors.y0, like.new_zeros(1 if running_cost is not None else 0)
    result = rollout_adjoint(
        step, start, torch.arange(last), [], stage_cost=stage_cost, terminal_cost=terminal_cost
    )
    leaves = _tree.tensors(result.adjoints[0])
    return torch.cat([x.double().reshape(last + 1, -1).cpu() for x in leaves], 1).numpy()


def _adjoint_of_solve(
    tensors: _Tensors,
    method: str,
    mesh: np.ndarray,
    points: Sequence[float],
    observed: dict[int, int],
) -> np.ndarray:
    """lambda_n at every step of one solve by torchdiffeq, what its steps carry held fixed."""
    z0 = tensors.flatten(tensors.y0)
    size = z0.numel()
    if tensors.running_cost is not None:
        z0 = torch.cat([z0, z0.new_zeros(1)])
    states: list[Tensor] = []

    def f(t: Tensor, z: Tensor) -> Tensor:
        return tensors.with_cost(t, z)

    f.callback_step = lambda t, z, dt: states.append(z)  # type: ignore[attr-defined]
    ends = _torchdiffeq.integrate(
        f, z0, torch.tensor(points, dtype=torch.float64), method, {"rtol": 1e-7, "atol": 1e-9},
        {"mesh": mesh},
    )  # fmt: skip
    cost = ends[-1, size:].sum() + tensors.end(tensors.unflatten(ends[-1, :size]))
    for n, i in observed.items():
        y = tensors.unflatten(ends[points.index(mesh[n]), :size])
        cost = cost + tensors.observation(i, float(mesh[n]), y)
    *along, last = torch.autograd.grad(cost, [*states, ends])
    rows = torch.stack([*along, last[-1]])[:, :size]
    return rows.detach().double().cpu().numpy()


def _one_step(tensors: _Tensors, engine: str, method: str):
    """One step of a method, started afresh, as a function (t, t_next, y) -> (y, cost)."""
    without = tensors.running_cost is None

    if engine == "contadj":
        layout = StateLayout(tensors.flatten(tensors.y0))
        method_step = stepper(get_tableau(method), None, layout)

        def take(t: float, t_next: float, y: Any):
            step = method_step.take(tensors.flat_field, t, t_next, tensors.flatten(y))
            paid = None if without else method_step.quadrature(tensors.flat_cost, step)
            return tensors.unflatten(step.y_next), paid

        return take

    def take_torchdiffeq(t: float, t_next: float, y: Any):
        flat = tensors.flatten(y)
        z = flat if without else torch.cat([flat, flat.new_zeros(1)])
        ends = torch.tensor([t, t_next], dtype=torch.float64)
        end = _torchdiffeq.integrate(
            tensors.with_cost, z, ends, method, {"rtol": 1e-7, "atol": 1e-9}, {"num_steps": 1}
        )[-1]
        if without:
            return tensors.unflatten(end), None
        return tensors.unflatten(end[:-1]), end[-1:]

    return take_torchdiffeq


def _with_history(
    problem: GradientProblem, tensors: _Tensors, method: str, adjoint: str
) -> Callable[[int], Measurement]:
    """The function from the number of steps to a gradient, for a method with a history."""
    if adjoint not in (DISCRETE, CONTINUOUS):
        raise ValueError(
            f"`adjoint` must be {DISCRETE} or {CONTINUOUS} with `method` {method}, whose steps use "
            f"more than one state; got {adjoint!r}"
        )
    y0 = tensors.flatten(tensors.y0).detach()
    size = y0.numel()
    step = _multistep.history_step(method)
    slope_sum = float(MULTISTEP[method].slope_sum) if method in MULTISTEP else None
    times = problem.observation_times or ()
    where = [problem.breakpoints.index(t) for t in times]

    def measure(num_steps: int) -> Measurement:
        mesh = problem.mesh(num_steps)
        intervals = [mesh[i : i + num_steps + 1] for i in range(0, len(mesh) - 1, num_steps)]
        evaluations = [0]

        def f(t: Tensor, z: Tensor) -> Tensor:
            evaluations[-1] += 1
            return tensors.with_cost(t, z)

        def cost(zs: Sequence[Tensor]) -> Tensor:
            evaluations.append(0)
            finite = torch.isfinite(torch.stack(list(zs))).all(1).tolist()
            if not all(finite):
                n = finite.index(False)
                raise FloatingPointError(
                    f"problem {problem.name!r}: the state is not finite at t = {mesh[n]:.17g}, "
                    f"after step {n} of {len(mesh) - 1}; take more steps, or mend `f` there"
                )
            total = zs[-1][size:].sum() + tensors.end(tensors.unflatten(zs[-1][:size]))
            for i, (t, k) in enumerate(zip(times, where, strict=True)):
                y = tensors.unflatten(zs[k * num_steps][:size])
                total = total + tensors.observation(i, t, y)
            return total

        start = time.perf_counter()
        z0 = y0 if tensors.running_cost is None else torch.cat([y0, y0.new_zeros(1)])
        given = step, f, z0, intervals, cost, tensors.leaves
        try:
            if adjoint == DISCRETE:
                sweep = _multistep.direct(*given)
            else:
                sweep = _multistep.backsolve(*given, size)
        except SolveError as error:
            raise FloatingPointError(f"problem {problem.name!r}: {error}") from error
        adjoints = sweep.adjoints[:, :size].double().cpu().numpy()
        gradient = Gradient(float(sweep.cost), adjoints[0], _flat(sweep.params))
        seconds = time.perf_counter() - start
        multipliers = None
        if sweep.multipliers is not None and slope_sum is not None:
            multipliers = slope_sum * sweep.multipliers[:, :size].double().cpu().numpy()
        along = adjoints if adjoint == DISCRETE else None
        forward, backward = evaluations
        return Measurement(
            gradient, mesh, along, forward, backward, sweep.reversal_error, seconds, multipliers
        )

    return measure
