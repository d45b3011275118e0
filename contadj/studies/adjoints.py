"""What each adjoint's gradient is worth, by method, number of steps and precision.

Two questions are asked with this study, each by a config.

**Rebuilding y backward** (experiments/rebuild.toml). Backsolve integrates y backward, where what
contracts forward expands: an error of y grows by e^X, X the integral of the contraction rate of the
fastest direction; X = K T for slow_fast, the integral of mu (x^2 - 1) along the solution for
van_der_pol. Two errors are there to grow. Round-off, u; and that of the method: a step and the step
back are the identity up to O(h^(p+2)) for even p, up to O(h^(p+1)) for odd p, so that after all
steps y is off by O(h^r), r = p + 1 or p (`retrace_order`). So, on a mesh that resolves the
solution,

- BacksolveAdjoint: error = (c h^r + c' u) e^X (`GROWTH`). Expected on slow_fast with rk4_classic
  and 512 steps, in order of magnitude: `EXPECTED_ERRORS`, computed in float64 before this study was
  written; there h^5 rules in float64, and u in float32.
- with a restart every R of N steps, e^(X R / N) instead: the discretisation error remains.
- CheckpointAdjoint, InterpolatingAdjoint, GaussAdjoint keep y: no growth, the discretisation error.
- ReversibleAdjoint: the gradient is that of the coupled scheme, to rounding, but the scheme is not
  stable. On y' = -K y its two roots have the product l and, for l -> 1, the sum
  2 - Psi_h Psi_-h = 2 cosh(K h), Psi_h = e^(-K h) - 1: they are e^(-K h) and e^(K h). The second
  one, started by the discretisation error, grows to e^X.

**Precision** (experiments/precision.toml). On a problem that neither contracts nor expands much,

    error = C h^p + c u h^-q,   1/2 <= q <= 1:

N = T / h rounding errors of size u add up like a random walk or all with one sign. The least error
is at h* = (q c u / (p C))^(1 / (p + q)), so that between two precisions the optimal step and the
error there go as u^(1 / (p + q)) and u^(p / (p + q)) (`optimum_ratio`), whatever the adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator
from scipy.integrate import solve_ivp

from .. import backends
from ..adjoints import ADJOINTS, canonical_adjoint
from ..config import Names, Steps
from ..config import Settings as _Settings
from ..convergence import (
    GradientFunction,
    Reference,
    Series,
    complete_reference,
    solve_reference,
)
from ..orders import ExpectedOrder, ObservedOrder, expected_order, observed_order
from ..problems import GradientProblem

SOURCES = (
    "contadj.problems._builtin", "contadj.torch._problems", "contadj.jax._problems",
    "contadj.tableaus", "contadj.multistep",
)  # fmt: skip
FRAMEWORKS = {"contadj": "torch", "torchdiffeq": "torch", "diffrax": "jax"}  # of the engines
ROUND_OFF = {"float64": 2.0**-53, "float32": 2.0**-24}

# Against e^-X in the place of a step size.
GROWTH = ExpectedOrder(
    -1.0, 0.15, "an error of y grows by e^X backward, X the integral of the contraction rate"
)
# Relative error of BacksolveAdjoint on slow_fast, T = 1, by K; rk4_classic, 512 steps, float64.
EXPECTED_ERRORS = {20: 1e-7, 30: 5e-3, 40: 2e2, 50: 1e7}
EXPECTED_RESTARTED = {50: 5e-9}  # every 32 steps

# Of the error in h where round-off rules: -q.
ROUNDING = ExpectedOrder(-0.75, 0.25, "N rounding errors add up to between N^(1/2) u and N u")


def retrace_order(order: int) -> ExpectedOrder:
    """Return the order in h of the reversal error of a method that does not retrace its steps."""
    source = "the leading errors of a step and of the step back cancel where p is even"
    return ExpectedOrder(order + 1 - order % 2, 0.15, source)


def optimum_ratio(order: float) -> tuple[float, float]:
    """Return the least and the largest ratio of the optimal steps in float32 and float64."""
    ratio = ROUND_OFF["float32"] / ROUND_OFF["float64"]
    return ratio ** (1 / (order + 1.0)), ratio ** (1 / (order + 0.5))


class Settings(_Settings):
    """The axes: every problem x engine x method x adjoint x dtype x number of steps.

    Parameters
    ----------
    problems : tuple of str
        As on the command line.
    engines : tuple of str
        What does the stepping, of one backend or of both.
    methods, adjoints, dtypes : tuple of str
        An adjoint may have options, `BacksolveAdjoint(restart_every=32)` say.
    steps : tuple of int
        Numbers of steps between neighbouring breakpoints of a problem.
    most_steps : dict of str to int
        An engine's largest number of steps, where that is less than the largest of `steps`.
    device : str
        "cpu", "cuda", "cuda:1", ...
    costs : bool
        Whether time and peak bytes are those of the adjoint's own code in a solve of just as many
        steps; it takes a compilation or a second gradient for every cell.
    reference_steps : int
        The reference comes from meshes of up to twice as many steps.
    definitions : dict of str to str
        Digests of problems that are not built in: another digest, another cell.
    """

    problems: Names = ("slow_fast(K=20)",)
    engines: Annotated[
        tuple[Literal["contadj", "torchdiffeq", "diffrax"], ...], Field(min_length=1)
    ] = ("contadj", "diffrax")
    methods: Names = ("rk4_classic",)
    adjoints: Names = tuple(ADJOINTS)
    dtypes: Annotated[tuple[Literal["float64", "float32"], ...], Field(min_length=1)] = ("float64",)
    steps: Steps = (512,)
    most_steps: dict[str, int] = Field(default_factory=dict)
    device: str = "cpu"
    costs: bool = False
    reference_steps: Annotated[int, Field(ge=1)] = 256
    definitions: dict[str, str] = Field(default_factory=dict)

    @field_validator("adjoints")
    @classmethod
    def _known(cls, adjoints: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(canonical_adjoint, adjoints)))


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """The cells, in one group for each function that is compiled."""
    axes = product(
        settings.problems, settings.engines, settings.methods, settings.adjoints, settings.dtypes
    )
    groups = []
    for problem, engine, method, adjoint, dtype in axes:
        most = settings.most_steps.get(engine, max(settings.steps))
        steps = [n for n in settings.steps if n <= most]
        common = {
            "problem": problem, "engine": engine, "method": method, "adjoint": adjoint,
            "dtype": dtype, "device": settings.device, "costs": settings.costs,
            "reference_steps": settings.reference_steps,
        }  # fmt: skip
        if problem in settings.definitions:
            common["definition"] = settings.definitions[problem]
        groups.append([
            common | {"num_steps": n, "max_steps": n if settings.costs else max(steps)}
            for n in steps
        ])  # fmt: skip
    return groups


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """The gradient's relative error, its reversal error, and what it cost."""
    framework = FRAMEWORKS[cell["engine"]]
    problem = backends.load_problem(cell["problem"], framework)
    gradient_at = backends.gradient_function(
        problem=cell["problem"],
        framework=framework,
        engine=cell["engine"],
        method=cell["method"],
        adjoint=cell["adjoint"],
        dtype=cell["dtype"],
        device=cell["device"],
        max_steps=cell["max_steps"],
        costs=cell["costs"],
    )
    measured = gradient_at(cell["num_steps"])
    exact = reference(cell["problem"], framework, cell["device"], cell["reference_steps"])
    if exact.gradient is None:
        raise ValueError(f"no reference ({exact.description})")
    if not np.all(np.isfinite(measured.gradient.vector)):
        raise FloatingPointError("the gradient is not finite")
    return {
        "h": float(np.max(np.diff(measured.mesh))),
        "mesh_size": len(measured.mesh) - 1,
        "cost": measured.gradient.cost,
        "error": _distance(measured.gradient.vector, exact.gradient.vector),
        "reference_error": exact.error,
        "reversal_error": measured.reversal_error,
        "contraction": contraction(problem),
        "f_evaluations_forward": measured.f_evaluations_forward,
        "f_evaluations_backward": measured.f_evaluations_backward,
        "gradient_seconds": measured.seconds,
        "peak_bytes": measured.peak_bytes,
    }


def _distance(vector: np.ndarray, exact: np.ndarray) -> float:
    """Relative, and not infinite where the square of a difference is."""
    difference = vector - exact
    largest = float(np.max(np.abs(difference))) or 1.0
    return largest * float(np.linalg.norm(difference / largest) / np.linalg.norm(exact))


@lru_cache(maxsize=64)
def reference(problem: str, framework: str, device: str, steps: int) -> Reference:
    """Return what gradients of a problem are held against, as the step-size study has it.

    Parameters
    ----------
    problem, framework, device : str
        As in `contadj.backends.gradient_function`.
    steps : int
        Half the number of steps of the finest mesh.
    """
    stated = backends.load_problem(problem, framework)
    if stated.gradient is not None:
        return complete_reference(stated, None)

    def make(**names: Any) -> GradientFunction:
        # The same gradient as DirectAdjoint's, without lambda_n and its cost.
        return backends.gradient_function(**(names | {"adjoint": "CheckpointAdjoint"}))

    series = Series(
        problem=problem, framework=framework, engine="", method="", dtype="float64", device=device,
        steps=(steps,), digest="", reference_engine=backends.reference_engine(framework),
        versions={}, device_description="",
    )  # fmt: skip
    return complete_reference(stated, solve_reference(make, series))


def contraction(problem: GradientProblem) -> float | None:
    """Return X, the integral of the contraction rate of a problem's fastest direction.

    Parameters
    ----------
    problem : GradientProblem
        None is returned for one that is not built in to contract.
    """
    if problem.name == "slow_fast":
        return float(problem.params["K"]) * (problem.t1 - problem.t0)
    if problem.name == "van_der_pol":
        mu = float(problem.params["mu"])

        def rates(t: float, z: np.ndarray) -> list[float]:
            x, v, _ = z
            return [v, mu * (1 - x**2) * v - x, mu * (x**2 - 1)]

        start, span = [*problem.y0, 0.0], (problem.t0, problem.t1)
        solution = solve_ivp(rates, span, start, "LSODA", rtol=1e-10, atol=1e-12)
        return float(solution.y[2, -1])
    return None


def lines(records: Iterable[Any], *axes: str) -> dict[tuple[Any, ...], list[Any]]:
    """The records that have a value, by their place on the axes named."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for one in records:
        if one.status == "ok":
            found.setdefault(tuple(one[axis] for axis in axes), []).append(one)
    return found


def stiffness(records: Iterable[Any]) -> list[Any]:
    """The records of slow_fast over one unit of time that have a value, by K."""
    chosen = [
        one
        for one in records
        if one.status == "ok"
        and one["problem"].startswith("slow_fast")
        and "t1" not in one["problem"]
    ]
    return sorted(chosen, key=lambda one: one["contraction"])


def growth_line(records: Sequence[Any]) -> tuple[list[float], list[float], list[float]]:
    """e^-X, errors, and floors of records sorted by X.

    What the method's own error may be, ten times the error at the least X, is no growth.
    """
    errors = [one["error"] for one in records]
    rates = [math.exp(-one["contraction"]) for one in records]
    return rates, errors, [10 * errors[0]] * len(errors)


def growth(records: Sequence[Any]) -> ObservedOrder:
    """How the error of records sorted by X grows, as an order in e^-X; expected: `GROWTH`."""
    return observed_order(*growth_line(records), GROWTH)


def optimum(records: Iterable[Any]) -> Any:
    """The record of the longest step whose error is at most three times the least.

    From there on it is chance which of the steps has the least error.
    """
    records = list(records)
    least = min(max(one["error"], one["reference_error"]) for one in records)
    return max((one for one in records if one["error"] <= 3 * least), key=lambda one: one["h"])


def findings(records: Sequence[Any]) -> list[str]:
    """How errors grow with the contraction, and where the optimal steps are."""
    found = []
    for (engine, adjoint, dtype), line in lines(
        stiffness(records), "engine", "adjoint", "dtype"
    ).items():
        if len(line) > 1:
            first, last = line[0], line[-1]
            text = (
                f"{engine} {adjoint} {dtype}: error {first['error']:.0e} at "
                f"X = {first['contraction']:g}, {last['error']:.0e} at {last['contraction']:g}"
            )
            if adjoint == "BacksolveAdjoint":
                seen = growth(line).order
                rate = "no two of them above the method's error" if seen is None else f"{-seen:.2f}"
                text += f"; growth as exp(g X), expected g = 1, g = {rate}"
            found.append(text)
    by_curve = lines(records, "problem", "engine", "method", "adjoint")
    for (problem, engine, method, adjoint), line in by_curve.items():
        best = {
            dtype: optimum(curve)
            for (dtype,), curve in lines(line, "dtype").items()
            if len(curve) > 2
        }
        stated = expected_order(method, "discrete")
        if len(best) < 2 or stated is None:
            continue
        texts = [
            f"{dtype} {one['error']:.0e} with {one['num_steps']} steps"
            for dtype, one in best.items()
        ]
        ratio = best["float32"]["h"] / best["float64"]["h"]
        least, largest = optimum_ratio(stated.order)
        found.append(
            f"{problem} {engine} {method} {adjoint}: optimum in {', in '.join(texts)}; ratio of "
            f"the two steps {ratio:.0f}, expected {least:.0f} to {largest:.0f}"
        )
    return found
