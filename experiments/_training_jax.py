"""Training in JAX: AdamW with a cosine schedule, and the cost of a gradient."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import _training
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _training import Cost, Training, console
from jax.flatten_util import ravel_pytree

import contadj.jax as cj

Loss = Callable[..., jax.Array]  # loss(model, *batch) -> scalar


def adjoint_of(name: str):
    """The adjoint of a name; checkpoint-K keeps K snapshots."""
    return _training.adjoint_of(cj, name)


def parser(description: str, out: str, epochs: int, num_steps: int) -> argparse.ArgumentParser:
    """The options of both scripts."""
    return _training.parser(cj, description, out, epochs, num_steps)


def start(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and choose the device."""
    arguments = _training.parse(cj, options)
    try:
        jax.config.update("jax_default_device", jax.devices(arguments.device)[0])
    except RuntimeError:
        options.error(f"--device: JAX has no {arguments.device!r}")
    return arguments


@dataclass(eq=False, kw_only=True)
class Trainer(Training):
    """Trains a module.

    Parameters
    ----------
    model : eqx.Module
    loss : callable
        loss(model, *batch) -> scalar.
    batches : callable
        batches(epoch) yields the batches of an epoch.
    held_out : callable
        held_out(model) returns the metric of the data left out.
    rate : float
        Learning rate of the first step.
    steps_per_epoch : int
        Batches in an epoch.
    """

    model: Any
    loss: Loss
    batches: Callable[[int], Iterable[tuple]]
    held_out: Callable[[Any], float]
    rate: float
    steps_per_epoch: int
    weight_decay: float = 0.0

    suffix = ".eqx"

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = optax.cosine_decay_schedule(self.rate, self.epochs * self.steps_per_epoch)
        self.optimizer = optax.adamw(schedule, weight_decay=self.weight_decay)
        self.state = self.optimizer.init(eqx.filter(self.model, eqx.is_inexact_array))
        self.seconds, self.steps = 0.0, 0

        @eqx.filter_jit
        def update(model, state, *batch):
            loss, gradient = eqx.filter_value_and_grad(self.loss)(model, *batch)
            params = eqx.filter(model, eqx.is_inexact_array)
            step, state = self.optimizer.update(gradient, state, params)
            return eqx.apply_updates(model, step), state, loss

        self.update = update

    def train_epoch(self) -> float:
        begin, losses = time.perf_counter(), []
        for batch in self.batches(self.epoch):
            self.model, self.state, loss = self.update(self.model, self.state, *batch)
            losses.append(loss)
        mean = float(jnp.mean(jnp.stack(losses)))
        self.seconds += time.perf_counter() - begin
        self.steps += len(losses)
        return mean

    def evaluate(self) -> float:
        return self.held_out(self.model)

    def write(self, file, record) -> None:
        file.write((json.dumps(record) + "\n").encode())
        eqx.tree_serialise_leaves(file, (self.model, self.state))

    def read(self, file):
        record = json.loads(file.readline())

        def take_over() -> None:
            like = (self.model, self.state)
            self.model, self.state = eqx.tree_deserialise_leaves(file, like)

        return record, take_over

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last epoch, or to an earlier one; compile time is printed apart."""
        if self.epoch < min(stop_after or self.epochs, self.epochs):
            begin = time.perf_counter()
            batch = next(iter(self.batches(self.epoch)))
            jax.block_until_ready(self.update(self.model, self.state, *batch))
            console.print(f"first step, compilation included: {time.perf_counter() - begin:.1f} s")
        super().fit(stop_after)
        if self.steps:
            console.print(f"then {1e3 * self.seconds / self.steps:.2f} ms a step")


def cost_of(model: Any, loss: Loss, batch: tuple) -> Cost:
    """XLA's temporary bytes and compile time of d(loss)/d(parameters) of a model."""
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def value(params, *batch):
        return loss(eqx.combine(params, rest), *batch)

    begin = time.perf_counter()
    compiled = jax.jit(jax.grad(value)).lower(params, *batch).compile()
    compilation = time.perf_counter() - begin
    gradient = jax.block_until_ready(compiled(params, *batch))
    seconds = _training.median_seconds(lambda: jax.block_until_ready(compiled(params, *batch)))
    size = compiled.memory_analysis().temp_size_in_bytes
    return Cost(size, seconds, compilation, np.asarray(ravel_pytree(gradient)[0]))


def compare(build: Callable[..., tuple[Any, Loss, tuple]], model: Any, num_steps: int) -> None:
    """Print the cost of a gradient with each adjoint, at the parameters of `model`.

    `build(adjoint, num_steps)` returns the model, its loss and a batch.
    """
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))

    def cost(adjoint, num_steps: int) -> Cost:
        built, *rest = build(adjoint, num_steps)
        params, other = eqx.partition(built, eqx.is_inexact_array)
        params = jax.tree.unflatten(jax.tree.structure(params), leaves)
        return cost_of(eqx.combine(params, other), *rest)

    _training.compare(cj, cost, num_steps, of_bytes="temp", of_count="compile s")
