"""Gradients by steps of h that leave a short one: the last going forward, and going backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..jax import get_solver
from ..jax._steps import fresh_step
from ..problems import GradientProblem


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
        The most steps of h that will be asked for; one compilation serves all.
    """
    t0, t1 = problem.t0, problem.t1
    whole = h * np.arange(int((t1 - t0) / h) + 1)
    # A step of length zero changes nothing.
    padding = max_steps + 2 - len(whole)
    forward = np.concatenate([t0 + whole, np.full(padding, t1)])
    backward = np.concatenate([t1 - whole, np.full(padding, t0)])
    with jax.enable_x64(True):
        discrete, continuous, reversal = _compiled(problem, method)(
            jnp.asarray(forward), jnp.asarray(backward)
        )
    return _flat(discrete), _flat(continuous), float(reversal)


def _flat(gradient) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])


@lru_cache(maxsize=2)
def _compiled(problem: GradientProblem, method: str) -> Callable:
    step = fresh_step(get_solver(method))
    y0, params = jnp.asarray(problem.y0), jax.tree.map(jnp.asarray, problem.params)
    end = problem.terminal_cost
    assert end is not None

    def march(field, z, times, p):
        def take(z, ends):
            z = step(diffrax.ODETerm(field), *ends, z, p)
            return z, jax.tree.leaves(z)[0]

        return lax.scan(take, z, (times[:-1], times[1:]))

    def adjoint_ode(t, z, p):
        y, adjoint, _ = z
        slope, pull = jax.vjp(lambda y, p: problem.f(t, y, p), y, p)
        return (slope, *jax.tree.map(jnp.negative, pull(adjoint)))

    def run(forward, backward):
        def cost(y0, p):
            y1, ys = march(problem.f, y0, forward, p)
            return end(y1, p), (y1, ys)

        discrete, (y1, ys) = jax.grad(cost, (0, 1), has_aux=True)(y0, params)
        start = (y1, *jax.grad(end, (0, 1))(y1, params))
        (rebuilt, adjoint, bar), _ = march(adjoint_ode, start, backward, params)
        largest = jnp.max(jnp.linalg.norm(jnp.vstack([y0, ys]), axis=1))
        reversal = jnp.linalg.norm(rebuilt - y0) / largest
        return discrete, (adjoint, bar), reversal

    return jax.jit(run)
