"""The rollouts of `contadj.studies.rollout` in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from ..torch import rollout, rollout_adjoint
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
    return nullcontext()


def _tensor(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def _scalar_example(horizon: int, theta: float) -> dict[str, Any]:
    return dict(
        step=lambda t, x, a, theta: FACTOR * x + theta,
        z0=_tensor(0.0),
        actions=torch.arange(horizon),
        params=_tensor(theta),
        terminal_cost=lambda x, theta: (x - TARGET) ** 2,
    )


def scalar_rollout(horizon: int, theta: float) -> tuple[float, Array]:
    """Return the cost and x_0, ..., x_T of the scalar example."""
    cost, states = rollout(**_scalar_example(horizon, theta))
    return cost.item(), states.numpy()


def scalar_adjoint(horizon: int, theta: float) -> tuple[Array, float]:
    """Return lambda_0, ..., lambda_T and dJ/dtheta of the scalar example."""
    found = rollout_adjoint(**_scalar_example(horizon, theta))
    return found.adjoints.numpy(), found.params.item()


class NetworkGradient:
    """The gradient of a network's rollout in its parameters, by one of the modes."""

    def __init__(self, mode: str, z0: Array, inner: Array, outer: Array):
        self._mode = mode
        self._z0 = _tensor(z0)
        self._params = _tensor(inner), _tensor(outer)
        self._flat = torch.cat([x.reshape(-1) for x in self._params])

    def _example(self, params: Any) -> dict[str, Any]:
        return dict(
            step=lambda t, z, a, p: z + 0.1 * torch.tanh(z @ p[0]) @ p[1],
            z0=self._z0,
            actions=torch.arange(NETWORK_HORIZON),
            params=params,
            terminal_cost=lambda z, p: (z**2).sum() / 2,
        )

    def _cost(self, flat: Tensor) -> Tensor:
        inner, outer = flat.chunk(2)
        params = inner.reshape(self._params[0].shape), outer.reshape(self._params[1].shape)
        return rollout(**self._example(params))[0]

    def _adjoint(self) -> Tensor:
        found = rollout_adjoint(**self._example(self._params))
        return torch.cat([x.reshape(-1) for x in found.params])

    def _unit(self, k: int) -> Tensor:
        unit = torch.zeros_like(self._flat)
        unit[k] = 1
        return unit

    def _tangent(self, k: int) -> Tensor:
        with forward_ad.dual_level():
            cost = self._cost(forward_ad.make_dual(self._flat, self._unit(k)))
            tangent = forward_ad.unpack_dual(cost).tangent
        assert tangent is not None
        return tangent

    def _moved(self, k: int) -> Tensor:
        return self._cost(self._flat + NETWORK_DELTA * self._unit(k))

    def rollout(self) -> Tensor:
        """Run it once."""
        return rollout(**self._example(self._params))[0]

    def gradient(self) -> Array:
        """The whole gradient."""
        if self._mode == "adjoint":
            return self._adjoint().numpy()
        each = range(len(self._flat))
        if self._mode == "forward":
            return torch.stack([self._tangent(k) for k in each]).numpy()
        moved = torch.stack([self._moved(k) for k in each])
        return ((moved - self._cost(self._flat)) / NETWORK_DELTA).numpy()

    @cached_property
    def multiplications_of_a_rollout(self) -> int:
        """Multiplications in the matrix products of a rollout."""
        return _multiplications(self.rollout)

    @cached_property
    def multiplications_of_a_pass(self) -> int:
        """Multiplications in the matrix products of one of the passes that the gradient takes."""
        passes = {
            "adjoint": self._adjoint,
            "forward": lambda: self._tangent(0),
            "differences": lambda: self._moved(0),
        }
        return _multiplications(passes[self._mode])


def _multiplications(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2  # it counts the additions too


def action_gradients(matrix: Array, saturated: bool, horizon: int) -> tuple[Array, Array]:
    """Return every dJ/da_t and dJ/dz_H of z[t+1] = A z[t] + a[t], or of A tanh(z[t]) + a[t]."""
    size = len(matrix)
    found = rollout_adjoint(
        lambda t, z, a, A: A @ (torch.tanh(z) if saturated else z) + a,
        torch.ones(size, dtype=torch.float64),
        torch.zeros(horizon, size, dtype=torch.float64),
        _tensor(matrix),
        terminal_cost=lambda z, A: ((z - TARGET) ** 2).sum() / 2,
    )
    return found.actions.numpy(), found.adjoints[-1].numpy()


class Plan:
    """The pendulum's cost as a function of its actions."""

    def __init__(self):
        self._example: dict[str, Any] = dict(
            step=lambda t, z, a, p: swing(torch.sin, z[0], z[1], TORQUE_LIMIT * torch.tanh(a)),
            z0=(_tensor(0.0), _tensor(0.0)),
            params=(),
            stage_cost=lambda t, z, a, p: EFFORT * STEP * (TORQUE_LIMIT * torch.tanh(a)) ** 2,
            terminal_cost=lambda z, p: off_upright(torch.cos, z[0], z[1]),
        )

    def value_and_gradient(self, actions: Array) -> tuple[float, Array]:
        """J and every dJ/da_t."""
        found = rollout_adjoint(actions=_tensor(actions.copy()), **self._example)
        return found.cost.item(), found.actions.numpy()

    def states(self, actions: Array) -> tuple[Array, Array]:
        """Angles and speeds at every step."""
        _, (angles, speeds) = rollout(actions=_tensor(actions.copy()), **self._example)
        return angles.numpy(), speeds.numpy()
