"""Live bytes of one gradient at many steps over those at few; the gradient is asserted too.

    python experiments/benchmarks/torch_memory.py [--steps 10000] [--base 100] [--device cpu]

The linear field y' = r y on a state of 1 MiB, two rates r, rk4 on a fixed mesh, float64. The
numerical solution and its gradient have a closed form, which shares no code with the package: a
step multiplies by R(h r), R(x) = sum_k x^k / k! up to k = 4. The loss is the mean over the
observations of <w, y(t_j)>, reduced as the solve passes them.

With more observation times than steps, several states are interpolated at once within a step. That
would make the few-step run look large, so it observes at most every step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import contadj.torch as ct

TARGET = 1.05
SPAN = 2.0
RATES = (-0.3, 0.2)
WEIGHTS = (1.0, 2.0)
ADJOINTS = {
    "BacksolveAdjoint()": ct.BacksolveAdjoint(),
    "ReversibleAdjoint(coupling=0.999)": ct.ReversibleAdjoint(coupling=0.999),
    "CheckpointAdjoint(snapshots=16)": ct.CheckpointAdjoint(snapshots=16),
    "CheckpointAdjoint()": ct.CheckpointAdjoint(),
    "DirectAdjoint()": ct.DirectAdjoint(),
}
CONSTANT = tuple(ADJOINTS)[:3]


class Growth(nn.Module):
    """y' = r y on (2, n) numbers, one rate per row."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.tensor(RATES, dtype=torch.float64))

    def forward(self, t, y):
        return self.rates[:, None] * y


@dataclass(frozen=True)
class Case:
    """One gradient: the state's size, the mesh and the observation times."""

    num_steps: int
    observations: int
    num_samples: int = 65_536
    device: str = "cpu"

    def state(self) -> Tensor:
        """(2, n) float64."""
        generator = torch.Generator().manual_seed(0)
        state = torch.randn(2, self.num_samples, generator=generator, dtype=torch.float64)
        return state.to(self.device)

    @property
    def on_mesh(self) -> bool:
        """Whether the observations are at step times."""
        return self.num_steps % (self.observations - 1) == 0

    def mesh(self) -> Tensor:
        """The step times."""
        return torch.linspace(0.0, SPAN, self.num_steps + 1, dtype=torch.float64)

    def times(self) -> Tensor:
        """The observation times, equally spaced."""
        if self.on_mesh:
            return self.mesh()[:: self.num_steps // (self.observations - 1)]
        return torch.linspace(0.0, SPAN, self.observations, dtype=torch.float64)

    def closed_form(self, exact: bool) -> tuple[Tensor, Tensor]:
        """dL/dy0 and dL/d(rates), of the exact solution or of rk4 with observations on its mesh."""
        h = SPAN / self.num_steps
        t = self.times().numpy()[1:]
        rates = np.array(RATES)[:, None]
        if exact:
            growth, slope = np.exp(rates * t), t * np.exp(rates * t)
        else:
            steps, x = np.rint(t / h), h * rates
            factor = 1 + x + x**2 / 2 + x**3 / 6 + x**4 / 24
            growth = factor**steps
            slope = steps * h * (1 + x + x**2 / 2 + x**3 / 6) * factor ** (steps - 1)
        weights = np.array(WEIGHTS)
        y0 = self.state().cpu().double().numpy()
        grad_y0 = np.repeat((weights * growth.mean(1))[:, None], self.num_samples, axis=1)
        grad_rates = weights * slope.mean(1) * y0.sum(1)
        return torch.from_numpy(grad_y0), torch.from_numpy(grad_rates)

    def gradient(self, adjoint: ct.Adjoint) -> tuple[Tensor, Tensor]:
        """dL/dy0 and dL/d(rates), the loss reduced as the solve passes the observations."""
        field = Growth().to(self.device)
        y0 = self.state().requires_grad_()
        count = self.observations - 1

        def loss(i, t, y):
            if i == 0:
                return 0.0 * y[0, 0]
            return (WEIGHTS[0] * y[0].sum() + WEIGHTS[1] * y[1].sum()) / count

        options = {"mesh": self.mesh()}
        solution = ct.solve(
            field, y0, self.times(), method="rk4", options=options, adjoint=adjoint, loss=loss
        )
        assert solution.loss is not None
        grads = torch.autograd.grad(solution.loss, (y0, field.rates))
        return grads[0], grads[1]

    def measure(self, adjoint: ct.Adjoint) -> tuple[int, float, float]:
        """Live bytes, seconds and the relative error of the gradient."""
        start = time.perf_counter()
        grads, live = ct.peak_live_bytes(lambda: self.gradient(adjoint), self.device)
        seconds = time.perf_counter() - start
        discrete = isinstance(adjoint, ct.CheckpointAdjoint | ct.DirectAdjoint)
        expected = self.closed_form(exact=not (discrete and self.on_mesh))
        error = max(
            float((got.cpu() - want).norm() / want.norm())
            for got, want in zip(grads, expected, strict=True)
        )
        return live, seconds, error

    def tolerance(self, adjoint: ct.Adjoint) -> float:
        """Round-off where the closed form is that of the numerical solution, else order 4."""
        discrete = isinstance(adjoint, ct.CheckpointAdjoint | ct.DirectAdjoint)
        if discrete and self.on_mesh:
            return 1e-10
        # Undoing a coupled step amplifies round-off by 1/coupling.
        return (SPAN / self.num_steps) ** 4 + 1e-7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--base", type=int, default=100)
    parser.add_argument("--observations", type=int, nargs="+", default=[2, 1001])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--adjoint", choices=CONSTANT, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.adjoint or CONSTANT
    few, many = arguments.base, arguments.steps
    table = Table(title=f"live bytes of a gradient, state of 1 MiB, {arguments.device}")
    for header in ("adjoint", "observations", f"{few} steps", f"{many} steps", "ratio", "target"):
        table.add_column(header, justify="left" if header == "adjoint" else "right")
    table.add_column("gradient error", justify="right")
    table.add_column("seconds", justify="right")
    missed = []

    def add(name: str, observations: int, few: int, many: int, target: float) -> None:
        adjoint = ADJOINTS[name]
        cases = [Case(n, min(observations, n + 1), device=arguments.device) for n in (few, many)]
        (small, *_, first), (large, seconds, error) = (case.measure(adjoint) for case in cases)
        for case, got in zip(cases, (first, error), strict=True):
            if got > case.tolerance(adjoint):
                raise SystemExit(f"{name}: the gradient is off by {got:.1e} in {case}")
        ratio = large / small
        if ratio > target:
            missed.append(f"{name} at {observations} times")
        table.add_row(
            name, str(observations), f"{small / 2**20:.2f} MiB", f"{large / 2**20:.2f} MiB",
            f"{ratio:.4f}", f"<= {target:.3f}", f"{error:.1e}", f"{seconds:.1f}",
        )  # fmt: skip
        Console(stderr=True).print(f"{name}, {observations} times: {ratio:.4f}")

    for observations in arguments.observations:
        for name in names:
            add(name, observations, few, many, TARGET)
    if not arguments.adjoint:
        # States alone: what is there at `few` steps, and one state more per step.
        small = Case(few, 2, device=arguments.device)
        live, _, _ = small.measure(ADJOINTS["CheckpointAdjoint()"])
        states = 10 * few
        allowed = (live + (states - few) * 2**20) / live
        add("CheckpointAdjoint()", 2, few, states, TARGET * allowed)
    Console().print(table)
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
