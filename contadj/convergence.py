"""The step-size study: problem x engine x method x number of steps -> records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .problems import Gradient
from .problems._problem import Array


@dataclass(frozen=True, eq=False)
class Measurement:
    """One gradient of one problem, by one method and adjoint, on one mesh.

    Parameters
    ----------
    gradient : Gradient
        Cost, dL/dy0 and dL/dtheta.
    mesh : (M + 1,) array
        The step times; M = steps per interval times intervals between breakpoints.
    adjoint : (M + 1, n) array, optional
        lambda_n = dL/dy_n at the mesh, the observation cost at t_n included; None where the
        adjoint does not produce it.
    f_evaluations_forward, f_evaluations_backward : int
        Evaluations of the vector field in the forward and in the backward solve.
    reversal_error : float, optional
        max over the pieces of the backward solve of |y rebuilt - y stored| / max_n |y_n|; None
        where y is not rebuilt.
    seconds : float
        Wall time of one gradient, after warm-up and compilation.
    """

    gradient: Gradient
    mesh: Array
    adjoint: Array | None
    f_evaluations_forward: int
    f_evaluations_backward: int
    reversal_error: float | None
    seconds: float


GradientFunction = Callable[[int], Measurement]  # number of steps per interval -> Measurement
