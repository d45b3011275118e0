"""Where Diffrax's internals are touched: the state that `AbstractAdjoint.loop` takes and returns.

`loop` is the documented extension point; the fields of the state it is given are not documented.
Written against Diffrax 0.7.1 and 0.7.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import diffrax
import jax.numpy as jnp
import jax.tree_util as jtu

PyTree = Any


def is_subsaveat(x: Any) -> bool:
    """Whether x is one entry of `SaveAt(subs=...)`."""
    return isinstance(x, diffrax.SubSaveAt)


def single_subsaveat(saveat: diffrax.SaveAt, adjoint: str) -> diffrax.SubSaveAt:
    """The one entry of `saveat`, or a refusal."""
    if not is_subsaveat(saveat.subs) or saveat.dense:
        what = "SaveAt(dense=True)" if saveat.dense else "SaveAt(subs=...)"
        raise NotImplementedError(
            f"`adjoint=contadj.jax.{adjoint}()` does not serve `saveat={what}`; give the times to "
            "`SaveAt(ts=...)`, or use `adjoint=contadj.jax.DirectAdjoint()`"
        )
    return saveat.subs


def saves_state(sub: diffrax.SubSaveAt) -> bool:
    """Whether the entry saves y itself, `fn` left at its default."""
    return sub.fn is diffrax.SubSaveAt(t1=True).fn


def require_ode(terms: PyTree, event: Any, adjoint: str) -> None:
    """Refuse what no adjoint here serves: noise and events."""
    paths = jtu.tree_leaves(terms, is_leaf=lambda x: isinstance(x, diffrax.AbstractBrownianPath))
    if any(isinstance(x, diffrax.AbstractBrownianPath) for x in paths):
        raise NotImplementedError(
            f"`adjoint=contadj.jax.{adjoint}()` does not serve stochastic terms; use "
            "`adjoint=diffrax.RecursiveCheckpointAdjoint()`"
        )
    if event is not None:
        raise NotImplementedError(
            f"`adjoint=contadj.jax.{adjoint}()` does not serve `event=...`; use "
            "`adjoint=contadj.jax.DirectAdjoint()`"
        )


def is_ode_term(terms: PyTree) -> bool:
    """Whether the terms are one `ODETerm`, inside the wrapper that turns time around."""
    return isinstance(getattr(terms, "term", terms), diffrax.ODETerm)


def finished(init_state, march, saving_buffers, carries: bool = False) -> Any:
    """Diffrax's final state, from the loop's own.

    An explicit solver's state is (whether f must be evaluated afresh, f at the end), where it has
    one; `carries` tells that the loop kept the solver's own state instead.
    """
    ts, ys = saving_buffers
    solver_state = march.solver_state
    if not carries and init_state.solver_state is not None:
        _, unused = init_state.solver_state
        afresh = jnp.asarray(solver_state is None)
        solver_state = (afresh, unused if solver_state is None else solver_state)
    save_state = dataclasses.replace(
        init_state.save_state,
        ts=ts,
        ys=ys,
        save_index=march.save_index,
        saveat_ts_index=march.ts_index,
    )
    return dataclasses.replace(
        init_state,
        y=march.y,
        tprev=march.tprev,
        tnext=march.tnext,
        made_jump=march.made_jump,
        solver_state=solver_state,
        controller_state=march.controller_state,
        progress_meter_state=march.progress,
        result=march.result,
        num_steps=march.num_steps,
        num_accepted_steps=march.accepted,
        num_rejected_steps=march.num_steps - march.accepted,
        save_state=save_state,
    )
