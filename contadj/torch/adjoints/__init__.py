"""The ways to compute a gradient, one file each."""

from ._backsolve import BacksolveAdjoint
from ._base import Adjoint
from ._checkpoint import CheckpointAdjoint
from ._direct import DirectAdjoint

__all__ = ["Adjoint", "BacksolveAdjoint", "CheckpointAdjoint", "DirectAdjoint"]
