"""When the square commutes.

Gap between the discrete gradient and the adjoint ODE solved backward by the same method (top), and
reversal error, how far the state rebuilt on the way is from the true one (bottom), on a driven
pendulum, nonlinear and time-dependent. Left: the adjoint ODE on the mesh of the forward solve, with
steps that divide the interval. Right: steps of h from either end, T = (N + {s:g}) h, which leave a
short step at opposite ends. Hollow points are round-off; triangles show the expected orders.

To expect: a gap of the order p of the method, but 3 for heun2 and 4 for reversible Heun; zero at
every h for implicit midpoint, gl4 and gl6 alone, which are symplectic and symmetric. To retrace the
state is not enough: the trapezoid rule does, and its gap is of order 2. Where the meshes differ,
gaps and reversal errors that were zero become O(h^(p+1)).

Found: orders of the gap {heun2:.2f} (heun2), {reversible_heun:.2f} (reversible Heun) and
{trapezoid:.2f} (trapezoid, whose state retraces to {trapezoid_reversal:.0e}); at most {exact:.0e}
for the three symplectic and symmetric methods. With a short step their orders are
{short_implicit_midpoint:.2f}, {short_gl4:.2f} and {short_gl6:.2f}. Reversal errors are of order p
for odd and p + 1 for even p, and of order {retraced:.2f} for reversible Heun, which would retrace
its two states but is given one. In all, {agree} of {lines} lines (21 methods, both backends) are as
expected; {listed} are not, for a reason given in the script.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from contadj.figures import Records, Slope
from contadj.plotting import plot_line, slope_triangle
from contadj.studies.commute import expected, floors, series

RECORDS = ("commute",)
FINDING = (
    "the gap is zero (at most {exact:.0e}) for implicit midpoint, gl4 and gl6 alone, of order "
    "{trapezoid:.2f} for the trapezoid rule, which retraces the state, {heun2:.2f} for heun2 and "
    "{reversible_heun:.2f} for reversible Heun; with a step that does not divide T it is never zero"
)

SHOWN = (
    "euler", "heun2", "ralston", "rk4_classic", "reversible_heun", "trapezoid", "implicit_midpoint",
    "gl4", "gl6",
)  # fmt: skip
LABELS = {"gap": "gap, relative", "reversal": "reversal error"}
# Lines that do not show their order on these meshes.
LATE = {
    ("dopri8", "gap", 0.0): "falls one order faster until it is at round-off",
}


def slopes(records: Records) -> list[Slope]:
    """Gap and reversal error of every method, backend and mesh."""
    return [
        Slope(
            label=f"{framework} {problem} {method} {quantity} {'short step' if s else ''}".strip(),
            h=[cell["h"] for cell in cells],
            errors=[cell[quantity] for cell in cells],
            floors=floors(cells),
            expected=expected(method, quantity, s),
            why_not=LATE.get((method, quantity, s), ""),
        )
        for (problem, framework, method, s), cells in series(records["commute"]).items()
        for quantity in LABELS
    ]


def numbers(records: Records) -> dict[str, float]:
    """What caption and finding quote."""
    every = {one.label: one for one in slopes(records)}
    states = [(one, one.observed.state) for one in every.values()]
    cells = records["commute"]

    def order(method: str, end: str = "") -> float:
        return every[f"torch driven {method} gap{end}"].observed.order or float("nan")

    def largest(quantity: str, *methods: str) -> float:
        return max(
            one[quantity] for one in cells if one["method"] in methods and not one["short_step"]
        )

    exact = ("implicit_midpoint", "gl4", "gl6")
    return {
        **{name: order(name) for name in ("heun2", "reversible_heun", "trapezoid")},
        **{f"short_{name}": order(name, " short step") for name in exact},
        "retraced": every["torch driven reversible_heun reversal"].observed.order or float("nan"),
        "exact": largest("gap", *exact),
        "trapezoid_reversal": largest("reversal", "trapezoid"),
        "s": max(one["short_step"] for one in cells),
        "lines": len(states),
        "listed": sum(bool(one.why_not) for one, _ in states),
        "agree": sum(
            state == ("at round-off" if one.expected.exact else "as expected")
            for one, state in states
        ),
    }


def draw(records: Records) -> Figure:
    """Gap and reversal error; on one mesh, and on two."""
    figure = Figure(figsize=(7.0, 5.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    every = series(records["commute"])
    problem = next(iter(every))[0]
    short = max(s for *_, s in every)
    for row, quantity in zip(grid, LABELS, strict=True):
        row[0].set_ylabel(LABELS[quantity])
        for axes, s in zip(row, (0.0, short), strict=True):
            triangles: dict[float, tuple[float, float]] = {}
            for number, method in enumerate(SHOWN):
                cells = every.get((problem, "torch", method, s))
                if cells is None:
                    continue
                h, errors, floor = (
                    [cell["h"] for cell in cells], [cell[quantity] for cell in cells], floors(cells)
                )  # fmt: skip
                plot_line(axes, h, errors, floor, method, number)
                want = expected(method, quantity, s)
                usable = [at for at, low in zip(zip(h, errors, strict=True), floor, strict=True)
                          if at[1] > low]  # fmt: skip
                if not want.exact:
                    # Under the finest pair of the lowest line of an order.
                    lowest = triangles.get(want.order, usable[-2])
                    triangles[want.order] = min(lowest, usable[-2], key=lambda at: at[1])
            for order, place in triangles.items():
                slope_triangle(axes, order, *place)
    grid[0, 0].set_title("steps that divide T: one mesh")
    grid[0, 1].set_title("steps that do not: a short one at opposite ends")
    for axes in grid[1]:
        axes.set_xlabel("step size h")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure
