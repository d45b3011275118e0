"""Which gradient of a bouncing ball converges to the true one as h → 0.

A ball falls, bounces once with restitution e = {e:g} and is at y(T); errors are maxima over
{phases} phases of the impact within a step. (a) Relative error of the gradient by BPTT through
fixed steps of midpoint with three impact rules, and through steps that find the time of impact
(toi); that of y(T) for the rule velocity, dashed grey. Hollow points are round-off. (b) The entries
of the gradient: true (bar), and by BPTT at the shortest step. (c) A penalty contact of stiffness k
against h; dotted: the distance of its limit as h → 0 from the truth. (d) Its distance from that
limit against h k.

To expect: with a rule y(T) converges at order 1 and the gradient, whose impact time is frozen, to
the closed form that lacks the saltation matrix: wrong for good, but in ∂y(T)/∂e. With the time of
impact: exact for midpoint, order 1 for euler. With a penalty, distances O(h k) from a limit that is
itself off by O(k^(-1/2)) and, in ∂y(T)/∂e, by the factor 1 − 2ζ² for good.

Found: the gradient stays off by {velocity:.0f} % (velocity), {clamp:.0f} % (clamp) and
{reflect:.0f} % (reflect); it is within {toi:.0e} of the true one where midpoint finds the impact.
A resolved penalty, h √k = {resolved:.2g}, is not enough: k = {stiff:g} at h k = {product:g} leaves
∂y(T)/∂y0 anywhere in an interval of {spread:.0f} % of the gradient, and so does k = {softer:g} at
a step {ratio:g} times as long ({spread_softer:.0f} %): no limit, but a set of limit points. At
h k = {least:.2g}, k = {softest:g} is {to_limit:.1g} % from its limit, which is {off:.0f} % from the
true gradient; k = {stiff:g} needs h below {needed:.0e} for h k < g/w. {right} of {total} orders are
as expected; the backends differ by at most {backends:.0e}.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from contadj.figures import Records, Slope
from contadj.orders import ExpectedOrder
from contadj.plotting import line_style, plot_line, slope_triangle
from contadj.studies.contact import (
    GRAVITY,
    HEIGHT,
    PARAMETERS,
    PHASES,
    RESTITUTION,
    RULES,
    expected,
    impact,
    line,
    series,
)

RECORDS = ("contact",)
FINDING = (
    "with an impact rule the gradient stays off by {velocity:.0f} to {reflect:.0f} %, as derived; "
    "a step that finds the impact has it to {toi:.0e}; a penalty needs small h k, not only h √k"
)

QUANTITIES = ("value", "true", "limit", "restitution")
NAMES = {
    "y0": r"$\partial y(T)/\partial y_0$",
    "v0": r"$\partial y(T)/\partial v_0$",
    "e": r"$\partial y(T)/\partial e$",
    "g": r"$\partial y(T)/\partial g$",
}
_ROOT = ExpectedOrder(
    0.5, 0.05, "delay of a contact of length k^(-1/2): see contadj.studies.contact"
)


def slopes(records: Records) -> list[Slope]:
    """Orders in h of all contacts but the penalty; of its limit, the order in 1/k."""
    found = series(records["contact"])
    lines = [
        Slope(f"{backend} {contact} {method} {quantity}", *line(ones, quantity), expected=wanted)
        for (backend, contact, method, _), ones in found.items()
        for quantity in QUANTITIES
        if (wanted := expected(contact, method, quantity)) is not None
    ]
    stiff = _penalties(found)
    distances = [ones[-1]["distance_stiff"] for ones in stiff.values()]
    inverse = [1 / k for k in stiff]
    return [*lines, Slope("limit of the penalty", inverse, distances, [1e-12] * len(stiff), _ROOT)]


def _penalties(found: dict[Any, list[Any]]) -> dict[float, list[Any]]:
    """JAX's records of each stiffness, softest first."""
    return {key[3]: ones for key, ones in sorted(found.items()) if key[:2] == ("jax", "penalty")}


def numbers(records: Records) -> dict[str, Any]:
    """What caption and finding quote."""
    every = [(one.expected, one.observed) for one in slopes(records)]
    found = series(records["contact"])
    stiff = _penalties(found)
    soft_k, (softer_k, top_k) = min(stiff), sorted(stiff)[-2:]
    soft, product = stiff[soft_k], 1.0
    at = {
        k: next(one for one in ones if one["h"] * k == product)
        for k, ones in stiff.items()
        if any(one["h"] * k == product for one in ones)
    }
    w = float(impact(np.array(HEIGHT))[1])
    twins = {
        (contact, method, k, one["num_steps"]): one["gradient"]
        for (backend, contact, method, k), ones in found.items()
        if backend == "torch"
        for one in ones
    }
    return {
        "e": RESTITUTION,
        "phases": PHASES,
        **{rule: 100 * found["jax", rule, "midpoint", 0.0][-1]["true"] for rule in RULES},
        "toi": max(one["true"] for one in found["jax", "time_of_impact", "midpoint", 0.0]),
        "product": product,
        "stiff": top_k,
        "softer": softer_k,
        "ratio": at[softer_k]["h"] / at[top_k]["h"],
        "resolved": at[top_k]["h"] * top_k**0.5,
        "spread": 100 * at[top_k]["spread"],
        "spread_softer": 100 * at[softer_k]["spread"],
        "softest": soft_k,
        "least": soft[-1]["h"] * soft_k,
        "to_limit": 100 * soft[-1]["limit"],
        "off": 100 * soft[-1]["distance"],
        "needed": GRAVITY / w / top_k,
        "total": len(every),
        "right": sum(
            seen.state == ("at round-off" if wanted.exact else "as expected")
            for wanted, seen in every
        ),
        "backends": max(
            float(np.abs(np.array(other) - one["gradient"]).max())
            for (backend, contact, method, k), ones in found.items()
            if backend == "jax"
            for one in ones
            if (other := twins.get((contact, method, k, one["num_steps"]))) is not None
        ),
    }


def draw(records: Records) -> Figure:
    """Impact rules and the time of impact above, the penalty contact below."""
    found = series(records["contact"])
    figure = Figure(figsize=(7.0, 5.6), layout="constrained")
    (errors, entries), (penalty, collapse) = figure.subplots(2, 2)
    _draw_errors(errors, found)
    _draw_entries(entries, found)
    _draw_penalty(penalty, collapse, _penalties(found))
    return figure


def _draw_errors(axes: Axes, found: dict[Any, list[Any]]) -> None:
    shown = [
        *((rule, "midpoint", f"rule {rule}") for rule in RULES),
        ("time_of_impact", "euler", "toi, euler"),
        ("time_of_impact", "midpoint", "toi, midpoint"),
    ]
    for number, (contact, method, label) in enumerate(shown):
        h, values, floors = line(found["jax", contact, method, 0.0], "true")
        plot_line(axes, h, values, floors, label, number)
        if contact == "time_of_impact" and method == "euler":
            slope_triangle(axes, 1, h[1], values[1])
    h, values, _ = line(found["jax", "velocity", "midpoint", 0.0], "value")
    axes.plot(h, values, color="0.5", linestyle="--", label="y(T), rule velocity")
    axes.set_title("(a) impact rules, time of impact")
    axes.set_xlabel("step size h")
    axes.set_ylabel("relative error of the gradient")
    axes.legend(loc="center left", bbox_to_anchor=(0.0, 0.5))


def _draw_entries(axes: Axes, found: dict[Any, list[Any]]) -> None:
    shown = {
        **{rule: (rule, "midpoint", 0.0) for rule in RULES},
        "toi": ("time_of_impact", "midpoint", 0.0),
        "penalty": ("penalty", "midpoint", max(key[3] for key in found)),
    }
    places = np.arange(len(PARAMETERS))
    true = found["jax", "velocity", "midpoint", 0.0][-1]["gradient_true"]
    axes.hlines(true, places - 0.42, places + 0.42, color="0.6", linewidth=2.5, label="true")
    for number, (label, key) in enumerate(shown.items()):
        style = line_style(number) | {"linestyle": "none"}
        axes.plot(
            places + 0.14 * (number - 2), found["jax", *key][-1]["gradient"], **style, label=label
        )
    axes.set_xticks(places, [NAMES[one] for one in PARAMETERS])
    axes.set_title("(b) entries at the shortest step")
    axes.set_ylabel("entry of the gradient, SI units")
    axes.legend(loc="upper left", ncols=2)
    axes.set_ylim(top=4.2)


def _draw_penalty(axes: Axes, collapse: Axes, stiff: dict[float, list[Any]]) -> None:
    for number, (k, ones) in enumerate(stiff.items()):
        h, values, floors = line(ones, "true")
        plot_line(axes, h, values, floors, f"k = {k:g}", number)
        colour = line_style(number)["color"]
        axes.axhline(ones[-1]["distance"], color=colour, linestyle=":", linewidth=0.8)
        products = [one["h"] * k for one in ones]
        plot_line(collapse, products, line(ones, "limit")[1], floors, f"k = {k:g}", number)
    slope_triangle(collapse, 1, products[1] / 4, products[1] / 120)
    w = float(impact(np.array(HEIGHT))[1])
    collapse.axvline(GRAVITY / w, color="0.5", linestyle="--", linewidth=0.8)
    collapse.annotate(
        "h k = g/w", (GRAVITY / w, 0.03), xycoords=("data", "axes fraction"), xytext=(3, 0),
        textcoords="offset points", fontsize=7, color="0.3",
    )  # fmt: skip
    axes.set_title("(c) penalty contact, midpoint")
    axes.set_xlabel("step size h")
    axes.set_ylabel("relative error of the gradient")
    axes.legend(loc="upper left")
    collapse.set_title("(d) penalty: distance from the limit")
    collapse.set_xlabel("h k")
    collapse.set_ylabel("relative distance from the limit")
