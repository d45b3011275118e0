"""The bouncing balls of `contadj.studies.contact`, side by side in one rollout."""

from __future__ import annotations

from math import pi
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tableaus import Tableau
from ..torch import implicit_step, rollout
from .contact import GRAVITY, RESTITUTION, SPEED, T1, Array


def sweep(
    contact: str, tableau: Tableau, num_steps: int, height: Array, k: float
) -> tuple[Array, Array]:
    """As `contadj.studies.contact.sweep`."""
    h = T1 / num_steps

    def field(z: Tensor, p: Any) -> Tensor:
        e, g = p
        y, v = z.unbind(1)
        push = -g
        if contact == "penalty":
            decay = -torch.log(e)
            c = 2 * decay / torch.sqrt(pi**2 + decay**2) * k**0.5
            push = push + torch.where(y < 0, -k * y - c * v, 0.0)
        return torch.stack([v, push], 1)

    def fly(z: Tensor, h: Any, p: Any) -> Tensor:
        """One step of the method; h may differ from ball to ball."""
        slopes: list[Tensor] = []
        for row in tableau.a:
            stage = z
            for weight, slope in zip(row, slopes, strict=False):
                stage = stage + h * float(weight) * slope
            slopes.append(field(stage, p))
        for weight, slope in zip(tableau.b, slopes, strict=True):
            z = z + h * float(weight) * slope
        return z

    def bounce(z: Tensor, p: Any) -> Tensor:
        y, v = z.unbind(1)
        e = p[0]
        floor = {"clamp": torch.zeros_like(y), "reflect": -e * y}.get(contact, y)
        return torch.stack([floor, -e * v], 1)

    def step(n: int, z: Tensor, a: Any, p: Any) -> Tensor:
        free = fly(z, h, p)
        if contact == "penalty":
            return free
        hit = ((free[:, 0] < 0) & (free[:, 1] < 0))[:, None]
        if contact != "time_of_impact":
            return torch.where(hit, bounce(free, p), free)

        def residual(delta: Tensor, z: Tensor, p: Any) -> Tensor:
            return torch.where(hit, fly(z, delta, p)[:, :1], delta)

        guess = torch.where(hit, h * z[:, :1] / (z - free)[:, :1], 0.0)
        delta = implicit_step(residual, guess, z, p, batch_dims=1)
        return torch.where(hit, fly(bounce(fly(z, delta, p), p), h - delta, p), free)

    def terminal_cost(z: Tensor, p: Any) -> Tensor:
        return z[:, 0].sum()

    start = torch.as_tensor(np.stack([height, np.full_like(height, SPEED)], 1)).requires_grad_()
    e, g = (torch.full((len(height),), one, dtype=torch.float64) for one in (RESTITUTION, GRAVITY))
    inputs = start, e.requires_grad_(), g.requires_grad_()
    cost, states = rollout(
        step, start, torch.arange(num_steps), (e, g), terminal_cost=terminal_cost
    )
    d_start, d_e, d_g = torch.autograd.grad(cost, inputs)
    gradient = torch.cat([d_start, d_e[:, None], d_g[:, None]], 1)
    return states[-1, :, 0].detach().numpy(), gradient.numpy()
