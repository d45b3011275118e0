"""Adaptive solves and their gradients in JAX, by Diffrax's own adjoints and contadj's."""

from __future__ import annotations

from functools import lru_cache

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import jax as cj
from ..jax import _problems
from ..problems import GradientProblem
from ..problems._problem import Array
from .tolerance import BALANCE_T1

_SOLVERS = {
    "bosh3": diffrax.Bosh3,
    "dopri5": diffrax.Dopri5,
    "tsit5": diffrax.Tsit5,
    "dopri8": diffrax.Dopri8,
}
MAX_STEPS = 1024


def _balance(t, y, p):
    return jnp.stack([y[0] - y[1], y[1] - y[0]])


def problem(name: str) -> GradientProblem:
    """Return `balance`, or a built-in problem."""
    if name != "balance":
        return _problems.builtin_problem(name)
    return GradientProblem(
        name, "jax", _balance, np.ones(2), {}, 0.0, BALANCE_T1, terminal_cost=lambda y, p: y[0]
    )


@lru_cache(maxsize=1)
def _compiled(name: str, method: str, adjoint: str):
    """The gradient as a compiled function of y0, the parameters and the tolerance."""
    one = problem(name)
    library, _, kind = adjoint.rpartition(".")
    way = getattr(diffrax if library == "diffrax" else cj, kind)()

    def cost(inputs, tolerance):
        y0, params = inputs
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(one.f), _SOLVERS[method](), one.t0, one.t1, None, y0, params,
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
            adjoint=way, max_steps=MAX_STEPS,
        )  # fmt: skip
        assert sol.ys is not None and one.terminal_cost is not None
        y1 = sol.ys[-1]
        return one.terminal_cost(y1, params), (y1, sol.stats["num_accepted_steps"])

    return eqx.filter_jit(jax.grad(cost, has_aux=True))


def solve(name: str, method: str, adjoint: str, tolerance: float) -> tuple[Array, Array, int]:
    """Return y(T), dL/dy0 then dL/d(parameters), and the accepted steps."""
    one = problem(name)
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (one.y0, dict(one.params)))
        gradient, (y1, steps) = _compiled(name, method, adjoint)(inputs, jnp.float64(tolerance))
        flat = np.concatenate([np.ravel(np.asarray(g)) for g in jax.tree.leaves(gradient)])
        return np.asarray(y1), flat, int(steps)
