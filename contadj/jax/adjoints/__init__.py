"""One file per adjoint; each goes into `diffrax.diffeqsolve(..., adjoint=...)`."""

from ._backsolve import BacksolveAdjoint
from ._checkpoint import CheckpointAdjoint
from ._direct import DirectAdjoint
from ._forward import ForwardSensitivity
from ._gauss import GaussAdjoint
from ._interpolating import InterpolatingAdjoint
from ._reversible import ReversibleAdjoint

__all__ = [
    "BacksolveAdjoint",
    "CheckpointAdjoint",
    "DirectAdjoint",
    "ForwardSensitivity",
    "GaussAdjoint",
    "InterpolatingAdjoint",
    "ReversibleAdjoint",
]
