"""A refusal of forward mode by name, where JAX would speak of a `custom_vjp`.

Reverse mode, too, begins with a tangent, and then transposes what became of it instead of computing
it. The primitive that stands on the tangent here is transposed to the identity, and raises where it
is computed.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

PyTree = Any


def _refuse(*_, adjoint: str, **__):
    raise TypeError(
        f"a solve with `adjoint=contadj.jax.{adjoint}()` has a gradient (jax.grad, jax.vjp) and no "
        "forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize); use "
        "`adjoint=contadj.jax.DirectAdjoint()` or `ForwardSensitivity()` for that. Second "
        "derivatives go forward over reverse, jax.jvp(jax.grad(f), ...)"
    )


_tangent = Primitive("contadj_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, *, adjoint: x)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, x, *, adjoint: [cotangent])
batching.primitive_batchers[_tangent] = _refuse


def _jvp(primals, tangents, *, adjoint: str):
    (x,), (v,) = primals, tangents
    return x, v if type(v) is ad.Zero else _tangent.bind(v, adjoint=adjoint)


_reverse_only = Primitive("contadj_reverse_only")
_reverse_only.def_impl(lambda x, *, adjoint: x)
_reverse_only.def_abstract_eval(lambda x, *, adjoint: x)
mlir.register_lowering(_reverse_only, lambda context, x, *, adjoint: [x])
ad.primitive_jvps[_reverse_only] = _jvp
batching.primitive_batchers[_reverse_only] = lambda args, axes, *, adjoint: (
    _reverse_only.bind(*args, adjoint=adjoint),
    axes[0],
)


def reverse_only(inputs: PyTree, adjoint: str) -> PyTree:
    """`inputs`, whose forward-mode derivative is refused in the name of `adjoint`."""

    def leaf(x):
        return _reverse_only.bind(x, adjoint=adjoint) if eqx.is_inexact_array(x) else x

    return jtu.tree_map(leaf, inputs)
