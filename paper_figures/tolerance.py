"""The tolerance of a solve does not bound the error of its gradient.

Relative error of the gradient against the tolerance, rtol = atol, of adaptive solves, the same for
forward and backward solve; the grey line is error = tolerance. Left: x' = x - y, y' = y - x from
(1, 1), whose solution is constant, and L = x(5). The steps are as long as the controller lets them
grow, at every tolerance, so the discrete gradient stays at one wrong value, that of the stability
polynomials of the steps taken: expected {tsit5_expected:.4f} of the exact one for Tsit5 in Diffrax,
found {tsit5:.4f}; {dopri5:.3f} for dopri5 of contadj; {torchdiffeq_dopri5:.1f} and
{torchdiffeq_dopri8:.0f} times the exact one for dopri5 and dopri8 of torchdiffeq, which step beyond
T and interpolate. The continuous gradients, lambda under error control of its own, follow the
tolerance. Right: a driven pendulum, whose solution makes the steps short, and every gradient
follows the tolerance: from 1e-4 to the last point above round-off to the power {low:.2f} to
{high:.2f}, expected 1, but for torchdiffeq's dopri8, expected 0.625 from its quartic interpolant,
found {quartic:.2f}.
"""

import numpy as np
from matplotlib.figure import Figure

from contadj.figures import Slope
from contadj.plotting import plot_line, slope_triangle
from contadj.studies import tolerance

RECORDS = ("tolerance",)
FINDING = (
    "on a constant solution the discrete gradient is {tsit5:.2f} (Diffrax, Tsit5) to "
    "{torchdiffeq_dopri8:.0f} (torchdiffeq, dopri8) times the exact one at every tolerance; the "
    "continuous gradients, and both on a generic problem, follow the tolerance"
)
LINES = {
    ("torchdiffeq.odeint", "dopri8"): "torchdiffeq odeint, dopri8",
    ("torchdiffeq.odeint", "dopri5"): "torchdiffeq odeint, dopri5",
    ("contadj.torch.CheckpointAdjoint", "dopri5"): "contadj.torch Checkpoint, dopri5",
    ("diffrax.RecursiveCheckpointAdjoint", "tsit5"): "Diffrax RecursiveCheckpoint, Tsit5",
    ("torchdiffeq.odeint_adjoint", "dopri5"): "torchdiffeq odeint_adjoint, dopri5",
    ("contadj.torch.BacksolveAdjoint", "dopri5"): "contadj.torch Backsolve, dopri5",
    ("contadj.jax.GaussAdjoint", "tsit5"): "contadj.jax Gauss, Tsit5",
    ("diffrax.BacksolveAdjoint", "tsit5"): "Diffrax Backsolve, Tsit5",
}
TITLES = {"balance": "constant solution, L = x(5)", "driven": "driven pendulum"}


def _line(records, problem, adjoint, method):
    cells = tolerance.lines(records["tolerance"])[problem, adjoint, method]
    return sorted((r for r in cells if r.status == "ok"), key=lambda r: -r["tolerance"])


def draw(records):
    figure = Figure(figsize=(7, 3.7))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, problem in ((left, "balance"), (right, "driven")):
        for number, ((adjoint, method), label) in enumerate(LINES.items()):
            line = _line(records, problem, adjoint, method)
            plot_line(
                axes,
                [r["tolerance"] for r in line],
                [r["error"] for r in line],
                [tolerance.FLOOR] * len(line),
                label,
                number,
            )
        axes.plot([1e-12, 1e-2], [1e-12, 1e-2], color="0.6", linewidth=0.7, zorder=1)
        axes.set_xscale("log")
        axes.set_xlabel("tolerance, rtol = atol")
        axes.set_title(TITLES[problem])
        axes.set_xticks([10.0**-k for k in range(12, 0, -2)])
    left.set_ylabel("relative error of the gradient")
    left.set_ylim(3e-14, 1e4)
    left.annotate("discrete", (1e-9, 3), fontsize=7, color="0.3", ha="center")
    left.annotate("continuous", (1e-7, 1e-10), fontsize=7, color="0.3", ha="center")
    slope_triangle(right, 1, 3e-6, 3e-7)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def slopes(records):
    found = []
    for problem in TITLES:
        for adjoint, method in LINES:
            chosen = tolerance.ends(_line(records, problem, adjoint, method))
            found.append(
                Slope(
                    f"{problem}, {adjoint}, {method}",
                    [r["tolerance"] for r in chosen],
                    [r["error"] for r in chosen],
                    [tolerance.FLOOR] * len(chosen),
                    tolerance.expected_order(problem, adjoint, method),
                )
            )
    return found


def numbers(records):
    def ratio(adjoint, method):
        return float(np.mean([r["ratio"] for r in _line(records, "balance", adjoint, method)]))

    quartic = ("torchdiffeq.odeint", "dopri8")
    orders = {
        place: tolerance.order_in_tolerance(_line(records, "driven", *place)) for place in LINES
    }
    usual = [order for place, order in orders.items() if place != quartic]
    tsit5 = ("diffrax.RecursiveCheckpointAdjoint", "tsit5")
    return {
        "tsit5": ratio(*tsit5),
        "tsit5_expected": tolerance.expected_ratio(*tsit5),
        "dopri5": ratio("contadj.torch.CheckpointAdjoint", "dopri5"),
        "torchdiffeq_dopri5": ratio("torchdiffeq.odeint", "dopri5"),
        "torchdiffeq_dopri8": ratio(*quartic),
        "low": min(usual),
        "high": max(usual),
        "quartic": orders[quartic],
    }
