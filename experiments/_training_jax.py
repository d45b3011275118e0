"""What the JAX training scripts share: options, checkpoints, loss curve, cost of a gradient."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import contadj.jax as cj

ADJOINTS = {
    "direct": cj.DirectAdjoint(),
    "checkpoint": cj.CheckpointAdjoint(),
    "checkpoint-4": cj.CheckpointAdjoint(snapshots=4),
    "reversible": cj.ReversibleAdjoint(),
    "backsolve": cj.BacksolveAdjoint(),
    "interpolating": cj.InterpolatingAdjoint(),
    "gauss": cj.GaussAdjoint(),
}
console = Console()
Loss = Callable[..., jax.Array]  # loss(model, *batch) -> scalar


def adjoint_of(name: str):
    """The adjoint of a name; checkpoint-K keeps K snapshots."""
    if name in ADJOINTS:
        return ADJOINTS[name]
    head, _, count = name.partition("-")
    if head == "checkpoint" and count.isdecimal() and int(count) > 0:
        return cj.CheckpointAdjoint(snapshots=int(count))
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
    options.add_argument("--device", default="cpu")
    return options


def start(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and choose the device."""
    arguments = options.parse_args()
    try:
        adjoint_of(arguments.adjoint)
    except argparse.ArgumentTypeError as error:
        options.error(f"--adjoint: {error}")
    for name in ("epochs", "num_steps"):
        if getattr(arguments, name) < 1:
            options.error(f"--{name.replace('_', '-')}: expected a positive number")
    try:
        jax.config.update("jax_default_device", jax.devices(arguments.device)[0])
    except RuntimeError:
        options.error(f"--device: JAX has no {arguments.device!r}")
    return arguments


@dataclass(eq=False)
class Trainer:
    """Trains a module with AdamW and a cosine schedule, epoch by epoch.

    Parameters
    ----------
    model : eqx.Module
    loss : callable
        loss(model, *batch) -> scalar.
    batches : callable
        batches(epoch) yields the batches of an epoch.
    held_out : callable
        held_out(model) returns the metric of the data left out.
    metric : str
        What it is called.
    rate : float
        Learning rate of the first step.
    steps_per_epoch : int
        Batches in an epoch.
    settings : dict
        What a resumed run must share with the one before it.
    """

    model: Any
    loss: Loss
    batches: Callable[[int], Iterable[tuple]]
    held_out: Callable[[Any], float]
    metric: str
    rate: float
    steps_per_epoch: int
    settings: dict[str, Any]
    out: Path
    epochs: int
    evaluate_every: int = 1
    weight_decay: float = 0.0
    epoch: int = 0
    history: list[float] = field(default_factory=list)
    held: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        schedule = optax.cosine_decay_schedule(self.rate, self.epochs * self.steps_per_epoch)
        self.optimizer = optax.adamw(schedule, weight_decay=self.weight_decay)
        self.state = self.optimizer.init(eqx.filter(self.model, eqx.is_inexact_array))
        self.settings = {**self.settings, "epochs": self.epochs}

        @eqx.filter_jit
        def update(model, state, *batch):
            loss, gradient = eqx.filter_value_and_grad(self.loss)(model, *batch)
            params = eqx.filter(model, eqx.is_inexact_array)
            step, state = self.optimizer.update(gradient, state, params)
            return eqx.apply_updates(model, step), state, loss

        self.update = update

    @property
    def checkpoint(self) -> Path:
        """The file a run goes on from."""
        return self.out / "checkpoint.eqx"

    def save(self) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one."""
        self.out.mkdir(parents=True, exist_ok=True)
        header = {
            "settings": self.settings, "epoch": self.epoch, "history": self.history,
            "held": self.held,
        }  # fmt: skip
        part = self.checkpoint.with_suffix(".part")
        with part.open("wb") as file:
            file.write((json.dumps(header) + "\n").encode())
            eqx.tree_serialise_leaves(file, (self.model, self.state))
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
            header = json.loads(file.readline())
            for name, value in self.settings.items():
                before = header["settings"].get(name)
                if before != value:
                    raise SystemExit(
                        f"--resume: the checkpoint was made with {name} = {before!r}, got "
                        f"{value!r}; give the same, or another --out"
                    )
            like = (self.model, self.state)
            self.model, self.state = eqx.tree_deserialise_leaves(file, like)
        self.epoch, self.history = header["epoch"], header["history"]
        self.held = [(epoch, value) for epoch, value in header["held"]]

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last epoch, or to an earlier one; compile time is printed apart."""
        last = self.epochs if stop_after is None else min(stop_after, self.epochs)
        if self.epoch < last:
            begin = time.perf_counter()
            batch = next(iter(self.batches(self.epoch)))
            jax.block_until_ready(self.update(self.model, self.state, *batch))
            console.print(f"first step, compilation included: {time.perf_counter() - begin:.1f} s")
        columns = (
            TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        seconds, steps = 0.0, 0
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=self.epochs, completed=self.epoch)
            while self.epoch < last:
                begin, losses = time.perf_counter(), []
                for batch in self.batches(self.epoch):
                    self.model, self.state, loss = self.update(self.model, self.state, *batch)
                    losses.append(loss)
                self.history.append(float(jnp.mean(jnp.stack(losses))))
                seconds, steps = seconds + time.perf_counter() - begin, steps + len(losses)
                self.epoch += 1
                if self.epoch % self.evaluate_every == 0 or self.epoch == last:
                    self.held.append((self.epoch, self.held_out(self.model)))
                    self.save()
                held = f", {self.metric} {self.held[-1][1]:.4g}" if self.held else ""
                progress.update(task, advance=1, description=f"loss {self.history[-1]:.4g}{held}")
        if steps:
            console.print(f"then {1e3 * seconds / steps:.2f} ms a step")

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
    """What one gradient takes: XLA's temporary bytes, seconds, compile time; and the gradient."""

    temporary: int
    seconds: float
    compilation: float
    gradient: jax.Array

    @staticmethod
    def of(model: Any, loss: Loss, batch: tuple, repeats: int = 5):
        """The cost of d(loss)/d(parameters) of a model."""
        params, rest = eqx.partition(model, eqx.is_inexact_array)

        def value(params, *batch):
            return loss(eqx.combine(params, rest), *batch)

        begin = time.perf_counter()
        compiled = jax.jit(jax.grad(value)).lower(params, *batch).compile()
        compilation = time.perf_counter() - begin
        gradient, seconds = jax.block_until_ready(compiled(params, *batch)), []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(params, *batch))
            seconds.append(time.perf_counter() - begin)
        size = compiled.memory_analysis().temp_size_in_bytes
        return Cost(size, statistics.median(seconds), compilation, ravel_pytree(gradient)[0])


def with_parameters(model: Any, trained: Any) -> Any:
    """`model` with the parameters of `trained`, which may have another adjoint."""
    leaves = jax.tree.leaves(eqx.filter(trained, eqx.is_inexact_array))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(params), leaves), rest)


def compare(build: Callable[..., tuple[Any, Loss, tuple]], num_steps: int) -> None:
    """Print the cost of a gradient with each adjoint, at `num_steps` and at four times as many.

    `build(adjoint, num_steps)` returns the model, its loss and a batch.
    """
    many = 4 * num_steps
    table = Table(title=f"one gradient: memory at {num_steps} and {many} steps per interval")
    table.add_column("adjoint")
    for header in (
        f"temp KiB, {num_steps}", f"temp KiB, {many}", "growth", f"ms, {num_steps}", f"ms, {many}",
        "compile s", "from direct",
    ):  # fmt: skip
        table.add_column(header, justify="right")
    exact = Cost.of(*build(ADJOINTS["direct"], num_steps), repeats=1).gradient
    for name, adjoint in ADJOINTS.items():
        few, more = (Cost.of(*build(adjoint, count)) for count in (num_steps, many))
        difference = float(jnp.linalg.norm(few.gradient - exact) / jnp.linalg.norm(exact))
        table.add_row(
            name, f"{few.temporary / 1024:.0f}", f"{more.temporary / 1024:.0f}",
            f"{more.temporary / max(few.temporary, 1):.2f}", f"{1e3 * few.seconds:.1f}",
            f"{1e3 * more.seconds:.1f}", f"{few.compilation:.1f}", f"{difference:.1e}",
        )  # fmt: skip
    console.print(table)
