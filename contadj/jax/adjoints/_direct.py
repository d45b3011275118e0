"""Backpropagation through the solve."""

from __future__ import annotations

import diffrax


class DirectAdjoint(diffrax.DirectAdjoint):
    """The discrete gradient, by differentiating through every step that was taken.

    Diffrax's adjoint of that name, refused without a bound on the number of steps. It
    differentiates in both modes and any number of times, and serves every term, event and `SaveAt`;
    time follows `max_steps`. Its loops are a tree that is rematerialised, so that memory grows with
    the logarithm of `max_steps` only.
    """

    def loop(self, *, max_steps, **kwargs):
        if max_steps is None:
            raise ValueError(
                "`adjoint=contadj.jax.DirectAdjoint()` keeps every step, and needs `max_steps` for "
                "that; give it, or use `adjoint=contadj.jax.BacksolveAdjoint()`"
            )
        return super().loop(max_steps=max_steps, **kwargs)
