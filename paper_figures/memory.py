"""Memory of a gradient against the number of steps.

Peak of live bytes (PyTorch: counted from every operator's result; JAX: XLA's temporary memory of
the compiled gradient) of the gradient of a neural ODE, 256 samples of 4 numbers, 148 parameters,
N steps of heun2; the grey line is N states. Expected: constant bytes for rebuilt states, forward
mode and {snapshots} snapshots; one state a step where states are stored; activations, at least 8
states a step, where plain backpropagation keeps the graph; about sqrt(2 N) states in Diffrax's
recursive checkpointing, and 16 states for each factor of 16 in its DirectAdjoint. Found:
{checkpoint:.2f} states a step for CheckpointAdjoint of PyTorch and {checkpoint_jax:.2f} in JAX,
{direct:.1f} for DirectAdjoint of PyTorch, {odeint:.1f} for odeint of torchdiffeq, {torchode:.1f}
for torchode; what is constant grows by at most {constant:.3f} states a step. At {steps} steps
DirectAdjoint of PyTorch holds {direct_mib:.1f} MiB, CheckpointAdjoint {checkpoint_mib:.1f} MiB,
BacksolveAdjoint {backsolve_mib:.2f} MiB, odeint_adjoint {odeint_adjoint_mib:.2f} MiB. Per-sample
parameter gradients make the bytes of BacksolveAdjoint of torchode large at every N.
"""

from matplotlib.figure import Figure

from contadj.plotting import legend_below, plot_line
from contadj.studies import work

RECORDS = ("work",)
FINDING = (
    "bytes grow as each adjoint promises: {checkpoint:.2f} states a step in PyTorch's "
    "CheckpointAdjoint against {direct:.0f} in plain backpropagation, and at most {constant:.3f} "
    "where they are constant"
)


def draw(records):
    figure = Figure(figsize=(7, 4.3))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, framework, title in zip(panels, ("torch", "jax"), ("PyTorch", "JAX"), strict=True):
        for adjoint in work.adjoints(records["work"], framework):
            line = work.on_fixed_mesh(records["work"], adjoint)
            steps = [r["num_steps"] for r in line]
            sizes = [r["bytes"] for r in line]
            label = work.label_of(adjoint)
            plot_line(axes, steps, sizes, [0.0] * len(line), label, work.LABELS.index(label))
        ends = [16, 1024]
        states = [n * work.STATE_BYTES for n in ends]
        axes.plot(ends, states, color="0.75", linewidth=2.5, zorder=1)
        axes.set_xlabel("number of steps N")
        axes.set_title(title)
        ticks = [16, 64, 256, 1024, *([4096] if framework == "jax" else [])]
        axes.set_xticks(ticks, list(map(str, ticks)))
    panels[0].set_ylabel("peak bytes of one gradient")
    legend_below(figure, panels, work.LABELS, ncols=3)
    return figure


def slopes(records):
    lines = [
        work.on_fixed_mesh(records["work"], adjoint)
        for framework in ("torch", "jax")
        for adjoint in work.adjoints(records["work"], framework)
    ]
    # Two pairs at least; forward mode is too slow for the longer meshes.
    return [one for one in map(work.growth, lines) if len(one.h) > 2]


def numbers(records):
    lines = {
        adjoint: work.on_fixed_mesh(records["work"], adjoint)
        for framework in ("torch", "jax")
        for adjoint in work.adjoints(records["work"], framework)
    }
    steps = {adjoint: work.states_per_step(line) for adjoint, line in lines.items()}

    def mib(adjoint):
        return lines[adjoint][-1]["bytes"] / 2**20

    return {
        "snapshots": work.SNAPSHOTS,
        "checkpoint": steps["contadj.torch.CheckpointAdjoint"],
        "checkpoint_jax": steps["contadj.jax.CheckpointAdjoint"],
        "direct": steps["contadj.torch.DirectAdjoint"],
        "odeint": steps["torchdiffeq.odeint"],
        "torchode": steps["torchode.AutoDiffAdjoint"],
        "constant": max(x for name, x in steps.items() if work.GROWTH[name] == "constant"),
        "steps": lines["contadj.torch.DirectAdjoint"][-1]["num_steps"],
        "direct_mib": mib("contadj.torch.DirectAdjoint"),
        "checkpoint_mib": mib("contadj.torch.CheckpointAdjoint"),
        "backsolve_mib": mib("contadj.torch.BacksolveAdjoint"),
        "odeint_adjoint_mib": mib("torchdiffeq.odeint_adjoint"),
    }
