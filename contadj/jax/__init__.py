"""Gradients of ODE solves in JAX: adjoints for `diffrax.diffeqsolve`, and rollouts."""

from ._problems import builtin_problem
from ._rollout import RolloutGradient, rollout, rollout_adjoint
from ._steps import get_solver
from .adjoints import BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint

__all__ = [
    "BacksolveAdjoint",
    "CheckpointAdjoint",
    "DirectAdjoint",
    "RolloutGradient",
    "builtin_problem",
    "get_solver",
    "rollout",
    "rollout_adjoint",
]
