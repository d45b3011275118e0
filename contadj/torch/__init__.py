"""The PyTorch backend: gradients of ODE solves, in torchdiffeq's terms."""

from ..reversal import ReversalWarning
from ._controls import Control
from ._errors import SolveError, SolveStats
from ._implicit import implicit_step
from ._memory import peak_live_bytes
from ._neural_ode import NeuralODE
from ._rollout import RolloutGradient, rollout, rollout_adjoint
from ._solve import Solution, collect_stats, odeint, solve
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
    "Control",
    "DirectAdjoint",
    "ForwardSensitivity",
    "GaussAdjoint",
    "InterpolatingAdjoint",
    "NeuralODE",
    "ReversalWarning",
    "ReversibleAdjoint",
    "RolloutGradient",
    "Solution",
    "SolveError",
    "SolveStats",
    "collect_stats",
    "implicit_step",
    "odeint",
    "peak_live_bytes",
    "rollout",
    "rollout_adjoint",
    "solve",
    "value_grad_and_stats",
]
