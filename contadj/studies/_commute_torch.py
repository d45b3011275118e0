"""Gradients by steps of h that leave a short one: the last going forward, and going backward."""

from __future__ import annotations

import numpy as np
import torch

from ..problems import GradientProblem
from ..torch import BacksolveAdjoint, DirectAdjoint, solve


def gradients(
    problem: GradientProblem, method: str, h: float, max_steps: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the discrete gradient, that of the adjoint ODE, and its reversal error.

    Parameters
    ----------
    problem : GradientProblem
        With a terminal cost alone.
    method : str
    h : float
        Step size, forward from t0 and backward from t1.
    max_steps : int
        Not needed here; the JAX twin compiles for it.
    """
    y0 = torch.tensor(problem.y0, requires_grad=True)
    params = {name: torch.tensor(p, requires_grad=True) for name, p in problem.params.items()}
    times = torch.tensor([problem.t0, problem.t1], dtype=torch.float64)
    steps = {"step_size": h}
    found, reversal = [], 0.0
    for adjoint in (
        DirectAdjoint(),
        BacksolveAdjoint(options=steps, reversal_tolerance=float("inf")),
    ):
        solution = solve(
            lambda t, y: problem.f(t, y, params), y0, times, method=method, options=steps,
            params=list(params.values()), adjoint=adjoint,
        )  # fmt: skip
        assert solution.ys is not None and problem.terminal_cost is not None
        cost = problem.terminal_cost(solution.ys[-1], params)
        grads = torch.autograd.grad(
            cost, [y0, *params.values()], allow_unused=True, materialize_grads=True
        )
        found.append(np.concatenate([g.numpy().ravel() for g in grads]))
        reversal = solution.stats.reversal_error or 0.0
    return found[0], found[1], reversal
