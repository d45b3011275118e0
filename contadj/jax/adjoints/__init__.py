"""One file per adjoint; each goes into `diffrax.diffeqsolve(..., adjoint=...)`."""

from ._backsolve import BacksolveAdjoint
from ._checkpoint import CheckpointAdjoint
from ._direct import DirectAdjoint

__all__ = ["BacksolveAdjoint", "CheckpointAdjoint", "DirectAdjoint"]
