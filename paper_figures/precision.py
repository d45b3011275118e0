"""The best step is that where round-off meets the error of the method.

Relative error of the gradient of a driven pendulum against the step h (below) and the number of
steps (above), of the discrete gradient (left) and of backsolve (right); float64 filled, float32
hollow; stars mark the optimum, the longest step whose error is within three times the least.
Expected: C h^p + c u h^-q, 1/2 <= q <= 1 (grey lines of slopes -1/2 and -1), so that the optimal
steps in float32 and float64 are apart by (2^29)^(1/(p+q)), and the adjoint does not matter. Found
with Diffrax and the discrete gradient: rk4_classic {rk4_32} steps in float32 (error
{rk4_error_32:.0e}) and {rk4_64} in float64 ({rk4_error_64:.0e}), {rk4_ratio:.0f} times as many,
expected {rk4_low:.0f} to {rk4_high:.0f}; dopri5 {dopri5_32} and {dopri5_64}, {dopri5_ratio:.0f}
times, expected {dopri5_low:.0f} to {dopri5_high:.0f}; heun2 {heun2_32} in float32, and in float64
beyond this grid, expected {heun2_low:.0f} to {heun2_high:.0f} times as many. By backsolve, the
first four numbers are {backsolve}. A thousand times more steps than the optimum cost float32 a
factor {lost:.0f} (rk4_classic, 65536 steps); its error, averaged over rk4_classic, dopri5 and both
adjoints, grows as N^{q_first:.2f} from 256 to 4096 steps and as N^{q_last:.2f} from there on.
"""

import numpy as np
from matplotlib.figure import Figure

from contadj.figures import Slope
from contadj.orders import expected_order, round_off_floor
from contadj.plotting import line_style, slope_triangle
from contadj.studies import adjoints as study

RECORDS = ("precision",)
FINDING = (
    "rk4_classic is best with {rk4_32} steps in float32 and {rk4_64} in float64, dopri5 with "
    "{dopri5_32} and {dopri5_64}; by backsolve {backsolve}"
)
ENGINE = "diffrax"
METHODS = ("heun2", "rk4_classic", "dopri5")
TITLES = {"CheckpointAdjoint": "discrete gradient", "BacksolveAdjoint": "backsolve"}
DTYPES = ("float64", "float32")
# Where round-off alone rules in float32 for the methods of orders 4 and 5.
ROUNDED = (256, 4096, 65536)


def _lines(records):
    return study.lines(records["precision"], "engine", "method", "adjoint", "dtype")


def draw(records):
    figure = Figure(figsize=(7, 3.8))
    lines = _lines(records)
    for axes, (adjoint, title) in zip(
        figure.subplots(1, 2, sharey=True), TITLES.items(), strict=True
    ):
        for number, method in enumerate(METHODS):
            for dtype in DTYPES:
                style = line_style(number)
                if dtype == "float32":
                    style["markerfacecolor"] = "white"
                line = lines[ENGINE, method, adjoint, dtype]
                h, errors = [r["h"] for r in line], [r["error"] for r in line]
                axes.plot(h, errors, label=f"{method}, {dtype}", **style)
                best = study.optimum(line)
                if best is not line[-1]:
                    axes.plot(
                        best["h"], best["error"], "*", color=style["color"], markersize=11,
                        markeredgecolor="white", markeredgewidth=0.8, zorder=5,
                    )  # fmt: skip
        h = np.array([4e-5, 6e-4])
        for corner in (2e-5, 3e-13):
            for q, text in ((0.5, "−1/2"), (1.0, "−1")):
                along = corner * (h[1] / h) ** q
                axes.plot(h, along, color="0.6", linewidth=0.8, zorder=1)
                axes.annotate(
                    text, (h[0], along[0]), xytext=(-2, 0), textcoords="offset points",
                    fontsize=6, color="0.3", ha="right", va="center",
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("step h")
        axes.set_title(title)
        span = line[0]["h"] * line[0]["mesh_size"]
        axes.set_xlim(1.3e-5, 1.2)
        above = axes.twiny()
        above.set_xscale("log")
        above.set_xlim(*(span / h for h in axes.get_xlim()))
        above.set_xlabel("number of steps")
        above.grid(False)
        for order, right, top in ((2, 0.03, 3e-4), (4, 0.0085, 8e-11), (5, 0.03, 3e-11)):
            slope_triangle(axes, order, right, top)
    figure.axes[0].set_ylabel("relative error of the gradient")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def slopes(records):
    found = []
    for (engine, method, adjoint, dtype), line in _lines(records).items():
        if dtype == "float64":
            found.append(
                Slope(
                    f"{engine} {method} {adjoint}",
                    [r["h"] for r in line],
                    [r["error"] for r in line],
                    [
                        max(round_off_floor(dtype, r["mesh_size"]), 10 * r["reference_error"])
                        for r in line
                    ],
                    expected_order(method, "discrete"),
                )
            )
    steps, errors = _rounded(records)
    h = [1 / n for n in steps]
    found.append(Slope("round-off in float32", h, errors, [0.0] * len(h), study.ROUNDING))
    return found


def _rounded(records):
    """Geometric means of the errors that are round-off alone, by number of steps."""
    lines = _lines(records)
    chosen = [
        {r["num_steps"]: r["error"] for r in lines[ENGINE, method, adjoint, "float32"]}
        for method in ("rk4_classic", "dopri5")
        for adjoint in TITLES
    ]
    return ROUNDED, [float(np.exp(np.mean([np.log(c[n]) for c in chosen]))) for n in ROUNDED]


def numbers(records):
    lines = _lines(records)
    found = {}
    for name, method in (("heun2", "heun2"), ("rk4", "rk4_classic"), ("dopri5", "dopri5")):
        of_dtype = [lines[ENGINE, method, "CheckpointAdjoint", dtype] for dtype in DTYPES]
        double, single = map(study.optimum, of_dtype)
        low, high = study.optimum_ratio(expected_order(method, "discrete").order)
        found |= {
            f"{name}_32": single["num_steps"],
            f"{name}_64": double["num_steps"],
            f"{name}_error_32": single["error"],
            f"{name}_error_64": double["error"],
            f"{name}_ratio": double["num_steps"] / single["num_steps"],
            f"{name}_low": low,
            f"{name}_high": high,
        }
    found["backsolve"] = ", ".join(
        f"{study.optimum(lines[ENGINE, method, 'BacksolveAdjoint', dtype])['num_steps']}"
        for method in ("rk4_classic", "dopri5")
        for dtype in ("float32", "float64")
    )
    line = lines[ENGINE, "rk4_classic", "CheckpointAdjoint", "float32"]
    found["lost"] = line[-1]["error"] / study.optimum(line)["error"]
    steps, errors = _rounded(records)
    rates = np.diff(np.log(errors)) / np.diff(np.log(steps))
    return found | {"q_first": rates[0], "q_last": rates[1]}
