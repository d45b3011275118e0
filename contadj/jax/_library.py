"""Diffrax's own solvers for ODEs, stepped as Diffrax steps them, for the study."""

from __future__ import annotations

import diffrax
import jax.numpy as jnp
import optimistix
from jax import lax

from ._multistep import HistoryStep
from ._steps import get_solver

# Solvers whose state is no function of y_n; what others carry on is f(t_n, y_n), or a guess of it.
CARRYING = ("LeapfrogMidpoint", "ReversibleHeun")
SOLVERS = (
    "Euler", "Heun", "Midpoint", "Ralston", "Bosh3", "Tsit5", "Dopri5", "Dopri8", "ImplicitEuler",
    "Kvaerno3", "Kvaerno4", "Kvaerno5", *CARRYING,
)  # fmt: skip


def library_solver(name: str) -> diffrax.AbstractSolver:
    """Return a solver of `SOLVERS`, an implicit one with a root finder for steps of a given length.

    The default one, VeryChord, takes its tolerances from a step-size controller, which a fixed mesh
    does not have, and calls "not converged after two iterations" a divergence.
    """
    solver = get_solver(name)
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        newton = optimistix.Newton(rtol=1e-12, atol=1e-13)
        return type(solver)(root_finder=newton)  # type: ignore[call-arg]
    return solver


def carrying_step(solver: diffrax.AbstractSolver) -> HistoryStep:
    """Return the step of a solver of `CARRYING`, whose state is its history."""

    def empty(y):
        zero = jnp.zeros(())
        return solver.init(diffrax.ODETerm(lambda t, y, args: y), zero, zero, y, None)

    def take(f, t, t_next, place, y, history, nudge, params):
        terms = diffrax.ODETerm(f)
        state = lax.cond(
            place == 0, lambda: solver.init(terms, t, t_next, y, params), lambda: history
        )
        y, _, _, state, _ = solver.step(terms, t, t_next, y, params, state, made_jump=False)
        return y, state

    first = int(isinstance(solver, diffrax.ReversibleHeun))
    return HistoryStep(empty, take, lambda num_steps: num_steps + first)
