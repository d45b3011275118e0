"""Adams, BDF, leapfrog and reversible Heun on a fixed mesh, for the study.

They are here to show what happens to lambda_n = dL/dy_n when a step uses more than y_n. A step maps
(y_n, history) to (y_{n+1}, history); lambda_n has the history that arrives at t_n held fixed and
everything after t_n recomputed, f(t_n, y_n) included. Of a linear multistep method

    y_{n+1} = sum_j a_j y_{n-j} + h sum_j b_j f_{n-j} + h b f_{n+1} + r_{n+1},   r = 0,

the adjoint recursion is, with J_n = f_y(t_n, y_n) and multipliers mu_n = dL/dr_n,

    lambda_n = dC/dy_n + sum_j a_j mu_{n+1+j} + h J_n^T sum_j b_j mu_{n+1+j},
    mu_n = (I - h b J_n)^{-T} lambda_n,

mu = 0 beyond the last step. One backward sweep gives both: `nudge` below is r_{n+1}.

Diffrax has a ReversibleHeun and a LeapfrogMidpoint of its own; these have one definition of
lambda_n, and the same numbers as the PyTorch backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from ..multistep import MULTISTEP, STARTER, Multistep
from ..tableaus import get_tableau
from ._implicit import implicit_step
from ._steps import explicit_step, explicit_tableau, get_solver

PyTree = Any


class HistoryStep(NamedTuple):
    """A step that uses more than y_n.

    Parameters
    ----------
    empty : callable
        `empty(y)`, a history of the right structure; the first step of an interval ignores it.
    take : callable
        `take(f, t, t_next, place, y, history, nudge, params) -> (y_next, history)`: f(t, y, params)
        the vector field, place the number of steps since the start of the interval, nudge added to
        the equation that y_next solves.
    evaluations : callable or None
        `evaluations(num_steps)` of f in an interval; None where it varies.
    """

    empty: Callable
    take: Callable
    evaluations: Callable[[int], int] | None


def history_step(name: str) -> HistoryStep:
    """Return the step of a method of `contadj.multistep.METHODS`."""
    return _multistep(MULTISTEP[name]) if name in MULTISTEP else _reversible_heun()


def _multistep(method: Multistep) -> HistoryStep:
    """A linear multistep method.

    The history holds y_{n-1}, y_{n-2}, ... and f_{n-1}, f_{n-2}, ..., as many as the method needs.
    While there are not enough, a Runge-Kutta step is taken.
    """
    tableau = explicit_tableau(get_solver(STARTER))
    assert tableau is not None
    starts = method.steps - 1
    a = [float(x) for x in method.values]
    b = [float(x) for x in method.slopes]
    b_next = float(method.next_slope)

    def empty(y):
        zero = jtu.tree_map(jnp.zeros_like, y)
        return (zero,) * (len(a) - 1), (zero,) * (len(b) - 1)

    def take(f, t, t_next, place, y, history, nudge, params):
        values, slopes = history
        h = t_next - t
        values = (y, *values)
        if b:
            slopes = (f(t, y, params), *slopes)

        def start():
            first = _scaled(h, slopes[0]) if b else None
            terms = diffrax.ODETerm(f)
            return _add(nudge, explicit_step(tableau, terms, t, t_next, y, params, first)[0])

        def formula():
            known = _add(nudge, *(_scaled(w, x) for w, x in zip(a, values, strict=True) if w))
            known = _add(known, *(_scaled(h * w, k) for w, k in zip(b, slopes, strict=True)))
            if not b_next:
                return known

            def residual(x):
                return _add(x, _scaled(-1.0, known), _scaled(-h * b_next, f(t_next, x, params)))

            return implicit_step(residual, y)

        y_next = lax.cond(place < starts, start, formula)
        return y_next, (values[: len(a) - 1], slopes[: max(len(b) - 1, 0)])

    def evaluations(num_steps):
        started = min(num_steps, starts)
        return get_tableau(STARTER).stages * started + num_steps - started

    return HistoryStep(empty, take, evaluations if method.explicit else None)


def _add(*trees: PyTree) -> PyTree:
    """The sum of pytrees of one structure."""
    return jtu.tree_map(lambda *leaves: sum(leaves), *trees)


def _scaled(weight, tree: PyTree) -> PyTree:
    """A pytree times a number."""
    return jtu.tree_map(lambda x: weight * x, tree)


def _reversible_heun() -> HistoryStep:
    """The reversible Heun method; its history is z_n and f(t_n, z_n).

        z_{n+1} = 2 y_n - z_n + h f(t_n, z_n)
        y_{n+1} = y_n + h/2 (f(t_n, z_n) + f(t_{n+1}, z_{n+1}))

    References
    ----------
    Kidger, Foster, Li & Lyons 2021, arXiv:2105.13493.
    """

    def empty(y):
        zero = jtu.tree_map(jnp.zeros_like, y)
        return zero, zero

    def take(f, t, t_next, place, y, history, nudge, params):
        h = t_next - t
        z, slope = lax.cond(place == 0, lambda: (y, f(t, y, params)), lambda: history)
        z = _add(_scaled(2.0, y), _scaled(-1.0, z), _scaled(h, slope))
        slope_next = f(t_next, z, params)
        return _add(y, _scaled(0.5 * h, _add(slope, slope_next)), nudge), (z, slope_next)

    return HistoryStep(empty, take, lambda num_steps: num_steps + 1)
