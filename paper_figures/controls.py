"""Which gradient with respect to a control u(t) converges to H_u, and at which order.

A pendulum with a torque u(t) and a cost of effort. (a) The method rk4_classic: largest error over
the steps of five gradients, relative to max |H_u|, against the step size; triangles show the
expected orders. (b) dJ/du of values at the stage times of {saw_steps} steps of explicit midpoint,
whose first stage has weight b = 0, and of rk4_classic, each divided by the spacing of the values,
beside H_u. (c) The order of the finest pair above round-off of every method: per step, per node,
and per node where u is held over the step; hatched where b = 0 and there is no quotient.

To expect: a control held over each step gives order 1 against H_u(t_n) and 2 against the middle of
the step, whatever the method; the nodal value f_uᵀ λₙ + c_u has the order p of the method; the
value per stage, g/(h b), has order 1 unless Σ_j b_j a_ji = b_i (1 − c_i), and with it 2 or what
the next conditions say. In (b) weights of 2/3 and 4/3 for rk4_classic, which a division by them
takes away, and of 0 and 2 for midpoint, which nothing takes away.

Found: {right} of {total} orders (both backends) are as expected, the largest deviation being
{worst:.2f}. dJ/du of midpoint saws between {low:.2f} and {high:.2f} of H_u on {saw_steps} steps and
between {low_fine:.2f} and {high_fine:.2f} on {fine_steps}: short steps do not take the saw away.
Its entries of weight zero tend to −h² λ_v′ / 2, with an order of {unweighted:.2f}. The backends
differ by at most {backends:.0e} of max |H_u|.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from contadj.figures import Records, Slope
from contadj.plotting import line_style, plot_line, slope_triangle
from contadj.studies.controls import (
    PER_STEP,
    expected,
    finest_traces,
    line,
    quantities,
    saw,
    series,
)

RECORDS = ("controls",)
FINDING = (
    "{right} of {total} orders per step, node and stage are as expected; where b = 0, dJ/du still "
    "saws between {low_fine:.1f} and {high_fine:.1f} of H_u on {fine_steps} steps"
)

SHOWN = {
    "held_start": "per step, at $t_n$",
    "held_middle": "per step, in the middle",
    "stage_2": "stage 2",
    "stage_1": "stage 1",
    "nodal": "nodal",
}
COLUMNS = {
    "held_start": "step\n$t_n$",
    "held_middle": "step\nmiddle",
    "nodal": "node",
    "nodal_held_start": "node\nheld, $t_n$",
    "nodal_held_middle": "node\nheld, mid.",
}


def slopes(records: Records) -> list[Slope]:
    """Every quantity of every method in both backends that has an expected order."""
    return [
        Slope(f"{backend} {method} {quantity}", *line(ones, quantity), expected=wanted)
        for (backend, method), ones in series(records["controls"]).items()
        for quantity in quantities(method)
        if (wanted := expected(method, quantity)) is not None
    ]


def numbers(records: Records) -> dict[str, Any]:
    """What caption and finding quote."""
    every = [(one, one.observed) for one in slopes(records)]
    traces = [one for one in records["controls"] if one["part"] == "trace"]
    coarse, fine = (_trace(traces, "midpoint", pick) for pick in (min, max))
    found = series(records["controls"])
    return {
        "total": len(every),
        "right": sum(seen.state == "as expected" for _, seen in every),
        "worst": max(abs((seen.order or 0.0) - one.expected.order) for one, seen in every),
        "unweighted": next(
            seen.order for one, seen in every if one.label == "torch midpoint unweighted_1"
        ),
        "saw_steps": coarse["num_steps"],
        "fine_steps": fine["num_steps"],
        **dict(zip(("low", "high"), saw(coarse), strict=True)),
        **dict(zip(("low_fine", "high_fine"), saw(fine), strict=True)),
        "backends": max(
            abs(one[quantity] - other[quantity])
            for (backend, method), ones in found.items()
            if backend == "torch"
            for one, other in zip(ones, found["jax", method], strict=True)
            for quantity in quantities(method)
            if not quantity.startswith("unweighted")
        ),
    }


def _trace(traces: list[Any], method: str, pick: Any) -> Any:
    of_method = [one for one in traces if (one["backend"], one["method"]) == ("torch", method)]
    return pick(of_method, key=lambda one: one["num_steps"])


def draw(records: Records) -> Figure:
    """Errors of one method; the saw; the orders of all methods."""
    figure = Figure(figsize=(7.0, 6.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    errors, trace = top.subplots(1, 2)
    _draw_errors(errors, series(records["controls"])["torch", "rk4_classic"])
    _draw_saw(trace, [one for one in records["controls"] if one["part"] == "trace"])
    _draw_orders(bottom.subplots(), records)
    return figure


def _draw_errors(axes: Axes, records: list[Any]) -> None:
    for number, (quantity, label) in enumerate(SHOWN.items()):
        h, values, floors = line(records, quantity)
        plot_line(axes, h, values, floors, label, number)
        wanted = expected("rk4_classic", quantity)
        if wanted and quantity != "stage_2":  # which lies beside another line of order 2
            middle = len(h) // 2
            slope_triangle(axes, wanted.order, h[middle], values[middle])
    axes.set_title("(a) rk4_classic")
    axes.set_xlabel("step size h")
    axes.set_ylabel("largest error / max |H$_u$|")
    axes.legend(loc="lower right")


def _draw_saw(axes: Axes, traces: list[Any]) -> None:
    for number, (method, label) in enumerate(
        (("midpoint", "midpoint, b = 0, 1"), ("rk4_classic", "rk4_classic, b = ⅙, ⅓, ⅓, ⅙"))
    ):
        one = _trace(traces, method, min)
        axes.plot(one["t"], one["gradient"], **line_style(number + 4), label=label, linewidth=0.7)
    fine = max(finest_traces(traces), key=lambda one: len(one["t"]))
    axes.plot(fine["t"], fine["exact"], color="black", linewidth=1.4, label="H$_u$(t)")
    axes.set_title(f"(b) values at the stage times of {one['num_steps']} steps")
    axes.set_xlabel("t")
    axes.set_ylabel("dJ/du / spacing of the values")
    axes.set_ylim(top=6.5)
    axes.legend(loc="upper right")


def _draw_orders(axes: Axes, records: Records) -> None:
    found = series(records["controls"])
    observed = {one.label: one.observed.order for one in slopes(records)}
    methods = [method for backend, method in found if backend == "torch"]
    stages = max(len(quantities(method)) for method in methods) - len(PER_STEP)
    columns = [*COLUMNS, *range(1, stages + 1)]
    orders = np.full((len(methods), len(columns)), np.nan)
    for row, method in enumerate(methods):
        for name in quantities(method):
            kind, _, number = name.rpartition("_")
            column = columns.index(name if name in COLUMNS else int(number))
            order = observed.get(f"torch {method} {name}")
            if kind == "unweighted":
                axes.add_patch(
                    Rectangle((column - 0.5, row - 0.5), 1, 1, hatch="////", fill=False,
                               edgecolor="0.6", linewidth=0)
                )  # fmt: skip
            elif order is not None:
                orders[row, column] = order
                axes.text(
                    column, row, f"{order:.2f}", ha="center", va="center", fontsize=6.5,
                    color="white" if order > 3.5 else "black",
                )  # fmt: skip
    axes.imshow(orders, cmap="cividis_r", vmin=0, vmax=6.5, aspect="auto")
    titles = [COLUMNS[one] if isinstance(one, str) else f"stage\n{one}" for one in columns]
    axes.set_xticks(range(len(columns)), titles)
    axes.set_yticks(range(len(methods)), methods)
    axes.grid(False)
    axes.tick_params(length=0, top=False)
    axes.set_title("(c) observed orders (hatched: b = 0)")
