"""An equinox module around a solve."""

from __future__ import annotations

from collections.abc import Callable

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from ._steps import get_solver
from .adjoints import CheckpointAdjoint

RETURNS = ("last", "all")


class NeuralODE(eqx.Module):
    """The solution of y' = func(t, y), y(t_0) = y0, as a module.

    Its parameters are those of `func`; it trains, is filtered and is serialised like any other
    equinox module. `func` sees one sample: use `jax.vmap` for a batch whose samples step on their
    own, or give y0 a batch axis that `func` takes.

    Parameters
    ----------
    func : eqx.Module or callable
        The vector field func(t, y).
    method : str or diffrax.AbstractSolver
        A method's name, or a Diffrax solver.
    adjoint : diffrax.AbstractAdjoint, optional
        How the gradient is computed; CheckpointAdjoint() where None.
    rtol, atol : float
        Tolerances, where the step size is controlled.
    num_steps : int, optional
        Equal steps between neighbouring times instead of step-size control.
    max_steps : int
        Most attempted steps, where the step size is controlled.
    times : sequence of float
        Times of a call without `t`.
    returns : "last" or "all"
        The state at the last time, or at all of them.

    Raises
    ------
    TypeError
        If `func` is not callable.
    ValueError
        For an unknown method or value of `returns`, or a count below 1.

    References
    ----------
    Chen, Rubanova, Bettencourt & Duvenaud (2018), arXiv:1806.07366.
    """

    func: Callable
    solver: diffrax.AbstractSolver
    adjoint: diffrax.AbstractAdjoint
    rtol: float = eqx.field(static=True)
    atol: float = eqx.field(static=True)
    num_steps: int | None = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)
    times: tuple[float, ...] = eqx.field(static=True)
    returns: str = eqx.field(static=True)

    def __init__(
        self,
        func: Callable[..., PyTree],
        *,
        method: str | diffrax.AbstractSolver = "tsit5",
        adjoint: diffrax.AbstractAdjoint | None = None,
        rtol: float = 1e-4,
        atol: float = 1e-6,
        num_steps: int | None = None,
        max_steps: int = 256,
        times: tuple[float, ...] = (0.0, 1.0),
        returns: str = "last",
    ):
        if not callable(func):
            raise TypeError(f"`func` must be callable as func(t, y), got {type(func).__name__}")
        if returns not in RETURNS:
            raise ValueError(f"`returns` must be 'last' or 'all', got {returns!r}")
        for name, value in (("num_steps", num_steps), ("max_steps", max_steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")
        self.func = func
        self.solver = method if isinstance(method, diffrax.AbstractSolver) else get_solver(method)
        self.adjoint = CheckpointAdjoint() if adjoint is None else adjoint
        self.rtol, self.atol = rtol, atol
        self.num_steps, self.max_steps = num_steps, max_steps
        self.times, self.returns = tuple(map(float, times)), returns

    def __call__(self, y0: PyTree, t: Float[Array, " times"] | None = None) -> PyTree:
        """Solve from `t[0]`, where y = y0, to the other times.

        Parameters
        ----------
        y0 : pytree of floating-point arrays
        t : (T,) array, optional
            Strictly monotone times; `times` where None.

        Returns
        -------
        pytree like y0
            With a leading axis T where `returns` is "all".
        """
        t = jnp.asarray(self.times if t is None else t)
        if t.ndim != 1 or t.shape[0] < 2:
            raise ValueError(f"`t` must have shape (T,) with T at least 2, got {t.shape}")
        dt0, controller, most = None, diffrax.PIDController(self.rtol, self.atol), self.max_steps
        if self.num_steps is not None:
            share = jnp.arange(self.num_steps) / self.num_steps
            inner = t[:-1, None] + (t[1:] - t[:-1])[:, None] * share
            controller = diffrax.StepTo(jnp.append(inner.ravel(), t[-1]))
            most = self.num_steps * (t.shape[0] - 1)
        saveat = diffrax.SaveAt(t1=True) if self.returns == "last" else diffrax.SaveAt(ts=t)
        ys = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, func: func(t, y)), self.solver, t[0], t[-1], dt0, y0,
            self.func, saveat=saveat, stepsize_controller=controller, adjoint=self.adjoint,
            max_steps=most,
        ).ys  # fmt: skip
        return ys if self.returns == "all" else jtu.tree_map(lambda y: y[-1], ys)
