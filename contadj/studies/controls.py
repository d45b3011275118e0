"""Which gradient with respect to a control u(t) converges to H_u, and at which order?

The pendulum of `contadj.problems` with a torque, x' = v, v' = -b v - k sin x + u(t), and the cost
of effort c = x^2 + 0.1 v^2 + 0.05 u^2, so that c_u = 0.1 u enters. Along the exact solution

    H_u(t) = f_u^T lambda + c_u = lambda_v(t) + 0.1 u(t).

An s-stage method on N steps h sees one control value u_{n,i} per step and stage; one backward sweep
gives all g_{n,i} = dJ/du_{n,i}. Three choices of the values: u at the stage times t_n + c_i h; held
over the step from its start, u(t_n); held, but taken from its middle, u(t_n + h/2).

Expected, as maxima over the steps (`expected` has them all):

- per step, G_n/h with G_n = sum_i g_{n,i} of a held control: order 1 against H_u(t_n); against
  H_u(t_n + h/2), taken from the middle, min(2, p). G_n averages H_u over the step, sum b_i = 1 and
  sum b_i c_i = 1/2; p is the order of the method, and a control held is a control known to order
  1 or 2 whatever p;
- nodal, f_u^T lambda_n + c_u(u(t_n)): order p (Sandu 2006, doi:10.1007/11758549_76) with u at the
  stage times; 1 and min(2, p) where it is held;
- per stage, g_{n,i} / (h b_i) against H_u(t_n + c_i h). The multipliers
  kappa_i = h b_i lambda_{n+1} + h sum_j a_ji f_y(Y_j)^T kappa_j are those of the partner method
  (Hager 2000, doi:10.1007/s002110000178; Sanz-Serna 2016, doi:10.1137/151002769), one stage of
  which has stage order 1 unless

      sum_j b_j a_ji = b_i (1 - c_i),

  and 2 with it. Expanding lambda(t_n + c_i h) about t_{n+1} in the same trees as kappa_i gives the
  conditions of orders 3 and 4 in `stage_order`. Stage by stage: heun2 2, 2; rk4_classic 3, 2, 2, 4;
  rk4 (the 3/8 rule) 2, 2, 2, 4; gl4 3, 3; radauIIA3 2, 2; trapezoid, ralston, bosh3, sdirk2: 1;
- where b_i = 0 (stage 1 of midpoint, stage 2 of heun3 and dopri5) the quotient is undefined, and is
  never formed: a value used by that stage alone has no weight in the integral, and dJ/du_{n,i} is
  not h b_i H_u plus an error but

      g_{n,i} / h^2 -> d_i (f_y^T lambda + c_y)_v = -d_i lambda_v'(t),    d_i = sum_j b_j a_ji,

  at order 1. The gradient of a control with one value for each stage time then saws at every h:
  midpoint's, divided by the spacing h/2 of the values, between 0 and 2 H_u.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from scipy.integrate import solve_ivp

from ..config import Settings as Base
from ..orders import ExpectedOrder, observed_order, round_off_floor
from ..problems import problem_data
from ..tableaus import Tableau, get_tableau

SOURCES = ("contadj.problems._builtin", "contadj.tableaus")

Array = NDArray[np.float64]

PENDULUM = problem_data("pend")
B, K = float(PENDULUM.params["b"]), float(PENDULUM.params["k"])
TARGET = float(PENDULUM.constants["target"])
Y0, T0, T1 = PENDULUM.y0, PENDULUM.t0, PENDULUM.t1

HELD = {"held_start": 0.0, "held_middle": 0.5}  # quantity -> where in the step u_n is taken
PER_STEP = (*HELD, "nodal", "nodal_held_start", "nodal_held_middle")


def torque(t: Any) -> Array:
    """The control u(t)."""
    return 0.8 * np.cos(2.0 * np.asarray(t, dtype=np.float64))


class Settings(Base):
    """The keys of the config: which methods, on how many steps, in which backends."""

    backends: Annotated[tuple[Literal["torch", "jax"], ...], Field(min_length=1)] = ("torch", "jax")
    methods: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "euler", "midpoint", "heun2", "ralston", "heun3", "bosh3", "rk4", "rk4_classic", "dopri5",
        "implicit_euler", "implicit_midpoint", "trapezoid", "sdirk2", "radauIIA3", "gl4",
        "radauIIA5", "gl6",
    )  # fmt: skip
    steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (8, 16, 32, 64)
    traced: tuple[str, ...] = ("midpoint", "rk4_classic")
    traced_steps: tuple[Annotated[int, Field(ge=1)], ...] = (16, 64)

    @field_validator("methods", "traced")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            get_tableau(name)
        return names


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """One cell per backend, method and number of steps: the orders; then the traces of dJ/du."""
    groups = [
        [
            {"part": part, "backend": backend, "method": method, "num_steps": n}
            for n in sorted(set(steps))
        ]
        for part, methods, steps in (
            ("orders", settings.methods, settings.steps),
            ("trace", settings.traced, settings.traced_steps),
        )
        for backend in settings.backends
        for method in methods
    ]
    return [group for group in groups if group]


def stage_order(tableau: Tableau, i: int) -> int | None:
    """Order of g_{n,i} / (h b_i) against H_u(t_n + c_i h); None where b_i = 0.

    An error O(h^q) needs that kappa_i / (h b_i) and lambda(t_n + c_i h) agree in all trees of fewer
    than q nodes; the trees of up to three are here, so that 4 means "at least 4, at most p". A
    stage at the end of the step that no other uses gives lambda_{n+1}, of order p.
    """
    a, b, c, p = tableau.a, tableau.b, tableau.c, tableau.order
    if b[i] == 0:
        return None
    used = (b != 0) | np.any(a != 0, axis=0)
    if c[i] == 1 and not np.any(a[used, i]):
        return p
    left, d = 1 - c, b @ a
    conditions = {
        2: [(d, b * left)],
        3: [((b * left) @ a, b * left**2 / 2), (d @ a, b * left**2 / 2)],
        4: [
            ((b * left**2) @ a, b * left**3 / 3),
            ((b * (a @ c - c**2 / 2)) @ a, 0 * b),
            ((d * left) @ a, b * left**3 / 3),
            ((b * left) @ a @ a, b * left**3 / 6),
            (d @ a @ a, b * left**3 / 6),
        ],
    }
    order = 1
    for q, pairs in conditions.items():
        if not all(np.isclose(got[i], wanted[i], rtol=0, atol=1e-13) for got, wanted in pairs):
            break
        order = q
    return min(order, p)


def expected(method: str, quantity: str) -> ExpectedOrder | None:
    """Return the order of a quantity: one of `PER_STEP`, "stage_i" or "unweighted_i", i from 1.

    None where nothing is stated: a stage of weight zero has no "stage_i" and another one no
    "unweighted_i", nor has one with d_i = 0.
    """
    tableau = get_tableau(method)
    p = tableau.order
    kind, _, number = quantity.rpartition("_")
    if kind == "stage":
        order = stage_order(tableau, int(number) - 1)
        source = "Hager 2000, doi:10.1007/s002110000178; conditions of `stage_order`"
    elif kind == "unweighted":
        i = int(number) - 1
        weight = abs((tableau.b @ tableau.a)[i])
        order = 1 if tableau.b[i] == 0 and weight > 1e-13 else None
        source = "kappa_i of a stage with b_i = 0 is h^2 d_i f_y^T lambda + O(h^3)"
    elif quantity == "nodal":
        order, source = p, "order p: Sandu 2006, doi:10.1007/11758549_76"
    elif quantity.endswith("held_start"):
        order, source = 1, "the held control is a shift by up to h"
    else:
        order, source = min(2, p), "the held control is right in the middle of the step"
    if order is None:
        return None
    # Few pairs lie between the pre-asymptotic steps and round-off from order 5 on.
    return ExpectedOrder(order, 0.15 if order < 5 else 0.4, source)


def quantities(method: str) -> list[str]:
    """The names of what is measured for a method."""
    tableau = get_tableau(method)
    kinds = ["unweighted" if b == 0 else "stage" for b in tableau.b]
    return [*PER_STEP, *(f"{kind}_{i}" for i, kind in enumerate(kinds, start=1))]


def field(t: float, y: Array) -> Array:
    """(x', v') along the exact control."""
    x, v = y
    return np.array([v, -B * v - K * np.sin(x) + torque(t)])


@lru_cache(maxsize=1)
def exact_adjoint() -> Callable[[Any], Array]:
    """lambda(t) and its rate: t -> (4, ...), the rows lambda_x, lambda_v, lambda_x', lambda_v'.

    The adjoint ODE by DOP853 in SciPy, beside y in reverse time from y(T); steps of T/300 and less
    keep its dense output at round-off.
    """
    fine = {"method": "DOP853", "rtol": 1e-13, "atol": 1e-14, "max_step": (T1 - T0) / 300}
    end = solve_ivp(field, (T0, T1), Y0, **fine).y[:, -1]

    def rate(y: Array, adjoint: Array) -> Array:
        x, v = y
        lx, lv = adjoint
        return np.array([K * np.cos(x) * lv - 2 * x, -lx + B * lv - 0.2 * v])

    def reverse(t: float, z: Array) -> Array:
        return np.concatenate([field(t, z[:2]), rate(z[:2], z[2:])])

    start = np.concatenate([end, [2 * (end[0] - TARGET), end[1]]])
    solution = solve_ivp(reverse, (T1, T0), start, dense_output=True, **fine).sol

    def at(t: Any) -> Array:
        t = np.asarray(t, dtype=np.float64)
        z = solution(t.ravel()).reshape(4, *t.shape)
        return np.concatenate([z[2:], rate(z[:2], z[2:])])

    return at


def exact_gradient(t: Any) -> Array:
    """H_u(t) = lambda_v(t) + 0.1 u(t)."""
    return exact_adjoint()(t)[1] + 0.1 * torque(t)


def sweep(backend: str, tableau: Tableau, h: float, controls: Array) -> tuple[Array, Array]:
    """The gradients of several rollouts of the pendulum that differ in their controls.

    Parameters
    ----------
    backend : "torch" or "jax"
    tableau : Tableau
    h : float
        The step size.
    controls : (N, m, s) array
        u_{n,i} of m rollouts.

    Returns
    -------
    adjoints : (N + 1, m, 2) array
        lambda_n.
    gradients : (N, m, s) array
        g_{n,i}.
    """
    twin = importlib.import_module(f"{__package__}._controls_{backend}")
    return twin.sweep(tableau, h, controls)


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """The errors of all quantities of a method on one mesh; or dJ/du over the stage times."""
    tableau, n = get_tableau(cell["method"]), cell["num_steps"]
    t, h = np.linspace(T0, T1, n + 1), (T1 - T0) / n
    stage_times = t[:-1, None] + tableau.c * h
    if cell["part"] == "trace":
        return _trace(cell["backend"], tableau, h, stage_times)
    held = [t[:-1, None] + shift * h + 0 * tableau.c for shift in HELD.values()]
    controls = torque(np.stack([stage_times, *held], axis=1))
    adjoints, gradients = sweep(cell["backend"], tableau, h, controls)

    wanted = exact_gradient(t)
    nodal = adjoints[..., 1] + 0.1 * torque(t)[:, None]
    errors: dict[str, Array] = {}
    for k, (name, shift) in enumerate(HELD.items(), start=1):
        per_step = gradients[:, k].sum(axis=1) / h
        errors[name] = per_step - exact_gradient(t[:-1] + shift * h)
        errors[f"nodal_{name}"] = nodal[:, k] - wanted
    errors["nodal"] = nodal[:, 0] - wanted
    at_stages, rate = exact_gradient(stage_times), exact_adjoint()(stage_times)[3]
    d = tableau.b @ tableau.a
    for i, weight in enumerate(tableau.b):
        g = gradients[:, 0, i]
        if weight == 0:
            errors[f"unweighted_{i + 1}"] = g / h**2 + d[i] * rate[:, i]
        else:
            errors[f"stage_{i + 1}"] = g / (h * weight) - at_stages[:, i]
    scale = np.abs(wanted).max()
    return {"h": h, **{name: np.abs(error).max() / scale for name, error in errors.items()}}


def _trace(backend: str, tableau: Tableau, h: float, stage_times: Array) -> dict[str, Any]:
    """dJ/du of a control with one value for each different stage time, per spacing of them."""
    _, gradients = sweep(backend, tableau, h, torque(stage_times)[:, None, :])
    # Stages at one time share one value: those of one step, and the ends of neighbouring ones.
    times, place = np.unique(np.round(stage_times, 12).ravel(), return_inverse=True)
    spacing = h / len(np.unique(tableau.c % 1.0))
    weights = np.broadcast_to(h * tableau.b, stage_times.shape)
    return {
        "t": times,
        "gradient": np.bincount(place, gradients[:, 0].ravel()) / spacing,
        "weight": np.bincount(place, weights.ravel()) / spacing,
        "exact": exact_gradient(times),
    }


def series(records: Sequence[Any]) -> dict[tuple[str, str], list[Any]]:
    """The records of orders of each (backend, method), from the longest step on."""
    found: dict[tuple[str, str], list[Any]] = {}
    for one in records:
        if one["part"] == "orders" and one.status == "ok":
            found.setdefault((one["backend"], one["method"]), []).append(one)
    return {key: sorted(ones, key=lambda one: one["num_steps"]) for key, ones in found.items()}


def line(records: Sequence[Any], quantity: str) -> tuple[list[float], list[float], list[float]]:
    """Step sizes, errors and round-off floors of one quantity of one of `series`."""
    floors = [max(1e-12, round_off_floor("float64", one["num_steps"])) for one in records]
    return [one["h"] for one in records], [one[quantity] for one in records], floors


def findings(records: Sequence[Any]) -> list[str]:
    """How many orders are as expected, which are not, and how far dJ/du saws."""
    found: list[str] = []
    right, total, undefined = 0, 0, set()
    for (backend, method), ones in series(records).items():
        for quantity in quantities(method):
            if quantity.startswith("unweighted"):
                undefined.add(f"{method} stage {quantity.rpartition('_')[2]}")
            wanted = expected(method, quantity)
            if wanted is None:
                continue
            seen = observed_order(*line(ones, quantity), wanted)
            total, right = total + 1, right + (seen.state == "as expected")
            if seen.state != "as expected":
                reason = f"{seen.state}, {seen.reason}" if seen.reason else seen.state
                found.append(f"{backend} {method} {quantity}, expected {wanted.order:g}: {reason}")
    found.insert(0, f"{right} of {total} orders are as expected")
    if undefined:
        found.append(
            f"no quotient is formed where the weight is zero: {', '.join(sorted(undefined))}"
        )
    for one in finest_traces(records):
        low, high = saw(one)
        found.append(
            f"{one['backend']} {one['method']}, {one['num_steps']} steps: dJ/du per spacing saws "
            f"between {low:.2f} and {high:.2f} of H_u; its weights lie between "
            f"{min(one['weight'][1:-1]):.2f} and {max(one['weight']):.2f}"
        )
    return found


def finest_traces(records: Sequence[Any]) -> list[Any]:
    """The trace of each (backend, method) on the most steps."""
    found: dict[tuple[str, str], Any] = {}
    for one in records:
        if one["part"] == "trace" and one.status == "ok":
            before = found.setdefault((one["backend"], one["method"]), one)
            if one["num_steps"] > before["num_steps"]:
                found[one["backend"], one["method"]] = one
    return list(found.values())


def saw(record: Any) -> tuple[float, float]:
    """Smallest and largest dJ/du per spacing as a multiple of H_u, where |H_u| is large."""
    gradient, exact = np.array(record["gradient"]), np.array(record["exact"])
    inner = np.abs(exact) > 0.5 * np.abs(exact).max()
    inner[[0, -1]] = False
    quotient = gradient[inner] / exact[inner]
    return float(quotient.min()), float(quotient.max())
