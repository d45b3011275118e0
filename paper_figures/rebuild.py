"""Rebuilding y backward amplifies errors by e^X, X the integrated contraction rate.

Gradient error (top) and reversal error (bottom) against X, in float64 (left) and float32 (right);
rk4_classic with {steps} steps. Lines: slow_fast over one unit of time, K = X. Single markers, of
backsolve alone: slow_fast with K = 20 over other horizons T, X = 20 T, and van der Pol's oscillator
for several mu, X = int mu (x^2 - 1) dt, where the rebuilt solution may blow up: then the marker is
missing, or low. Expected: backsolve grows as e^X (dotted; between the last two points the exponent
is {growth_float64:.2f} X and {growth_float32:.2f} X), whether X comes from K, from T or from
another problem; adjoints that keep y do not grow. Found with backsolve in float64: {K20:.0e} at
K = 20, {K30:.0e} at 30, {K40:.0e} at 40, {K50:.0e} at 50; with y restarted every 32 steps
{restarted:.0e} at 50, with y stored {interpolating:.0e} (interpolating) and {gauss:.0e} (Gauss),
checkpoint {checkpoint:.0e}. In float32 backsolve has an error of {single:.0e} at K = 20 and is
worthless at 30; the others stay at round-off. The gradient of the reversible coupling is exact for
its own solution, but that departs from the true one: its parasitic root is e^(K h). Its reversal
error does not show that; that of backsolve does, being {ratio_low:.0f} to {ratio_high:.0f} times
the gradient's from X = 30 on. Diffrax in place of contadj's steppers gives the same errors of
backsolve in float64, to {engines:.0e} relative.
"""

import numpy as np
from matplotlib.figure import Figure

from contadj.figures import Slope
from contadj.plotting import line_style
from contadj.studies import adjoints as study

RECORDS = ("rebuild",)
FINDING = (
    "backsolve's error grows as e^({growth_float64:.2f} X): {K20:.0e} at K = 20, {K50:.0e} at 50; "
    "{restarted:.0e} there with a restart every 32 steps"
)
BACKSOLVE = "BacksolveAdjoint"
RESTARTED = "BacksolveAdjoint(restart_every=32)"
LABELS = {
    BACKSOLVE: "backsolve",
    RESTARTED: "backsolve, restart every 32 steps",
    "ReversibleAdjoint": "reversible, coupling 0.999",
    "InterpolatingAdjoint": "interpolating",
    "GaussAdjoint": "Gauss",
    "CheckpointAdjoint": "checkpoint",
}
OTHERS = {
    "horizon": ("s", "backsolve, K = 20, T varies"),
    "van_der_pol": ("*", "backsolve, van der Pol"),
}
DTYPES = ("float64", "float32")


def _lines(records):
    return study.lines(study.stiffness(records["rebuild"]), "engine", "adjoint", "dtype")


def _others(records, dtype):
    """Backsolve on the other problems."""
    found = {name: [] for name in OTHERS}
    for one in study.lines(records["rebuild"], "engine", "adjoint", "dtype")[
        "contadj", BACKSOLVE, dtype
    ]:
        if "t1" in one["problem"]:
            found["horizon"].append(one)
        elif one["problem"].startswith("van_der_pol"):
            found["van_der_pol"].append(one)
    return found


def draw(records):
    figure = Figure(figsize=(7, 5.2))
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    lines = _lines(records)
    for column, dtype in enumerate(DTYPES):
        for axes, quantity in zip(grid[:, column], ("error", "reversal_error"), strict=True):
            for number, (adjoint, label) in enumerate(LABELS.items()):
                cells = [r for r in lines["contadj", adjoint, dtype] if r[quantity]]
                if cells:
                    axes.plot(
                        [r["contraction"] for r in cells],
                        [r[quantity] for r in cells],
                        label=label,
                        **line_style(number),
                    )
            for name, cells in _others(records, dtype).items():
                marker, label = OTHERS[name]
                axes.plot(
                    [r["contraction"] for r in cells],
                    [r[quantity] for r in cells],
                    marker,
                    color="black",
                    markerfacecolor="white",
                    markersize=5 if marker == "*" else 3.5,
                    label=label,
                )
            x = np.array([18.0, 52.0])
            anchor = next(r for r in lines["contadj", BACKSOLVE, dtype] if r["contraction"] == 30)
            axes.plot(
                x, anchor[quantity] / 30 * np.exp(x - 30), color="0.5", linestyle=":", label="$e^X$"
            )
            axes.set_yscale("log")
        grid[0, column].set_title(dtype)
        grid[1, column].set_xlabel("X, integral of the contraction rate")
    grid[0, 0].set_ylim(1e-13, 1e14)
    grid[1, 0].set_ylim(1e-17, 1e16)
    grid[0, 0].set_ylabel("relative error of the gradient")
    grid[1, 0].set_ylabel("reversal error")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def slopes(records):
    found = []
    for (engine, adjoint, dtype), line in _lines(records).items():
        if adjoint == BACKSOLVE:
            rates, errors, floors = study.growth_line(line)
            found.append(Slope(f"{engine} {dtype}", rates, errors, floors, study.GROWTH))
    return found


def numbers(records):
    lines = _lines(records)

    def at(adjoint, K, dtype="float64"):
        cells = lines["contadj", adjoint, dtype]
        return next(r["error"] for r in cells if r["contraction"] == K)

    backsolve = [lines["contadj", BACKSOLVE, dtype] for dtype in DTYPES]
    grown = [r for line in backsolve for r in line if r["contraction"] >= 30]
    ratios = [r["reversal_error"] / r["error"] for r in grown]
    return {
        "steps": records["rebuild"][0]["num_steps"],
        **{f"K{K}": at(BACKSOLVE, K) for K in study.EXPECTED_ERRORS},
        "single": at(BACKSOLVE, 20, "float32"),
        "restarted": at(RESTARTED, 50),
        "interpolating": at("InterpolatingAdjoint", 50),
        "gauss": at("GaussAdjoint", 50),
        "checkpoint": at("CheckpointAdjoint", 50),
        "growth_float64": -study.growth(backsolve[0]).order,
        "growth_float32": -study.growth(backsolve[1]).order,
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "engines": max(
            abs(r["error"] / at(BACKSOLVE, r["contraction"]) - 1)
            for (_, adjoint, dtype), line in lines.items()
            if (adjoint, dtype) == (BACKSOLVE, "float64")
            for r in line
            if r["contraction"] >= 20
        ),
    }
