"""What the continuous adjoints share: arguments, observations, error control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optimistix as optx

from .. import _diffrax, _tree
from .._forward import ClosedTerm, Options, Saving, Solve, prepare, restore
from .._reverse_only import reverse_only
from .._steps import get_solver
from .._times import FIXED

PyTree = Any


def _as_solver(method: Any) -> Any:
    if isinstance(method, str):
        return get_solver(method)
    if method is None or isinstance(method, diffrax.AbstractSolver):
        return method
    raise TypeError(
        "`method` must be the name of a method, a Diffrax solver such as diffrax.Tsit5(), or None; "
        f"got {method!r}"
    )


class ContinuousAdjoint(diffrax.AbstractAdjoint):
    """The continuous gradient by a backward solve; subclasses say of what.

    Parameters
    ----------
    method : str or diffrax.AbstractSolver, optional
        Method of the backward solve; that of the forward solve where None.
    rtol, atol : float, optional
        Tolerances of the backward solve; those of the forward solve where None. Given for a solve
        with fixed steps, both, they make the backward solve adaptive.
    seminorm : bool
        Leave theta-bar out of the error control: it is a quadrature, which feeds back on nothing.
    max_steps : int, optional
        Most attempted steps of the backward solve; that of the forward solve where None.
    """

    method: Any = eqx.field(converter=_as_solver, default=None)
    rtol: Any = None
    atol: Any = None
    seminorm: bool = eqx.field(static=True, default=False)
    max_steps: int | None = eqx.field(static=True, default=None)
    probe: Any = None

    def __check_init__(self):
        if not isinstance(self.seminorm, bool):
            raise TypeError(f"`seminorm` must be a bool, got {self.seminorm!r}")
        if self.max_steps is not None and (type(self.max_steps) is not int or self.max_steps < 1):
            raise ValueError(
                f"`max_steps` must be None or an int of at least 1, got {self.max_steps!r}"
            )

    def loop(self, *, init_state, terms, solver, saveat, args, t0, **kwargs):
        name = type(self).__name__
        if not _diffrax.is_ode_term(terms):
            raise NotImplementedError(
                f"`adjoint=contadj.jax.{name}()` serves one `diffrax.ODETerm`; add the vector "
                "fields into one, or use "
                "`adjoint=contadj.jax.CheckpointAdjoint()`"
            )
        sub = _diffrax.single_subsaveat(saveat, name)
        if sub.steps:
            raise NotImplementedError(
                f"`adjoint=contadj.jax.{name}()` does not serve `SaveAt(steps=...)`; give the "
                "times to `SaveAt(ts=...)`, or use `adjoint=contadj.jax.CheckpointAdjoint()`"
            )
        solve, options = prepare(
            name, init_state=init_state, terms=terms, solver=solver, saveat=saveat, args=args,
            t0=t0, **kwargs,
        )  # fmt: skip
        self._require_controller(solve.controller)
        field = solve.stepper.terms
        if field is None:
            field = ClosedTerm(terms, solve.t0, solve.y0, args)
        # y itself is what the backward solve starts from: `fn` is applied to it outside.
        plain = diffrax.SubSaveAt(t0=sub.t0, t1=sub.t1, ts=sub.ts)
        fn, identity = solve.saving.fn, Saving(plain, solve.t0, solve.y0, None)
        solve = eqx.tree_at(lambda s: s.saving, solve, identity)
        if not _diffrax.saves_state(sub):
            length = options.ts.shape[0]
            states = jtu.tree_map(
                lambda x: jnp.full((length, *x.shape), jnp.inf, x.dtype), solve.y0
            )
            options = eqx.tree_at(lambda o: o.ys, options, states)
        backward = Backward(
            solver if self.method is None else self.method, self.rtol, self.atol, self.seminorm,
            options.max_steps if self.max_steps is None else self.max_steps,
        )  # fmt: skip
        inputs = reverse_only((solve, field, self.probe), name)
        end, (ts, ys) = self.solve(inputs, options=options, backward=backward)
        if not _diffrax.saves_state(sub):
            ys = observe(fn, solve, ts, ys, init_state.save_state.ys)
        end = restore(end, solve, options)
        return _diffrax.finished(init_state, end, (ts, ys), solve.stepper.carries), {}

    def _require_controller(self, controller):
        inner = controller
        if type(inner) is diffrax.ClipStepSizeController and inner.store_rejected_steps is None:
            inner = inner.controller
        if type(inner) not in (*FIXED, diffrax.PIDController):
            raise NotImplementedError(
                f"`adjoint=contadj.jax.{type(self).__name__}()` cannot run `stepsize_controller="
                f"{type(controller).__name__}(...)` in reverse; use ConstantStepSize, StepTo or "
                "PIDController, or `adjoint=contadj.jax.CheckpointAdjoint()`"
            )
        if type(inner) in FIXED and (self.rtol is None) != (self.atol is None):
            raise ValueError(
                f"`rtol` and `atol` of contadj.jax.{type(self).__name__}(...) must be given "
                "together when the forward solve has fixed steps"
            )

    def solve(self, inputs, *, options: Options, backward: Backward):
        """The end of the forward solve and what was saved, differentiable in `inputs`."""
        raise NotImplementedError


class Backward(eqx.Module):
    """How the backward solve is made."""

    solver: diffrax.AbstractSolver
    rtol: Any
    atol: Any
    seminorm: bool = eqx.field(static=True)
    max_steps: int | None = eqx.field(static=True)


def observe(fn, solve, ts, ys, buffers):
    """What `SaveAt(fn=...)` asks for, from the states; unsaved entries stay infinite."""
    saved = jnp.isfinite(ts)

    def one(saved, t, y):
        # Not evaluated at infinity, whose cotangent would be 0 * inf.
        out = fn(jnp.where(saved, t, solve.t0), _tree.where(saved, y, solve.y0))
        return jtu.tree_map(lambda x: jnp.where(saved, x, jnp.inf), out)

    out = jax.vmap(one)(saved, ts, ys)
    return jtu.tree_map(lambda x, like: x.astype(like.dtype), out, buffers)


def as_probe(stats, probe):
    if probe is None:
        return None
    return jnp.stack([jnp.asarray(x, probe.dtype) for x in stats])


def augmented_norm(norm: Callable, seminorm: bool) -> Callable:
    """The largest of the norms of the states and, without the seminorm, theta-bar, last."""

    def augmented(tree):
        *states, sums = tree
        sizes = [norm(state) for state in states]
        if not seminorm and jtu.tree_leaves(sums):
            sizes.append(optx.rms_norm(sums))
        return jnp.max(jnp.stack(sizes))

    return augmented


def backward_controller(solve: Solve, backward: Backward):
    """The backward controller, or None for the forward mesh reversed."""
    controller: Any = solve.controller
    if type(controller) in FIXED:
        if backward.rtol is None:
            return None
        return diffrax.PIDController(
            backward.rtol, backward.atol, norm=augmented_norm(optx.rms_norm, backward.seminorm)
        )
    controller = controller.wrap(-1)  # jumps and steps that must be met, in reversed time
    wrapped = type(controller) is diffrax.ClipStepSizeController
    inner: Any = controller.controller if wrapped else controller
    inner = eqx.tree_at(
        lambda c: (c.rtol, c.atol, c.norm),
        inner,
        (
            inner.rtol if backward.rtol is None else backward.rtol,
            inner.atol if backward.atol is None else backward.atol,
            augmented_norm(inner.norm, backward.seminorm),
        ),
    )
    return eqx.tree_at(lambda c: c.controller, controller, inner) if wrapped else inner


def pair(x: PyTree, y: PyTree):
    """Re sum x y, the change of the cost when y is the rate of change of the state."""
    pairs = jtu.tree_map(lambda a, b: jnp.sum(jnp.real(a * b)), x, y)
    return sum(jtu.tree_leaves(pairs))


def saved_times(solve, adjoint, d_ts, d_t0, saved, moving):
    """The cotangent of a solve from those of y0 and of the times that were saved."""
    first = int(solve.saving.t0)
    d_saving_ts, d_t1 = None, None
    if moving:
        if solve.saving.ts is not None:
            d_saving_ts = d_ts[first : first + len(solve.saving.ts)]
        if solve.saving.t1:
            # Saved last, wherever the solve ended.
            d_t1 = jnp.where(solve.t0 == solve.t1, 0, d_ts[saved - 1])
            if d_saving_ts is not None:
                index = jnp.arange(len(d_saving_ts)) + first
                d_saving_ts = jnp.where(index < saved - 1, d_saving_ts, 0)
    return eqx.tree_at(
        lambda s: (s.saving.ts, s.y0, s.t0, s.t1),
        eqx.filter(solve, lambda x: False),
        (d_saving_ts, adjoint, d_t0, d_t1),
        is_leaf=lambda x: x is None,
    )
