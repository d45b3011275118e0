"""The adjoint along the way: where lambda_n approaches lambda(t_n).

λ_n = ∂L/∂y_n of a numerical solution, the history before t_n held fixed, against the adjoint λ(t_n)
of a driven pendulum, nonlinear and time-dependent; errors relative to max |λ(t)|. (a) λ_n, the
largest error over all steps. (b) The multiplier of the step's equation, s ∂L/∂r_n with r_n its
residual and s the sum of the weights of its slopes: all steps (dashed), and the middle half of the
interval (full). (c, d) λ_n and multipliers near both ends, {trace} steps; grey: λ(t).

To expect: Runge–Kutta of order p at every step, reversible Heun of order 2; Adams methods of order
1, whatever the order of their gradient; of BDF λ_n tends to λ/s, 3/2 λ and 11/6 λ, and the
multiplier converges at order p in the interior and not at the end; leapfrog never. The gradients of
all of them converge at the method's order.

Found: rk4_classic {rk4_classic:.2f}, reversible Heun {reversible_heun:.2f}; ab2, ab3, ab4, am3 and
am4 between {adams_low:.2f} and {adams_high:.2f}, their gradients up to {adams_gradient:.2f}; bdf2
{bdf2_inner:.2f} and bdf3 {bdf3_inner:.2f} in the interior, {bdf_end:.2f} in size off at the end;
leapfrog off by {leapfrog:.2f} at the finest step. PyTorch drawn; in all, {agree} of {lines} lines
of both backends are as expected.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from contadj.figures import Records, Slope
from contadj.orders import expected_order
from contadj.plotting import legend_below, line_style, plot_line, slope_triangle
from contadj.studies.along import QUANTITIES, floors, series

RECORDS = ("along",)
FINDING = (
    "λ_n converges at order p for Runge–Kutta methods, at order 1 ({adams_low:.2f} to "
    "{adams_high:.2f}) for Adams methods of every order, for BDF after rescaling and in the "
    "interior alone ({bdf2_inner:.2f}, {bdf3_inner:.2f}), for leapfrog never"
)

ADAMS = ("ab2", "ab3", "ab4", "am3", "am4")
STYLES = {
    name: number
    for number, name in enumerate((
        "heun2", "rk4_classic", "reversible_heun", "ab2", "ab4", "am3", "bdf2", "bdf3", "leapfrog",
    ))
}  # fmt: skip


def slopes(records: Records) -> list[Slope]:
    """Every quantity of every method and backend."""
    found = []
    for (framework, method), cells in series(records["along"]).items():
        for quantity in QUANTITIES:
            expected = expected_order(method, quantity)
            if expected is None or cells[0][quantity] is None:
                continue
            found.append(
                Slope(
                    label=f"{framework} {method} {quantity}",
                    h=[cell["h"] for cell in cells],
                    errors=[cell[quantity] for cell in cells],
                    floors=floors(cells),
                    expected=expected,
                )
            )
    return found


def numbers(records: Records) -> dict[str, float]:
    """What caption and finding quote."""
    every = {one.label: one.observed for one in slopes(records)}
    finest = {key: cells[-1] for key, cells in series(records["along"]).items()}

    def order(method: str, quantity: str = "adjoint") -> float:
        return every[f"torch {method} {quantity}"].order or float("nan")

    adams = [order(method) for method in ADAMS]
    return {
        "rk4_classic": order("rk4_classic"),
        "reversible_heun": order("reversible_heun"),
        "adams_low": min(adams),
        "adams_high": max(adams),
        "adams_gradient": max(order(method, "discrete") for method in ADAMS),
        "bdf2_inner": order("bdf2", "multiplier_interior"),
        "bdf3_inner": order("bdf3", "multiplier_interior"),
        "bdf_end": finest["torch", "bdf2"]["multiplier"],
        "leapfrog": finest["torch", "leapfrog"]["adjoint"],
        "trace": _trace_steps(records),
        "lines": len(every),
        "agree": sum(one.state in ("as expected", "at round-off") for one in every.values()),
    }


def _trace_steps(records: Records) -> int:
    return min(one["num_steps"] for one in records["along"] if one.cell["trace"])


def draw(records: Records) -> Figure:
    """Errors against h, and traces near both ends."""
    figure = Figure(figsize=(7.0, 5.6), layout="constrained")
    grid = figure.subplots(2, 2)
    every = series(records["along"])
    _draw_errors(grid[0, 0], every)
    _draw_multipliers(grid[0, 1], every)
    _draw_traces(grid[1], every, _trace_steps(records))
    legend_below(figure, grid[0], list(STYLES), ncols=5)
    return figure


def _draw_errors(axes, every) -> None:
    triangles = {}
    for method in ("heun2", "rk4_classic", "reversible_heun", "ab2", "ab4", "am3", "bdf2",
                   "leapfrog"):  # fmt: skip
        cells = every["torch", method]
        h, errors = [cell["h"] for cell in cells], [cell["adjoint"] for cell in cells]
        plot_line(axes, h, errors, floors(cells), method, STYLES[method])
        expected = expected_order(method, "adjoint")
        if expected and expected.order > 0:
            place = h[-2], errors[-2]
            lowest = triangles.get(expected.order, place)
            triangles[expected.order] = min(lowest, place, key=lambda at: at[1])
    for order, place in triangles.items():
        slope_triangle(axes, order, *place)
    axes.set(title="(a) λₙ, all steps", xlabel="step size h", ylabel="max |λₙ − λ(tₙ)|, relative")


def _draw_multipliers(axes, every) -> None:
    for method in ("ab4", "bdf2", "bdf3", "leapfrog"):
        cells = every["torch", method]
        h = [cell["h"] for cell in cells]
        inner = [cell["multiplier_interior"] for cell in cells]
        plot_line(axes, h, inner, floors(cells), method, STYLES[method])
        style = line_style(STYLES[method])
        axes.plot(
            h, [cell["multiplier"] for cell in cells], color=style["color"], linestyle=(0, (2, 2)),
            marker=style["marker"], markerfacecolor="white",
        )  # fmt: skip
        expected = expected_order(method, "multiplier_interior")
        if expected and expected.order > 0:
            slope_triangle(axes, expected.order, h[-2], inner[-2])
    axes.set(
        title="(b) multipliers: interior, and all steps (hollow)", xlabel="step size h",
        ylabel="max |s ∂L/∂rₙ − λ(tₙ)|, relative",
    )  # fmt: skip


def _draw_traces(row, every, steps: int) -> None:
    for axes, end in zip(row, ("start", "end"), strict=True):
        for method in ("ab4", "bdf2", "leapfrog"):
            cell = next(one for one in every["torch", method] if one["num_steps"] == steps)
            half = len(cell["trace_t"]) // 2
            part = slice(0, half) if end == "start" else slice(half, None)
            t = cell["trace_t"][part]
            if method == "ab4":
                axes.plot(t, cell["trace_exact"][part], color="0.7", linewidth=4)
            style = line_style(STYLES[method]) | {"linewidth": 0.8}
            axes.plot(t, cell["trace_adjoint"][part], **style)
            if method == "bdf2":
                multiplier = [
                    float("nan") if v is None else v for v in cell["trace_multiplier"][part]
                ]
                axes.plot(t, multiplier, **(style | {"marker": "o"}), markerfacecolor="white")
        axes.set_xlabel("t")
    row[0].set(title=f"(c) near t₀, {steps} steps", ylabel="first component, relative")
    row[1].set_title("(d) near T; circles: multiplier of bdf2")
