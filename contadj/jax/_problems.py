"""Vector fields and costs of the built-in problems in JAX; numbers: `contadj.problems`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..problems import GradientProblem, ProblemData, problem_data

Params = dict[str, Any]


def _lin(t, y, p: Params):
    return p["a"] * y + p["theta"]


def _nonaut(t, y, p: Params):
    return jnp.cos(t) * y + p["theta"]


def _pend(t, y, p: Params):
    x, v = y
    return jnp.stack([v, -p["b"] * v - p["k"] * jnp.sin(x)])


def _pend_running_cost(t, y, p: Params):
    x, v = y
    return x**2 + 0.1 * v**2


def _driven(t, y, p: Params):
    x, v = y
    return jnp.stack([v, -p["b"] * v - p["k"] * jnp.sin(x) + p["g"] * jnp.cos(2 * t)])


def _mlp(t, y, p: Params):
    return p["W2"] @ jnp.tanh(p["W1"] @ y + p["b1"]) + p["b2"]


def _slow_fast(t, y, p: Params):
    y1, y2 = y
    return jnp.stack([-p["K"] * (y1 - jnp.cos(y2)), -y2 + p["c"] * y1])


def _van_der_pol(t, y, p: Params):
    x, v = y
    return jnp.stack([v, p["mu"] * (1 - x**2) * v - x])


def _hare_lynx(t, y, p: Params):
    u, v = y
    return jnp.stack([p["alpha"] - p["beta"] * jnp.exp(v), -p["gamma"] + p["delta"] * jnp.exp(u)])


def _costs(data: ProblemData) -> dict[str, Callable]:
    """The costs of a built-in problem, closed over its constants."""

    def constant(name, y):
        return jnp.asarray(data.constants[name], y.dtype)  # float32 stays float32

    def distance(y, p):
        return jnp.sum((y - constant("target", y)) ** 2)

    def half_distance(y, p):
        return 0.5 * jnp.sum((y - constant("target", y)) ** 2)

    def pend_end(y, p):
        return (y[0] - constant("target", y)) ** 2 + 0.5 * y[1] ** 2

    def slow_end(y, p):
        return (y[1] - constant("target", y)) ** 2

    def van_der_pol_end(y, p):
        return y[0] ** 2 + 0.5 * y[1] ** 2

    def misfit(i, t, y, p):
        return jnp.sum((y - constant("log_pelts", y)[i]) ** 2)

    return {
        "lin": {"terminal_cost": distance},
        "nonaut": {"terminal_cost": distance},
        "pend": {"terminal_cost": pend_end, "running_cost": _pend_running_cost},
        "driven": {"terminal_cost": pend_end},
        "mlp": {"terminal_cost": half_distance},
        "slow_fast": {"terminal_cost": slow_end},
        "van_der_pol": {"terminal_cost": van_der_pol_end},
        "hare_lynx": {"observation_cost": misfit},
    }[data.name]


_FIELDS: dict[str, Callable] = {
    "lin": _lin,
    "nonaut": _nonaut,
    "pend": _pend,
    "driven": _driven,
    "mlp": _mlp,
    "slow_fast": _slow_fast,
    "van_der_pol": _van_der_pol,
    "hare_lynx": _hare_lynx,
}


def builtin_problem(name: str, **options: float) -> GradientProblem:
    """Return a built-in problem, its vector field and costs written in JAX.

    Parameters
    ----------
    name : str
        One of `contadj.problems.BUILT_IN`.
    **options : float
        The problem's own options, as in `contadj.problems.problem_data`.

    Returns
    -------
    GradientProblem

    Raises
    ------
    ValueError
        If there is no problem of that name.
    """
    data = problem_data(name, **options)
    return GradientProblem(
        name,
        "jax",
        _FIELDS[name],
        data.y0,
        dict(data.params),
        data.t0,
        data.t1,
        observation_times=data.observation_times,
        gradient=data.gradient,
        adjoint=data.adjoint,
        **_costs(data),
    )
