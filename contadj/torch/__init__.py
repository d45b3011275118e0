"""The PyTorch backend: gradients of ODE solves, in torchdiffeq's terms."""

from ._errors import ReversalWarning, SolveError, SolveStats
from ._implicit import implicit_step
from ._rollout import RolloutGradient, rollout, rollout_adjoint
from ._solve import Solution, odeint, solve
from ._value_grad_and_stats import value_grad_and_stats
from .adjoints import (
    Adjoint,
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
)

__all__ = [
    "Adjoint",
    "BacksolveAdjoint",
    "CheckpointAdjoint",
    "DirectAdjoint",
    "ForwardSensitivity",
    "GaussAdjoint",
    "InterpolatingAdjoint",
    "ReversalWarning",
    "ReversibleAdjoint",
    "RolloutGradient",
    "Solution",
    "SolveError",
    "SolveStats",
    "implicit_step",
    "odeint",
    "rollout",
    "rollout_adjoint",
    "solve",
    "value_grad_and_stats",
]
