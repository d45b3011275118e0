"""Training in PyTorch: AdamW with a cosine schedule, and the cost of a gradient."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import _training
import numpy as np
import torch
from _training import Cost, Training
from torch import Tensor, nn

import contadj.torch as ct

Built = tuple[nn.Module, ct.NeuralODE, Callable[[], Tensor]]


def adjoint_of(name: str) -> ct.Adjoint:
    """The adjoint of a name; checkpoint-K keeps K snapshots."""
    return _training.adjoint_of(ct, name)


def parser(description: str, out: str, epochs: int, num_steps: int) -> argparse.ArgumentParser:
    """The options of both scripts."""
    options = _training.parser(ct, description, out, epochs, num_steps)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    return options


def start(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, set threads and seed."""
    arguments = _training.parse(ct, options)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    return arguments


@dataclass(eq=False, kw_only=True)
class Trainer(Training):
    """Trains a module.

    Parameters
    ----------
    model : nn.Module
    losses : callable
        losses(epoch) yields functions without arguments, one a step, that return the loss.
    held_out : callable
        held_out() returns the metric of the data left out.
    rate : float
        Learning rate of the first epoch.
    """

    model: nn.Module
    losses: Callable[[int], Iterable[Callable[[], Tensor]]]
    held_out: Callable[[], float]
    rate: float
    weight_decay: float = 0.0

    suffix = ".pt"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, weight_decay=self.weight_decay
        )

    def train_epoch(self) -> float:
        rate = self.rate * 0.5 * (1.0 + math.cos(math.pi * self.epoch / self.epochs))
        self.optimizer.param_groups[0]["lr"] = rate
        total, count = 0.0, 0
        for loss_of_step in self.losses(self.epoch):
            self.optimizer.zero_grad()
            loss = loss_of_step()
            loss.backward()
            self.optimizer.step()
            total, count = total + float(loss.detach()), count + 1
        return total / count

    def evaluate(self) -> float:
        return self.held_out()

    def write(self, file, record) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, **record}, file)

    def read(self, file):
        state = torch.load(file, weights_only=True)

        def take_over() -> None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

        return state, take_over


def cost_of(model: nn.Module, block: ct.NeuralODE, loss: Callable[[], Tensor]) -> Cost:
    """Live bytes and f evaluations of d(loss)/d(parameters) of a model around `block`."""
    params = list(model.parameters())
    device = params[0].device

    def gradient() -> Tensor:
        grads = torch.autograd.grad(loss(), params)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return torch.cat([grad.flatten() for grad in grads])

    value, live = ct.peak_live_bytes(gradient, device)
    seconds = _training.median_seconds(gradient)
    assert block.stats is not None
    evaluations = block.stats.f_evaluations_forward + block.stats.f_evaluations_backward
    return Cost(live, seconds, evaluations, np.asarray(value.cpu()))


def compare(build: Callable[[ct.Adjoint, int], Built], model: nn.Module, num_steps: int) -> None:
    """Print the cost of a gradient with each adjoint, at the parameters of `model`."""
    state = model.state_dict()

    def cost(adjoint: ct.Adjoint, num_steps: int) -> Cost:
        built = build(adjoint, num_steps)
        built[0].load_state_dict(state)
        return cost_of(*built)

    _training.compare(ct, cost, num_steps, of_bytes="live", of_count="f evaluations")
