"""Where along the way does lambda_n = dL/dy_n approach the adjoint lambda(t_n)?

Of Runge-Kutta methods, Adams-Bashforth and Adams-Moulton, BDF, leapfrog and reversible Heun, on a
nonlinear problem that depends on time. The gradient dL/dy0, dL/dtheta of every one of them
converges at the method's order; lambda_n, the history before t_n held fixed, need not. Expected,
with sources in `contadj.orders`:

- Runge-Kutta: order p at every step. Reversible Heun: order 2 at every step.
- Adams methods: order 1, whatever the order of the method.
- BDF: lambda_n tends to lambda(t_n) / s, s the sum of the weights of the slopes (2/3 for bdf2,
  6/11 for bdf3): it does not converge. The multiplier of the step's equation, s dL/dr_n with r_n
  its residual, does: at order p in the interior, and not in the few last steps. The first values,
  made by Runge-Kutta steps, serve fewer formulas, and there lambda_n tends to other multiples of
  lambda(t_n): at t_1 of bdf3 to 11/6 (1 - 9/11 + 2/11) lambda = 2/3 lambda; at t_0 to lambda.
- Leapfrog: neither converges, anywhere: the parasitic root -1 is not damped.

Four errors, each relative to max_t |lambda(t)|: of lambda_n and of the multiplier, over all steps
and over those with t_n in the middle half of the interval. The steps that start a method are none
of its formula and have no multiplier. The reference lambda(t_n) is that of a method of order 8 on a
finer mesh.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .. import backends
from ..config import Names, Steps
from ..config import Settings as _Settings
from ..convergence import DISCRETE
from ..multistep import METHODS, MULTISTEP
from ..orders import expected_order, observed_order, round_off_floor
from ..problems._problem import Array
from ..results import CellRecord

SOURCES = (
    "contadj.problems._builtin", "contadj.torch._problems", "contadj.jax._problems",
    "contadj.tableaus", "contadj.multistep", "contadj.torch._multistep", "contadj.jax._multistep",
)  # fmt: skip
ENGINES = {"torch": "contadj", "jax": "diffrax"}
QUANTITIES = ("discrete", "adjoint", "adjoint_interior", "multiplier", "multiplier_interior")
REFERENCE_STEPS = 1024


class Settings(_Settings):
    """The keys of the config.

    Parameters
    ----------
    problem : str
        A built-in problem without observations inside its interval.
    backends : tuple of str
    methods : tuple of str
    steps : tuple of int
        Numbers of steps, divisors of 1024.
    trace_steps : tuple of int
        Numbers of steps whose lambda_n near both ends is kept.
    trace_length : int
        Steps kept at each end.
    """

    problem: str = "driven"
    backends: tuple[Literal["torch", "jax"], ...] = ("torch", "jax")
    methods: Names = ("euler", "heun2", "bosh3", "rk4_classic", *METHODS)
    steps: Steps = (16, 32, 64, 128, 256, 512)
    trace_steps: tuple[int, ...] = (32, 64)
    trace_length: int = 10


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """Every backend x method x number of steps."""
    return [
        [
            {"problem": settings.problem, "framework": framework, "method": method,
             "num_steps": n, "max_steps": max(settings.steps),
             "trace": settings.trace_length if n in settings.trace_steps else 0}
            for n in settings.steps
        ]
        for framework in settings.backends
        for method in settings.methods
    ]  # fmt: skip


@lru_cache
def reference(problem: str, framework: str) -> tuple[Array, Array]:
    """The gradient, and lambda(t) on the mesh of `REFERENCE_STEPS` steps, (N + 1, n)."""
    found = backends.gradient_function(
        problem=problem, framework=framework, engine=ENGINES[framework], method="dopri8",
        adjoint=DISCRETE, dtype="float64", device="cpu", max_steps=REFERENCE_STEPS,
    )(REFERENCE_STEPS)  # fmt: skip
    assert found.adjoint is not None
    return found.gradient.vector, found.adjoint


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """The errors of one cell, and traces of the first component near both ends."""
    n = cell["num_steps"]
    found = backends.gradient_function(
        problem=cell["problem"], framework=cell["framework"], engine=ENGINES[cell["framework"]],
        method=cell["method"], adjoint=DISCRETE, dtype="float64", device="cpu",
        max_steps=cell["max_steps"],
    )(n)  # fmt: skip
    gradient, fine = reference(cell["problem"], cell["framework"])
    exact = fine[:: REFERENCE_STEPS // n]
    scale = np.linalg.norm(exact, axis=1).max()
    inner = np.abs(found.mesh - found.mesh.mean()) <= (found.mesh[-1] - found.mesh[0]) / 4

    multipliers = found.multipliers
    if multipliers is not None:
        # One for the end of each step that is none of the starting ones.
        multipliers = multipliers[MULTISTEP[cell["method"]].steps - 1 :]

    def error(got: Array | None, interior: bool) -> float | None:
        if got is None:
            return None
        last = len(exact) - len(got)
        distance = np.linalg.norm(got - exact[last:], axis=1)
        return float(np.max(distance[inner[last:]] if interior else distance) / scale)

    assert found.adjoint is not None
    difference = np.linalg.norm(found.gradient.vector - gradient)
    values: dict[str, Any] = {
        "h": float(np.max(np.diff(found.mesh))),
        "discrete": float(difference / np.linalg.norm(gradient)),
        "adjoint": error(found.adjoint, False),
        "adjoint_interior": error(found.adjoint, True),
        "multiplier": error(multipliers, False),
        "multiplier_interior": error(multipliers, True),
    }
    if length := cell["trace"]:
        ends = [*range(length), *range(n + 1 - length, n + 1)]
        values["trace_t"] = found.mesh[ends]
        values["trace_exact"] = exact[ends, 0] / scale
        values["trace_adjoint"] = found.adjoint[ends, 0] / scale
        if multipliers is not None:
            missing = np.full((len(exact) - len(multipliers), exact.shape[1]), np.nan)
            padded = np.concatenate([missing, multipliers])
            values["trace_multiplier"] = padded[ends, 0] / scale
    return values


def series(records: list[CellRecord]) -> dict[tuple[str, str], list[CellRecord]]:
    """Return the records of each (framework, method), coarsest first."""
    found: dict[tuple[str, str], list[CellRecord]] = {}
    for record in sorted(records, key=lambda one: one["num_steps"]):
        if record.status == "ok":
            found.setdefault((record["framework"], record["method"]), []).append(record)
    return found


def floors(records: list[CellRecord]) -> list[float]:
    """Return the round-off floor of each record."""
    return [round_off_floor("float64", one["num_steps"]) for one in records]


def findings(records: list[CellRecord]) -> list[str]:
    """What the records show."""
    lines = []
    for (framework, method), found in series(records).items():
        shown = []
        for quantity in QUANTITIES:
            want = expected_order(method, quantity)
            if want is None or found[0][quantity] is None:
                continue
            observed = observed_order(
                [one["h"] for one in found], [one[quantity] for one in found], floors(found), want
            )
            order = "none" if observed.order is None else f"{observed.order:.2f}"
            mark = "" if observed.state in ("as expected", "at round-off") else "!"
            shown.append(f"{quantity} {order} ({want.order:g}){mark}")
        lines.append(f"{framework} {method}, order (expected): {', '.join(shown)}")
    return lines
