"""Diffrax solvers from the shared tableaus, and one step of any solver as a function of y alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..tableaus import TABLEAUS, Tableau, get_tableau
from ._implicit import ImplicitRungeKutta

PyTree = Any


class _PolynomialInterpolation(diffrax.AbstractLocalInterpolation):
    """y(t_n + x h) = y_n + h sum_i k_i sum_j coefficients[i][j] x^(j+1)."""

    coefficients: tuple[tuple[float, ...], ...] = eqx.field(static=True)
    t0: Any
    t1: Any
    y0: PyTree
    k: PyTree

    def __init__(self, coefficients, *, t0, t1, y0, y1, k):
        del y1
        self.coefficients = coefficients
        self.t0, self.t1, self.y0, self.k = t0, t1, y0, k

    def evaluate(self, t0, t1=None, left=True):
        if t1 is not None:
            return jtu.tree_map(lambda a, b: b - a, self.evaluate(t0), self.evaluate(t1))
        length = self.t1 - self.t0
        x = (t0 - self.t0) / jnp.where(length == 0, 1, length)
        weights = jnp.asarray(self.coefficients, jnp.result_type(x))
        powers = x ** jnp.arange(1, weights.shape[1] + 1)
        weights = weights @ powers

        def leaf(y, k):
            return y + jnp.tensordot(weights.astype(y.dtype), k, axes=1)

        return jtu.tree_map(leaf, self.y0, self.k)


def _butcher(tableau: Tableau) -> diffrax.ButcherTableau:
    """The tableau in Diffrax's form, with f at the end of the step as its last stage.

    A method without an interpolant needs that stage for cubic Hermite dense output; being first
    same as last, it costs no evaluation per step.
    """
    a, b, c = np.array(tableau.a), np.array(tableau.b), np.array(tableau.c)
    error = np.zeros_like(b) if tableau.embedded is None else b - tableau.embedded
    if tableau.interpolant is None:
        a = np.block([[a, np.zeros((len(b), 1))], [b[None, :], np.zeros((1, 1))]])
        b, c, error = np.append(b, 0.0), np.append(c, 1.0), np.append(error, 0.0)
    rows = tuple(a[i, :i] for i in range(1, len(b)))
    return diffrax.ButcherTableau(c=c[1:], b_sol=b, b_error=error, a_lower=rows)


@cache
def _solver_class(name: str) -> type[diffrax.AbstractERK]:
    shared = get_tableau(name)
    if shared.interpolant is None:
        interpolation = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k
    else:
        coefficients = tuple(tuple(map(float, row)) for row in shared.interpolant)
        interpolation = partial(_PolynomialInterpolation, coefficients)

    class Solver(diffrax.AbstractERK):
        tableau: ClassVar[diffrax.ButcherTableau] = _butcher(shared)
        interpolation_cls: ClassVar[Callable] = interpolation

        def order(self, terms):
            return shared.order

        def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
            y1, error, *rest = super().step(terms, t0, t1, y0, args, solver_state, made_jump)
            # None, not zero: a step-size controller must refuse a method that has no estimate.
            return y1, None if shared.embedded is None else error, *rest

    Solver.__name__ = Solver.__qualname__ = f"Solver_{name}"
    return Solver


def get_solver(name: str) -> diffrax.AbstractSolver:
    """Return a Diffrax solver by the name of its method.

    Parameters
    ----------
    name : str
        A method of `contadj.TABLEAUS`, stepped with the coefficients there, or the name of a
        solver class of Diffrax such as "Tsit5".

    Returns
    -------
    diffrax.AbstractSolver

    Raises
    ------
    ValueError
        If there is no method of that name.
    """
    if isinstance(name, str) and name in TABLEAUS:
        tableau = TABLEAUS[name]
        return _solver_class(name)() if tableau.explicit else ImplicitRungeKutta(tableau)
    solver = getattr(diffrax, name, None) if isinstance(name, str) else None
    if isinstance(solver, type) and issubclass(solver, diffrax.AbstractSolver):
        try:
            return solver()
        except TypeError as error:
            raise ValueError(
                f"`method` {name!r} needs arguments; pass diffrax.{name}(...) instead"
            ) from error
    raise ValueError(
        f"`method` must be one of {', '.join(TABLEAUS)}, or the name of a Diffrax solver such as "
        f"'Tsit5'; got {name!r}"
    )


def evaluations(solver: diffrax.AbstractSolver) -> int | None:
    """Evaluations of the vector field in one step started afresh; None where it varies."""
    tableau = explicit_tableau(solver)
    if tableau is not None:
        return tableau.num_stages - int(tableau.fsal)
    return 1 if isinstance(solver, diffrax.Euler) else None


def explicit_tableau(solver: diffrax.AbstractSolver) -> diffrax.ButcherTableau | None:
    """The tableau of a solver whose step it says all about, else None."""
    # A wrapper such as HalfSolver passes for what it wraps, but has no tableau of its own.
    tableau = getattr(solver, "tableau", None)
    explicit = isinstance(solver, diffrax.AbstractERK)
    return tableau if explicit and isinstance(tableau, diffrax.ButcherTableau) else None


def _combine(y: PyTree, weights, ks: list[PyTree]) -> PyTree:
    """y + sum_i weights[i] ks[i], zero weights skipped; y may be None."""

    def leaf(y, *ks):
        total = y
        for weight, k in zip(weights, ks, strict=True):
            if weight != 0:
                total = weight * k if total is None else total + weight * k
        return total

    if y is None:
        return jtu.tree_map(lambda *ks: leaf(None, *ks), *ks)
    return jtu.tree_map(leaf, y, *ks)


def explicit_step(tableau: diffrax.ButcherTableau, terms, t0, t1, y, args, k0=None):
    """One step of an explicit method, its stages unrolled; every stage is evaluated afresh.

    Unrolled stages compile to straight-line code, which XLA fuses and differentiates without the
    stage buffers of a loop. What the caller does not use (an error estimate, a last stage needed
    for dense output alone) is never computed.

    Parameters
    ----------
    tableau : diffrax.ButcherTableau
    terms : diffrax.AbstractTerm
    t0, t1 : scalar
        Ends of the step.
    y : pytree
        State at t0.
    args : pytree
    k0 : pytree, optional
        The first stage, h f(t0, y), where it is known.

    Returns
    -------
    y1, error : pytree
    dense : dict
        What `solver.interpolation_cls` takes.
    slope : pytree or None
        f at the end of the step, where the method is first same as last.
    """
    control = terms.contr(t0, t1)
    h = t1 - t0
    nodes = [float(tableau.c1), *map(float, tableau.c)]
    rows = [(), *(tuple(map(float, row)) for row in tableau.a_lower)]
    ks = [] if k0 is None else [k0]
    stage, slope = y, None
    for node, row in list(zip(nodes, rows, strict=True))[len(ks) :]:
        t = t1 if node == 1 else t0 + node * h
        stage = _combine(y, row, ks) if ks else y
        if tableau.fsal:
            slope = terms.vf(t, stage, args)
            ks.append(terms.prod(slope, control))
        else:
            ks.append(terms.vf_prod(t, stage, args, control))
    y1 = stage if tableau.ssal else _combine(y, list(map(float, tableau.b_sol)), ks)
    error = (
        _combine(None, list(map(float, tableau.b_error)), ks) if np.any(tableau.b_error) else None
    )
    dense = {"y0": y, "y1": y1, "k": jtu.tree_map(lambda *k: jnp.stack(k), *ks)}
    return y1, error, dense, slope


def fresh_step(solver: diffrax.AbstractSolver) -> Callable:
    """One step of `solver` as a function of the state alone, started afresh.

    No stage or history is carried over from the step before, so that its derivative is the
    derivative of y_{n+1} with respect to y_n.

    Returns
    -------
    callable
        `step(terms, t0, t1, y, args) -> y1`, differentiable in both modes.
    """
    tableau = explicit_tableau(solver)
    if tableau is not None:
        return lambda terms, t0, t1, y, args: explicit_step(tableau, terms, t0, t1, y, args)[0]
    solver = differentiable(solver)

    def step(terms, t0, t1, y, args):
        # A Python float is weakly typed, which an implicit solver's loops do not accept.
        t0, t1 = (jnp.asarray(t, jnp.result_type(t)) for t in (t0, t1))
        state = solver.init(terms, t0, t1, y, args)
        return solver.step(terms, t0, t1, y, args, state, made_jump=False)[0]

    return step


def differentiable(solver: diffrax.AbstractSolver) -> diffrax.AbstractSolver:
    """`solver` with its loop over stages differentiable in both modes, however often."""
    if isinstance(solver, diffrax.HalfSolver):
        return diffrax.HalfSolver(differentiable(solver.solver))
    if isinstance(solver, diffrax.AbstractRungeKutta) and solver.scan_kind is None:
        return eqx.tree_at(
            lambda s: s.scan_kind, solver, "bounded", is_leaf=lambda leaf: leaf is None
        )
    return solver
