"""Arithmetic on cotangents: pytrees in which None stands for "nothing to differentiate"."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

PyTree = Any


def zeros(tree: PyTree, after: Any = 0) -> PyTree:
    """Zero cotangents for the floating leaves of `tree`; None for every other leaf.

    They are computed once `after`, a count, is known: from its being negative, which it is not.
    """

    def leaf(x):
        if not eqx.is_inexact_array(x):
            return None
        return jnp.broadcast_to(jnp.asarray(after < 0, x.dtype), x.shape)

    return jtu.tree_map(leaf, tree)


def add(x: PyTree, y: PyTree) -> PyTree:
    """Add two cotangents of one structure; None is zero."""

    def leaf(a, b):
        return b if a is None else (a if b is None else a + b)

    return jtu.tree_map(leaf, x, y, is_leaf=lambda v: v is None)


def materialise(cotangent: PyTree, primal: PyTree) -> PyTree:
    """Replace the symbolic zeros (None) of `cotangent` by arrays shaped like `primal`."""

    def leaf(p, c):
        return jnp.zeros_like(p) if c is None and eqx.is_inexact_array(p) else c

    return jtu.tree_map(leaf, primal, cotangent, is_leaf=lambda v: v is None)


def norm(tree: PyTree):
    """The Euclidean norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in jtu.tree_leaves(tree)))


def where(condition, x: PyTree, y: PyTree) -> PyTree:
    """Choose one of two pytrees of one structure, leaf by leaf."""
    return jtu.tree_map(lambda a, b: jnp.where(condition, a, b), x, y)


def vjp(fn, *primals: PyTree):
    """Value of `fn` and its pull-back, differentiating the floating leaves alone.

    The pull-back takes a cotangent in which None is zero, and returns one cotangent per primal.
    """
    dynamic, static = eqx.partition(primals, eqx.is_inexact_array)

    def pure(dynamic):
        out = fn(*eqx.combine(dynamic, static))
        inexact, rest = eqx.partition(out, eqx.is_inexact_array)
        return inexact, rest

    inexact, pull, rest = jax.vjp(pure, dynamic, has_aux=True)

    def pull_back(cotangent):
        return pull(materialise(eqx.filter(cotangent, eqx.is_inexact_array), inexact))[0]

    return eqx.combine(inexact, rest), pull_back


def buffer(length: int, tree: PyTree) -> PyTree:
    """Zero-filled storage for `length` copies of `tree`, along a new leading axis."""
    return jtu.tree_map(lambda x: jnp.zeros((length, *jnp.shape(x)), jnp.result_type(x)), tree)


def read(storage: PyTree, i) -> PyTree:
    """Entry `i` of a buffer."""
    return jtu.tree_map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), storage)


def write(storage: PyTree, i, tree: PyTree) -> PyTree:
    """The buffer with `tree` as entry `i`."""
    return jtu.tree_map(
        lambda x, v: jax.lax.dynamic_update_index_in_dim(x, jnp.asarray(v, x.dtype), i, 0),
        storage,
        tree,
    )


def strong(tree: PyTree) -> PyTree:
    """Arrays with their dtypes made explicit: no Python scalar, no weak type."""
    return jtu.tree_map(
        lambda x: jnp.asarray(x, jnp.result_type(x)) if eqx.is_array_like(x) else x, tree
    )


def while_loop(more, body, start: PyTree) -> PyTree:
    """`lax.while_loop` over the arrays of a pytree; what is not an array is left as it is.

    Scalars travel in one vector per dtype: that is one operation, where each by itself is one.
    """
    leaves, structure = jtu.tree_flatten(start)
    arrays = [i for i, x in enumerate(leaves) if eqx.is_array(x)]
    scalars: dict[Any, list[int]] = {}
    for i in arrays:
        if jnp.ndim(leaves[i]) == 0:
            scalars.setdefault(leaves[i].dtype, []).append(i)
    groups = list(scalars.values())
    alone = [i for i in arrays if jnp.ndim(leaves[i]) > 0]

    def pack(tree):
        out, got = jtu.tree_flatten(tree)
        assert got == structure, f"{got} != {structure}"
        old = lambda i: jnp.asarray(out[i], leaves[i].dtype)  # noqa: E731
        return [old(i) for i in alone], [jnp.stack([old(i) for i in g]) for g in groups]

    def unpack(packed):
        out = list(leaves)
        for i, x in zip(alone, packed[0], strict=True):
            out[i] = x
        for group, vector in zip(groups, packed[1], strict=True):
            for k, i in enumerate(group):
                out[i] = vector[k]
        return jtu.tree_unflatten(structure, out)

    end = jax.lax.while_loop(
        lambda packed: more(unpack(packed)), lambda packed: pack(body(unpack(packed))), pack(start)
    )
    return unpack(end)


def as_floats(tree: PyTree) -> PyTree:
    """Integer and Boolean arrays as floating-point ones, exact below 2^24.

    An integer output of a `custom_vjp` carries a tangent type that error checks on it cannot take.
    """
    dtype = jnp.result_type(float)
    return jtu.tree_map(
        lambda x: x.astype(dtype) if eqx.is_array(x) and not eqx.is_inexact_array(x) else x, tree
    )


def undo_floats(tree: PyTree, like: PyTree) -> PyTree:
    """What `as_floats` was given, its dtypes those of `like`; differentiating it is refused."""

    def leaf(x, old):
        if not hasattr(old, "dtype"):
            return old
        if x.dtype != old.dtype:
            return jax.lax.stop_gradient(x).astype(old.dtype)
        return eqxi.nondifferentiable_backward(
            x,
            msg=(
                "the final `solver_state` and `controller_state` of a solve have no gradient with "
                "an adjoint of contadj.jax; use diffrax.DirectAdjoint(), or jax.lax.stop_gradient"
            ),
        )

    return jtu.tree_map(leaf, tree, like)


def reversed_once(gradient: PyTree, adjoint: str) -> PyTree:
    """A gradient that forward mode can differentiate again, and reverse mode is refused."""
    return eqxi.nondifferentiable_backward(
        gradient,
        msg=(
            f"the backward pass of contadj.jax.{adjoint} cannot be differentiated in reverse mode; "
            "take second derivatives forward over reverse, jax.jvp(jax.grad(f), ...) or "
            "jax.jacfwd(jax.grad(f)), or use `adjoint=contadj.jax.DirectAdjoint()`"
        ),
    )
