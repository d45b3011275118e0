"""What a gradient problem is, in either framework, and what a gradient of one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FRAMEWORKS = ("torch", "jax")


@dataclass(frozen=True, eq=False)
class Gradient:
    """The value of a problem's cost and its gradient, as flat arrays.

    Pytrees are flattened depth first, dictionaries by sorted key, each leaf in C order; so the
    entries of the two frameworks line up.

    Parameters
    ----------
    cost : float
        L = terminal cost + integral of the running cost + sum of the observation costs.
    y0 : (n,) array
        dL/dy0.
    params : (p,) array
        dL/dtheta.
    """

    cost: float
    y0: Array
    params: Array

    @staticmethod
    def of(cost: float, y0: ArrayLike, params: ArrayLike) -> Gradient:
        """A gradient from anything that numpy takes for an array."""
        return Gradient(cost, np.asarray(y0, np.float64), np.asarray(params, np.float64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", float(self.cost))
        object.__setattr__(self, "y0", np.atleast_1d(np.asarray(self.y0, dtype=np.float64)))
        object.__setattr__(self, "params", np.atleast_1d(np.asarray(self.params, np.float64)))

    @property
    def vector(self) -> Array:
        """The whole gradient, (n + p,): dL/dy0 then dL/dtheta."""
        return np.concatenate([self.y0, self.params])


@dataclass(frozen=True, eq=False)
class GradientProblem:
    """An initial value problem, a cost, and what their gradient should be.

    The solution of  y' = f(t, y, p),  y(t0) = y0  is given the cost

        L = terminal_cost(y(t1), p) + int_{t0}^{t1} running_cost(t, y, p) dt
            + sum_i observation_cost(i, t_i, y(t_i), p)

    and dL/dy0 and dL/dp are asked for.

    Parameters
    ----------
    name : str
        Name in records, tables and figures.
    framework : "torch" or "jax"
        The framework that `f` and the costs are written in.
    f : callable
        The vector field `f(t, y, params)`, returning the structure of y.
    y0 : pytree of arrays
        Initial state.
    params : pytree of arrays
        The parameters; an `nn.Module` or `equinox.Module` contributes its arrays.
    t0, t1 : float
        Ends of the interval.
    terminal_cost : callable, optional
        `terminal_cost(y, params)`, a scalar.
    running_cost : callable, optional
        `running_cost(t, y, params)`, a scalar, integrated over [t0, t1].
    observation_times : sequence of float, optional
        Strictly increasing times in [t0, t1].
    observation_cost : callable, optional
        `observation_cost(i, t, y, params)`, a scalar, summed over the observation times.
    gradient : Gradient, optional
        The exact gradient where it is known.
    adjoint : callable, optional
        `adjoint(t) -> (n,) array`, the exact lambda(t) where it is known.

    Raises
    ------
    ValueError
        If no cost is given, if the interval is empty or infinite, or if the observation times and
        the observation cost do not belong together.
    TypeError
        If `f` or a cost cannot be called.
    """

    name: str
    framework: str
    f: Callable[..., Any]
    y0: Any
    params: Any
    t0: float
    t1: float
    terminal_cost: Callable[..., Any] | None = field(default=None, kw_only=True)
    running_cost: Callable[..., Any] | None = field(default=None, kw_only=True)
    observation_times: Sequence[float] | None = field(default=None, kw_only=True)
    observation_cost: Callable[..., Any] | None = field(default=None, kw_only=True)
    gradient: Gradient | None = field(default=None, kw_only=True)
    adjoint: Callable[[float], Array] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        where = f"problem {self.name!r}"
        if self.framework not in FRAMEWORKS:
            raise ValueError(
                f"{where}: `framework` must be 'torch' or 'jax', got {self.framework!r}"
            )
        for argument in ("f", "terminal_cost", "running_cost", "observation_cost"):
            value = getattr(self, argument)
            if value is None and argument != "f":
                continue
            if not callable(value):
                raise TypeError(f"{where}: `{argument}` must be callable, got {value!r}")
        t0, t1 = float(self.t0), float(self.t1)
        if not (np.isfinite(t0) and np.isfinite(t1) and t0 < t1):
            raise ValueError(f"{where}: `t0` < `t1` must be finite, got t0 = {t0}, t1 = {t1}")
        object.__setattr__(self, "t0", t0)
        object.__setattr__(self, "t1", t1)
        if (self.observation_times is None) != (self.observation_cost is None):
            raise ValueError(
                f"{where}: `observation_times` and `observation_cost` must be given together"
            )
        if self.observation_times is not None:
            times = np.asarray(self.observation_times, dtype=np.float64)
            if times.ndim != 1 or times.size == 0 or np.any(np.diff(times) <= 0):
                raise ValueError(f"{where}: `observation_times` must be strictly increasing")
            if times[0] < t0 or times[-1] > t1:
                raise ValueError(
                    f"{where}: `observation_times` must lie in [{t0}, {t1}], got "
                    f"[{times[0]}, {times[-1]}]"
                )
            object.__setattr__(self, "observation_times", tuple(map(float, times)))
        if all(
            cost is None for cost in (self.terminal_cost, self.running_cost, self.observation_cost)
        ):
            raise ValueError(
                f"{where}: give at least one of `terminal_cost`, `running_cost`, `observation_cost`"
            )

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """t0, the observation times strictly inside the interval, and t1."""
        inner = [t for t in self.observation_times or () if self.t0 < t < self.t1]
        return (self.t0, *inner, self.t1)

    def mesh(self, num_steps: int) -> Array:
        """The mesh with `num_steps` equal steps between neighbouring breakpoints."""
        if num_steps < 1:
            raise ValueError(f"`num_steps` must be at least 1, got {num_steps}")
        points = self.breakpoints
        pieces = [np.linspace(left, right, num_steps + 1)[:-1] for left, right in pairwise(points)]
        return np.concatenate([*pieces, [self.t1]])


@dataclass(frozen=True, eq=False)
class ProblemData:
    """What a built-in problem needs beside its vector field: numbers, no framework.

    Parameters
    ----------
    name : str
        The problem's name.
    y0 : (n,) array
        Initial state.
    params : mapping of str to array
        Named parameters.
    t0, t1 : float
        Ends of the interval.
    constants : mapping of str to array
        Other numbers that the costs need, targets and data.
    observation_times : tuple of float, optional
    gradient : Gradient, optional
        Exact, or computed in extended precision.
    adjoint : callable, optional
        lambda(t) in closed form.
    """

    name: str
    y0: Array
    params: Mapping[str, Array]
    t0: float
    t1: float
    constants: Mapping[str, Array] = field(default_factory=dict)
    observation_times: tuple[float, ...] | None = None
    gradient: Gradient | None = None
    adjoint: Callable[[float], Array] | None = None
