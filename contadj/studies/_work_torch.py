"""A neural ODE's gradient in PyTorch: by contadj, torchdiffeq and torchode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchdiffeq
from torch import Tensor, nn

from .. import torch as ct
from ..problems._problem import Array
from .work import BATCH, SNAPSHOTS, T1, data


class _Network(nn.Module):
    W1: Tensor
    W2: Tensor
    b1: Tensor
    b2: Tensor

    def __init__(self, params: dict[str, Array]):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))

    def forward(self, t, y):
        return torch.tanh(y @ self.W1 + self.b1) @ self.W2 + self.b2


def _adjoint(kind: str) -> ct.Adjoint:
    if kind == f"CheckpointAdjoint({SNAPSHOTS})":
        return ct.CheckpointAdjoint(snapshots=SNAPSHOTS)
    if kind == "ReversibleAdjoint":
        return ct.ReversibleAdjoint(coupling=0.999)
    if kind == "BacksolveAdjoint":  # a loose tolerance is part of the question: no warning
        return ct.BacksolveAdjoint(reversal_tolerance=math.inf)
    return getattr(ct, kind)()


def _torchode(kind: str, net: nn.Module, num_steps: int | None, tolerance: float | None):
    """y(T) from y0, by torchode."""
    import torchode

    to: Any = torchode  # its annotations are of jaxtyping, without shapes
    term = to.ODETerm(net)
    if num_steps is None:
        method, control, dt0 = (
            to.Dopri5,
            to.IntegralController(tolerance, tolerance, term=term),
            None,
        )
    else:
        method, control = to.Heun, to.FixedStepController()
        # The joint solve is of one state, all samples in it.
        count = 1 if kind == "JointBacksolveAdjoint" else BATCH
        dt0 = torch.full((count,), T1 / num_steps, dtype=torch.float64)
    if kind == "AutoDiffAdjoint":
        way = to.AutoDiffAdjoint(method(term), control)
    else:
        way = getattr(to, kind)(term, method(None), control)

    def solve(y0: Tensor) -> Tensor:
        t = y0.new_zeros(BATCH)
        solution = way.solve(to.InitialValueProblem(y0, t, t + T1), term, dt0=dt0)
        if bool((solution.status != 0).any()):
            raise RuntimeError(f"torchode ended with status {int(solution.status.max())}")
        return solution.ys[:, -1]

    return solve


def prepare(
    adjoint: str, num_steps: int | None, tolerance: float | None
) -> tuple[Callable[[], Array], Callable[[], int]]:
    """Return a function that computes the gradient, and one that counts its bytes.

    Parameters
    ----------
    adjoint : str
        One of `contadj.studies.work.ADJOINTS`.
    num_steps : int, optional
        Equal steps of heun2; dopri5 under control of its error where None.
    tolerance : float, optional
        Of dopri5.
    """
    torch.set_num_threads(1)
    start, params = data()
    net, y0 = _Network(params), torch.tensor(start)
    t = torch.tensor([0.0, T1], dtype=torch.float64)
    library, _, kind = adjoint.rpartition(".")
    if num_steps is None:
        how: dict[str, Any] = {"method": "dopri5", "rtol": tolerance, "atol": tolerance}
    else:
        how = {"method": "heun2", "options": {"step_size": T1 / num_steps}}
    if library == "torchode":
        solve = _torchode(kind, net, num_steps, tolerance)
    elif library == "torchdiffeq":
        function = getattr(torchdiffeq, kind)

        def solve(y0: Tensor) -> Tensor:
            return function(net, y0, t, **how)[-1]
    else:
        way = _adjoint(kind)

        def solve(y0: Tensor) -> Tensor:
            return ct.odeint(net, y0, t, adjoint=way, **how)[-1]

    def gradient() -> tuple[Tensor, ...]:
        y1 = solve(y0)
        return torch.autograd.grad((y1**2).sum() / (2 * BATCH), list(net.parameters()))

    def flat() -> Array:
        return np.concatenate([np.ravel(g.numpy()) for g in gradient()])

    return flat, lambda: ct.peak_live_bytes(gradient)[1]
