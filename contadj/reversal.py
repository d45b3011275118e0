"""When the reversal error makes a gradient worthless, and what is said then."""

from __future__ import annotations

ON_REVERSAL = ("warn", "raise")
# The distance of the two states of a reversible coupling, over their size, above which its gradient
# is reported: where the coupling is unstable, that distance is about the gradient's relative error.
COUPLING_TOLERANCE = 0.25


class ReversalWarning(UserWarning):
    """The state rebuilt in reverse time has drifted from the one of the forward solve.

    Or the two states of a reversible coupling have drifted apart.
    """


def check_reversal(tolerance: float, on_reversal: str) -> None:
    """Raise unless the arguments `reversal_tolerance` and `on_reversal` are what they may be."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(
            "`reversal_tolerance` must be a float of at least 0 (float('inf') for none), got "
            f"{tolerance!r}"
        )
    if on_reversal not in ON_REVERSAL:
        raise ValueError(f"`on_reversal` must be 'warn' or 'raise', got {on_reversal!r}")


def reversal_message(error: float | None, tolerance: float, remedy: str) -> str:
    """What is said of a reversal error above the tolerance; None where its value is not known."""
    size = "" if error is None else f"by {error:.1e} of its size, "
    return (
        f"the state rebuilt in reverse time is off {size}more than `reversal_tolerance` = "
        f"{tolerance:.1e} of its size: the gradient may be worthless. Use CheckpointAdjoint(), or "
        f"{remedy}, or smaller steps"
    )


def coupling_message(apart: float | None) -> str:
    """What is said of a distance above `COUPLING_TOLERANCE`; None where its value is not known."""
    size = "" if apart is None else f"by {apart:.1e} of their size, "
    return (
        f"the two states of the reversible coupling are apart {size}more than "
        f"{COUPLING_TOLERANCE:g}: it is unstable with these steps and the gradient may be "
        "worthless. Use smaller steps, or CheckpointAdjoint()"
    )
