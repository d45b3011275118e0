"""Adams, BDF, leapfrog and reversible Heun on a fixed mesh, for the study.

They are here to show what happens to lambda_n = dL/dy_n when a step uses more than y_n. A step maps
(y_n, history) to (y_{n+1}, history); lambda_n has the history that arrives at t_n held fixed and
everything after t_n recomputed, f(t_n, y_n) included. Of a linear multistep method

    y_{n+1} = sum_j a_j y_{n-j} + h sum_j b_j f_{n-j} + h b f_{n+1} + r_{n+1},   r = 0,

the adjoint recursion is, with J_n = f_y(t_n, y_n) and multipliers mu_n = dL/dr_n,

    lambda_n = dC/dy_n + sum_j a_j mu_{n+1+j} + h J_n^T sum_j b_j mu_{n+1+j},
    mu_n = (I - h b J_n)^{-T} lambda_n,

mu = 0 beyond the last step. One backward sweep gives both: `nudge` below is r_{n+1}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..multistep import MULTISTEP, STARTER, Multistep
from ..tableaus import get_tableau
from . import _tree
from ._field import pull
from ._implicit import implicit_step
from ._steps import RungeKutta, VectorField, time_like

History = Any
# step(f, t, t_next, y, history, nudge) -> (y_next, history); history is () in the first step of an
# interval, and nudge is added to the equation that y_next solves.
HistoryStep = Callable[[VectorField, float, float, Tensor, History, Tensor], tuple[Tensor, History]]


def history_step(name: str) -> HistoryStep:
    """Return the step of a method of `contadj.multistep.METHODS`."""
    return multistep_step(MULTISTEP[name]) if name in MULTISTEP else reversible_heun_step


def multistep_step(method: Multistep) -> HistoryStep:
    """Return the step of a linear multistep method.

    The history holds y_{n-1}, y_{n-2}, ... and f_{n-1}, f_{n-2}, ..., as many as the method needs.
    While there are not enough, a Runge-Kutta step is taken.
    """
    starter = RungeKutta(get_tableau(STARTER))
    a = [float(x) for x in method.values]
    b = [float(x) for x in method.slopes]
    b_next = float(method.next_slope)

    def step(
        f: VectorField, t: float, t_next: float, y: Tensor, history: History, nudge: Tensor
    ) -> tuple[Tensor, History]:
        values, slopes = history or ([], [])
        h = t_next - t
        starting = 1 + max(len(values), len(slopes)) < method.steps
        values = [y, *values]
        if b or starting:
            slopes = [f(time_like(t, y), y), *slopes]
        if starting:
            y_next = starter.take(f, t, t_next, y, first=slopes[0]).y_next + nudge
        else:
            y_next = nudge
            for weight, value in zip(a, values, strict=False):
                y_next = torch.add(y_next, value, alpha=weight)
            for weight, slope in zip(b, slopes, strict=False):
                y_next = torch.add(y_next, slope, alpha=h * weight)
            if b_next:
                y_next = _solve(f, time_like(t_next, y), h * b_next, y_next, y)
        return y_next, (values[: method.steps - 1], slopes[: method.steps - 1])

    return step


def _solve(f: VectorField, t: Tensor, weight: float, known: Tensor, guess: Tensor) -> Tensor:
    """x = known + weight f(t, x)."""
    return implicit_step(lambda x: x - known - weight * f(t, x), guess)


def reversible_heun_step(
    f: VectorField, t: float, t_next: float, y: Tensor, history: History, nudge: Tensor
) -> tuple[Tensor, History]:
    """Take a step of the reversible Heun method; its history is z_n and f(t_n, z_n).

        z_{n+1} = 2 y_n - z_n + h f(t_n, z_n)
        y_{n+1} = y_n + h/2 (f(t_n, z_n) + f(t_{n+1}, z_{n+1}))

    References
    ----------
    Kidger, Foster, Li & Lyons 2021, arXiv:2105.13493.
    """
    h = t_next - t
    z, slope = history or (y, f(time_like(t, y), y))
    z = 2 * y - z + h * slope
    slope_next = f(time_like(t_next, y), z)
    return y + (0.5 * h) * (slope + slope_next) + nudge, (z, slope_next)


def integrate(
    step: HistoryStep, f: VectorField, y: Tensor, intervals: Sequence[np.ndarray]
) -> tuple[list[Tensor], list[History]]:
    """Step through intervals without a graph, starting afresh in each.

    Parameters
    ----------
    step : callable
        From `history_step`.
    f : callable
        f(t, y).
    y : (n,) Tensor
        State at the first time.
    intervals : sequence of arrays
        The step times of each interval; equidistant, since the coefficients are.

    Returns
    -------
    ys : list of (n,) Tensor
        y_0, ..., y_M.
    histories : list
        The history that each of the M steps used.
    """
    ys, histories = [y], []
    with torch.no_grad():
        for times in intervals:
            history: History = ()
            for t, t_next in pairwise(map(float, times)):
                histories.append(history)
                y, history = step(f, t, t_next, y, history, torch.zeros_like(y))
                ys.append(y)
    return ys, histories


@dataclass(frozen=True)
class Sweep:
    """What one gradient leaves behind.

    Parameters
    ----------
    cost : scalar Tensor
    params : list of Tensor
        dL/dtheta.
    adjoints : (M + 1, n) Tensor
        lambda_n; the first is the gradient of y0.
    multipliers : (M, n) Tensor, optional
        mu_1, ..., mu_M, of the discrete gradient.
    reversal_error : float, optional
        Where y was rebuilt.
    """

    cost: Tensor
    params: list[Tensor]
    adjoints: Tensor
    multipliers: Tensor | None = None
    reversal_error: float | None = None


def direct(
    step: HistoryStep,
    f: VectorField,
    y0: Tensor,
    intervals: Sequence[np.ndarray],
    cost: Callable[[Sequence[Tensor]], Tensor],
    params: Sequence[Tensor],
) -> Sweep:
    """Return the discrete gradient, lambda_n and mu_n, from one backward sweep.

    Parameters
    ----------
    step, f, y0, intervals
        As in `integrate`.
    cost : callable
        `cost(ys)`, a scalar; raises where they are not finite.
    params : sequence of Tensor
        The parameters of f and the cost.
    """
    ys, histories = integrate(step, f, y0, intervals)
    value, jumps, totals = _costs(cost, ys, params)
    n = len(ys) - 1
    adjoints, multipliers = [jumps[n]], []
    for times in reversed(intervals):
        from_history: list[Tensor | None] = []
        for t_next, t in pairwise(map(float, times[::-1])):
            n -= 1
            parts, rebuild = _tree.flatten(histories[n])
            y, nudge, *parts = map(_leaf, (ys[n], torch.zeros_like(y0), *parts))
            y_next, history = step(f, t, t_next, y, rebuild(parts), nudge)
            outs = [y_next, *_tree.tensors(history)]
            cotangents = [adjoints[-1], *(from_history or [None] * (len(outs) - 1))]
            grads = pull(outs, cotangents, [y, nudge, *parts, *params])
            along, multiplier = _zero_for_none(grads[:2], (y, nudge))
            adjoints.append(along + jumps[n])
            multipliers.append(multiplier)
            from_history = grads[2 : 2 + len(parts)]
            _add(totals, grads[2 + len(parts) :])
    return Sweep(value, totals, _stack(adjoints), _stack(multipliers))


def _stack(backward: list[Tensor]) -> Tensor:
    return torch.stack(backward[::-1])


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _zero_for_none(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, like, strict=True)]


def _add(totals: list[Tensor], grads: Sequence[Tensor | None]) -> None:
    for i, grad in enumerate(grads):
        if grad is not None:
            totals[i] = totals[i] + grad


def _costs(cost: Callable, ys: Sequence[Tensor], params: Sequence[Tensor]):
    """The cost, its jumps dC/dy_n, and its direct derivative in the parameters."""
    leaves = [_leaf(y) for y in ys]
    value = cost(leaves)
    wanted = [*leaves, *params]
    grads = _zero_for_none(pull([value], [torch.ones_like(value)], wanted), wanted)
    return value.detach(), grads[: len(ys)], grads[len(ys) :]


def backsolve(
    step: HistoryStep,
    f: VectorField,
    y0: Tensor,
    intervals: Sequence[np.ndarray],
    cost: Callable[[Sequence[Tensor]], Tensor],
    params: Sequence[Tensor],
    n: int,
) -> Sweep:
    """Return the continuous gradient: (y, lambda, theta-bar) in reverse time, by the same method.

        y' = f(t, y),   lambda' = -f_y^T lambda - c_y,   theta-bar' = -f_theta^T lambda - c_theta

    Every interval is stepped through backward from its end, afresh: y set back to the stored state,
    lambda with the jump dC/dy.

    Parameters
    ----------
    step, f, y0, intervals, cost, params
        As in `direct`.
    n : int
        Entries of y; one more of y0, if there is one, is the integral of a running cost c.
    """
    ys, _ = integrate(step, f, y0, intervals)
    value, jumps, totals = _costs(cost, ys, params)
    states, jumps = [y[:n] for y in ys], [jump[:n] for jump in jumps]
    theta_bar = torch.cat([y0.new_zeros(0), *(total.reshape(-1) for total in totals)])
    field = _adjoint_field(f, n, y0.numel() - n, params)
    i = len(ys) - 1
    adjoints, drifts = [jumps[i]], []
    for times in reversed(intervals):
        start = torch.cat([states[i], adjoints[-1], theta_bar])
        back, _ = integrate(step, field, start, [times[::-1]])
        for state in back[1:]:
            i -= 1
            adjoints.append(state[n : 2 * n] + jumps[i])
        drifts.append(torch.linalg.vector_norm(back[-1][:n] - states[i]))
        theta_bar = back[-1][2 * n :]
    parts = theta_bar.split([x.numel() for x in params])
    totals = [part.view_as(x) for part, x in zip(parts, params, strict=True)]
    largest = torch.stack([torch.linalg.vector_norm(y) for y in states]).max()
    error = float(torch.stack(drifts).max() / largest)
    return Sweep(value, totals, _stack(adjoints), reversal_error=error)


def _adjoint_field(f: VectorField, n: int, costs: int, params: Sequence[Tensor]) -> VectorField:
    """The right-hand side of (y, lambda, theta-bar), one flat vector."""

    def field(t: Tensor, state: Tensor) -> Tensor:
        record = torch.is_grad_enabled() and state.requires_grad
        with torch.enable_grad():
            y, adjoint = state[:n], state[n : 2 * n]
            if not record:
                y = _leaf(y)
            slope = f(t, torch.cat([y, y.new_zeros(costs)]))
            wanted = [y, *params]
            cotangent = torch.cat([adjoint, y.new_ones(costs)])
            grads = pull([slope], [cotangent], wanted, create_graph=record)
            back = [-x.reshape(-1) for x in _zero_for_none(grads, wanted)]
            out = torch.cat([slope[:n], *back])
        return out if record else out.detach()

    return field
