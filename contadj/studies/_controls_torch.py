"""The pendulum of `contadj.studies.controls` with one control value per step and stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tableaus import Tableau
from ..torch import implicit_step, rollout_adjoint
from .controls import TARGET, Y0, Array, B, K


def _field(z: Tensor, u: Tensor) -> Tensor:
    """Slopes of (x, v, running cost) on the last axis."""
    x, v = z[..., 0], z[..., 1]
    cost = x**2 + 0.1 * v**2 + 0.05 * u**2
    return torch.stack([v, -B * v - K * torch.sin(x) + u, cost], -1)


def _terminal_cost(z: Tensor, params: Any) -> Tensor:
    x, v, cost = z.unbind(-1)
    return (cost + (x - TARGET) ** 2 + 0.5 * v**2).sum()


def sweep(tableau: Tableau, h: float, controls: Array) -> tuple[Array, Array]:
    """As `contadj.studies.controls.sweep`."""
    a, b = torch.as_tensor(np.array(tableau.a)), torch.as_tensor(np.array(tableau.b))

    def explicit_slopes(z: Tensor, u: Tensor) -> Tensor:
        slopes: list[Tensor] = []
        for i in range(tableau.stages):
            stage = z
            for j, slope in enumerate(slopes):
                if tableau.a[i, j] != 0:
                    stage = stage + h * a[i, j] * slope
            slopes.append(_field(stage, u[:, i]))
        return torch.stack(slopes, 1)

    def implicit_slopes(z: Tensor, u: Tensor) -> Tensor:
        def residual(slopes: Tensor, z: Tensor, u: Tensor) -> Tensor:
            return slopes - _field(z[:, None] + h * (a @ slopes), u)

        guess = _field(z[:, None].expand(-1, tableau.stages, -1), u)
        return implicit_step(residual, guess, z, u, batch_dims=1)

    slopes = explicit_slopes if tableau.explicit else implicit_slopes

    def step(n: int, z: Tensor, u: Tensor, params: Any) -> Tensor:
        return z + h * (b @ slopes(z, u))

    z0 = torch.as_tensor(np.append(Y0, 0.0)).repeat(controls.shape[1], 1)
    actions = torch.as_tensor(controls)
    found = rollout_adjoint(step, z0, actions, (), terminal_cost=_terminal_cost)
    return found.adjoints[..., :2].numpy(), found.actions.numpy()
