"""When does the square commute: discrete gradient = adjoint ODE solved backward, at every h?

Gap and reversal error (how far the state rebuilt backward is from the true one) of every
Runge-Kutta method and of reversible Heun on a nonlinear problem that depends on time, where no
coincidence of a linear or autonomous one closes the gap. Expected:

- The gap is O(h^p), the difference of two approximations of order p; of heun2 it is O(h^3) and of
  reversible Heun O(h^4) (measured before). `contadj.orders` has it.
- It is zero for every h exactly for the methods that are symplectic and symmetric: implicit
  midpoint, gl4, gl6. The discrete adjoint of a Runge-Kutta method is its symplectic partner run
  backward (Sanz-Serna 2016, doi:10.1137/151002769): a symplectic method is its own partner, and a
  symmetric one run backward on the same mesh retraces the state.
- To retrace the state is not enough: the trapezoid rule does, and its gap is O(h^2).
- The reversal error is zero for a symmetric method. For the others a step and the step back leave
  (C(y) + (-1)^(p+1) C(y)) h^(p+1) + O(h^(p+2)) with C the constant of the local error: 2 C h^(p+1)
  for odd p, O(h^(p+2)) for even p. Over the interval this adds up to O(h^p) and O(h^(p+1)).
- The mesh must be the same. With T = (N + s) h, 0 < s < 1, a solve by steps of h ends with a short
  one at T going forward and at t0 going backward. Steps of h then lie on [0, T - s h] there and on
  [s h, T] here, so that local errors C h^(p+1) sum to values that differ by
  (s - s^(p+1)) (C(t0) - C(T)) h^(p+1): where gap or reversal error were zero, both are O(h^(p+1)),
  while a gap of lower order stays as it is. `short_step` is s.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import numpy as np

from .. import backends
from ..config import Names, Steps
from ..config import Settings as _Settings
from ..convergence import CONTINUOUS, DISCRETE
from ..multistep import REVERSIBLE_HEUN
from ..orders import ExpectedOrder, expected_order, observed_order, round_off_floor
from ..results import CellRecord
from ..tableaus import TABLEAUS

SOURCES = (
    "contadj.problems._builtin", "contadj.torch._problems", "contadj.jax._problems",
    "contadj.tableaus", "contadj.torch._multistep", "contadj.jax._multistep",
)  # fmt: skip
ENGINES = {"torch": "contadj", "jax": "diffrax"}
_SHIFTED = "local errors of order p + 1, on meshes shifted by part of a step"


class Settings(_Settings):
    """The keys of the config.

    Parameters
    ----------
    problems : tuple of str
        Built-in problems.
    backends : tuple of str
    steps : tuple of int
        Numbers N of steps; N + `short_step` steps of h where a short one ends the solve.
    with_short_step : tuple of str
        Methods also run with a short step.
    short_step : float
        s, the length of the short step as a fraction of h.
    """

    problems: Names = ("driven",)
    backends: tuple[Literal["torch", "jax"], ...] = ("torch", "jax")
    steps: Steps = (4, 8, 16, 32, 64, 128)
    with_short_step: Names = ("implicit_midpoint", "gl4", "gl6", "trapezoid", "heun2")
    short_step: float = 0.5


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """Every problem x backend x method x mesh x number of steps."""
    return [
        [
            {"problem": problem, "framework": framework, "method": method, "short_step": s,
             "num_steps": n, "max_steps": max(settings.steps)}
            for n in settings.steps
        ]
        for problem in settings.problems
        for framework in settings.backends
        for method in (*TABLEAUS, REVERSIBLE_HEUN)
        for s in (0.0, settings.short_step)
        if s == 0.0 or method in settings.with_short_step
    ]  # fmt: skip


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Gap, relative to the discrete gradient, and reversal error of one cell."""
    framework, n, s = cell["framework"], cell["num_steps"], cell["short_step"]
    if s:
        module = import_module(f"{__package__}._commute_{framework}")
        problem = backends.load_problem(cell["problem"], framework)
        h = (problem.t1 - problem.t0) / (n + s)
        discrete, continuous, reversal = module.gradients(
            problem, cell["method"], h, cell["max_steps"]
        )
        mesh_size = n + 1
    else:
        found = [
            backends.gradient_function(
                problem=cell["problem"], framework=framework, engine=ENGINES[framework],
                method=cell["method"], adjoint=adjoint, dtype="float64", device="cpu",
                max_steps=cell["max_steps"],
            )(n)
            for adjoint in (DISCRETE, CONTINUOUS)
        ]  # fmt: skip
        discrete, continuous = (one.gradient.vector for one in found)
        reversal, mesh = found[1].reversal_error, found[1].mesh
        h, mesh_size = float(np.max(np.diff(mesh))), len(mesh) - 1
    gap = np.linalg.norm(discrete - continuous) / np.linalg.norm(discrete)
    if not np.isfinite(gap):
        raise FloatingPointError("a gradient is not finite")
    return {"h": h, "mesh_size": mesh_size, "gap": gap, "reversal": reversal}


def expected(method: str, quantity: str, short_step: float) -> ExpectedOrder:
    """Return the order of "gap" or "reversal" that the docstring above derives."""
    tableau = TABLEAUS.get(method)
    order = tableau.order if tableau else 2
    symmetric = tableau is not None and tableau.symmetric
    tolerance = 0.15 if order < 5 else 0.4
    if quantity == "gap":
        same = expected_order(method, "gap")
        assert same is not None
        if not (short_step and same.exact):
            return same
        return ExpectedOrder(order + 1, tolerance, _SHIFTED)
    if method == REVERSIBLE_HEUN:
        return ExpectedOrder(4, tolerance, "the second state is not known at T, but alternates")
    if not symmetric:
        reversal = order + 1 - order % 2
        return ExpectedOrder(reversal, tolerance, "p for odd p, p + 1 for even p")
    if short_step:
        return ExpectedOrder(order + 1, tolerance, _SHIFTED)
    return ExpectedOrder(float("inf"), 0.0, "zero: a symmetric method retraces the state")


def series(records: list[CellRecord]) -> dict[tuple[str, str, str, float], list[CellRecord]]:
    """Return the records of each (problem, framework, method, short_step), coarsest first."""
    axes = ("problem", "framework", "method", "short_step")
    found: dict[Any, list[CellRecord]] = {}
    for record in sorted(records, key=lambda one: one["num_steps"]):
        if record.status == "ok":
            found.setdefault(tuple(record[axis] for axis in axes), []).append(record)
    return found


def floors(records: list[CellRecord]) -> list[float]:
    """Return the round-off floor of each record."""
    return [round_off_floor("float64", one["mesh_size"]) for one in records]


def findings(records: list[CellRecord]) -> list[str]:
    """What the records show."""
    lines = []
    for (problem, framework, method, s), cells in series(records).items():
        for quantity in ("gap", "reversal"):
            want = expected(method, quantity, s)
            observed = observed_order(
                [one["h"] for one in cells], [one[quantity] for one in cells], floors(cells), want
            )
            if want.exact:
                what = f"{max(one[quantity] for one in cells):.0e} at most, expected zero"
            else:
                order = "no" if observed.order is None else f"{observed.order:.2f}"
                what = f"order {order}, expected {want.order:g}"
            mesh = f", steps of T / (N + {s:g})" if s else ""
            lines.append(
                f"{problem} {framework} {method}{mesh}: {quantity} {what}: {observed.state}"
            )
    return lines
