"""Tolerance is not accuracy: the gradient's error against the tolerance of an adaptive solve.

The step-size controller watches the solution, and nothing watches its derivative.

`balance` is x' = x - y, y' = y - x from (1, 1), L = x(5). The solution is constant, and the matrix
has the eigenvalues 0 and 2, so dL/d(x0, y0) = (1 + e^10, 1 - e^10) / 2. f = 0 along the solution:
steps grow by the largest factor, ten, whatever the tolerance, and the discrete gradient is
(1 + prod_i R(2 h_i)) / 2 with R the method's stability polynomial: `discrete_ratio`. Relative to
the exact one that is 0.34 for Tsit5, 0.37 for Dopri5, 0.04 for Bogacki-Shampine, 0.89 for Dopri8,
of a solve that ends on T. One that steps beyond T and interpolates, as torchdiffeq's, is worse: its
last step has length 10.

- Discrete gradient on `balance`: order 0 in the tolerance, and that ratio.
- Continuous gradient on `balance`: lambda grows from (1, 0) to its value at 0 under error control
  of its own, so its relative error is proportional to the tolerance: order 1.
- `driven`, a smooth nonlinear problem: the embedded error of all four methods is one order below
  the solution, so a step has h^p proportional to the tolerance, and so is the error of the
  solution and of both gradients (the discrete one on its mesh: Alexe & Sandu 2009,
  doi:10.1016/j.cam.2009.08.109): order 1.
- Where a solution is interpolated with a local error h^q, q < p, the order is q/p (`INTERPOLANT`):
  torchdiffeq steps beyond T and takes y(T) and lambda(0) from a quartic, through a midpoint that
  for bosh3 is y_n + h k_2 / 2, good to h^2; Diffrax's Dopri8 has an interpolant of order 5, which
  the adjoints that take y(t) from the forward solution use.

The gradient of `driven` is held against forward sensitivities by SciPy's DOP853 at 1e-13.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator
from scipy.integrate import solve_ivp

from ..config import Settings as BaseSettings
from ..orders import ExpectedOrder
from ..problems import problem_data
from ..problems._problem import Array
from ..tableaus import get_tableau

SOURCES = (
    "contadj.problems._builtin",
    "contadj.torch._problems",
    "contadj.jax._problems",
    "contadj.tableaus",
)
PROBLEMS = ("balance", "driven")
DISCRETE = (
    "contadj.torch.CheckpointAdjoint",
    "torchdiffeq.odeint",
    "contadj.jax.CheckpointAdjoint",
    "diffrax.RecursiveCheckpointAdjoint",
)
CONTINUOUS = (
    "contadj.torch.BacksolveAdjoint",
    "contadj.torch.InterpolatingAdjoint",
    "contadj.torch.GaussAdjoint",
    "torchdiffeq.odeint_adjoint",
    "contadj.jax.BacksolveAdjoint",
    "contadj.jax.InterpolatingAdjoint",
    "contadj.jax.GaussAdjoint",
    "diffrax.BacksolveAdjoint",
)
BALANCE_T1 = 5.0
# Where f = 0, as contadj.torch and Diffrax choose it: Hairer, Norsett & Wanner, Solving Ordinary
# Differential Equations I, II.4, and a constant.
FIRST_STEP = {"torch": 1e-6, "jax": 1e-2}
# q where an interpolated solution has the local error h^q.
INTERPOLANT = {
    ("torchdiffeq", "bosh3"): 2,
    ("torchdiffeq", "dopri5"): 5,
    ("torchdiffeq", "dopri8"): 5,
    ("diffrax", "dopri8"): 6,
}
ALONG_FORWARD = ("contadj.jax.InterpolatingAdjoint", "contadj.jax.GaussAdjoint")
# Relative errors of the gradient below which rounding and the reference's own error count.
FLOOR = 3e-13

Method = Literal["bosh3", "dopri5", "tsit5", "dopri8"]


class Settings(BaseSettings):
    """What the study of tolerances covers.

    Parameters
    ----------
    problems : tuple of str
        Of "balance" and "driven".
    adjoints : tuple of str
        Of `DISCRETE` and `CONTINUOUS`, the module or library in front.
    torch_methods, jax_methods : tuple of str
        Adaptive methods; torchdiffeq is asked for those that it has.
    tolerances : tuple of float
        rtol = atol of the forward and of the backward solve.
    finest_of : dict of str to float
        The smallest tolerance of the methods named, whose solves take too many steps below it.
    """

    problems: tuple[Literal["balance", "driven"], ...] = PROBLEMS
    adjoints: tuple[str, ...] = (*DISCRETE, *CONTINUOUS)
    torch_methods: tuple[Method, ...] = ("bosh3", "dopri5", "tsit5", "dopri8")
    jax_methods: tuple[Method, ...] = ("tsit5", "dopri8")
    tolerances: Annotated[tuple[float, ...], Field(min_length=1)] = tuple(
        10.0**-k for k in range(2, 13, 2)
    )
    finest_of: dict[Method, float] = Field(default={"bosh3": 1e-8})

    @field_validator("adjoints")
    @classmethod
    def _known(cls, adjoints: tuple[str, ...]) -> tuple[str, ...]:
        for one in adjoints:
            if one not in (*DISCRETE, *CONTINUOUS):
                raise ValueError(f"must be of {', '.join((*DISCRETE, *CONTINUOUS))}")
        return adjoints


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """Return one group per problem, adjoint and method, in it one cell per tolerance."""
    groups = []
    for problem in settings.problems:
        for adjoint in settings.adjoints:
            in_torch = framework(adjoint) == "torch"
            for method in settings.torch_methods if in_torch else settings.jax_methods:
                if adjoint.startswith("torchdiffeq.") and method == "tsit5":
                    continue
                finest = settings.finest_of.get(method, 0.0)
                place = {"problem": problem, "adjoint": adjoint, "method": method}
                tolerances = [x for x in settings.tolerances if x >= finest]
                groups.append([place | {"tolerance": x} for x in tolerances])
    return groups


def framework(adjoint: str) -> str:
    """Return "torch" or "jax", the framework that an adjoint is of."""
    return "torch" if adjoint.startswith(("contadj.torch.", "torchdiffeq.")) else "jax"


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of one gradient, and the steps behind it."""
    if framework(cell["adjoint"]) == "torch":
        from ._tolerance_torch import solve
    else:
        from ._tolerance_jax import solve
    y1, gradient, steps = solve(cell["problem"], cell["method"], cell["adjoint"], cell["tolerance"])
    if not np.all(np.isfinite(gradient)):
        raise FloatingPointError("the gradient is not finite")
    exact_y1, exact = reference(cell["problem"])
    return {
        "error": np.linalg.norm(gradient - exact) / np.linalg.norm(exact),
        "state_error": np.linalg.norm(y1 - exact_y1) / np.linalg.norm(exact_y1),
        "ratio": gradient[0] / exact[0],
        "steps": steps,
    }


@lru_cache(maxsize=2)
def reference(problem: str) -> tuple[Array, Array]:
    """Return y(T), and dL/dy0 then dL/d(parameters)."""
    if problem == "balance":
        growth = np.exp(2 * BALANCE_T1)
        return np.ones(2), np.array([1 + growth, 1 - growth]) / 2
    data = problem_data("driven")
    b, g, k = (float(data.params[name]) for name in "bgk")

    def field(t: float, z: Array) -> Array:
        (x, v), S = z[:2], z[2:].reshape(2, 5)
        J = np.array([[0, 1], [-k * np.cos(x), -b]])
        # Columns: x0, v0, then b, g, k.
        direct = np.zeros((2, 5))
        direct[1, 2:] = -v, np.cos(2 * t), -np.sin(x)
        acceleration = -b * v - k * np.sin(x) + g * np.cos(2 * t)
        return np.concatenate([[v, acceleration], (J @ S + direct).ravel()])

    start = np.concatenate([data.y0, np.eye(2, 5).ravel()])
    z1 = solve_ivp(field, (data.t0, data.t1), start, "DOP853", rtol=1e-13, atol=1e-14).y[:, -1]
    x, v = z1[:2]
    pull = np.array([2 * (x - float(data.constants["target"])), v])
    return z1[:2], pull @ z1[2:].reshape(2, 5)


def discrete_ratio(method: str, first_step: float) -> float:
    """Return the discrete over the exact dL/dx0 of `balance`, of a solve that ends on T.

    Each step is ten times as long as the one before, until T is reached.
    """
    tableau = get_tableau(method)

    def stability(z: float) -> float:
        stages = np.linalg.solve(np.eye(tableau.stages) - z * tableau.a, np.ones(tableau.stages))
        return 1 + z * float(tableau.b @ stages)

    left, h, product = BALANCE_T1, first_step, 1.0
    while left > 0:
        h = min(h, left)
        product *= stability(2 * h)
        left, h = left - h, 10 * h
    return float((1 + product) / (1 + np.exp(2 * BALANCE_T1)))


def expected_ratio(adjoint: str, method: str) -> float | None:
    """Return what `discrete_ratio` is for a discrete gradient; None for torchdiffeq's."""
    if adjoint.startswith("torchdiffeq."):
        return None
    return discrete_ratio(method, FIRST_STEP[framework(adjoint)])


def expected_order(problem: str, adjoint: str, method: str) -> ExpectedOrder:
    """Return the order of the gradient's error in the tolerance."""
    if problem == "balance" and adjoint in DISCRETE:
        source = "f = 0 along the solution: any tolerance takes the same steps"
        return ExpectedOrder(0, 0.02, source)
    p, q = get_tableau(method).order, math.inf
    if adjoint.startswith("torchdiffeq."):
        q = INTERPOLANT["torchdiffeq", method]
    elif adjoint in ALONG_FORWARD and problem != "balance":  # y is constant there
        q = INTERPOLANT.get(("diffrax", method), q)
    source = "h^p ~ tolerance, by control of the local error h^p of the embedded method"
    if q < p:
        source += f"; a solution interpolated to h^{q}"
    # Steps are whole numbers and their errors may cancel, so that single decades scatter.
    return ExpectedOrder(min(p, q) / p, 0.25, source)


def ends(line: list[Any]) -> list[Any]:
    """Return the records at the coarsest tolerance, at 1e-3 or the next below, and at the finest
    above the floor: the order is that between the last two, since single decades scatter."""
    usable = [r for r in line if r.status == "ok" and r["error"] > FLOOR]
    usable.sort(key=lambda r: -r["tolerance"])
    inner = [r for r in usable if r["tolerance"] <= 1e-3]
    return [usable[0], inner[0], inner[-1]] if len(inner) > 1 and usable[0] != inner[0] else []


def order_in_tolerance(line: list[Any]) -> float | None:
    """Return the order of the error in the tolerance.

    Parameters
    ----------
    line : list of CellRecord
        Of one problem, adjoint and method.
    """
    if not (chosen := ends(line)):
        return None
    coarse, fine = chosen[1:]
    drop = math.log(coarse["error"] / fine["error"])
    return drop / math.log(coarse["tolerance"] / fine["tolerance"])


def lines(records: list[Any]) -> dict[tuple[str, str, str], list[Any]]:
    """Return the records of each problem, adjoint and method."""
    found: dict[tuple[str, str, str], list[Any]] = {}
    for r in records:
        found.setdefault((r["problem"], r["adjoint"], r["method"]), []).append(r)
    return found


def findings(records: list[Any]) -> list[str]:
    """Return what was found, in sentences."""
    sentences, orders = [], {}
    for (problem, adjoint, method), line in lines(records).items():
        done = [r for r in line if r.status == "ok"]
        if not done:
            continue
        discrete = adjoint in DISCRETE
        kind = f"{problem}, {'discrete' if discrete else 'continuous'} gradients"
        if problem == "balance" and discrete:
            ratios = [r["ratio"] for r in done]
            ratio = expected_ratio(adjoint, method)
            expected = "" if ratio is None else f", expected {ratio:.4f}"
            sentences.append(
                f"{kind}: {adjoint} with {method} gives {min(ratios):.4g} to {max(ratios):.4g} "
                f"times the exact one at tolerances from {done[0]['tolerance']:.0e} to "
                f"{done[-1]['tolerance']:.0e}{expected}"
            )
        elif (order := order_in_tolerance(line)) is not None:
            expected = expected_order(problem, adjoint, method).order
            orders.setdefault((kind, expected), []).append((order, f"{adjoint} {method}"))
    for (kind, expected), found in orders.items():
        (low, lowest), (high, highest) = min(found), max(found)
        sentences.append(
            f"{kind}: error proportional to tolerance^{low:.2f} ({lowest}) up to ^{high:.2f} "
            f"({highest}), expected {expected:.3g}"
        )
    return sentences
