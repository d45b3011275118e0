"""What is said when the reversal error makes a gradient worthless."""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from ...reversal import (
    COUPLING_TOLERANCE,
    ReversalWarning,
    check_reversal,
    coupling_message,
    reversal_message,
)

PyTree = Any


def relative_size(part, scale):
    """part / scale, or part itself where the scale is zero."""
    return part / jnp.where(scale > 0, scale, 1)


class Reversal(eqx.Module):
    """The reversal error above which a gradient is reported, and how."""

    tolerance: float = eqx.field(static=True)
    action: str = eqx.field(static=True)

    def __check_init__(self):
        check_reversal(self.tolerance, self.action)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to report."""
        return self.tolerance != float("inf")

    def report(self, gradient: PyTree, error, remedy: str, throw: bool) -> PyTree:
        """Warn, or make the gradient an error (nan without `throw`), where the error is too large.

        The warning comes from a callback on the host, which is only called where it is due; under
        `jax.vmap`, for every element, so that the error is looked at once more there.
        """

        def message(error):
            return reversal_message(error, self.tolerance, remedy)

        return self._report(gradient, error, self.tolerance, message, throw)

    def report_apart(self, gradient: PyTree, apart, throw: bool) -> PyTree:
        """The same where the two states of a reversible coupling are too far apart."""
        return self._report(gradient, apart, COUPLING_TOLERANCE, coupling_message, throw)

    def _report(self, gradient, error, tolerance, message, throw):
        if not self.wanted:
            return gradient
        error = lax.stop_gradient(error)
        due = ~(error <= tolerance)  # nan too
        if self.action == "raise":
            gradient = jtu.tree_map(lambda x: jnp.where(due, jnp.nan, x), gradient)
            if throw:
                gradient = eqx.error_if(gradient, due, message(None))
            return gradient

        def warn(error):
            if not error <= tolerance:
                warnings.warn(message(float(error)), ReversalWarning, stacklevel=2)

        lax.cond(due, lambda e: jax.debug.callback(warn, e), lambda e: None, error)
        return gradient
