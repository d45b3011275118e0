"""Discrete and continuous gradient tend to the exact one, and to each other, as h → 0.

Top: on a small neural vector field (mlp), relative error of the discrete gradient, of the
continuous one (the adjoint ODE solved backward by the same method and steps), and the gap between
the two, against the step size; hollow points are round-off, triangles show the expected orders.
Bottom: observed minus expected order of every Runge-Kutta method on all five problems and all three
engines: 0 is what theory says. Hollow markers are lines known not to have that order on these
meshes, each with its reason in the script.

To expect: the order p of the method for both gradients and, at every step, for λ; for the gap p
too, but 3 for heun2 and zero at every h for the methods that are symplectic and symmetric, implicit
midpoint, gl4 and gl6, whose gap is not drawn.

Found: {agree} of {lines} lines are so ({zero} of them zero up to round-off), none off by more than
{worst:.2f}. On Van der Pol's oscillator rebuilding y backward multiplies errors by {growth:.0e};
what one sees of the adjoint ODE there is the reversal error, O(h^(p+1)) for even p, and {retraced}
lines have that order instead. The other {listed} do not show their order on these meshes: tsit5 is
a mixture of orders 5 and 6, dopri8 is at round-off before its order, and on Van der Pol's
oscillator steps are too long or round-off is amplified. On the scalar affine nonaut heun2 and the
rk4 methods have no gap at all. Engines differ by at most {engines:.0e} in any relative error well
above round-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp

from contadj.convergence import floor
from contadj.figures import Records, Slope
from contadj.orders import QUANTITIES, ExpectedOrder, expected_order
from contadj.plotting import LABELS, line_style, plot_line, slope_triangle
from contadj.problems import problem_data
from contadj.results import Record
from contadj.tableaus import TABLEAUS

RECORDS = ("discrete_to_continuous",)
FINDING = (
    "{agree} of {lines} lines (problem, engine, method, quantity) have the stated order or are "
    "zero; {retraced} have that of the reversal error, {listed} are late, each for a listed reason"
)

SHOWN = ("euler", "heun2", "bosh3", "rk4_classic", "dopri5", "gl6", "dopri8")
STIFF = "van_der_pol(mu=5,t1=1)"
BACKWARD = ("continuous", "gap")

_RETRACED = "order p + 1 of the reversal error of a method of even order, which is far larger"
_TSIT5 = "its error constant is far below that of the next order: a mixture of orders 5 and 6"
_DOPRI8 = "the error falls one order faster until it is at round-off"
_COARSE = "the coarse steps are too long for this problem: still on the way to the order"
_CANCEL = "its reversal error, O(h^3), and the gap of order 2 have opposite signs and nearly cancel"
_HIDDEN = "round-off, amplified in rebuilding y backward, hides all but the coarsest errors"
# Lines that do not show their order on these meshes.
LATE: dict[tuple[str, str, str], str] = {
    **{("nonaut", "tsit5", quantity): _TSIT5 for quantity in QUANTITIES},
    ("pend", "tsit5", "gap"): _TSIT5,
    ("pend", "tsit5", "adjoint"): _TSIT5,
    ("mlp", "tsit5", "continuous"): _TSIT5,
    (STIFF, "tsit5", "discrete"): _TSIT5,
    (STIFF, "tsit5", "adjoint"): _TSIT5,
    (STIFF, "dopri5", "discrete"): _COARSE,
    (STIFF, "heun2", "discrete"): _COARSE,
    (STIFF, "trbdf2", "gap"): _CANCEL,
    **{("lin", "dopri8", quantity): _DOPRI8 for quantity in QUANTITIES},
    **{("pend", "dopri8", quantity): _DOPRI8 for quantity in QUANTITIES},
    ("nonaut", "dopri8", "discrete"): _DOPRI8,
    (STIFF, "dopri8", "discrete"): _DOPRI8,
    (STIFF, "dopri8", "adjoint"): _DOPRI8,
    **{(STIFF, name, q): _COARSE for name in ("euler", "implicit_euler") for q in BACKWARD},
    **{(STIFF, name, "continuous"): _HIDDEN for name in ("implicit_midpoint", "gl4", "gl6")},
}
# The gap in y0 and an additive parameter of a scalar affine problem, which is all that nonaut has.
NO_GAP = ("heun2", "rk4", "rk4_classic")


@cache
def growth() -> float:
    """Growth of errors in y on the way back to t0 on the stiff problem: exp(-int div f dt)."""
    data = problem_data("van_der_pol", mu=5.0, t1=1.0)
    mu = float(data.params["mu"])

    def field(t, z):
        x, v, _ = z
        return [v, mu * (1 - x**2) * v - x, -mu * (1 - x**2)]

    end = solve_ivp(field, (data.t0, data.t1), [*data.y0, 0.0], rtol=1e-10, atol=1e-12)
    return float(np.exp(end.y[2, -1]))


def expected(problem: str, method: str, quantity: str) -> ExpectedOrder:
    """What theory says of a line, what is special about its problem included."""
    stated = expected_order(method, quantity)
    assert stated is not None
    if problem == "nonaut" and method in NO_GAP and quantity == "gap":
        return ExpectedOrder(float("inf"), 0.0, "no gap on a scalar affine problem")
    tableau = TABLEAUS[method]
    retraced = problem == STIFF and quantity in BACKWARD and not tableau.symmetric
    if retraced and stated.order == tableau.order and tableau.order % 2 == 0:
        return ExpectedOrder(tableau.order + 1, max(stated.tolerance, 0.2), _RETRACED)
    return stated


def lines(records: Records) -> dict[tuple[str, str, str], list[Record]]:
    """Return the records of each (engine, problem, method), coarsest first."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records["discrete_to_continuous"], key=lambda one: one.num_steps):
        if record.h is not None:
            found.setdefault((record.engine, record.problem, record.method), []).append(record)
    return found


def floors(cells: Sequence[Record], quantity: str) -> list[float]:
    """Return the round-off floor of each record, amplified where y is rebuilt backward."""
    amplified = cells[0].problem == STIFF and quantity in BACKWARD
    return [floor(cell, quantity) * (growth() if amplified else 1.0) for cell in cells]


def slopes(records: Records) -> list[Slope]:
    """Every problem, engine, method and quantity of the records."""
    return [
        Slope(
            label=f"{engine} {problem} {method} {quantity}",
            h=[cell.h or 0.0 for cell in cells],
            errors=[cell.relative(quantity) for cell in cells],
            floors=floors(cells, quantity),
            expected=expected(problem, method, quantity),
            why_not=LATE.get((problem, method, quantity), ""),
        )
        for (engine, problem, method), cells in lines(records).items()
        for quantity in QUANTITIES
    ]


def numbers(records: Records) -> dict[str, float]:
    """What caption and finding quote."""
    every = slopes(records)
    states = [(one, one.observed) for one in every]
    zero = sum(one.expected.exact and seen.state == "at round-off" for one, seen in states)
    measured = [
        abs(seen.order - one.expected.order)
        for one, seen in states
        if not one.why_not and not one.expected.exact and seen.order is not None
    ]
    retraced = sum(
        seen.state == "as expected" and one.expected.source == _RETRACED for one, seen in states
    )
    return {
        "lines": len(every),
        "listed": sum(bool(one.why_not) for one in every),
        "agree": zero + sum(seen.state == "as expected" for _, seen in states) - retraced,
        "zero": zero,
        "worst": max(measured),
        "growth": growth(),
        "retraced": retraced,
        "engines": _difference_of_engines(records),
    }


def _difference_of_engines(records: Records) -> float:
    """Largest relative difference of an error between engines, where it is above round-off."""
    found: dict[tuple[str, str, int, str], list[float]] = {}
    for record in records["discrete_to_continuous"]:
        for quantity in ("discrete", "continuous"):
            value = record.relative(quantity)
            if value and value > 1e3 * floors([record], quantity)[0]:
                key = record.problem, record.method, record.num_steps, quantity
                found.setdefault(key, []).append(value)
    return max(max(v) / min(v) - 1 for v in found.values())


def draw(records: Records) -> Figure:
    """Errors of some methods on one problem; orders of all methods on all problems."""
    figure = Figure(figsize=(7.0, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    every = lines(records)
    panels = top.subplots(1, 3, sharex=True, sharey=True)
    for axes, quantity in zip(panels, ("discrete", "continuous", "gap"), strict=True):
        drawn = set()
        for number, method in enumerate(SHOWN):
            cells = every["contadj", "mlp", method]
            place = plot_line(
                axes, [cell.h or 0.0 for cell in cells],
                [cell.relative(quantity) for cell in cells], floors(cells, quantity), method,
                number,
            )  # fmt: skip
            order = expected("mlp", method, quantity).order
            if place and np.isfinite(order) and order not in drawn:
                slope_triangle(axes, order, *place)
                drawn.add(order)
        axes.set_title(LABELS[quantity])
        axes.set_xlabel("step size h")
    panels[0].set_xlim(right=2**-0.4)
    panels[0].set_ylabel("relative error, mlp")
    handles, labels = panels[0].get_legend_handles_labels()
    top.legend(handles, labels, loc="outside lower center", ncols=len(SHOWN), columnspacing=1.2)
    _draw_orders(bottom.subplots(), records)
    return figure


def _draw_orders(axes, records: Records) -> None:
    axes.axhline(0, color="0.5", linewidth=0.6)
    for number, quantity in enumerate(QUANTITIES):
        style = line_style(number) | {"linestyle": "none", "markersize": 3}
        axes.plot([], [], **style, label="λ along the way" if quantity == "adjoint" else quantity)
        for one in slopes(records):
            *_, method, its = one.label.split()
            stated = expected_order(method, quantity)
            order = one.observed.order
            if its != quantity or order is None or stated is None or stated.exact:
                continue
            x = list(TABLEAUS).index(method) + (number - 1.5) * 0.2
            known = one.why_not or stated.order != one.expected.order
            face = "white" if known else style["color"]
            axes.plot(x, order - stated.order, **style, markerfacecolor=face, markeredgewidth=0.6)
    axes.plot([], [], "o", color="0.3", markersize=3, markerfacecolor="white", label="exception")
    axes.set_xticks(range(len(TABLEAUS)), list(TABLEAUS), rotation=40, ha="right")
    axes.set_xlim(-0.6, len(TABLEAUS) - 0.4)
    axes.set_ylabel("observed − stated order")
    axes.set_ylim(top=3.9)
    axes.legend(loc="upper left", ncols=5)
