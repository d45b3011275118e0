"""Which gradient of a bouncing ball converges to the true one as h -> 0?

A ball starts at height y0 with speed v0, falls under gravity g, bounces once on the floor y = 0
with restitution e, v+ = -e v-, and is at y(T). With tau the time and w the speed of impact, w^2 =
v0^2 + 2 g y0, tau = (v0 + w)/g, and s = T - tau,

    y(T) = e w s - g s^2 / 2.

Its derivatives with respect to q = (y0, v0, e, g) are e_row (D P + R) + (0, 0, 0, -s^2/2), where
e_row = (1, s) carries a change of (y, v) just after the impact to y(T), P = (1, tau, 0, -tau^2/2;
0, 1, 0, -tau) is the derivative of (y, v) just before it at a fixed time, R = (0; w) in the column
of e, and D says how a change of (y, v) gets through the impact:

- **true**: the saltation matrix D = (-e, 0; (1+e) g/w, -e) (Aizerman & Gantmakher 1958,
  doi:10.1093/qjmam/11.4.459): a ball that is higher arrives later, delta tau = delta y / w, and has
  the accelerations before and after for other times;
- **stepped**: fixed steps, and after each, where y < 0 and v < 0, an impact rule, one of

      velocity (y, v) -> (y, -e v),     clamp (0, -e v),     reflect (-e y, -e v).

  The ball is below the floor by less than h w then, so that y(T) converges with order 1. The index
  of the step of the impact does not depend on q as far as a derivative can see, so that BPTT has
  for D the Jacobian of the rule, diag(1, -e), diag(0, -e), diag(-e, -e), whatever h and wherever
  in the step the impact falls. Its limit is the formula above with that D, reached at order 1, and
  it is not the true gradient for any of the three: the entry (1+e) g/w is missing in all, and
  velocity and clamp are wrong in the first as well. The derivative with respect to e alone is
  right, R being the same. (Hu et al. 2020, arXiv:1910.00935, show the sign of dy(T)/dy0 wrong.)
- **time of impact**: a step that would end below the floor solves for the time delta inside it at
  which its own formula gives y = 0, applies v -> -e v there, and goes on for h - delta. With the
  implicit function theorem for delta its derivative has the saltation matrix of the method: exact
  at every h for midpoint, which is exact on a parabola; order 1 for euler.
- **penalty**: a floor that pushes with -k y - c v where y < 0. With c = 2 zeta sqrt(k), zeta =
  L / sqrt(pi^2 + L^2), L = -ln e, it bounces with restitution e up to O(g / (w sqrt(k))), after a
  contact of t_c = pi / sqrt(k (1 - zeta^2)). BPTT of fixed steps tends, as h -> 0, to the
  derivative at frozen times of entry and exit (`penalty_limit`), with D = exp(A t_c), A =
  (0, 1; -k, -c). With t_c = pi / omega_d + eta, eta = O(g / (w k)) the delay that gravity makes,
  D = -e (I + eta A + ...), whose lower left entry e k eta stays finite: the missing (1+e) g/w. So
  the limit differs from the true gradient by O(k^(-1/2)) in y0, v0 and g, also where damping makes
  the force jump at the floor: the jumps at entry and exit, which BPTT does not see, change D by
  O(c eta) only. With respect to e it does not tend to the truth even so: c moves the exit by
  O(1/sqrt(k)) and the force jumps by c v = O(sqrt(k)) there, so that w becomes w (1 - 2 zeta^2)
  in R as k -> infinity (`stiff_limit`).
  At a step h the contact lasts a whole number of steps, t_c + O(h), and D = -e (I + (eta + O(h)) A)
  is off by e k h times a number in (-1, 1) that depends on where in a step the ball enters. A
  resolved contact, h sqrt(k) << 1, is enough for y(T) to be right to order h, and not for the
  gradient: that needs h k << g/w. With k h held fixed the gradient has no limit, but a whole
  interval of limit points; at best, k ~ h^(-2/3), it comes as near to its limit as O(h^(1/3)).

All errors are maxima over `PHASES` drop heights whose impacts are spread over one step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import inf
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.linalg import expm
from scipy.optimize import root_scalar

from ..config import Settings as Base
from ..orders import ExpectedOrder, observed_order, round_off_floor
from ..tableaus import Tableau, get_tableau

SOURCES = ("contadj.tableaus",)

Array = NDArray[np.float64]

SPEED, RESTITUTION, GRAVITY, T1 = 0.5, 0.6, 9.81, 1.0
IMPACT = 0.5625  # the earliest time of impact, a step time of every mesh of a multiple of 16 steps
HEIGHT = GRAVITY * IMPACT**2 / 2 - SPEED * IMPACT
PARAMETERS = ("y0", "v0", "e", "g")
RULES = {
    "velocity": np.diag([1.0, -RESTITUTION]),
    "clamp": np.diag([0.0, -RESTITUTION]),
    "reflect": np.diag([-RESTITUTION, -RESTITUTION]),
}
PHASES = 16
# Python steps one by one; longer rollouts are JAX's alone.
LONGEST_IN_TORCH = 4096

Steps = Annotated[int, Field(ge=16, multiple_of=16)]


class Settings(Base):
    """The keys of the config: contacts stepped by which methods, on how many steps, how stiff."""

    backends: Annotated[tuple[Literal["torch", "jax"], ...], Field(min_length=1)] = ("torch", "jax")
    methods: tuple[Literal["euler", "midpoint"], ...] = ("euler", "midpoint")
    steps: Annotated[tuple[Steps, ...], Field(min_length=1)] = (16, 32, 64, 128)
    stiffness: tuple[Annotated[float, Field(gt=0)], ...] = (256.0, 1024.0)
    penalty_steps: tuple[Steps, ...] = (64, 256, 1024)


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """One cell per backend, contact, method, stiffness and number of steps."""
    groups = []
    for backend in settings.backends:
        for contact in (*RULES, "time_of_impact"):
            groups += [
                [
                    {"backend": backend, "contact": contact, "method": method, "k": 0.0,
                     "num_steps": n}
                    for n in settings.steps
                ]
                for method in settings.methods
            ]  # fmt: skip
        groups += [
            [
                {"backend": backend, "contact": "penalty", "method": "midpoint", "k": k,
                 "num_steps": n}
                for k in settings.stiffness
            ]
            for n in settings.penalty_steps
            if backend == "jax" or n <= LONGEST_IN_TORCH
        ]  # fmt: skip
    return [group for group in groups if group]


def expected(contact: str, method: str, quantity: str) -> ExpectedOrder | None:
    """Return the order in h of "value", "true", "limit" or "restitution" errors; None for penalty.

    `true` and `restitution` are the errors of the gradient and of its entry for e against the true
    ones, `limit` is its distance from the limit derived above.
    """
    if contact == "penalty":
        return None
    if contact == "time_of_impact":
        order = inf if method == "midpoint" else 1
        return ExpectedOrder(order, 0.15, "saltation matrix of the method: see the module")
    order = {"value": 1, "true": 0, "limit": 1, "restitution": 1}[quantity]
    return ExpectedOrder(order, 0.15, "the impact time is frozen: see the module")


def impact(height: Array) -> tuple[Array, Array]:
    """Time tau and speed w of the impact."""
    w = np.sqrt(SPEED**2 + 2 * GRAVITY * height)
    return (SPEED + w) / GRAVITY, w


def exact_value(height: Array) -> Array:
    """y(T)."""
    tau, w = impact(height)
    return RESTITUTION * w * (T1 - tau) - GRAVITY * (T1 - tau) ** 2 / 2


def _before(tau: float) -> Array:
    """P: derivative of (y, v) with respect to (y0, v0, e, g) just before the impact."""
    return np.array([[1.0, tau, 0.0, -(tau**2) / 2], [0.0, 1.0, 0.0, -tau]])


def _at_the_end(change: Array, s: float) -> Array:
    """The derivative of y(T), from that of (y, v) at a time s earlier."""
    return change[0] + s * change[1] + np.array([0.0, 0.0, 0.0, -(s**2) / 2])


def rigid_gradient(height: float, jump: Array | None = None) -> Array:
    """dy(T)/dq of one bounce, with a given D; by default the saltation matrix, the true one."""
    tau, w = (float(one) for one in impact(np.array(height)))
    if jump is None:
        jump = np.array([[-RESTITUTION, 0.0], [(1 + RESTITUTION) * GRAVITY / w, -RESTITUTION]])
    after = jump @ _before(tau)
    after[1, 2] += w
    return _at_the_end(after, T1 - tau)


def damping(k: float) -> tuple[float, float]:
    """c and dc/de of a penalty contact."""
    decay = -np.log(RESTITUTION)
    square = np.pi**2 + decay**2
    rate = -(np.pi**2) / square**1.5 / RESTITUTION  # d zeta / d e
    return 2 * decay / np.sqrt(square) * np.sqrt(k), 2 * np.sqrt(k) * rate


def penalty_limit(height: float, k: float) -> Array:
    """dy(T)/dq of a penalty contact at frozen times of entry and exit: BPTT's limit as h -> 0."""
    tau, w = (float(one) for one in impact(np.array(height)))
    c, dc = damping(k)
    # (y, v, 1) in contact, and the changes of (y, v) with c and with g beside it.
    flow = np.zeros((7, 7))
    flow[:3, :3] = [[0, 1, 0], [-k, -c, -GRAVITY], [0, 0, 0]]
    flow[3:5, 3:5] = flow[5:7, 5:7] = flow[:2, :2]
    flow[4, 1] = flow[6, 2] = -1.0
    start = np.array([0.0, -w, 1.0, 0.0, 0.0, 0.0, 0.0])
    half = np.pi / np.sqrt(k - c**2 / 4)
    bracket = 0.5 * half, 1.5 * half
    t_c = root_scalar(lambda t: (expm(flow * t) @ start)[0], bracket=bracket, xtol=1e-15).root
    end = expm(flow * t_c) @ start
    after = expm(flow[:2, :2] * t_c) @ _before(tau)
    after[:, 2] += dc * end[3:5]
    after[:, 3] += end[5:7]
    return _at_the_end(after, T1 - tau - t_c)


def stiff_limit(height: float) -> Array:
    """The limit of `penalty_limit` as k -> infinity."""
    tau, w = (float(one) for one in impact(np.array(height)))
    change = rigid_gradient(height)
    change[2] = (T1 - tau) * w * (1 - damping(1.0)[0] ** 2 / 2)  # c = 2 zeta at k = 1
    return change


def heights(num_steps: int) -> Array:
    """Drop heights from `HEIGHT` on whose impacts are spread evenly over one step."""
    tau = IMPACT + T1 / num_steps * (np.arange(PHASES) + 0.5) / PHASES
    return GRAVITY * tau**2 / 2 - SPEED * tau


def sweep(
    backend: str, contact: str, tableau: Tableau, num_steps: int, height: Array, k: float
) -> tuple[Array, Array]:
    """y(T) of balls that start at some heights, and its derivatives by BPTT.

    Parameters
    ----------
    backend : "torch" or "jax"
    contact : str
        A rule of `RULES`, "time_of_impact" or "penalty".
    tableau : Tableau
        The explicit method that steps.
    num_steps : int
    height : (m,) array
    k : float
        The stiffness of a penalty contact.

    Returns
    -------
    value : (m,) array
    gradient : (m, 4) array
        With respect to y0, v0, e and g.
    """
    twin = importlib.import_module(f"{__package__}._contact_{backend}")
    return twin.sweep(contact, tableau, num_steps, height, k)


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """The errors of y(T) and of its gradient by one contact on one mesh."""
    contact, k, n = cell["contact"], cell["k"], cell["num_steps"]
    height = heights(n)
    value, gradient = sweep(cell["backend"], contact, get_tableau(cell["method"]), n, height, k)
    true = np.array([rigid_gradient(one) for one in height])
    if contact == "penalty":
        limit = np.array([penalty_limit(one, k) for one in height])
    else:
        limit = np.array([rigid_gradient(one, RULES.get(contact)) for one in height])
    size = np.linalg.norm(true, axis=1)
    if not np.all(np.isfinite(gradient)):
        raise FloatingPointError("the gradient is not finite")
    mean = rigid_gradient(HEIGHT)
    ends = {"distance": mean, "distance_stiff": stiff_limit(HEIGHT)}
    return {
        "h": T1 / n,
        "value": np.abs(value - exact_value(height)).max(),
        "true": (np.linalg.norm(gradient - true, axis=1) / size).max(),
        "limit": (np.linalg.norm(gradient - limit, axis=1) / size).max(),
        "restitution": (np.abs(gradient - true)[:, 2] / size).max(),
        # Width of the interval that dy(T)/dy0 fills as the phase of the impact varies.
        "spread": np.ptp((gradient - limit)[:, 0] / size),
        # Of BPTT's limit at this k from the true gradient, and from its limit as k -> infinity.
        **{
            name: np.linalg.norm(penalty_limit(HEIGHT, k) - end) / np.linalg.norm(mean)
            for name, end in ends.items()
            if k
        },
        "gradient": gradient[0],
        "gradient_true": true[0],
        "gradient_limit": limit[0],
    }


def series(records: Sequence[Any]) -> dict[tuple[str, str, str, float], list[Any]]:
    """The records of each (backend, contact, method, k), from the longest step on."""
    found: dict[tuple[str, str, str, float], list[Any]] = {}
    for one in records:
        if one.status == "ok":
            key = one["backend"], one["contact"], one["method"], one["k"]
            found.setdefault(key, []).append(one)
    return {key: sorted(ones, key=lambda one: one["num_steps"]) for key, ones in found.items()}


def line(records: Sequence[Any], quantity: str) -> tuple[list[float], list[float], list[float]]:
    """Step sizes, errors and round-off floors of one quantity of one of `series`."""
    floors = [round_off_floor("float64", one["num_steps"]) for one in records]
    return [one["h"] for one in records], [one[quantity] for one in records], floors


def findings(records: Sequence[Any]) -> list[str]:
    """What converges to the true gradient, and to what the others tend."""
    found = []
    for (backend, contact, method, k), ones in series(records).items():
        name, last = f"{backend} {contact} {method}", ones[-1]
        if contact == "penalty":
            product = last["h"] * k
            found.append(
                f"{name}, k = {k:g}: at h = {last['h']:.1e} (h sqrt(k) = {last['h'] * k**0.5:.2g}, "
                f"h k = {product:.2g}) y(T) is off by {last['value']:.1e}, the gradient by "
                f"{100 * last['true']:.1f} %, {last['limit'] / product:.2f} h k from its limit, "
                f"which is off by {100 * last['distance']:.1f} %"
            )
            continue
        for quantity in ("value", "true", "limit", "restitution"):
            wanted = expected(contact, method, quantity)
            seen = observed_order(*line(ones, quantity), wanted)
            assert wanted is not None
            right = seen.state == ("at round-off" if wanted.exact else "as expected")
            if quantity == "true":
                found.append(
                    f"{name}: the gradient is off by {100 * last['true']:.3g} % at h = "
                    f"{last['h']:.1e}"
                )
            if not right:
                found.append(
                    f"{name} {quantity}, expected order {wanted.order:g}: {seen.state}, "
                    f"{seen.reason}"
                )
    return found
