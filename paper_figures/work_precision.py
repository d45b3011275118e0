"""What the accuracy of a gradient costs in time and in memory.

Relative error of the gradient of a neural ODE (256 samples of 4 numbers, 148 parameters) in
PyTorch, top, and JAX, bottom. Left: against the seconds of one gradient, adaptive dopri5 at
tolerances {coarsest:.0e} to {finest:.0e}, one thread, compilation left out; the median of repeated
runs in one process. Right: against peak bytes, N steps of heun2, N = {fewest} to {most}. Expected:
errors of order 2 in 1/N, much the same for all adjoints, at very different bytes; where memory is
constant the line is vertical. Found: at tolerance {finest:.0e} CheckpointAdjoint takes
{torch_ms:.0f} ms in PyTorch and {jax_ms:.1f} ms in JAX. torchdiffeq's odeint takes {odeint:.1f}
times as long as the first, its odeint_adjoint {odeint_adjoint:.1f} times, torchode's
AutoDiffAdjoint {torchode:.1f} times; Diffrax's RecursiveCheckpointAdjoint takes {recursive:.1f}
times as long as the second, its BacksolveAdjoint {backsolve:.1f} times. Errors at {most} steps are
{low:.1e} to {high:.1e}.
"""

from matplotlib.figure import Figure

from contadj.figures import Slope
from contadj.orders import ExpectedOrder
from contadj.plotting import legend_below, line_style
from contadj.studies import work

RECORDS = ("work",)
FINDING = (
    "at tolerance {finest:.0e} CheckpointAdjoint takes {torch_ms:.0f} ms in PyTorch (torchdiffeq's "
    "odeint {odeint:.1f} times as long, odeint_adjoint {odeint_adjoint:.1f}, torchode "
    "{torchode:.1f}) and {jax_ms:.1f} ms in JAX (Diffrax's RecursiveCheckpointAdjoint "
    "{recursive:.1f} times)"
)
ROWS = {"torch": "PyTorch", "jax": "JAX"}


def _line(records, adjoint, mesh):
    if mesh == "fixed":
        return work.on_fixed_mesh(records["work"], adjoint)
    return work.at_tolerances(records["work"], adjoint)


def draw(records):
    figure = Figure(figsize=(7, 5.8))
    grid = figure.subplots(2, 2, sharey=True, sharex="col")
    for row, (framework, title) in zip(grid, ROWS.items(), strict=True):
        columns = (("adaptive", "gradient_seconds"), ("fixed", "bytes"))
        for axes, (mesh, cost) in zip(row, columns, strict=True):
            for adjoint in work.adjoints(records["work"], framework):
                line = _line(records, adjoint, mesh)
                label = work.label_of(adjoint)
                axes.plot(
                    [r[cost] for r in line],
                    [r["error"] for r in line],
                    **line_style(work.LABELS.index(label)),
                    label=label,
                )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(f"{title}, {'dopri5' if mesh == 'adaptive' else 'heun2'}")
        row[0].set_ylabel("relative error of the gradient")
    grid[1, 0].set_xlabel("seconds of one gradient")
    grid[1, 1].set_xlabel("peak bytes of one gradient")
    legend_below(figure, grid[:, 0], work.LABELS, ncols=3)
    return figure


def slopes(records):
    expected = ExpectedOrder(2, 0.15, "order of heun2, for discrete and continuous gradients")
    found = []
    for framework in ROWS:
        for adjoint in work.adjoints(records["work"], framework):
            line = _line(records, adjoint, "fixed")
            if len(line) > 2:  # forward mode is too slow for the longer meshes
                h = [work.T1 / r["num_steps"] for r in line]
                errors = [r["error"] for r in line]
                label = f"{adjoint}, heun2"
                found.append(Slope(label, h, errors, [work.FLOOR] * len(h), expected))
    return found


def numbers(records):
    def finest(adjoint):
        return _line(records, adjoint, "adaptive")[-1]

    ours = {one: finest(f"contadj.{one}.CheckpointAdjoint") for one in ROWS}

    def times(adjoint):
        own = ours[work.framework(adjoint)]
        return finest(adjoint)["gradient_seconds"] / own["gradient_seconds"]

    every = [r for r in records["work"] if r.status == "ok"]
    fixed = [r for r in every if r["mesh"] == "fixed"]
    adaptive = [r["tolerance"] for r in every if r["mesh"] == "adaptive"]
    most = _line(records, "contadj.torch.CheckpointAdjoint", "fixed")[-1]["num_steps"]
    errors = [r["error"] for r in fixed if r["num_steps"] == most]
    return {
        "coarsest": max(adaptive),
        "finest": ours["torch"]["tolerance"],
        "fewest": min(r["num_steps"] for r in fixed),
        "most": most,
        "torch_ms": 1e3 * ours["torch"]["gradient_seconds"],
        "jax_ms": 1e3 * ours["jax"]["gradient_seconds"],
        "odeint": times("torchdiffeq.odeint"),
        "odeint_adjoint": times("torchdiffeq.odeint_adjoint"),
        "torchode": times("torchode.AutoDiffAdjoint"),
        "recursive": times("diffrax.RecursiveCheckpointAdjoint"),
        "backsolve": times("diffrax.BacksolveAdjoint"),
        "low": min(errors),
        "high": max(errors),
    }
