"""How far back a gradient reaches: bounded by the norm of the step, not by its spectral radius.

|dJ/da_t| of a cost at time k = {horizon}, relative to |dJ/dz_k|, for dynamics of spectral radius
ρ. Normal: z[t+1] = ρQz[t] + a[t], Q orthogonal. Tanh: ρQ tanh(z[t]) + a[t]. Shear: the matrix
ρ[[1, 1], [0, 1]], whose norm exceeds ρ. Grey: the bound ρ^(k−t) on ∂z_k/∂z_t, one step later for
the action, ρ^(k−1−t). Lines PyTorch, crosses JAX. Expected: normal dynamics attain the bound at
every t, tanh stays below it, shear breaks it by a factor that grows like k − t. Found: normal
within {attained} of the bound (relative) and within {error} of the powers of the matrix; tanh at
most {tanh} times it; shear up to {shear} times, so that at ρ = {contracting} the gradient grows
over the {rise} steps before k before it decays.
"""

import numpy as np
from matplotlib.figure import Figure

from contadj.plotting import legend_below, line_style

RECORDS = ("rollout",)
FINDING = (
    "normal dynamics attain the bound ρ^(k−1−t) within {attained}; a shear exceeds it {shear} "
    "times and at ρ = {contracting} grows over {rise} steps before it decays"
)
TITLES = {-1: "contracting", 0: "neutral", 1: "expanding"}


def chosen(records):
    return [r for r in records["rollout"] if r["part"] == "profile" and r.status == "ok"]


def ratios(records, dynamics):
    """dJ/da_t over the bound."""
    return np.array(
        [np.divide(r["profile"], r["bound"]) for r in chosen(records) if r["dynamics"] == dynamics]
    )


def numbers(records):
    profiles = chosen(records)
    shears = [r for r in profiles if r["dynamics"] == "shear"]
    slowest = min(shears, key=lambda r: r["radius"])
    horizon = len(slowest["profile"])
    return {
        "horizon": horizon,
        "attained": f"{np.max(np.abs(ratios(records, 'normal') - 1)):.0e}",
        "error": f"{max(r['error'] for r in profiles if r['dynamics'] == 'normal'):.0e}",
        "tanh": f"{np.max(ratios(records, 'tanh')):.3g}",
        "shear": f"{np.max(ratios(records, 'shear')):.0f}",
        "contracting": f"{slowest['radius']:g}",
        "rise": horizon - 1 - int(np.argmax(slowest["profile"])),
    }


def slopes(records):
    return []  # exponential in t: no order; held to the matrix powers in tests


def draw(records):
    profiles = chosen(records)
    radii = sorted({r["radius"] for r in profiles})
    figure = Figure(figsize=(7.0, 2.6), layout="constrained")
    grid = figure.subplots(1, len(radii), sharey=True, squeeze=False)[0]
    for axes, radius in zip(grid, radii, strict=True):
        for number, dynamics in enumerate(("normal", "tanh", "shear")):
            for one in profiles:
                if (one["radius"], one["dynamics"]) == (radius, dynamics):
                    draw_profile(axes, one, number)
        axes.set(yscale="log", xlabel="t")
        axes.set_title(f"{TITLES[int(np.sign(radius - 1))]}, ρ = {radius:g}")
    grid[0].set_ylabel(r"$|dJ/da_t|$, relative to $|dJ/dz_k|$")
    grid[0].plot([], [], "x", color="k", markersize=5, label="JAX")
    legend_below(figure, grid[:1], ncols=5)
    return figure


def draw_profile(axes, one, number):
    profile, bound = np.array(one["profile"]), np.array(one["bound"])
    times, size = np.arange(len(profile)), bound[-1]
    style = line_style(number + 3)
    if one["framework"] == "jax":
        every = slice(4 * number % 7, None, 7)
        axes.plot(times[every], profile[every] / size, "x", color="k", markersize=5)
        return
    axes.plot(times, bound / size, color="0.8", linewidth=4, label="bound", zorder=1)
    axes.plot(times, profile / size, **style, markevery=(number, 5), label=one["dynamics"])
