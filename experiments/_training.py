"""What the training scripts of both frameworks share: options, checkpoints, progress, costs."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, ClassVar

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

console = Console()


def adjoints(backend: ModuleType) -> dict[str, Any]:
    """The adjoints that are compared, of contadj.torch or contadj.jax."""
    return {
        "direct": backend.DirectAdjoint(),
        "checkpoint": backend.CheckpointAdjoint(),
        "checkpoint-4": backend.CheckpointAdjoint(snapshots=4),
        "reversible": backend.ReversibleAdjoint(),
        "backsolve": backend.BacksolveAdjoint(),
        "interpolating": backend.InterpolatingAdjoint(),
        "gauss": backend.GaussAdjoint(),
    }


def adjoint_of(backend: ModuleType, name: str) -> Any:
    """The adjoint of a name; checkpoint-K keeps K snapshots."""
    known = adjoints(backend)
    if name in known:
        return known[name]
    head, _, count = name.partition("-")
    if head == "checkpoint" and count.isdecimal() and int(count) > 0:
        return backend.CheckpointAdjoint(snapshots=int(count))
    raise argparse.ArgumentTypeError(
        f"expected one of {', '.join(known)} or checkpoint-K, got {name!r}"
    )


def parser(
    backend: ModuleType, description: str, out: str, epochs: int, num_steps: int
) -> argparse.ArgumentParser:
    """The options of every script."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--adjoint", default="checkpoint", help=f"{', '.join(adjoints(backend))} or checkpoint-K"
    )
    options.add_argument("--compare", action="store_true", help="table over all adjoints; no run")
    options.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path(out), help="where results are written")
    options.add_argument("--epochs", type=int, default=epochs)
    options.add_argument("--stop-after", type=int, help="end after this epoch, to resume later")
    options.add_argument("--num-steps", type=int, default=num_steps, help="per interval of t")
    options.add_argument("--device", default="cpu")
    return options


def parse(backend: ModuleType, options: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, its adjoint and its counts checked."""
    arguments = options.parse_args()
    try:
        adjoint_of(backend, arguments.adjoint)
    except argparse.ArgumentTypeError as error:
        options.error(f"--adjoint: {error}")
    for name in ("epochs", "num_steps", "threads"):
        if getattr(arguments, name, 1) < 1:
            options.error(f"--{name.replace('_', '-')}: expected a positive number")
    return arguments


@dataclass(eq=False, kw_only=True)
class Training(ABC):
    """A run that is evaluated, saved, resumed and drawn; subclasses train.

    Parameters
    ----------
    metric : str
        What is measured on the data left out.
    settings : dict
        What a resumed run must share with the one before it.
    out : Path
        Where results are written.
    epochs : int
        How long the run is.
    evaluate_every : int
        Epochs from one evaluation, and checkpoint, to the next.
    """

    metric: str
    settings: dict[str, Any]
    out: Path
    epochs: int
    evaluate_every: int = 1
    epoch: int = 0
    history: list[float] = field(default_factory=list)
    held: list[tuple[int, float]] = field(default_factory=list)

    suffix: ClassVar[str]

    def __post_init__(self) -> None:
        self.settings = {**self.settings, "epochs": self.epochs}

    @abstractmethod
    def train_epoch(self) -> float:
        """Train for an epoch; the mean loss."""

    @abstractmethod
    def evaluate(self) -> float:
        """The metric of the data left out."""

    @abstractmethod
    def write(self, file: BinaryIO, record: dict[str, Any]) -> None:
        """Write a checkpoint: the record, the parameters and the optimiser's state."""

    @abstractmethod
    def read(self, file: BinaryIO) -> tuple[dict[str, Any], Callable[[], None]]:
        """The record of a checkpoint, and what takes over the rest of it."""

    @property
    def checkpoint(self) -> Path:
        """The file a run goes on from."""
        return self.out / f"checkpoint{self.suffix}"

    def save(self) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one."""
        self.out.mkdir(parents=True, exist_ok=True)
        record = {
            "settings": self.settings, "epoch": self.epoch, "history": self.history,
            "held": self.held,
        }  # fmt: skip
        part = self.checkpoint.with_suffix(".part")
        with part.open("wb") as file:
            self.write(file, record)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.checkpoint)

    def load(self) -> None:
        """Go on from the checkpoint."""
        if not self.checkpoint.exists():
            raise SystemExit(
                f"--resume: expected {self.checkpoint}, which is not there; leave --resume out"
            )
        with self.checkpoint.open("rb") as file:
            record, take_over = self.read(file)
            for name, value in self.settings.items():
                before = record["settings"].get(name)
                if before != value:
                    raise SystemExit(
                        f"--resume: the checkpoint was made with {name} = {before!r}, got "
                        f"{value!r}; give the same, or another --out"
                    )
            take_over()
        self.epoch, self.history = record["epoch"], record["history"]
        self.held = [(epoch, value) for epoch, value in record["held"]]

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
                self.history.append(self.train_epoch())
                self.epoch += 1
                if self.epoch % self.evaluate_every == 0 or self.epoch == last:
                    self.held.append((self.epoch, self.evaluate()))
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
    """What one gradient takes: bytes, seconds, and what else its framework counts; the gradient."""

    bytes: int
    seconds: float
    count: float
    gradient: np.ndarray


def median_seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Wall time of a call."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def compare(
    backend: ModuleType,
    cost: Callable[[Any, int], Cost],
    num_steps: int,
    *,
    of_bytes: str,
    of_count: str,
) -> None:
    """Print the cost of a gradient with each adjoint, at `num_steps` and at four times as many.

    `cost(adjoint, num_steps)` measures it; `of_bytes` and `of_count` say what it counts.
    """
    many = 4 * num_steps
    table = Table(title=f"one gradient: memory at {num_steps} and {many} steps per interval")
    table.add_column("adjoint")
    for header in (
        f"{of_bytes} KiB, {num_steps}", f"{of_bytes} KiB, {many}", "growth", f"ms, {num_steps}",
        f"ms, {many}", f"{of_count}, {num_steps}", "from direct",
    ):  # fmt: skip
        table.add_column(header, justify="right")
    exact = None
    for name, adjoint in adjoints(backend).items():  # direct, the exact one, is the first
        few, more = cost(adjoint, num_steps), cost(adjoint, many)
        exact = few.gradient if exact is None else exact
        difference = np.linalg.norm(few.gradient - exact) / np.linalg.norm(exact)
        table.add_row(
            name, f"{few.bytes / 1024:.0f}", f"{more.bytes / 1024:.0f}",
            f"{more.bytes / max(few.bytes, 1):.2f}", f"{1e3 * few.seconds:.1f}",
            f"{1e3 * more.seconds:.1f}", f"{few.count:.4g}", f"{difference:.1e}",
        )  # fmt: skip
    console.print(table)
