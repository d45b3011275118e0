"""A pendulum swung up by its action gradients alone.

{actions} torques, each held for 0.1 (in units of √(length/gravity)), |torque| ≤ {limit}, from
hanging still; cost: 1 + cos(angle) + speed²/2 at the end, and a little for the effort. No push in
one direction gets there with a torque below max (1 − cos s)/s = {needed}: the plan has to swing
first. Left: cost against iterations of optimisers that see the cost and dJ/da_t only; lines
PyTorch, crosses JAX. Middle: the planned angle ({best}); crosses: not the plan but an independent
fine integration of the pendulum under its torques, at the end. Right: the torques, and their
limit. Expected: L-BFGS in fewest iterations, gradient descent in most; the integration ends within
1e-4 of the plan. Found, off upright at the end: {off}. Iterations to a cost below {threshold}:
{iterations}. The integration ends within {error} of the plan; the frameworks' costs differ by at
most {apart} in the first 20 iterations.
"""

import math

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar

from contadj.plotting import line_style
from contadj.studies.rollout import PLAN_HORIZON, STEP, TORQUE_LIMIT

RECORDS = ("rollout",)
FINDING = (
    "off upright after {count} iterations: {off}; iterations to a cost of {threshold}: {iterations}"
)
THRESHOLD = 0.1


def chosen(records):
    return [r for r in records["rollout"] if r["part"] == "planning" and r.status == "ok"]


def plans(records, framework):
    return {r["optimiser"]: r for r in chosen(records) if r["framework"] == framework}


def best(records):
    return min(chosen(records), key=lambda r: r["costs"][-1])


def needed_torque():
    """The largest (1 - cos s) / s: below it a push in one direction stops short of upright."""
    return -minimize_scalar(lambda s: (math.cos(s) - 1) / s, bounds=(0.1, math.pi)).fun


def numbers(records):
    framework = chosen(records)[0]["framework"]
    found = plans(records, framework)
    reached = {
        name: next((i for i, cost in enumerate(r["costs"]) if cost < THRESHOLD), None)
        for name, r in found.items()
    }
    apart = [
        abs(np.subtract(r["costs"][:20], other["costs"][:20])).max()
        for name, r in found.items()
        if (other := plans(records, "jax").get(name))
    ]
    return {
        "actions": PLAN_HORIZON,
        "limit": TORQUE_LIMIT,
        "needed": f"{needed_torque():.3f}",
        "best": best(records)["optimiser"],
        "off": ", ".join(f"{name} {r['off_upright']:.2g} rad" for name, r in found.items()),
        "threshold": THRESHOLD,
        "iterations": ", ".join(f"{name} {n or 'never'}" for name, n in reached.items()),
        "count": max(len(r["costs"]) for r in found.values()) - 1,
        "error": f"{max(r['integration_error'] for r in chosen(records)):.0e}",
        "apart": f"{max(apart):.0e}",
    }


def slopes(records):
    return []  # iterations, not step sizes


def draw(records):
    figure = Figure(figsize=(7.0, 2.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for number, name in enumerate(dict.fromkeys(r["optimiser"] for r in chosen(records))):
        for framework in ("torch", "jax"):
            if (one := plans(records, framework).get(name)) is None:
                continue
            costs, style = np.array(one["costs"]), line_style(number + 3)
            if framework == "torch":
                left.plot(costs, **style, markevery=20, label=name)
            else:
                every = np.arange(10, len(costs), 20)
                left.plot(every, costs[every], "x", color="k", markersize=5)
    left.plot([], [], "x", color="k", markersize=5, label="JAX")
    left.set(yscale="log", xlabel="iterations", ylabel="cost")
    left.legend(loc="upper right")
    one = best(records)
    times = STEP * np.arange(PLAN_HORIZON + 1)
    middle.plot(times, one["angles"], color="k")
    sign = math.copysign(1, one["angles"][-1])
    end = sign * (math.pi - one["integrated_off_upright"])
    middle.plot([times[-1]], [end], "x", color=line_style(5)["color"], markersize=6)
    for angle, text, start in ((0, "hanging", 0.75), (sign * math.pi, "upright", 0.02)):
        middle.axhline(angle, color="0.5", linewidth=0.8, linestyle=":")
        middle.annotate(
            text, (start * times[-1], angle), xytext=(0, -9), textcoords="offset points",
            fontsize=7, color="0.3",
        )  # fmt: skip
    middle.set(xlabel="time", ylabel="angle (rad)")
    right.stairs(one["torques"], times, color="k", linewidth=1, baseline=None)
    for limit in (TORQUE_LIMIT, -TORQUE_LIMIT):
        right.axhline(limit, color="0.5", linewidth=0.8, linestyle=":")
    right.set(xlabel="time", ylabel="torque")
    return figure
