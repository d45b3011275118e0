"""Backpropagation through the solve."""

from __future__ import annotations

import diffrax


class DirectAdjoint(diffrax.DirectAdjoint):
    """The discrete gradient, by differentiating every step that was taken and keeping it all.

    Diffrax's adjoint of that name, refused without a bound on the number of steps. It
    differentiates in both modes and any number of times, and serves every term, event and `SaveAt`;
    time and memory follow `max_steps`, O(max_steps * activations).
    """

    def loop(self, *, max_steps, **kwargs):
        if max_steps is None:
            raise ValueError(
                "`adjoint=contadj.jax.DirectAdjoint()` keeps every step, and needs `max_steps` for "
                "that; give it, or use `adjoint=contadj.jax.BacksolveAdjoint()`"
            )
        return super().loop(max_steps=max_steps, **kwargs)
