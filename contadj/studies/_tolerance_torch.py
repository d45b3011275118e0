"""Adaptive solves and their gradients in PyTorch, by contadj and by torchdiffeq."""

from __future__ import annotations

import math

import numpy as np
import torch
import torchdiffeq

from .. import torch as ct
from ..problems import GradientProblem
from ..problems._problem import Array
from ..torch import _problems
from .tolerance import BALANCE_T1


def _balance(t, y, p):
    return torch.stack([y[0] - y[1], y[1] - y[0]])


def problem(name: str) -> GradientProblem:
    """Return `balance`, or a built-in problem."""
    if name != "balance":
        return _problems.builtin_problem(name)
    return GradientProblem(
        name, "torch", _balance, np.ones(2), {}, 0.0, BALANCE_T1, terminal_cost=lambda y, p: y[0]
    )


class _Field(torch.nn.Module):
    """f(t, y) with the parameters of a problem as its own, which odeint_adjoint looks for."""

    def __init__(self, one: GradientProblem):
        super().__init__()
        self.f = one.f
        self.p = torch.nn.ParameterDict(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in one.params.items()}
        )

    def forward(self, t, y):
        return self.f(t, y, self.p)


def solve(
    name: str, method: str, adjoint: str, tolerance: float
) -> tuple[Array, Array, int | None]:
    """Return y(T), dL/dy0 then dL/d(parameters), and the accepted steps where they are told."""
    one = problem(name)
    assert one.terminal_cost is not None
    field = _Field(one)
    y0 = torch.tensor(one.y0, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([one.t0, one.t1], dtype=torch.float64)
    library, _, kind = adjoint.rpartition(".")
    how = {"method": method, "rtol": tolerance, "atol": tolerance}
    steps = None
    if library == "torchdiffeq":
        y1 = getattr(torchdiffeq, kind)(field, y0, t, **how)[-1]
    else:
        # What a loose tolerance does to the state rebuilt is part of the question: no warning.
        quiet = {"reversal_tolerance": math.inf} if kind == "BacksolveAdjoint" else {}
        solution = ct.solve(field, y0, t, adjoint=getattr(ct, kind)(**quiet), **how)
        assert solution.ys is not None
        y1, steps = solution.ys[-1], solution.stats.steps_accepted
    inputs = [y0, *(field.p[name] for name in sorted(field.p))]
    gradient = torch.autograd.grad(one.terminal_cost(y1, field.p), inputs)
    return y1.detach().numpy(), np.concatenate([np.ravel(g.numpy()) for g in gradient]), steps
