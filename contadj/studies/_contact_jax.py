"""The bouncing balls of `contadj.studies.contact`, side by side in one rollout."""

from __future__ import annotations

from functools import partial
from math import pi

import jax
import jax.numpy as jnp
import numpy as np

from ..jax import implicit_step, rollout
from ..tableaus import Tableau
from .contact import GRAVITY, RESTITUTION, SPEED, T1, Array


def sweep(
    contact: str, tableau: Tableau, num_steps: int, height: Array, k: float
) -> tuple[Array, Array]:
    """As `contadj.studies.contact.sweep`."""
    with jax.enable_x64(True):
        start = jnp.stack([height, jnp.full_like(height, SPEED)], 1)
        e, g = (jnp.full(len(height), one) for one in (RESTITUTION, GRAVITY))
        gradients, end = _gradient((start, (e, g)), contact, tableau, num_steps, k)
        d_start, (d_e, d_g) = gradients
        return np.asarray(end), np.concatenate([d_start, d_e[:, None], d_g[:, None]], 1)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _gradient(inputs, contact: str, tableau: Tableau, num_steps: int, k):
    h = T1 / num_steps

    def field(z, p):
        e, g = p
        y, v = z[:, 0], z[:, 1]
        push = -g
        if contact == "penalty":
            decay = -jnp.log(e)
            c = 2 * decay / jnp.sqrt(pi**2 + decay**2) * k**0.5
            push = push + jnp.where(y < 0, -k * y - c * v, 0.0)
        return jnp.stack([v, push], 1)

    def fly(z, h, p):
        """One step of the method; h may differ from ball to ball."""
        slopes = []
        for row in tableau.a:
            stage = z
            for weight, slope in zip(row, slopes, strict=False):
                stage = stage + h * float(weight) * slope
            slopes.append(field(stage, p))
        for weight, slope in zip(tableau.b, slopes, strict=True):
            z = z + h * float(weight) * slope
        return z

    def bounce(z, p):
        y, v = z[:, 0], z[:, 1]
        e = p[0]
        floor = {"clamp": jnp.zeros_like(y), "reflect": -e * y}.get(contact, y)
        return jnp.stack([floor, -e * v], 1)

    def step(n, z, a, p):
        free = fly(z, h, p)
        if contact == "penalty":
            return free
        hit = ((free[:, 0] < 0) & (free[:, 1] < 0))[:, None]
        if contact != "time_of_impact":
            return jnp.where(hit, bounce(free, p), free)

        def residual(delta, z, p):
            return jnp.where(hit, fly(z, delta, p)[:, :1], delta)

        guess = jnp.where(hit, h * z[:, :1] / (z - free)[:, :1], 0.0)
        delta = implicit_step(residual, guess, z, p)
        return jnp.where(hit, fly(bounce(fly(z, delta, p), p), h - delta, p), free)

    def terminal_cost(z, p):
        return z[:, 0].sum()

    def value(inputs):
        start, p = inputs
        cost, states = rollout(step, start, jnp.arange(num_steps), p, terminal_cost=terminal_cost)
        return cost, states[-1, :, 0]

    return jax.grad(value, has_aux=True)(inputs)
