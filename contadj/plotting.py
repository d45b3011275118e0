"""Records -> matplotlib axes: errors against the step size, log-log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .convergence import floor
from .orders import QUANTITIES, expected_order
from .results import Record

LABELS = {
    "discrete": "|discrete − exact|",
    "continuous": "|continuous − exact|",
    "gap": "|discrete − continuous|",
    "adjoint": "max |λₙ − λ(tₙ)|",
}
# Okabe & Ito's colours without yellow, told apart by colour-blind readers; marker and line style
# differ too, so that a grey print can be read.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def line_style(number: int) -> dict[str, Any]:
    """Return colour, marker and line style of the line with a number; no two agree in all three."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
    }


def plot_line(
    axes: Axes,
    h: Sequence[float],
    errors: Sequence[float | None],
    floors: Sequence[float],
    label: str,
    number: int,
) -> tuple[float, float] | None:
    """Draw one line of errors against step sizes, log-log.

    Points at or below the round-off floor are hollow; missing and zero errors are left out.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Where to draw.
    h, errors, floors : sequences of float, of one length
        An error may be None.
    label : str
        For the legend.
    number : int
        Chooses colour, marker and line style.

    Returns
    -------
    (h, error) or None
        The coarsest point above round-off, where a slope triangle belongs.
    """
    points = sorted((x, e, e > floor) for x, e, floor in zip(h, errors, floors, strict=True) if e)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if not points:
        return None
    xs, ys, usable = (np.array(column) for column in zip(*points, strict=True))
    style = line_style(number)
    axes.plot(xs, ys, color=style["color"], linestyle=style["linestyle"], linewidth=1)
    for chosen, face in ((usable, style["color"]), (~usable, "white")):
        axes.plot(
            xs[chosen], ys[chosen], style["marker"], color=style["color"], markerfacecolor=face
        )
    # An empty line carries line and marker together into the legend.
    axes.plot([], [], **style, label=label)
    if not usable.any():
        return None
    coarsest = int(np.flatnonzero(usable)[-1])
    return xs[coarsest], ys[coarsest]


def plot_errors(axes: Axes, records: Sequence[Record], quantity: str) -> None:
    """Draw the relative error of one quantity against h, one line per method.

    Points at or below the round-off floor are hollow; triangles show the expected orders.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Where to draw.
    records : sequence of Record
        Of one problem and one engine.
    quantity : str
        One of `contadj.orders.QUANTITIES`.
    """
    triangles: dict[float, tuple[float, float]] = {}
    for number, method in enumerate(dict.fromkeys(record.method for record in records)):
        cells = [record for record in records if record.method == method and record.h is not None]
        place = plot_line(
            axes,
            [cell.h or math.nan for cell in cells],
            [cell.relative(quantity) for cell in cells],
            [floor(cell, quantity) for cell in cells],
            method,
            number,
        )
        expected = expected_order(method, quantity)
        if place and expected and not expected.exact and expected.order > 0:
            triangles[expected.order] = place
    axes.grid(True, which="major", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    for order, (right, top) in triangles.items():
        slope_triangle(axes, order, right, top)


def slope_triangle(axes: Axes, order: float, right: float, top: float) -> None:
    """Draw a triangle of slope `order` just under a line's point (right, top)."""
    left, high = right / 2, top / 3
    low = high / 2**order
    axes.plot([left, right, right, left], [low, low, high, low], color="0.5", linewidth=0.7)
    axes.annotate(
        f"{order:g}", (right, np.sqrt(low * high)), xytext=(3, 0), textcoords="offset points",
        fontsize=7, color="0.3", va="center",
    )  # fmt: skip


def legend_below(
    figure: Figure, panels: Iterable[Axes], order: Sequence[str] | None = None, **options: Any
) -> None:
    """Put one legend under a figure: every label of its panels once.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Laid out with constraints.
    panels : iterable of matplotlib.axes.Axes
        Whose labelled lines are collected.
    order : sequence of str, optional
        The labels in their order; by default as they come.
    **options
        Of `figure.legend`.
    """
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = list(handles) if order is None else [name for name in order if name in handles]
    if labels:
        shown = [handles[name] for name in labels]
        figure.legend(shown, labels, loc="outside lower center", **options)


def convergence_figure(records: Sequence[Record]) -> Figure:
    """Draw a study: one row per problem, one column per quantity.

    Parameters
    ----------
    records : sequence of Record
        Of one engine.

    Returns
    -------
    matplotlib.figure.Figure
        Not registered with pyplot; `figure.savefig(path)` writes it.
    """
    problems = list(dict.fromkeys(record.problem for record in records))
    figure = Figure(
        figsize=(3.1 * len(QUANTITIES), 0.5 + 2.6 * len(problems)), layout="constrained"
    )
    grid = figure.subplots(len(problems), len(QUANTITIES), squeeze=False)
    for row, problem in zip(grid, problems, strict=True):
        chosen = [record for record in records if record.problem == problem]
        for axes, quantity in zip(row, QUANTITIES, strict=True):
            plot_errors(axes, chosen, quantity)
            axes.set_title(f"{problem.rpartition('/')[2]}: {quantity}", fontsize=9)
            axes.set_xlabel("h")
            axes.set_ylabel(f"{LABELS[quantity]}, relative", fontsize=8)
    legend_below(figure, grid.flat, ncols=6, fontsize=8)
    return figure
