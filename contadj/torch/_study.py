"""Gradients of a problem on a given mesh, as the step-size study asks for them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..convergence import Measurement
from ..problems import Gradient, GradientProblem
from ..tableaus import TABLEAUS, get_tableau
from . import _torchdiffeq, _tree
from ._errors import SolveError
from ._field import StateLayout
from ._implicit import stepper
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

_ADJOINTS: dict[str, Adjoint] = {
    type(adjoint).__name__: adjoint
    # The study reports the reversal error in its records; a warning would say it twice.
    for adjoint in (
        DirectAdjoint(),
        CheckpointAdjoint(),
        ReversibleAdjoint(0.999, reversal_tolerance=float("inf")),
        BacksolveAdjoint(reversal_tolerance=float("inf")),
        InterpolatingAdjoint(),
        GaussAdjoint(),
        ForwardSensitivity(),
    )
}
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def methods(engine: str | None = None) -> tuple[str, ...]:
    """Names of the methods that the engine steps on a given mesh."""
    _check("engine", engine or ENGINES[0], ENGINES)
    if engine == "torchdiffeq":
        return tuple(name for name in _torchdiffeq.METHODS if name != "scipy_solver")
    return tuple(TABLEAUS)


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
) -> Callable[[int], Measurement]:
    """Return a function from the number of steps to one measured gradient.

    Parameters
    ----------
    problem : GradientProblem
        Written in PyTorch.
    method : str
        One of `methods(engine)`.
    adjoint : str
        One of `adjoints()`.
    engine : "contadj" or "torchdiffeq"
    dtype : "float64", "float32", "float16" or "bfloat16"
    device : str
        "cpu", "cuda", "cuda:1", ...
    max_steps : int, optional
        Not needed here; the JAX backend compiles for it.

    Returns
    -------
    callable
        `measure(num_steps) -> Measurement`, `num_steps` equal steps between neighbouring
        breakpoints of the problem. `adjoint` of the measurement is there for `DirectAdjoint`, by a
        rollout whose step is one step of the method.

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
    _check("adjoint", adjoint, adjoints())
    _check("dtype", dtype, tuple(_DTYPES))
    describe_device(device)
    tensors = _Tensors(problem, _DTYPES[dtype], torch.device(device))
    points = problem.breakpoints
    times = problem.observation_times or ()
    where = [points.index(t) for t in times]

    def gradient(mesh: np.ndarray):
        solution = solve(
            tensors.field,
            tensors.y0,
            torch.tensor(points, dtype=torch.float64),
            method=method,
            options={"mesh": mesh},
            adjoint=_ADJOINTS[adjoint],
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
            start = time.perf_counter()
            stats, cost, grads = gradient(mesh)
            value = float(cost.detach())
            seconds = time.perf_counter() - start
            multipliers = None
            if adjoint == "DirectAdjoint":
                observed = {k * num_steps: i for i, k in enumerate(where)}
                multipliers = _multipliers(tensors, engine, method, mesh, observed)
        except SolveError as error:
            raise FloatingPointError(f"problem {problem.name!r}: {error}") from error
        count = len(_tree.tensors(tensors.y0))
        return Measurement(
            Gradient(value, _flat(grads[:count]), _flat(grads[count:])),
            mesh,
            multipliers,
            stats.f_evaluations_forward,
            stats.f_evaluations_backward,
            stats.reversal_error,
            seconds,
        )

    return measure


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    if not tensors:
        return np.zeros(0)
    return torch.cat([x.detach().double().reshape(-1).cpu() for x in tensors]).numpy()


def _multipliers(
    tensors: _Tensors, engine: str, method: str, mesh: np.ndarray, observed: dict[int, int]
) -> np.ndarray:
    """lambda_n = dL/dy_n at every step, (M + 1, n): the adjoint sweep of a rollout of steps."""
    last = len(mesh) - 1
    y0_leaves, rebuild = _tree.flatten(tensors.y0)
    running_cost = tensors.running_cost
    take = _one_step(tensors, engine, method, rebuild, [leaf.shape for leaf in y0_leaves])

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

    start = tensors.y0, y0_leaves[0].new_zeros(1 if running_cost is not None else 0)
    result = rollout_adjoint(
        step, start, torch.arange(last), [], stage_cost=stage_cost, terminal_cost=terminal_cost
    )
    leaves = _tree.tensors(result.adjoints[0])
    return torch.cat([x.double().reshape(last + 1, -1).cpu() for x in leaves], 1).numpy()


def _one_step(tensors: _Tensors, engine: str, method: str, rebuild: Callable, shapes: list):
    """One step of a method, started afresh, as a function (t, t_next, y) -> (y, cost)."""
    cost = tensors.running_cost
    sizes = [shape.numel() for shape in shapes]

    def flatten(y: Any) -> Tensor:
        return torch.cat([leaf.reshape(-1) for leaf in _tree.tensors(y)])

    def unflatten(y: Tensor) -> Any:
        parts = y.split(sizes)
        return rebuild([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

    def f(t: Tensor, y: Tensor) -> Tensor:
        return flatten(tensors.field(t, unflatten(y)))

    def c(t: Tensor, y: Tensor) -> Tensor:
        assert cost is not None
        return cost(t, unflatten(y)).reshape(1)

    if engine == "contadj":
        method_step = stepper(get_tableau(method), None, StateLayout(flatten(tensors.y0)))

        def take(t: float, t_next: float, y: Any):
            step = method_step.take(f, t, t_next, flatten(y))
            paid = None if cost is None else method_step.quadrature(c, step)
            return unflatten(step.y_next), paid

        return take

    def with_cost(t: Tensor, z: Tensor) -> Tensor:
        return f(t, z) if cost is None else torch.cat([f(t, z[:-1]), c(t, z[:-1])])

    def take_torchdiffeq(t: float, t_next: float, y: Any):
        flat = flatten(y)
        z = flat if cost is None else torch.cat([flat, flat.new_zeros(1)])
        ends = torch.tensor([t, t_next], dtype=torch.float64)
        end = _torchdiffeq.integrate(
            with_cost, z, ends, method, {"rtol": 1e-7, "atol": 1e-9}, {"num_steps": 1}
        )[-1]
        return (unflatten(end), None) if cost is None else (unflatten(end[:-1]), end[-1:])

    return take_torchdiffeq
