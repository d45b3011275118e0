"""The adjoints by name, and the options that a study can set: the same in both backends."""

from __future__ import annotations

from .names import parse_options, spell

ADJOINTS: dict[str, tuple[str, ...]] = {
    "DirectAdjoint": (),
    "CheckpointAdjoint": ("snapshots",),
    "ReversibleAdjoint": ("coupling",),
    "BacksolveAdjoint": ("restart_every",),
    "InterpolatingAdjoint": (),
    "GaussAdjoint": (),
    "ForwardSensitivity": (),
}


def parse_adjoint(text: str) -> tuple[str, dict[str, float]]:
    """Return the class and the options of an adjoint, `BacksolveAdjoint(restart_every=32)` say.

    Whole numbers are integers.

    Raises
    ------
    ValueError
        If there is no such adjoint, or it has no such option.
    """
    name, options = parse_options("adjoint", text, tuple(ADJOINTS), ADJOINTS.__getitem__)
    return name, {
        key: int(value) if value.is_integer() else value for key, value in options.items()
    }


def canonical_adjoint(text: str) -> str:
    """Return the one spelling of an adjoint, after checking it as `parse_adjoint` does."""
    return spell(*parse_adjoint(text))
