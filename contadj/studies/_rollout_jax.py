"""The rollouts of `contadj.studies.rollout` in JAX."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as JaxArray
from jax import lax
from jax.extend.core import Jaxpr, jaxprs_in_params

from ..jax import rollout, rollout_adjoint
from .rollout import (
    EFFORT,
    FACTOR,
    NETWORK_DELTA,
    NETWORK_HORIZON,
    STEP,
    TARGET,
    TORQUE_LIMIT,
    Array,
    off_upright,
    swing,
)


def double_precision() -> Any:
    """Return the context in which the study runs."""
    return jax.enable_x64(True)


def _scalar_example(horizon: int, theta: float) -> dict[str, Any]:
    return dict(
        step=lambda t, x, a, theta: FACTOR * x + theta,
        z0=jnp.array(0.0),
        actions=jnp.arange(horizon),
        params=jnp.array(theta),
        terminal_cost=lambda x, theta: (x - TARGET) ** 2,
    )


def scalar_rollout(horizon: int, theta: float) -> tuple[float, Array]:
    """Return the cost and x_0, ..., x_T of the scalar example."""
    cost, states = rollout(**_scalar_example(horizon, theta))
    return cost.item(), np.asarray(states)


def scalar_adjoint(horizon: int, theta: float) -> tuple[Array, float]:
    """Return lambda_0, ..., lambda_T and dJ/dtheta of the scalar example."""
    found = rollout_adjoint(**_scalar_example(horizon, theta))
    return np.asarray(found.adjoints), found.params.item()


class NetworkGradient:
    """The gradient of a network's rollout in its parameters, by one of the modes."""

    def __init__(self, mode: str, z0: Array, inner: Array, outer: Array):
        self._z0 = jnp.asarray(z0)
        self._params = jnp.asarray(inner), jnp.asarray(outer)
        self._flat = jnp.concatenate([x.reshape(-1) for x in self._params])
        self._pass, whole = {
            "adjoint": (self._adjoint, self._adjoint),
            "forward": (self._tangent, self._tangents),
            "differences": (self._moved, self._differences),
        }[mode]
        self._rollout = jax.jit(self._cost).lower(self._flat).compile()
        self._gradient = jax.jit(whole).lower(self._flat).compile()

    def _step(self, t: Any, z: JaxArray, a: Any, params: Any) -> JaxArray:
        inner, outer = params
        return z + 0.1 * jnp.tanh(z @ inner) @ outer

    def _example(self, params: Any) -> dict[str, Any]:
        return dict(
            step=self._step,
            z0=self._z0,
            actions=jnp.arange(NETWORK_HORIZON),
            params=params,
            terminal_cost=lambda z, p: (z**2).sum() / 2,
        )

    def _split(self, flat: JaxArray) -> tuple[JaxArray, ...]:
        halves = jnp.split(flat, 2)
        return tuple(x.reshape(y.shape) for x, y in zip(halves, self._params, strict=True))

    def _cost(self, flat: JaxArray) -> JaxArray:
        return rollout(**self._example(self._split(flat)))[0]

    def _adjoint(self, flat: JaxArray, k: Any = None) -> JaxArray:
        found = rollout_adjoint(**self._example(self._split(flat)))
        return jnp.concatenate([x.reshape(-1) for x in found.params])

    def _unit(self, k: Any) -> JaxArray:
        return jnp.zeros_like(self._flat).at[k].set(1)

    def _tangent(self, flat: JaxArray, k: Any) -> JaxArray:
        # `rollout` has the adjoint sweep for its derivative, and no forward mode.
        def cost(flat: JaxArray) -> JaxArray:
            params = self._split(flat)
            times = jnp.arange(NETWORK_HORIZON)
            z, _ = lax.scan(lambda z, t: (self._step(t, z, t, params), None), self._z0, times)
            return (z**2).sum() / 2

        return jax.jvp(cost, (flat,), (self._unit(k),))[1]

    def _tangents(self, flat: JaxArray) -> JaxArray:
        return lax.map(lambda k: self._tangent(flat, k), jnp.arange(flat.size))

    def _moved(self, flat: JaxArray, k: Any) -> JaxArray:
        return self._cost(flat + NETWORK_DELTA * self._unit(k))

    def _differences(self, flat: JaxArray) -> JaxArray:
        moved = lax.map(lambda k: self._moved(flat, k), jnp.arange(flat.size))
        return (moved - self._cost(flat)) / NETWORK_DELTA

    def rollout(self) -> JaxArray:
        """Run it once."""
        return self._rollout(self._flat).block_until_ready()

    def gradient(self) -> Array:
        """The whole gradient."""
        return np.asarray(self._gradient(self._flat))

    @cached_property
    def multiplications_of_a_rollout(self) -> int:
        """Multiplications in the matrix products of a rollout."""
        return _multiplications(jax.make_jaxpr(self._cost)(self._flat).jaxpr)

    @cached_property
    def multiplications_of_a_pass(self) -> int:
        """Multiplications in the matrix products of one of the passes that the gradient takes."""
        return _multiplications(jax.make_jaxpr(self._pass)(self._flat, 0).jaxpr)


def _multiplications(jaxpr: Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            factor, product = _shape(equation.invars[0]), _shape(equation.outvars[0])
            total += math.prod(product) * math.prod(factor[i] for i in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(_multiplications(one) for one in jaxprs_in_params(equation.params))
    return total


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def action_gradients(matrix: Array, saturated: bool, horizon: int) -> tuple[Array, Array]:
    """Return every dJ/da_t and dJ/dz_H of z[t+1] = A z[t] + a[t], or of A tanh(z[t]) + a[t]."""
    size = len(matrix)
    found = rollout_adjoint(
        lambda t, z, a, A: A @ (jnp.tanh(z) if saturated else z) + a,
        jnp.ones(size),
        jnp.zeros((horizon, size)),
        jnp.asarray(matrix),
        terminal_cost=lambda z, A: ((z - TARGET) ** 2).sum() / 2,
    )
    return np.asarray(found.actions), np.asarray(found.adjoints[-1])


class Plan:
    """The pendulum's cost as a function of its actions."""

    def __init__(self):
        example: dict[str, Any] = dict(
            step=lambda t, z, a, p: swing(jnp.sin, z[0], z[1], TORQUE_LIMIT * jnp.tanh(a)),
            z0=(jnp.array(0.0), jnp.array(0.0)),
            params=(),
            stage_cost=lambda t, z, a, p: EFFORT * STEP * (TORQUE_LIMIT * jnp.tanh(a)) ** 2,
            terminal_cost=lambda z, p: off_upright(jnp.cos, z[0], z[1]),
        )
        self._differentiate = jax.jit(lambda actions: rollout_adjoint(actions=actions, **example))
        self._run = jax.jit(lambda actions: rollout(actions=actions, **example))

    def value_and_gradient(self, actions: Array) -> tuple[float, Array]:
        """J and every dJ/da_t."""
        found = self._differentiate(actions)
        return found.cost.item(), np.array(found.actions)

    def states(self, actions: Array) -> tuple[Array, Array]:
        """Angles and speeds at every step."""
        _, (angles, speeds) = self._run(actions)
        return np.asarray(angles), np.asarray(speeds)
