"""A value, its gradient, and the statistics of the solves behind both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from . import _tree
from ._errors import SolveStats
from ._solve import collect_stats


def value_grad_and_stats(
    fn: Callable[..., Float[Tensor, ""]],
) -> Callable[..., tuple[Float[Tensor, ""], Any, list[SolveStats]]]:
    """Turn a scalar function into one that also returns its gradient and solve statistics.

    Parameters
    ----------
    fn : callable
        `fn(x, *args) -> scalar Tensor`, x a tensor or a nest of tensors; solves inside it count.

    Returns
    -------
    callable
        `(x, *args) -> (value, gradient, stats)`: the gradient has the structure of x, zero where
        nothing depends on a leaf; `stats` has one `SolveStats` per solve, in order, the
        backward-pass ones (f evaluations, reversal error) included.

    Raises
    ------
    TypeError
        From the returned function, if fn does not return a scalar tensor.
    """

    def run(x: Any, *args: Any) -> tuple[Tensor, Any, list[SolveStats]]:
        leaves, unflatten = _tree.flatten(x)
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        with collect_stats() as stats, torch.enable_grad():
            value = fn(unflatten(inputs), *args)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise TypeError(f"`fn` must return a scalar tensor, got {value!r}")
            grads = torch.autograd.grad(value, inputs, allow_unused=True)
        full = [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(inputs, grads, strict=True)
        ]
        return value.detach(), unflatten(full), stats

    return run
