"""The methods of torchdiffeq and Diffrax against the orders they state.

Observed minus stated order of the discrete gradient (d), of the continuous one (c: the adjoint ODE
solved backward by the same method and steps) and of λ along the way (λ), on three problems, for
every method for ODEs of both libraries; 0.0 is what the library's order promises. Hatched: a
deviation, each with its cause in the script and below; ×: an error above 100 times the gradient on
the finest mesh.

Diffrax's implicit solvers are given Newton's method for their stages: the default root finder takes
its tolerances from a step-size controller, so that a fixed mesh is refused, and with tolerances
given calls "not converged after two iterations" a divergence.

To expect: 0 everywhere but where a method's steps carry more than the state, since λ is then the
derivative with the history held fixed: of order 1 for Adams methods and where a carried slope was
not evaluated at y_n, of order 0 for leapfrog.

Found: {agree} of {cells} are within the tolerance ({tolerance}) of the stated order; {deviate}
deviate:
{reasons}

Left out:
{left_out}
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from contadj.convergence import floor
from contadj.figures import Records, Slope
from contadj.orders import ExpectedOrder
from contadj.results import Record

RECORDS = ("library_audit",)
FINDING = (
    "{agree} of {cells} orders of {methods} methods are the stated ones; {deviate} are not, most "
    "of them λ of methods that carry more than the state, and explicit_adams, which is unstable"
)

# `order` of torchdiffeq's solver classes and `order()` of Diffrax's, as a test reads them.
STATED = {
    "torchdiffeq": {
        "euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4, "explicit_adams": 4,
        "implicit_adams": 4, "adaptive_heun": 2, "fehlberg2": 2, "bosh3": 3, "dopri5": 5,
        "dopri8": 8,
    },
    "diffrax": {
        "Euler": 1, "Heun": 2, "Midpoint": 2, "Ralston": 2, "Bosh3": 3, "Tsit5": 5, "Dopri5": 5,
        "Dopri8": 8, "ImplicitEuler": 1, "Kvaerno3": 3, "Kvaerno4": 4, "Kvaerno5": 5,
        "ReversibleHeun": 2, "LeapfrogMidpoint": 2,
    },
}  # fmt: skip
# Methods for ODEs that are not in the grid, and why.
LEFT_OUT = {
    "scipy_solver": "calls SciPy and leaves no graph, so that there is no discrete gradient",
    "HalfSolver": "no method: two half steps of another solver, for an error estimate",
    "SemiImplicitEuler": "takes a pair of terms, each a function of the other half of the state",
}
NAMES = {"torchdiffeq": "torchdiffeq", "diffrax": "Diffrax"}
QUANTITIES = {"discrete": "d", "continuous": "c", "adjoint": "λ"}
PROBLEMS = ("nonaut", "pend", "mlp")

_EVERY = tuple(QUANTITIES)
# Methods, quantities and problems that deviate, and the cause in the library or the method.
DEVIATIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("explicit_adams",), _EVERY, PROBLEMS,
        "torchdiffeq lets the order grow to 11 (max_order=12), where the stable steps are far "
        "shorter than these",
    ),
    (
        ("implicit_adams",), ("discrete",), PROBLEMS,
        "order 5, one above torchdiffeq's attribute: the order grows to 12, and the start by rk4 "
        "and a formula of order 4 leaves O(h^5)",
    ),
    (
        ("implicit_adams",), ("continuous",), ("nonaut", "pend"),
        "the same (on mlp the tolerance of its iteration is reached)",
    ),
    (
        ("implicit_adams",), ("adjoint",), PROBLEMS,
        "order 1 of every Adams method: past slopes are held fixed",
    ),
    (
        ("adaptive_heun",),
        ("adjoint",),
        PROBLEMS,
        "torchdiffeq carries the last stage on as f(t, y) at the new state, which it is not; held "
        "fixed, it leaves order 1",
    ),
    (
        ("fehlberg2",),
        ("adjoint",),
        ("nonaut", "mlp"),
        "the same, on the way from 2 to 1: what is carried has a weight of 1/512",
    ),
    (
        ("LeapfrogMidpoint",), ("adjoint",), PROBLEMS,
        "a two-step method whose parasitic root is -1: λ never converges",
    ),
    (
        ("Tsit5",), _EVERY, ("nonaut",),
        "its error constant is far below that of the next order: a mixture of orders 5 and 6",
    ),
    (("Tsit5",), ("adjoint",), ("pend",), "the same mixture"),
    (("Tsit5",), ("continuous",), ("mlp",), "the same mixture"),
    (
        ("dopri8", "Dopri8"), ("discrete",), ("nonaut",),
        "the error falls one order faster until it is at round-off",
    ),
    (("dopri8", "Dopri8"), _EVERY, ("pend",), "the same"),
)  # fmt: skip
REASONS = {
    (method, quantity, problem): reason
    for methods, quantities, problems, reason in DEVIATIONS
    for method in methods
    for quantity in quantities
    for problem in problems
}


def lines(records: Records) -> dict[tuple[str, str, str], list[Record]]:
    """Return the records of each (engine, method, problem), coarsest first."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records["library_audit"], key=lambda one: one.num_steps):
        if record.h is not None:
            found.setdefault((record.engine, record.method, record.problem), []).append(record)
    return found


def orders(records: Records) -> dict[tuple[str, str, str, str], Slope]:
    """Return the line of each (engine, method, problem, quantity), and the order stated for it."""
    return {
        (engine, method, problem, quantity): Slope(
            label=f"{engine} {method} {problem} {quantity}",
            h=[cell.h or 0.0 for cell in cells],
            errors=[cell.relative(quantity) for cell in cells],
            floors=[floor(cell, quantity) for cell in cells],
            expected=ExpectedOrder(
                p := STATED[engine][method], 0.15 if p < 5 else 0.4, f"{engine} says so"
            ),
            why_not=REASONS.get((method, quantity, problem), ""),
        )
        for (engine, method, problem), cells in lines(records).items()
        for quantity in QUANTITIES
    }


def slopes(records: Records) -> list[Slope]:
    """All cells of the map."""
    return list(orders(records).values())


def numbers(records: Records) -> dict[str, object]:
    """What caption and finding quote."""
    every = slopes(records)
    agree = sum(one.observed.state == "as expected" for one in every)
    return {
        "cells": len(every),
        "methods": len({(engine, method) for engine, method, *_ in lines(records)}),
        "agree": agree,
        "deviate": len(every) - agree,
        "tolerance": "0.15, from order 5 on 0.4",
        "reasons": "\n".join(
            f"- {', '.join(methods)} ({', '.join(QUANTITIES[q] for q in quantities)}"
            f"{'' if problems == PROBLEMS else ' on ' + ', '.join(problems)}): {reason}"
            for methods, quantities, problems, reason in DEVIATIONS
        ),
        "left_out": "\n".join(f"- {name}: {reason}" for name, reason in LEFT_OUT.items()),
    }


def draw(records: Records) -> Figure:
    """One map for each library."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    every = orders(records)
    for axes, engine in zip(figure.subplots(1, 2), STATED, strict=True):
        _draw_map(axes, engine, every)
    return figure


def _draw_map(axes: Axes, engine: str, every: dict[tuple[str, str, str, str], Slope]) -> None:
    methods = [name for name in STATED[engine] if any(name == key[1] for key in every)]
    problems = [name for name in PROBLEMS if any(name == key[2] for key in every)]
    columns = [(problem, quantity) for problem in problems for quantity in QUANTITIES]
    values = np.full((len(methods), len(columns)), np.nan)
    for row, method in enumerate(methods):
        for column, (problem, quantity) in enumerate(columns):
            one = every[engine, method, problem, quantity]
            observed = one.observed
            text = "–"
            if (one.errors[-1] or 0.0) > 100:
                text = "×"
            elif observed.order is not None and observed.state != "not enough pairs":
                values[row, column] = observed.order - one.expected.order
                text = f"{values[row, column]:+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
            axes.text(
                column, row, text.replace("-", "−"), ha="center", va="center", fontsize=6,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
            if observed.state != "as expected":
                place = (column - 0.5, row - 0.5)
                axes.add_patch(
                    Rectangle(place, 1, 1, fill=False, hatch="////", edgecolor="0.35", linewidth=0)
                )
    axes.imshow(values, cmap="PuOr", vmin=-4, vmax=4, aspect="auto")
    axes.set_yticks(range(len(methods)), [f"{name} ({STATED[engine][name]})" for name in methods])
    axes.set_xticks(range(len(columns)), [QUANTITIES[quantity] for _, quantity in columns])
    axes.tick_params(length=0)
    axes.grid(False)
    for edge in range(1, len(problems)):
        axes.axvline(3 * edge - 0.5, color="black", linewidth=0.6)
    for place, problem in enumerate(problems):
        axes.annotate(
            problem, (3 * place + 1, 0), xytext=(0, -14), textcoords="offset points",
            xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=7,
        )  # fmt: skip
    axes.set_title(f"{NAMES[engine]}: observed − stated order")
