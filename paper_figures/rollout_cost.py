"""The adjoint sweep costs a few rollouts, whatever the number of parameters.

Left: multiplications for all H action sensitivities of a scalar rollout, counted: each product of
factors formed on its own, and one adjoint sweep; expected H(H−1)/2 and H−1. Middle:
multiplications in the matrix products of a gradient in p parameters (a network z + tanh(zA)B/10 of
8 states, {horizon} steps), in rollouts, counted; expected p + 1 for differences, 3p for forward
mode one parameter at a time, 4 for the adjoint. Both frameworks give the same counts. Right: the
same in processor time; filled PyTorch, hollow JAX. Since a rollout that uses p parameters grows
with p itself, all is relative to one rollout with these parameters. Found: {products} and {sweep}
multiplications at H = {actions}; the adjoint takes {work} rollouts' worth of multiplications from
p = {fewest} to {most}, and {least_time} to {most_time} rollouts of time; at p = {one_by_one}
differences take {differences_time} rollouts of time and forward mode {forward_time} (PyTorch,
JAX). Times carry no expected order: what a library adds to an operation differs between the modes.
"""

from matplotlib.figure import Figure

from contadj.figures import Slope
from contadj.plotting import line_style, plot_line, slope_triangle
from contadj.studies.rollout import GROWTH, NETWORK_HORIZON

RECORDS = ("rollout",)
FINDING = (
    "{work} rollouts' worth of multiplications and {least_time} to {most_time} of time for the "
    "gradient in {fewest} to {most} parameters; each product on its own takes {products} "
    "multiplications where a sweep takes {sweep}"
)
MODES = ("forward", "differences", "adjoint")
LABELS = {"forward": "forward mode", "differences": "differences", "adjoint": "adjoint"}
FACES = {"torch": {}, "jax": {"markerfacecolor": "white"}}


def chosen(records, part, **axes):
    found = [r for r in records["rollout"] if r["part"] == part and r.status == "ok"]
    found = [r for r in found if all(r[name] == value for name, value in axes.items())]
    return sorted(found, key=lambda r: r["horizon" if part == "multiplications" else "parameters"])


def frameworks(records):
    return dict.fromkeys(r["framework"] for r in chosen(records, "cost"))


def numbers(records):
    last = chosen(records, "multiplications")[-1]
    adjoint = chosen(records, "cost", mode="adjoint")
    work = sorted({f"{r['work']:.3g}" for r in adjoint})
    times = {
        mode: " and ".join(
            f"{chosen(records, 'cost', mode=mode, framework=one)[-1]['time']:.0f}"
            for one in frameworks(records)
        )
        for mode in ("forward", "differences")
    }
    return {
        "horizon": NETWORK_HORIZON,
        "actions": last["horizon"],
        "products": last["products"],
        "sweep": last["sweep"],
        "work": " to ".join(dict.fromkeys([work[0], work[-1]])),
        "fewest": adjoint[0]["parameters"],
        "most": adjoint[-1]["parameters"],
        "least_time": f"{min(r['time'] for r in adjoint):.1f}",
        "most_time": f"{max(r['time'] for r in adjoint):.1f}",
        "one_by_one": chosen(records, "cost", mode="forward")[-1]["parameters"],
        "forward_time": times["forward"],
        "differences_time": times["differences"],
    }


def slope(label, counts, values, expected):
    """The growth of a count: its order in 1/count."""
    return Slope(label, [1 / n for n in counts], values, [0.0] * len(counts), expected)


def slopes(records):
    counted = chosen(records, "multiplications")
    horizons = [r["horizon"] for r in counted]
    lines = [
        slope(name, horizons, [r[name] for r in counted], GROWTH[name])
        for name in ("products", "sweep")
    ]
    for framework in frameworks(records):
        for mode in MODES:
            cells = chosen(records, "cost", framework=framework, mode=mode)
            parameters, work = [r["parameters"] for r in cells], [r["work"] for r in cells]
            lines.append(slope(f"{framework} {mode}", parameters, work, GROWTH[mode]))
    return lines


def draw(records):
    figure = Figure(figsize=(7.0, 2.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    counted = chosen(records, "multiplications")
    horizons = [r["horizon"] for r in counted]
    for number, (name, label) in enumerate(
        [("products", "single products"), ("sweep", "one sweep")]
    ):
        plot_line(left, horizons, [r[name] for r in counted], [0] * len(counted), label, number)
        slope_triangle(left, -GROWTH[name].order, horizons[-1], counted[-1][name])
    left.set(xlabel="number of actions H", ylabel="multiplications")
    left.set_xlim(right=2 * horizons[-1])
    left.legend(loc="upper left")
    for framework in frameworks(records):
        for number, mode in enumerate(MODES, 2):
            cells = chosen(records, "cost", framework=framework, mode=mode)
            parameters = [r["parameters"] for r in cells]
            style = line_style(number) | FACES[framework]
            label = LABELS[mode] if framework == "torch" else None
            middle.plot(parameters, [r["work"] for r in cells], **style, label=label)
            right.plot(parameters, [r["time"] for r in cells], **style)
    for axes, what in ((middle, "multiplications"), (right, "processor time")):
        axes.set(xscale="log", yscale="log", xlabel="number of parameters p")
        axes.set_ylabel(f"{what}, in rollouts")
    last = chosen(records, "cost", mode="differences")[-1]
    slope_triangle(middle, 1, last["parameters"], last["work"])
    middle.legend(loc="center right")
    for framework, face in FACES.items():
        name = {"torch": "PyTorch", "jax": "JAX"}[framework]
        right.plot([], [], "o", color="k", label=name, **face)
    right.legend(loc="upper right")
    return figure
