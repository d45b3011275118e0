"""What a solve raises and warns of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SolveStats:
    """Statistics of one solve; the backward ones are filled in by the backward pass.

    Parameters
    ----------
    steps_accepted, steps_rejected : int
        Steps of the forward solve.
    f_evaluations_forward, f_evaluations_backward : int
        Evaluations of the vector field.
    backward_steps_accepted, backward_steps_rejected : int
        Steps of the reverse-time solve, of adjoints that have one of their own.
    reversal_error : float, optional
        max over the pieces of the backward solve of |y rebuilt - y stored| / max_n |y_n|, of
        adjoints that rebuild y.
    """

    steps_accepted: int = 0
    steps_rejected: int = 0
    f_evaluations_forward: int = 0
    f_evaluations_backward: int = 0
    backward_steps_accepted: int = 0
    backward_steps_rejected: int = 0
    reversal_error: float | None = None


class SolveError(RuntimeError):
    """A solve that could not go on; `stats` holds its statistics so far."""

    def __init__(self, message: str, stats: SolveStats):
        super().__init__(message)
        self.stats = stats
