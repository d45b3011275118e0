"""Equations solved by Newton's method, differentiated by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import optimistix as optx
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from ..tableaus import Tableau


def _signature(tree: PyTree) -> tuple:
    leaves, structure = jtu.tree_flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _newton(tree: PyTree, rtol, atol) -> optx.Newton:
    """Newton's method down to rounding: below sqrt(eps) its next update would be below eps."""
    if rtol is None:
        dtype = jnp.result_type(*jtu.tree_leaves(tree))
        rtol = float(jnp.finfo(dtype).eps) ** 0.5
        atol = max(atol, 1e-2 * rtol)
    return optx.Newton(rtol=rtol, atol=atol)


def implicit_step(
    residual: Callable[..., PyTree[Inexact[Array, " ..."]]],
    guess: PyTree[Inexact[Array, " ..."]],
    *args: PyTree,
    rtol: float | None = None,
    atol: float = 0.0,
    max_iterations: int = 50,
) -> PyTree[Inexact[Array, " ..."]]:
    """Solve residual(x, *args) = 0 for x by Newton's method, differentiably.

    The derivative is that of the implicit function theorem: one linear solve, whatever the number
    of iterations, in either mode and any number of times.

        dx/dtheta = -(dR/dx)^{-1} dR/dtheta

    Parameters
    ----------
    residual : callable
        `residual(x, *args)`, with the structure, shapes and dtypes of x. Gradients reach the arrays
        in `args` and those that it closes over.
    guess : pytree of floating-point arrays
        Where the iteration starts; nothing depends on it.
    *args
        Passed on.
    rtol : float, optional
        Size of the last update relative to x at which the iteration stops; None, the default, goes
        to the rounding of the dtype.
    atol : float
        Size of the last update that is always small enough.
    max_iterations : int
        Iterations after which the solve is given up.

    Returns
    -------
    x : like `guess`

    Raises
    ------
    TypeError
        If `guess` is not floating point, or `residual` does not return what x is.
    ValueError
        If `max_iterations` or a tolerance is out of range.
    RuntimeError
        When run, if the iteration does not converge.

    References
    ----------
    Christianson (1994), doi:10.1080/10556789408805572; Blondel et al. (2022), arXiv:2105.15183.
    """
    if type(max_iterations) is not int or max_iterations < 1:
        raise ValueError(f"`max_iterations` must be an int of at least 1, got {max_iterations!r}")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ValueError(f"`{name}` must not be negative, got {value!r}")
    guess = jtu.tree_map(jnp.asarray, guess)
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jtu.tree_leaves(guess)):
        raise TypeError("`guess` must hold floating-point arrays; write 1.0 for 1")
    out = eqx.filter_eval_shape(residual, guess, *args)
    if _signature(out) != _signature(guess):
        raise TypeError(
            "`residual` must return the structure, shapes and dtypes of `guess`, "
            f"{eqx.tree_pformat(guess)}; got {eqx.tree_pformat(out)}"
        )
    return optx.root_find(
        lambda x, args: residual(x, *args), _newton(guess, rtol, atol),
        jtu.tree_map(lax.stop_gradient, guess), args, max_steps=max_iterations,
    ).value  # fmt: skip


class ImplicitRungeKutta(diffrax.AbstractSolver):
    """A fully or diagonally implicit Runge-Kutta method, its stages solved together.

        k_i = h f(t_n + c_i h, y_n + sum_j a_ij k_j),   y_{n+1} = y_n + sum_i b_i k_i

    Dense output is the cubic Hermite polynomial. Derivatives are those of the implicit function
    theorem, exact whatever the number of iterations.

    Parameters
    ----------
    tableau : Tableau
    rtol : float, optional
        Size of Newton's last update relative to k; None goes to rounding.
    atol : float
        Size of the last update that is always small enough.
    """

    tableau: Tableau = eqx.field(static=True)
    rtol: float | None = None
    atol: float = 0.0

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable] = diffrax.ThirdOrderHermitePolynomialInterpolation

    def order(self, terms):
        return self.tableau.order

    def init(self, terms, t0, t1, y0, args):
        return None

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        a, b, c = self.tableau.a, self.tableau.b, self.tableau.c
        h = t1 - t0
        control = terms.contr(t0, t1)
        times = [t1 if node == 1 else t0 + float(node) * h for node in c]

        def combine(weights, ks):
            """y0 + sum_i weights[i] k_i."""

            def leaf(y, k):
                return y + jnp.tensordot(jnp.asarray(weights, y.dtype), k, axes=1)

            return jtu.tree_map(leaf, y0, ks)

        def residual(ks, _):
            slopes = [
                terms.vf_prod(t, combine(row, ks), args, control)
                for t, row in zip(times, a, strict=True)
            ]
            return jtu.tree_map(lambda k, *f: k - jnp.stack(f), ks, *slopes)

        first = terms.vf_prod(t0, y0, args, control)
        guess = jtu.tree_map(lambda k: jnp.stack([lax.stop_gradient(k)] * len(b)), first)
        found = optx.root_find(
            residual, _newton(y0, self.rtol, self.atol), guess, max_steps=50, throw=False
        )
        y1 = combine(b, found.value)
        error = None
        if self.tableau.embedded is not None:
            weights = b - self.tableau.embedded
            error = jtu.tree_map(
                lambda k: jnp.tensordot(jnp.asarray(weights, k.dtype), k, axes=1), found.value
            )
        last = terms.vf_prod(t1, y1, args, control)
        dense = {"y0": y0, "y1": y1, "k0": first, "k1": last}
        return y1, error, dense, None, diffrax.RESULTS.promote(found.result)

    def func(self, terms, t0, y0, args):
        return terms.vf(t0, y0, args)
