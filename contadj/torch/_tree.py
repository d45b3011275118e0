"""Nested states: tuples, lists, dictionaries and tensors, to and from a list of leaves.

The order is JAX's: depth first, dictionaries by sorted key, None a node without leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree and the function that rebuilds it from new leaves."""
    leaves: list[Any] = []
    rebuild = _visit(tree, leaves)

    def unflatten(new_leaves: Sequence[Any]) -> Any:
        return rebuild(iter(new_leaves))

    return leaves, unflatten


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the leaves of trees of one structure."""
    leaves, unflatten = flatten(tree)
    columns = [flatten(other)[0] for other in others]
    return unflatten([function(*row) for row in zip(leaves, *columns, strict=True)])


def _visit(node: Any, leaves: list[Any]) -> Callable[[Any], Any]:
    if node is None:
        return lambda _: None
    if isinstance(node, dict):
        keys = sorted(node)
        parts = [_visit(node[key], leaves) for key in keys]
        return lambda new: {key: part(new) for key, part in zip(keys, parts, strict=True)}
    if isinstance(node, tuple | list):
        parts = [_visit(child, leaves) for child in node]
        kind = type(node)
        if hasattr(node, "_fields"):
            return lambda new: kind(*[part(new) for part in parts])
        return lambda new: kind(part(new) for part in parts)
    leaves.append(node)
    return next


def tensors(tree: Any) -> list[Tensor]:
    """The leaves of a tree that are tensors."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
