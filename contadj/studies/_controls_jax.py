"""The pendulum of `contadj.studies.controls` with one control value per step and stage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..jax import implicit_step, rollout_adjoint
from ..tableaus import Tableau
from .controls import TARGET, Y0, Array, B, K


def _field(z, u):
    """Slopes of (x, v, running cost) on the last axis."""
    x, v = z[..., 0], z[..., 1]
    cost = x**2 + 0.1 * v**2 + 0.05 * u**2
    return jnp.stack([v, -B * v - K * jnp.sin(x) + u, cost], -1)


def _terminal_cost(z, params):
    x, v, cost = jnp.moveaxis(z, -1, 0)
    return (cost + (x - TARGET) ** 2 + 0.5 * v**2).sum()


def sweep(tableau: Tableau, h: float, controls: Array) -> tuple[Array, Array]:
    """As `contadj.studies.controls.sweep`."""
    with jax.enable_x64(True):
        found = jax.jit(_gradient, static_argnums=0)(tableau, h, controls)
        return np.asarray(found.adjoints[..., :2]), np.asarray(found.actions)


def _gradient(tableau: Tableau, h, controls):
    a, b = jnp.asarray(tableau.a), jnp.asarray(tableau.b)

    def explicit_slopes(z, u):
        slopes = []
        for i in range(tableau.stages):
            stage = z
            for j, slope in enumerate(slopes):
                if tableau.a[i, j] != 0:
                    stage = stage + h * a[i, j] * slope
            slopes.append(_field(stage, u[:, i]))
        return jnp.stack(slopes, 1)

    def implicit_slopes(z, u):
        def residual(slopes, z, u):
            return slopes - _field(z[:, None] + h * (a @ slopes), u)

        guess = _field(jnp.repeat(z[:, None], tableau.stages, 1), u)
        return implicit_step(residual, guess, z, u)

    slopes = explicit_slopes if tableau.explicit else implicit_slopes

    def step(n, z, u, params):
        return z + h * (b @ slopes(z, u))

    z0 = jnp.tile(jnp.append(jnp.asarray(Y0), 0.0), (controls.shape[1], 1))
    return rollout_adjoint(step, z0, controls, (), terminal_cost=_terminal_cost)
