"""A neural ODE's gradient in JAX: by Diffrax with its own adjoints and with contadj's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# One thread, if this is where XLA starts.
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from .. import jax as cj
from ..problems._problem import Array
from .work import BATCH, MAX_STEPS, SNAPSHOTS, T1, data


def _field(t, y, p):
    return jnp.tanh(y @ p["W1"] + p["b1"]) @ p["W2"] + p["b2"]


def _adjoint(adjoint: str) -> diffrax.AbstractAdjoint:
    library, _, kind = adjoint.rpartition(".")
    if library == "diffrax":
        return getattr(diffrax, kind)()
    if kind == f"CheckpointAdjoint({SNAPSHOTS})":
        return cj.CheckpointAdjoint(snapshots=SNAPSHOTS)
    if kind == "BacksolveAdjoint":
        # What a loose tolerance does to the state rebuilt is part of the question: no warning.
        return cj.BacksolveAdjoint(reversal_tolerance=math.inf)
    if kind == "ReversibleAdjoint":
        return cj.ReversibleAdjoint(coupling=0.999)
    return getattr(cj, kind)()


@lru_cache(maxsize=1)
def _compiled(adjoint: str, num_steps: int | None) -> Any:
    """The gradient as a compiled function of the parameters, y0 and the tolerance."""
    way = _adjoint(adjoint)

    def loss(p, y0, tolerance):
        if num_steps is None:
            solver, dt0 = diffrax.Dopri5(), None
            control: Any = diffrax.PIDController(rtol=tolerance, atol=tolerance)
        else:
            solver, dt0, control = diffrax.Heun(), T1 / num_steps, diffrax.ConstantStepSize()
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(_field), solver, 0.0, T1, dt0, y0, p, adjoint=way,
            stepsize_controller=control, max_steps=num_steps or MAX_STEPS,
        )  # fmt: skip
        assert sol.ys is not None
        return jnp.sum(sol.ys[-1] ** 2) / (2 * BATCH)

    return jax.jit(jax.grad(loss)).lower(*_arguments(1.0)).compile()


def _arguments(tolerance: float):
    y0, params = data()
    return jax.tree.map(jnp.asarray, (params, y0, np.float64(tolerance)))


def prepare(
    adjoint: str, num_steps: int | None, tolerance: float | None
) -> tuple[Callable[[], Array], Callable[[], int]]:
    """Return a function that computes the gradient, and one that counts its bytes.

    Parameters
    ----------
    adjoint : str
        One of `contadj.studies.work.ADJOINTS`.
    num_steps : int, optional
        Equal steps of heun2; dopri5 under control of its error where None.
    tolerance : float, optional
        Of dopri5.
    """
    with jax.enable_x64(True):
        compiled = _compiled(adjoint, num_steps)
        arguments = _arguments(tolerance or 1.0)

    def flat() -> Array:
        gradient = jax.block_until_ready(compiled(*arguments))
        return np.concatenate([np.ravel(np.asarray(gradient[name])) for name in sorted(gradient)])

    return flat, lambda: compiled.memory_analysis().temp_size_in_bytes
