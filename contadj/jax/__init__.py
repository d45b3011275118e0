"""Gradients of ODE solves in JAX: adjoints for `diffrax.diffeqsolve`, and rollouts."""

from ..reversal import ReversalWarning
from ._implicit import implicit_step
from ._neural_ode import NeuralODE
from ._problems import builtin_problem
from ._rollout import RolloutGradient, rollout, rollout_adjoint
from ._steps import get_solver
from ._value_grad_and_stats import BackwardStats, value_grad_and_stats
from .adjoints import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
)

__all__ = [
    "BacksolveAdjoint",
    "BackwardStats",
    "CheckpointAdjoint",
    "DirectAdjoint",
    "ForwardSensitivity",
    "GaussAdjoint",
    "InterpolatingAdjoint",
    "NeuralODE",
    "ReversalWarning",
    "ReversibleAdjoint",
    "RolloutGradient",
    "builtin_problem",
    "get_solver",
    "implicit_step",
    "rollout",
    "rollout_adjoint",
    "value_grad_and_stats",
]
