"""The same problem as in own_torch.py."""

import jax.numpy as jnp
import numpy as np

from contadj import GradientProblem


def f(t, y, p):
    x, v = y
    force = -p["spring"]["k"] * jnp.sin(x) - p["b"] * v
    return jnp.stack([v, force + p["drive"]["a"] * jnp.cos(p["drive"]["omega"] * t)])


def squared_distance(i, t, y, p):
    return (y[0] - 0.1 * (i + 1)) ** 2 + 0.5 * y[1] ** 2


def problem(name="driven"):
    params = {
        "spring": {"k": np.float64(2.0)},
        "b": np.float64(0.3),
        "drive": {"omega": np.float64(1.7), "a": np.float64(0.8)},
    }
    return GradientProblem(
        name, "jax", f, np.array([1.0, 0.5]), params, 0.0, 3.0,
        observation_times=(0.7, 1.5, 3.0), observation_cost=squared_distance,
    )  # fmt: skip
