"""The ways to compute a gradient, one file each."""

from ._backsolve import BacksolveAdjoint
from ._base import Adjoint
from ._checkpoint import CheckpointAdjoint
from ._direct import DirectAdjoint
from ._forward import ForwardSensitivity
from ._gauss import GaussAdjoint
from ._interpolating import InterpolatingAdjoint
from ._reversible import ReversibleAdjoint

__all__ = [
    "Adjoint",
    "BacksolveAdjoint",
    "CheckpointAdjoint",
    "DirectAdjoint",
    "ForwardSensitivity",
    "GaussAdjoint",
    "InterpolatingAdjoint",
    "ReversibleAdjoint",
]
