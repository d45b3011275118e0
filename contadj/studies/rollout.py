"""The rollout: one adjoint sweep, what it costs, how far back it reaches, and what it plans.

A rollout is z[t+1] = f(z[t], a[t], theta) for t = 0, ..., H-1 with cost J = c(z[H]); lambda_t =
dJ/dz_t comes from one sweep backward, and with it dJ/da_t, dJ/dtheta and dJ/dz_0. Five parts, and
what is expected of each:

`sweep`. x[t+1] = a x[t] + theta, x[0] = 0, J = (x[T] - x*)^2 with a = 0.9, theta = 1, x* = 2.
    With S_t = (1 - a^t) / (1 - a): x[t] = theta S_t, lambda_t = 2 (x[T] - x*) a^(T-t), dJ/dtheta =
    sum of lambda_1, ..., lambda_T = 2 (x[T] - x*) S_T. For T = 3: x = 1, 1.9, 2.71; lambda =
    1.1502, 1.278, 1.42; dJ/dtheta = 3.8482. J is quadratic in theta, so that the central
    difference has no truncation error: it agrees but for round-off, about eps J / delta = 1e-11.

`multiplications`. A scalar rollout whose actions are added: dJ/da_t is the product of dJ/dz_H and
    the H-1-t factors F_{H-1}, ..., F_{t+1}. Each product formed on its own takes
    sum_t (H-1-t) = H(H-1)/2 multiplications, one sweep, which hands each on to the next, H-1.

`cost`. The gradient in p parameters. Differences take p+1 rollouts. Forward mode takes p passes of
    state and tangent: beside the products of the rollout those of both arguments' tangents, 3p
    rollouts' worth. The sweep runs the rollout, repeats each step and takes both products of its
    vector-Jacobian product: 4 rollouts' worth at any p (Griewank & Walther 2008,
    doi:10.1137/1.9780898717761, chapter 4: at most 4 for a gradient, to which the repeated step
    adds 1). A rollout that uses all its parameters grows with p itself, so that costs are given in
    rollouts, of multiplications in matrix products (counted) and of processor time (measured).

`profile`. |dJ/da_t| for z[t+1] = A z[t] + a[t] with the cost at time k: |dJ/da_t| = |lambda_{t+1}|,
    and |lambda_t| <= rho^(k-t) |lambda_k| where |A| <= rho. A = rho Q with Q orthogonal (`normal`)
    attains the bound at every t. z[t+1] = rho Q tanh(z[t]) + a[t] (`tanh`) stays below it. For
    A = rho [[1, 1], [0, 1]] (`shear`), whose norm exceeds its spectral radius rho, the bound with
    rho does not hold: (A^T)^n grows like n rho^n, for rho < 1 at first, up to n = -1/log(rho).

`planning`. A pendulum, angle'' = -sin(angle) - 0.05 angle' + torque, to be swung up in 100 steps of
    0.1 with |torque| <= 0.5. The work of a steady push from rest, torque * angle, falls short of
    1 - cos(angle) for any torque below max (1 - cos s) / s = 0.725: it has to swing first. The
    gradients dJ/da_t alone find the swing; L-BFGS in fewest iterations, gradient descent in
    most. An integration of the pendulum under the planned torque that shares no code with the
    rollout ends where the plan says, but for the O(dt^4) of its Runge-Kutta steps, below 1e-4.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..config import Names, Steps
from ..config import Settings as BaseSettings
from ..orders import ExpectedOrder, observed_order

SOURCES = ()  # the examples are all defined here and in the modules beside it

Array = NDArray[Any]

# How what a part counts grows: the order in 1/H of the multiplications, in 1/p of the costs, which
# are those in multiplications. Times follow them but for what a library adds to an operation.
GROWTH = {
    "products": ExpectedOrder(-2, 0.05, "H(H-1)/2 multiplications"),
    "sweep": ExpectedOrder(-1, 0.05, "H-1 multiplications"),
    "forward": ExpectedOrder(-1, 0.01, "3 rollouts' worth per parameter"),
    "differences": ExpectedOrder(-1, 0.01, "one rollout per parameter, and one more"),
    "adjoint": ExpectedOrder(
        0, 0.01, "cheap gradients: Griewank & Walther 2008, doi:10.1137/1.9780898717761, chapter 4"
    ),
}

# The scalar example.
FACTOR, THETA, TARGET, DELTA = 0.9, 1.0, 2.0, 1e-4
# The network whose parameters are counted: p = 2 * WIDTH * (hidden units).
WIDTH, NETWORK_HORIZON, NETWORK_DELTA = 8, 50, 1e-6
# The profile.
PROFILE_HORIZON = 40
# The pendulum, in units of sqrt(length / gravity), and what its plan is charged for.
STEP, PLAN_HORIZON, DAMPING, TORQUE_LIMIT, EFFORT = 0.1, 100, 0.05, 0.5, 0.01
# Every plan starts from a slight push: hanging still, the pendulum is where the gradient is zero.
FIRST_ACTION = 0.1
RATES = {"gradient descent": 3.0, "Adam": 0.1}


class Settings(BaseSettings):
    """What is measured.

    Parameters
    ----------
    frameworks : tuple of str
        "torch", "jax".
    horizons : tuple of int
        Of the scalar example.
    multiplications : tuple of int
        Horizons at which multiplications are counted.
    hidden : tuple of int
        Hidden units of the network; it has 16 parameters for each.
    hidden_one_by_one : int
        Up to which of them forward mode and differences are run, one pass per parameter.
    radii : tuple of float
        Spectral radii of the profile.
    optimisers : tuple of str
        Of the planning.
    iterations : int
        Of the planning.
    """

    frameworks: Names = ("torch", "jax")
    horizons: Steps = (3, 8)
    multiplications: Steps = (2, 4, 8, 16, 32, 64, 128, 256)
    hidden: Steps = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
    hidden_one_by_one: int = 64
    radii: tuple[float, ...] = (0.9, 1.0, 1.1)
    optimisers: tuple[Literal["gradient descent", "Adam", "L-BFGS"], ...] = (
        "gradient descent",
        "Adam",
        "L-BFGS",
    )
    iterations: int = 150


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """Return the cells, those of one part and framework together."""
    groups: list[list[dict[str, Any]]] = [
        [{"part": "multiplications", "horizon": n} for n in settings.multiplications]
    ]
    for framework in settings.frameworks:
        groups.append([_cell("sweep", framework, horizon=n) for n in settings.horizons])
        groups.append(
            [
                _cell("cost", framework, mode=mode, hidden=n, parameters=2 * WIDTH * n)
                for mode in ("differences", "forward", "adjoint")
                for n in settings.hidden
                if mode == "adjoint" or n <= settings.hidden_one_by_one
            ]
        )
        groups.append(
            [
                _cell("profile", framework, dynamics=dynamics, radius=radius)
                for dynamics in ("normal", "shear", "tanh")
                for radius in settings.radii
            ]
        )
        groups.append(
            [
                _cell("planning", framework, optimiser=name, iterations=settings.iterations)
                for name in settings.optimisers
            ]
        )
    return groups


def _cell(part: str, framework: str, **axes: Any) -> dict[str, Any]:
    """Return one cell of a part that runs in a framework."""
    return {"part": part, "framework": framework, **axes}


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Measure one cell; `_rollout_torch` and `_rollout_jax` run its rollouts."""
    if cell["part"] == "multiplications":
        return count_multiplications(cell["horizon"])
    twin = importlib.import_module(f"{__package__}._rollout_{cell['framework']}")
    with twin.double_precision():
        return _MEASURE[cell["part"]](twin, cell)


# ----------------------------------------------------------------------------------- the sweep


def scalar_solution(horizon: int) -> tuple[Array, Array, float]:
    """Return x_0, ..., x_T, lambda_0, ..., lambda_T and dJ/dtheta in closed form."""
    t = np.arange(horizon + 1)
    sums = (1 - FACTOR**t) / (1 - FACTOR)
    states = THETA * sums
    last = 2 * (states[-1] - TARGET)
    return states, last * FACTOR ** (horizon - t), float(last * sums[-1])


def _measure_sweep(twin: Any, cell: dict[str, Any]) -> dict[str, Any]:
    horizon = cell["horizon"]
    cost, states = twin.scalar_rollout(horizon, THETA)
    adjoints, gradient = twin.scalar_adjoint(horizon, THETA)
    above, _ = twin.scalar_rollout(horizon, THETA + DELTA)
    below, _ = twin.scalar_rollout(horizon, THETA - DELTA)
    exact_states, exact_adjoints, exact = scalar_solution(horizon)
    return {
        "cost": cost,
        "states": states,
        "adjoints": adjoints,
        "gradient": gradient,
        "difference": (above - below) / (2 * DELTA),
        "states_error": np.max(np.abs(states - exact_states)),
        "adjoints_error": np.max(np.abs(adjoints - exact_adjoints)),
        "gradient_error": abs(gradient - exact),
    }


# ------------------------------------------------------------------------- the multiplications


class CountingFloat(float):
    """A number that counts multiplications."""

    multiplications = 0

    def __mul__(self, other: float) -> CountingFloat:
        CountingFloat.multiplications += 1
        return CountingFloat(float(self) * float(other))


def by_products(factors: Sequence[float], last: float) -> list[float]:
    """Return every dJ/da_t of a scalar rollout, each product of factors formed on its own."""
    found = []
    for t in range(len(factors)):
        product = last
        for factor in reversed(factors[t + 1 :]):
            product = factor * product
        found.append(product)
    return found


def by_sweep(factors: Sequence[float], last: float) -> list[float]:
    """Return every dJ/da_t of a scalar rollout by one adjoint sweep."""
    found = [adjoint := last]
    for factor in reversed(factors[1:]):
        adjoint = factor * adjoint
        found.append(adjoint)
    return found[::-1]


def linearised_rollout(horizon: int) -> tuple[list[CountingFloat], CountingFloat]:
    """Return F_t of x[t+1] = sin(x[t]) + a[t] with x[0] = 1, a[t] = 1/2, and dJ/dx_H of x_H^2."""
    x, factors = 1.0, []
    for _ in range(horizon):
        factors.append(CountingFloat(math.cos(x)))
        x = math.sin(x) + 0.5
    return factors, CountingFloat(2 * x)


def count_multiplications(horizon: int) -> dict[str, Any]:
    """Return how many multiplications each way takes, counted, and how far their results differ."""
    counts, results = {}, []
    for name, way in (("products", by_products), ("sweep", by_sweep)):
        factors, last = linearised_rollout(horizon)
        CountingFloat.multiplications = 0
        results.append(way(factors, last))
        counts[name] = CountingFloat.multiplications
    return {**counts, "difference": np.max(np.abs(np.subtract(*results)))}


# ------------------------------------------------------------------------------------ the cost


def network(hidden: int) -> tuple[Array, Array, Array]:
    """Return z_0 and the two matrices of z[t+1] = z[t] + tanh(z[t] A) B / 10, J = |z_H|^2 / 2."""
    rng = np.random.default_rng(0)
    inner = rng.standard_normal((WIDTH, hidden)) / math.sqrt(WIDTH)
    outer = rng.standard_normal((hidden, WIDTH)) / math.sqrt(hidden)
    return np.linspace(-1, 1, WIDTH)[None], inner, outer


def _network_cost(z: Array, inner: Array, outer: Array) -> float:
    for _ in range(NETWORK_HORIZON):
        z = z + 0.1 * np.tanh(z @ inner) @ outer
    return 0.5 * float(np.sum(z**2))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a call's result and the median processor time of calls that take 0.3 s together.

    Unlike wall time it does not count what else the machine does.
    """
    result, times = None, list[float]()
    while sum(times) < 0.3:
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
    return result, median(times)


def _measure_cost(twin: Any, cell: dict[str, Any]) -> dict[str, Any]:
    z0, inner, outer = network(cell["hidden"])
    p = inner.size + outer.size
    passes = {"adjoint": 1, "forward": p, "differences": p + 1}[cell["mode"]]
    run = twin.NetworkGradient(cell["mode"], z0, inner, outer)
    # Counting runs a rollout and a pass, so that no first call is timed.
    work = passes * run.multiplications_of_a_pass / run.multiplications_of_a_rollout
    _, rollout_seconds = timed(run.rollout)
    gradient, seconds = timed(run.gradient)
    # The derivative in one direction, by differences of a rollout without a framework.
    direction = np.random.default_rng(1).standard_normal(p)
    direction /= np.linalg.norm(direction)
    d_inner = direction[: inner.size].reshape(inner.shape)
    d_outer = direction[inner.size :].reshape(outer.shape)
    above = _network_cost(z0, inner + 1e-5 * d_inner, outer + 1e-5 * d_outer)
    below = _network_cost(z0, inner - 1e-5 * d_inner, outer - 1e-5 * d_outer)
    error = abs(gradient @ direction - (above - below) / 2e-5) / np.linalg.norm(gradient)
    return {
        "passes": passes,
        "work": work,
        "seconds_of_gradient": seconds,
        "seconds_of_rollout": rollout_seconds,
        "time": seconds / rollout_seconds,
        "directional_error": error,
    }


# --------------------------------------------------------------------------------- the profile


def dynamics_matrix(dynamics: str, radius: float) -> Array:
    """Return A of the profile, of the spectral radius given."""
    if dynamics == "shear":
        return radius * np.array([[1.0, 1.0], [0.0, 1.0]])
    orthogonal, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))
    return radius * orthogonal


def _measure_profile(twin: Any, cell: dict[str, Any]) -> dict[str, Any]:
    matrix = dynamics_matrix(cell["dynamics"], cell["radius"])
    by_action, last = twin.action_gradients(matrix, cell["dynamics"] == "tanh", PROFILE_HORIZON)
    left = np.arange(PROFILE_HORIZON - 1, -1, -1)  # k - (t + 1)
    size = np.linalg.norm(last)
    values = {
        "profile": np.linalg.norm(by_action, axis=1),
        "bound": cell["radius"] ** left * size,
        "bound_of_norm": np.linalg.norm(matrix, 2) ** left * size,
    }
    if cell["dynamics"] != "tanh":
        exact = np.array([np.linalg.matrix_power(matrix.T, n) @ last for n in left])
        values["error"] = np.max(np.abs(by_action - exact)) / np.max(np.abs(exact))
    return values


# -------------------------------------------------------------------------------- the planning


def swing(sin: Callable[[Any], Any], angle: Any, speed: Any, torque: Any) -> tuple[Any, Any]:
    """Return angle and speed one step later, by the classical Runge-Kutta method, torque held."""

    def slope(angle: Any, speed: Any) -> tuple[Any, Any]:
        return speed, torque - sin(angle) - DAMPING * speed

    a1, s1 = slope(angle, speed)
    a2, s2 = slope(angle + STEP / 2 * a1, speed + STEP / 2 * s1)
    a3, s3 = slope(angle + STEP / 2 * a2, speed + STEP / 2 * s2)
    a4, s4 = slope(angle + STEP * a3, speed + STEP * s3)
    return (
        angle + STEP / 6 * (a1 + 2 * a2 + 2 * a3 + a4),
        speed + STEP / 6 * (s1 + 2 * s2 + 2 * s3 + s4),
    )


def off_upright(cos: Callable[[Any], Any], angle: Any, speed: Any) -> Any:
    """Return the terminal cost: zero where the pendulum stands upright and still."""
    return 1 + cos(angle) + speed**2 / 2


def minimise(
    value_and_gradient: Callable[[Array], tuple[float, Array]],
    start: Array,
    optimiser: str,
    iterations: int,
) -> tuple[list[float], Array]:
    """Return the cost before each iteration and after the last, and the point reached."""
    if optimiser == "L-BFGS":
        return _lbfgs(value_and_gradient, start, iterations)
    x, costs, rate = start.copy(), [], RATES[optimiser]
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for i in range(1, iterations + 1):
        cost, gradient = value_and_gradient(x)
        costs.append(cost)
        if optimiser == "Adam":  # Kingma & Ba 2015, arXiv:1412.6980, its constants
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            gradient = mean / (1 - 0.9**i) / (np.sqrt(square / (1 - 0.999**i)) + 1e-8)
        x -= rate * gradient
    return [*costs, value_and_gradient(x)[0]], x


def _lbfgs(value_and_gradient, start: Array, iterations: int) -> tuple[list[float], Array]:
    from scipy.optimize import OptimizeResult, minimize

    costs = [value_and_gradient(start)[0]]

    def note(intermediate_result: OptimizeResult) -> None:
        costs.append(float(intermediate_result.fun))

    options = {"maxiter": iterations, "maxfun": 10 * iterations, "ftol": 0.0, "gtol": 1e-10}
    result = minimize(
        value_and_gradient, start, jac=True, method="L-BFGS-B", callback=note, options=options
    )
    return costs, result.x


def swung(torques: Array) -> tuple[float, float]:
    """Return angle and speed at the end under torques held for a step each, integrated finely."""
    from scipy.integrate import solve_ivp

    state = np.zeros(2)
    for torque in torques:
        state = solve_ivp(
            lambda t, y, u=torque: (y[1], u - np.sin(y[0]) - DAMPING * y[1]),
            (0.0, STEP), state, method="DOP853", rtol=1e-12, atol=1e-12,
        ).y[:, -1]  # fmt: skip
    return float(state[0]), float(state[1])


def _measure_planning(twin: Any, cell: dict[str, Any]) -> dict[str, Any]:
    plan = twin.Plan()
    start = np.full(PLAN_HORIZON, FIRST_ACTION)
    costs, actions = minimise(plan.value_and_gradient, start, cell["optimiser"], cell["iterations"])
    torques = TORQUE_LIMIT * np.tanh(actions)
    angles, speeds = plan.states(actions)
    angle, speed = swung(torques)
    return {
        "costs": costs,
        "torques": torques,
        "angles": angles,
        "off_upright": abs(abs(angles[-1]) - math.pi),
        "speed": speeds[-1],
        "integrated_off_upright": abs(abs(angle) - math.pi),
        "integration_error": max(abs(angle - angles[-1]), abs(speed - speeds[-1])),
    }


_MEASURE = {
    "sweep": _measure_sweep,
    "cost": _measure_cost,
    "profile": _measure_profile,
    "planning": _measure_planning,
}


def findings(records: Sequence[Any]) -> list[str]:
    """Return what was found, in sentences."""
    done = [record for record in records if record.status == "ok"]
    parts: dict[str, list[Any]] = {}
    for record in done:
        parts.setdefault(record["part"], []).append(record)
    return [line for part, chosen in parts.items() for line in _FINDINGS[part](chosen)]


def growth(records: Sequence[Any], axis: str, value: str) -> float | None:
    """Return the order in 1/axis in which a value grows, at the largest pair of the records."""
    ordered = sorted(records, key=lambda record: record[axis])
    h = [1 / record[axis] for record in ordered]
    values = [record[value] for record in ordered]
    return observed_order(h, values, [0.0] * len(h), None).order


def _find_sweep(records: Sequence[Any]) -> list[str]:
    lines = []
    for one in records:
        off = abs(one["difference"] / one["gradient"] - 1)
        lines.append(
            f"{one['framework']}, T = {one['horizon']}: dJ/dtheta = {one['gradient']:.6g} by the "
            f"sweep, {one['gradient_error']:.0e} off its closed form; the central difference "
            f"differs by {off:.0e}, expected: round-off."
        )
    return lines


def _find_multiplications(records: Sequence[Any]) -> list[str]:
    last = max(records, key=lambda record: record["horizon"])
    n = last["horizon"]
    return [
        f"{n} action sensitivities: {last['products']} multiplications with each product formed "
        f"on its own, {last['sweep']} in one sweep; expected {n * (n - 1) // 2} and {n - 1}."
    ]


def _find_cost(records: Sequence[Any]) -> list[str]:
    lines = []
    for framework, mode in dict.fromkeys((r["framework"], r["mode"]) for r in records):
        chosen = [r for r in records if (r["framework"], r["mode"]) == (framework, mode)]
        last = max(chosen, key=lambda record: record["parameters"])
        order = growth(chosen, "parameters", "work")
        lines.append(
            f"{framework}, {mode}: {last['work']:.4g} rollouts' worth of multiplications and "
            f"{last['time']:.3g} of time at p = {last['parameters']}; the work grows like "
            f"p^{-(order or 0):.2f}, expected p^{-GROWTH[mode].order:g}."
        )
    return lines


def _find_profile(records: Sequence[Any]) -> list[str]:
    lines = []
    for one in records:
        worst = max(a / b for a, b in zip(one["profile"], one["bound"], strict=True))
        expected = {"normal": "1", "shear": "far above 1", "tanh": "at most 1"}[one["dynamics"]]
        lines.append(
            f"{one['framework']}, {one['dynamics']}, spectral radius {one['radius']:g}: dJ/da_t "
            f"reaches {worst:.3g} times the bound of the spectral radius, expected {expected}."
        )
    return lines


def _find_planning(records: Sequence[Any]) -> list[str]:
    return [
        f"{one['framework']}, {one['optimiser']}: {one['off_upright']:.2g} rad off upright after "
        f"{len(one['costs']) - 1} iterations, at a cost of {one['costs'][-1]:.3g}; the integration "
        f"of the planned torque ends {one['integration_error']:.0e} from the plan, expected: below "
        "1e-4."
        for one in records
    ]


_FINDINGS = {
    "sweep": _find_sweep,
    "multiplications": _find_multiplications,
    "cost": _find_cost,
    "profile": _find_profile,
    "planning": _find_planning,
}
