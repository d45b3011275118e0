"""What the training scripts share: command line, checkpoints, loss curve, cost of a gradient."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import contadj.torch as ct

ADJOINTS: dict[str, ct.Adjoint] = {
    "direct": ct.DirectAdjoint(),
    "checkpoint": ct.CheckpointAdjoint(),
    "checkpoint-4": ct.CheckpointAdjoint(snapshots=4),
    "reversible": ct.ReversibleAdjoint(),
    "backsolve": ct.BacksolveAdjoint(),
    "interpolating": ct.InterpolatingAdjoint(),
    "gauss": ct.GaussAdjoint(),
}
console = Console()


def adjoint_of(name: str) -> ct.Adjoint:
    """The adjoint of a name; checkpoint-K keeps K snapshots."""
    if name in ADJOINTS:
        return ADJOINTS[name]
    head, _, count = name.partition("-")
    if head == "checkpoint" and count.isdecimal() and int(count) > 0:
        return ct.CheckpointAdjoint(snapshots=int(count))
    raise argparse.ArgumentTypeError(
        f"expected one of {', '.join(ADJOINTS)} or checkpoint-K, got {name!r}"
    )


def parser(description: str, out: str, epochs: int, num_steps: int) -> argparse.ArgumentParser:
    """The options of both scripts."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--adjoint", default="checkpoint", help=f"{', '.join(ADJOINTS)} or checkpoint-K"
    )
    options.add_argument("--compare", action="store_true", help="table over all adjoints; no run")
    options.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path(out), help="where results are written")
    options.add_argument("--epochs", type=int, default=epochs)
    options.add_argument("--stop-after", type=int, help="end after this epoch, to resume later")
    options.add_argument("--num-steps", type=int, default=num_steps, help="per interval of t")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--device", default="cpu")
    return options


def start(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, set threads and seed."""
    arguments = options.parse_args()
    try:
        adjoint_of(arguments.adjoint)
    except argparse.ArgumentTypeError as error:
        options.error(f"--adjoint: {error}")
    for name in ("epochs", "num_steps", "threads"):
        if getattr(arguments, name) < 1:
            options.error(f"--{name.replace('_', '-')}: expected a positive number")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    return arguments


@dataclass(eq=False)
class Trainer:
    """Trains a module with Adam and a cosine schedule, epoch by epoch.

    Parameters
    ----------
    model : nn.Module
    losses : callable
        losses(epoch) yields functions without arguments, one a step, that return the loss.
    held_out : callable
        held_out() returns the metric of the data left out.
    metric : str
        What it is called.
    rate : float
        Learning rate of the first epoch.
    settings : dict
        What a resumed run must share with the one before it.
    """

    model: nn.Module
    losses: Callable[[int], Iterable[Callable[[], Tensor]]]
    held_out: Callable[[], float]
    metric: str
    rate: float
    settings: dict[str, Any]
    out: Path
    epochs: int
    evaluate_every: int = 1
    weight_decay: float = 0.0
    epoch: int = 0
    history: list[float] = field(default_factory=list)
    held: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, weight_decay=self.weight_decay
        )
        self.settings = {**self.settings, "epochs": self.epochs}

    @property
    def checkpoint(self) -> Path:
        """The file a run goes on from."""
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "settings": self.settings,
            "epoch": self.epoch,
            "history": self.history,
            "held": self.held,
        }
        part = self.checkpoint.with_suffix(".part")
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.checkpoint)

    def load(self) -> None:
        """Go on from the checkpoint."""
        if not self.checkpoint.exists():
            raise SystemExit(
                f"--resume: expected {self.checkpoint}, which is not there; leave --resume out"
            )
        state = torch.load(self.checkpoint, weights_only=True)
        for name, value in self.settings.items():
            before = state["settings"].get(name)
            if before != value:
                raise SystemExit(
                    f"--resume: the checkpoint was made with {name} = {before!r}, got {value!r}; "
                    "give the same, or another --out"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.history = state["epoch"], state["history"]
        self.held = [(epoch, value) for epoch, value in state["held"]]

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last epoch, or to an earlier one."""
        last = self.epochs if stop_after is None else min(stop_after, self.epochs)
        columns = (
            TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=self.epochs, completed=self.epoch)
            while self.epoch < last:
                rate = self.rate * 0.5 * (1.0 + math.cos(math.pi * self.epoch / self.epochs))
                self.optimizer.param_groups[0]["lr"] = rate
                total, count = 0.0, 0
                for loss_of_step in self.losses(self.epoch):
                    self.optimizer.zero_grad()
                    loss = loss_of_step()
                    loss.backward()
                    self.optimizer.step()
                    total, count = total + float(loss.detach()), count + 1
                self.history.append(total / count)
                self.epoch += 1
                if self.epoch % self.evaluate_every == 0 or self.epoch == last:
                    self.held.append((self.epoch, self.held_out()))
                    self.save()
                held = f", {self.metric} {self.held[-1][1]:.4g}" if self.held else ""
                progress.update(task, advance=1, description=f"loss {self.history[-1]:.4g}{held}")

    def draw(self) -> Path:
        """Draw the loss curve."""
        figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
        axis.semilogy(range(1, len(self.history) + 1), self.history, label="training loss")
        axis.set(xlabel="epoch", ylabel="training loss")
        right = axis.twinx()
        right.plot(*zip(*self.held, strict=True), color="tab:orange", label=self.metric)
        right.set_ylabel(self.metric)
        figure.legend(loc="outside upper center", ncols=2)
        path = self.out / "loss.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
        return path


@dataclass(frozen=True)
class Cost:
    """What one gradient takes: live bytes, seconds, f evaluations; and the gradient itself."""

    live: int
    seconds: float
    evaluations: int
    gradient: Tensor

    @staticmethod
    def of(model: nn.Module, block: ct.NeuralODE, loss: Callable[[], Tensor], repeats: int = 5):
        """The cost of d(loss)/d(parameters) of a model around `block`."""
        params = list(model.parameters())
        device = params[0].device

        def gradient() -> Tensor:
            grads = torch.autograd.grad(loss(), params)
            return torch.cat([grad.flatten() for grad in grads])

        value, live = ct.peak_live_bytes(gradient, device)
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            gradient()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begin)
        assert block.stats is not None
        evaluations = block.stats.f_evaluations_forward + block.stats.f_evaluations_backward
        return Cost(live, statistics.median(seconds), evaluations, value)


def compare(
    build: Callable[[ct.Adjoint, int], tuple[nn.Module, ct.NeuralODE, Callable[[], Tensor]]],
    num_steps: int,
) -> None:
    """Print the cost of a gradient with each adjoint, at `num_steps` and at four times as many.

    `build(adjoint, num_steps)` returns the model, its solve, and its loss.
    """
    many = 4 * num_steps
    table = Table(title=f"one gradient: memory at {num_steps} and {many} steps per interval")
    table.add_column("adjoint")
    for header in (
        f"live KiB, {num_steps}", f"live KiB, {many}", "growth", f"ms, {num_steps}",
        f"ms, {many}", f"f evaluations, {num_steps}", "from direct",
    ):  # fmt: skip
        table.add_column(header, justify="right")
    exact = Cost.of(*build(ADJOINTS["direct"], num_steps), repeats=1).gradient
    for name, adjoint in ADJOINTS.items():
        few, more = (Cost.of(*build(adjoint, count)) for count in (num_steps, many))
        difference = float((few.gradient - exact).norm() / exact.norm())
        table.add_row(
            name, f"{few.live / 1024:.0f}", f"{more.live / 1024:.0f}",
            f"{more.live / few.live:.2f}", f"{1e3 * few.seconds:.1f}", f"{1e3 * more.seconds:.1f}",
            str(few.evaluations), f"{difference:.1e}",
        )  # fmt: skip
    console.print(table)
