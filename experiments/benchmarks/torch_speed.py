"""Speed of gradients against torchdiffeq and against the floor, as ratios measured in one run.

    python experiments/benchmarks/torch_speed.py [--compile] [--only spiral] [--threads 1]

**Spiral**: the neural ODE of the original paper, y' = net(y^3), 2-50-2 tanh, y0 = (2, 0), 30 (and
1000) observations on [0, 1.5], float32, dopri5, rtol 1e-3, atol 1e-6; one gradient of the squared
error to a damped spiral. **MLP**: rk4, 50 steps, float32, two hidden layers. The floor is what no
method can do without: the f evaluations of the forward solve, and one evaluation with its
vector-Jacobian product per stage, in a bare loop. All candidates of a case take turns; the ratio is
that of their medians. A turn is as many gradients in a row as take a tenth of a second, as in
training: one alone would mostly measure how the others emptied the processor's caches. With
--compile the first call, which compiles, is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torchdiffeq
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import contadj.torch as ct

Gradient = Callable[[], list[Tensor]]
MLPS = ((64, 2, 64), (256, 32, 128), (256, 64, 512))
STEPS = 50
TURN = 0.1
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class CubedNet(nn.Module):
    """net(y^3), 2-50-2."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for layer in (self.net[0], self.net[2]):
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, t, y):
        return self.net(y**3)


class MLP(nn.Module):
    """Two hidden layers."""

    def __init__(self, state: int, hidden: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(state, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, state),
        )  # fmt: skip

    def forward(self, t, y):
        return self.net(y)


class Bench:
    """Candidates measured in turns.

    Parameters
    ----------
    device : str
    seconds : float
        How long all candidates of a case take together, at least three rounds.
    clock : callable
    """

    def __init__(self, device: str, seconds: float, clock: Callable[[], float]):
        self._device, self._seconds, self._clock = device, seconds, clock

    def medians(self, candidates: dict[str, Gradient]) -> dict[str, float]:
        """Seconds of one gradient, by candidate."""
        repeats = {}
        for name, gradient in candidates.items():
            self._timed(gradient, 1)
            repeats[name] = max(1, round(TURN / self._timed(gradient, 1)))
        times: dict[str, list[float]] = {name: [] for name in candidates}
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
            for name, gradient in candidates.items():
                times[name].append(self._timed(gradient, repeats[name]))
        return {name: statistics.median(values) for name, values in times.items()}

    def _timed(self, gradient: Gradient, repeats: int) -> float:
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)
        begin = self._clock()
        for _ in range(repeats):
            gradient()
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)
        return (self._clock() - begin) / repeats


def relative(got: list[Tensor], want: list[Tensor]) -> float:
    """Relative distance of two gradients."""
    a, b = (torch.cat([grad.flatten() for grad in grads]) for grads in (got, want))
    return float((a - b).norm() / b.norm())


class Rows:
    """The table of one benchmark."""

    def __init__(self, title: str):
        self.table = Table(title=title)
        self.missed: list[str] = []
        for header, justify in (
            ("what", "left"), ("ms", "right"), ("against", "left"), ("ms", "right"),
            ("ratio", "right"), ("target", "right"), ("", "left"),
        ):  # fmt: skip
            self.table.add_column(header, justify=justify)

    def faster(self, name: str, ours: float, peer: str, theirs: float, target: float) -> None:
        """How many times faster than a peer."""
        self._add(name, ours, peer, theirs, theirs / ours, f">= {target:g}", theirs / ours < target)

    def at_most(self, name: str, ours: float, peer: str, theirs: float, target: float) -> None:
        """How many times the time of another."""
        self._add(name, ours, peer, theirs, ours / theirs, f"<= {target:g}", ours / theirs > target)

    def beside(self, name: str, ours: float, peer: str, theirs: float) -> None:
        """A ratio without a target."""
        self._add(name, ours, peer, theirs, ours / theirs, "", None)

    def _add(self, name, ours, peer, theirs, ratio, target, missed) -> None:
        mark = "" if missed is None else "missed" if missed else "met"
        self.table.add_row(
            name, f"{1e3 * ours:.2f}", peer, f"{1e3 * theirs:.2f}", f"{ratio:.2f}", target, mark
        )
        if missed:
            self.missed.append(f"{name} against {peer}: {ratio:.2f}, target {target}")

    def count(self, name: str, value: float, target: float) -> None:
        """A ratio of counts."""
        missed = value > target
        self.table.add_row(
            name, "", "", "", f"{value:.2f}", f"<= {target:g}", "missed" if missed else "met"
        )
        if missed:
            self.missed.append(f"{name}: {value:.2f}, target <= {target:g}")


def spiral(bench: Bench, device: str, compiled: bool) -> Rows:
    torch.manual_seed(0)
    field = CubedNet().to(device)
    params = list(field.parameters())
    y0 = torch.tensor([[2.0, 0.0]], device=device)
    settings = {"rtol": 1e-3, "atol": 1e-6, "method": "dopri5"}
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], device=device)
    checkpoint = ct.CheckpointAdjoint()

    def case(observations: int):
        t = torch.linspace(0.0, 1.5, observations, device=device)
        with torch.no_grad():
            target = torchdiffeq.odeint(
                lambda t, y: y**3 @ matrix, y0, t, rtol=1e-8, atol=1e-8, method="dopri5"
            )

        def gradient(integrate) -> Gradient:
            def run() -> list[Tensor]:
                loss = (integrate(t) - target).square().mean()
                return list(torch.autograd.grad(loss, params))

            return run

        return gradient

    def ours(adjoint, compile=False):
        return lambda t: ct.odeint(field, y0, t, adjoint=adjoint, compile=compile, **settings)

    few, many = case(30), case(1000)
    candidates = {
        "CheckpointAdjoint()": few(ours(checkpoint)),
        "CheckpointAdjoint(), 1000 observations": many(ours(checkpoint)),
        "BacksolveAdjoint()": few(ours(ct.BacksolveAdjoint())),
        "torchdiffeq odeint_adjoint": few(
            lambda t: torchdiffeq.odeint_adjoint(field, y0, t, **settings)
        ),
        "torchdiffeq odeint": few(lambda t: torchdiffeq.odeint(field, y0, t, **settings)),
    }
    if compiled:
        fast = torch.compile(field)
        candidates["CheckpointAdjoint(), compiled"] = few(ours(checkpoint, True))
        candidates["torchdiffeq odeint, compiled f"] = few(
            lambda t: torchdiffeq.odeint(fast, y0, t, **settings)
        )
    exact = candidates["torchdiffeq odeint"]()
    for name, gradient in candidates.items():
        # Two tolerances of 1e-3 and other meshes; the 1000 observations are another loss.
        error = relative(gradient(), exact)
        if "1000" not in name and not error < 0.05:
            raise SystemExit(f"{name}: the gradient is off by {error:.1e} from torchdiffeq's")
    seconds = bench.medians(candidates)
    solution = ct.solve(field, y0, torch.linspace(0.0, 1.5, 30), adjoint=checkpoint, **settings)
    torch.autograd.grad(solution.ys.square().sum(), params)
    stats = solution.stats
    both = stats.f_evaluations_forward + stats.f_evaluations_backward
    rows = Rows(f"spiral, 30 observations, {stats.steps_accepted} steps")
    ours_name, peer, bptt = (
        "CheckpointAdjoint()",
        "torchdiffeq odeint_adjoint",
        "torchdiffeq odeint",
    )
    rows.faster(ours_name, seconds[ours_name], peer, seconds[peer], 10.0)
    if compiled:
        name = "CheckpointAdjoint(), compiled"
        rows.faster(name, seconds[name], peer, seconds[peer], 100.0)
        other = "torchdiffeq odeint, compiled f"
        rows.faster(name, seconds[name], other, seconds[other], 10.0)
    rows.count(
        "f evaluations, forward and backward over forward", both / stats.f_evaluations_forward, 3.0
    )
    name = "CheckpointAdjoint(), 1000 observations"
    rows.at_most(name, seconds[name], "30 observations", seconds[ours_name], 2.0)
    rows.beside("BacksolveAdjoint()", seconds["BacksolveAdjoint()"], peer, seconds[peer])
    rows.beside(bptt, seconds[bptt], peer, seconds[peer])
    return rows


def floor(field: nn.Module, y0: Tensor) -> Gradient:
    """Bare evaluations of f, and bare vector-Jacobian products, as many as rk4 has stages."""
    params = list(field.parameters())
    t = torch.zeros((), device=y0.device)
    cotangent = torch.ones_like(y0)
    count = 4 * STEPS

    def run() -> list[Tensor]:
        with torch.no_grad():
            for _ in range(count):
                field(t, y0)
        grads: tuple[Tensor, ...] = ()
        for _ in range(count):
            leaf = y0.detach().requires_grad_()
            grads = torch.autograd.grad(field(t, leaf), (leaf, *params), cotangent)
        return list(grads)

    return run


def mlp(bench: Bench, device: str, compiled: bool, size: tuple[int, int, int]) -> Rows:
    batch, state, hidden = size
    torch.manual_seed(0)
    field = MLP(state, hidden).to(device)
    params = list(field.parameters())
    y0 = torch.randn(batch, state, device=device)
    t = torch.tensor([0.0, 1.0])
    mesh = {"method": "rk4", "options": {"num_steps": STEPS}}
    peer_mesh = {"method": "rk4", "options": {"step_size": 1.0 / STEPS}}

    def gradient(integrate) -> Gradient:
        return lambda: list(torch.autograd.grad(integrate()[-1].square().mean(), params))

    def ours(adjoint, compile=False) -> Gradient:
        return gradient(lambda: ct.odeint(field, y0, t, adjoint=adjoint, compile=compile, **mesh))

    adjoints = {
        "CheckpointAdjoint()": ct.CheckpointAdjoint(), "BacksolveAdjoint()": ct.BacksolveAdjoint()
    }  # fmt: skip
    candidates = {"floor": floor(field, y0)}
    candidates.update({name: ours(adjoint) for name, adjoint in adjoints.items()})
    if compiled:
        candidates.update(
            {f"{name}, compiled": ours(adjoint, True) for name, adjoint in adjoints.items()}
        )
    peer_t = t.to(device)
    peer, bptt = "torchdiffeq odeint_adjoint", "torchdiffeq odeint"
    candidates[peer] = gradient(lambda: torchdiffeq.odeint_adjoint(field, y0, peer_t, **peer_mesh))
    candidates[bptt] = gradient(lambda: torchdiffeq.odeint(field, y0, peer_t, **peer_mesh))
    exact = candidates[bptt]()
    for name, run in candidates.items():
        if name != "floor" and not (error := relative(run(), exact)) < 1e-3:
            raise SystemExit(f"{name}: the gradient is off by {error:.1e} from torchdiffeq's")
    seconds = bench.medians(candidates)
    smallest = size == MLPS[0]
    rows = Rows(f"MLP, (batch, state, hidden) = {size}, rk4, {STEPS} steps")
    for name in adjoints:
        target = 1.5 if smallest else 1.25
        rows.at_most(name, seconds[name], "floor", seconds["floor"], target)
        if compiled:
            name = f"{name}, compiled"
            if smallest:
                rows.at_most(name, seconds[name], "floor", seconds["floor"], 1.0)
            else:
                rows.beside(name, seconds[name], "floor", seconds["floor"])
    rows.beside(peer, seconds[peer], "floor", seconds["floor"])
    rows.beside(bptt, seconds[bptt], "floor", seconds["floor"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="also the compiled candidates")
    parser.add_argument("--only", choices=("spiral", "mlp"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall",
        help="cpu: processor time of all threads, for a machine shared with others",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=20.0, help="per case, all candidates")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.clock == "cpu" and arguments.device != "cpu":
        parser.error("--clock cpu does not see the work of another device")
    bench = Bench(arguments.device, arguments.seconds, CLOCKS[arguments.clock])
    console, missed = Console(), []
    console.print(
        f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} thread(s); "
        f"medians of interleaved runs, {arguments.clock} time"
    )
    cases: list[Callable[[], Rows]] = []
    if arguments.only != "mlp":
        cases.append(lambda: spiral(bench, arguments.device, arguments.compile))
    if arguments.only != "spiral":
        cases.extend(
            lambda size=size: mlp(bench, arguments.device, arguments.compile, size) for size in MLPS
        )
    for case in cases:
        rows = case()
        console.print(rows.table)
        missed += rows.missed
    if missed:
        raise SystemExit("missed:\n  " + "\n  ".join(missed))


if __name__ == "__main__":
    main()
