"""One sweep backward gives every sensitivity of a rollout.

The scalar example x[t+1] = 0.9 x[t] + θ, x[0] = 0, θ = 1, with the cost (x[T] − 2)², for T = 3 and
T = 8. Top: the states, forward. Bottom: λ_t from the adjoint sweep, backward (bars), and its
running sum from t = T down (line), which at t = 1 is dJ/dθ; the dashed line is the central
difference of two rollouts. Lines and bars PyTorch, crosses JAX. Expected for T = 3: states 1, 1.9,
2.71, adjoints 1.42, 1.278, 1.1502 and dJ/dθ = 3.8482. Found: dJ/dθ = {gradient_short} and
{gradient_long}; states, adjoints and gradients of both frameworks are within {error} of the closed
form, the differences within {difference} of the gradients (relative), which is their round-off.
"""

import numpy as np
from matplotlib.figure import Figure

from contadj.plotting import line_style

RECORDS = ("rollout",)
FINDING = (
    "dJ/dθ = {gradient_short} (T = 3) and {gradient_long} (T = 8) by one sweep, {error} from the "
    "closed form and {difference} from finite differences"
)


def chosen(records):
    return [r for r in records["rollout"] if r["part"] == "sweep" and r.status == "ok"]


def numbers(records):
    sweeps = chosen(records)
    horizons = sorted({r["horizon"] for r in sweeps})
    gradient = {r["horizon"]: r["gradient"] for r in sweeps}
    errors = ("states_error", "adjoints_error", "gradient_error")
    return {
        "gradient_short": f"{gradient[horizons[0]]:.4f}",
        "gradient_long": f"{gradient[horizons[-1]]:.4f}",
        "error": f"{max(r[name] for r in sweeps for name in errors):.0e}",
        "difference": f"{max(abs(r['difference'] / r['gradient'] - 1) for r in sweeps):.0e}",
    }


def slopes(records):
    return []  # nothing here depends on a step size


def draw(records):
    sweeps = chosen(records)
    horizons = sorted({r["horizon"] for r in sweeps})
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    grid = figure.subplots(2, len(horizons), sharex="col", squeeze=False)
    for column, horizon in zip(grid.T, horizons, strict=True):
        forward, backward = column
        for one in (r for r in sweeps if r["horizon"] == horizon):
            draw_sweep(forward, backward, one)
        forward.axhline(2.0, color="0.4", linewidth=0.8, linestyle=":")
        forward.annotate("target", (0, 2.0), xytext=(0, 2), textcoords="offset points", fontsize=7)
        forward.set_title(f"T = {horizon}")
        backward.set_xlabel("t")
        backward.set_xticks(range(horizon + 1))
        backward.set_ylim(bottom=0)
    grid[0, 0].set_ylabel("state $x_t$")
    grid[1, 0].set_ylabel("sensitivity")
    grid[1, 0].legend(loc="best")
    return figure


def draw_sweep(forward, backward, one):
    times = np.arange(one["horizon"] + 1)
    adjoints = np.array(one["adjoints"])
    sums = np.cumsum(adjoints[:0:-1])[::-1]
    if one["framework"] == "jax":
        for axes, x, y in ((forward, times, one["states"]), (backward, times[1:], sums)):
            axes.plot(x, y, "x", color="k", markersize=5, label="JAX", zorder=3)
        backward.plot(times, adjoints, "x", color="k", markersize=5, zorder=3)
        return
    blue, orange = (line_style(number)["color"] for number in (4, 5))
    forward.plot(times, one["states"], "o-", color=blue)
    backward.bar(times, adjoints, width=0.5, color="0.85", edgecolor="0.3", label=r"$\lambda_t$")
    backward.plot(times[1:], sums, "s-", color=orange, label=r"$\sum_{s \geq t} \lambda_s$")
    backward.axhline(
        one["difference"], color="k", linewidth=0.8, linestyle="--", label="finite difference"
    )
