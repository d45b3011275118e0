"""The user's vector field on a flat state: checked once, counted, and guarded.

A backward pass that evaluates f again gets a wrong gradient, without any error, when f is not the
same function any more, or when f uses tensors that nobody told it about. The first evaluation is
therefore watched: which leaves its graph reaches, whether it draws random numbers, whether it
writes to buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _tree


class StateLayout:
    """How a nested state lies in one flat tensor.

    A single tensor is kept as it is; several leaves are raveled and concatenated.

    Raises
    ------
    TypeError
        If a leaf is no floating-point or complex tensor, or if leaves differ in dtype or device.
    """

    def __init__(self, y0: Any):
        leaves, self._unflatten = _tree.flatten(y0)
        if not leaves:
            raise TypeError("`y0` must hold at least one tensor, got none")
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(f"`y0` must be made of tensors, got {type(leaf).__name__}")
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(
                    f"`y0` must be floating-point or complex, got {leaf.dtype}; convert it with "
                    "y0.float()"
                )
        first = leaves[0]
        if any(leaf.dtype != first.dtype or leaf.device != first.device for leaf in leaves):
            kinds = ", ".join(f"{leaf.dtype} on {leaf.device}" for leaf in leaves)
            raise TypeError(f"the leaves of `y0` must share one dtype and device, got {kinds}")
        self.single = isinstance(y0, Tensor)
        self.shapes = [leaf.shape for leaf in leaves]
        self._sizes = [leaf.numel() for leaf in leaves]

    def flatten(self, tree: Any) -> Tensor:
        """One tensor from a nested state."""
        if self.single:
            return tree
        return torch.cat([leaf.reshape(-1) for leaf in _tree.flatten(tree)[0]])

    def unflatten(self, flat: Tensor, lead: tuple[int, ...] = ()) -> Any:
        """The nested state from one tensor, with leading axes `lead`."""
        if self.single:
            return flat
        parts = flat.split(self._sizes, dim=-1)
        return self._unflatten(
            [part.reshape(lead + shape) for part, shape in zip(parts, self.shapes, strict=True)]
        )

    def tolerance(self, value: Any, argument: str, like: Tensor) -> float | Tensor:
        """A tolerance as a number, or as a tensor where components have their own."""
        if isinstance(value, int | float):
            number = float(value)
            if not number >= 0.0:
                raise ValueError(f"`{argument}` must be non-negative, got {value!r}")
            return number
        if isinstance(value, Tensor) and (self.single or value.ndim == 0):
            tensor = value.detach().to(like.device, like.real.dtype)
            if self.single:
                torch.broadcast_shapes(tensor.shape, self.shapes[0])
            return tensor
        parts, _ = _tree.flatten(value)
        if len(parts) != len(self.shapes):
            raise ValueError(
                f"`{argument}` must be a number, a tensor, or have the structure of `y0` "
                f"({len(self.shapes)} leaves), got {len(parts)} leaves"
            )
        return torch.cat([
            torch.as_tensor(part).to(like.device, like.real.dtype).expand(shape).ravel()
            for part, shape in zip(parts, self.shapes, strict=True)
        ])  # fmt: skip


class VectorField:
    """f(t, y) on flat states, with a count of its evaluations.

    Parameters
    ----------
    func : callable
        The user's f(t, y), on the nested state.
    layout : StateLayout
        How the nested state lies in a flat tensor.

    Raises
    ------
    TypeError
        From `probe`, if f returns anything but the structure, shape, dtype and device of y.
    """

    def __init__(self, func: Callable[..., Any], layout: StateLayout):
        if not callable(func):
            raise TypeError(f"`func` must be callable as func(t, y), got {type(func).__name__}")
        self.func = func
        self.layout = layout
        self.evaluations = 0
        self._calls_autograd = False
        self._checked = False

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.evaluations += 1
        if torch.is_grad_enabled():
            return self._evaluate(t, y)
        if not self._calls_autograd:
            try:
                return self._evaluate(t, y)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
            # f differentiates something itself (an energy, a divergence): it needs a graph always.
            self._calls_autograd = True
        with torch.enable_grad():
            return self._evaluate(t, y.detach().requires_grad_()).detach()

    def _evaluate(self, t: Tensor, y: Tensor) -> Tensor:
        if not self._checked:
            return self._checked_once(t, y)
        if self.layout.single:
            return self.func(t, y)
        return self.layout.flatten(self.func(t, self.layout.unflatten(y)))

    def _checked_once(self, t: Tensor, y: Tensor) -> Tensor:
        tree = self.func(t, self.layout.unflatten(y))
        self._check(tree, y)
        self._checked = True
        return self.layout.flatten(tree)

    def probe(self, t: Tensor, y: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, Probe]:
        """Evaluate f with a graph and report what it did.

        Parameters
        ----------
        t : scalar Tensor
        y : Tensor
            Flat state.
        params : sequence of Tensor
            The tensors that gradients are asked for already; the walk through the graph ends there.

        Returns
        -------
        value : Tensor
            f(t, y), detached.
        Probe
        """
        start = y.detach().requires_grad_()
        buffers = list(self.func.buffers()) if isinstance(self.func, nn.Module) else []
        versions = [buffer._version for buffer in buffers]
        random_before = _random_state(y.device)
        with torch.enable_grad():
            first_node = (start.real * 1).grad_fn
            self.evaluations += 1
            value = self._checked_once(t, start)
        draws_random = any(
            not torch.equal(before, after)
            for before, after in zip(random_before, _random_state(y.device), strict=True)
        )
        written = [b for b, version in zip(buffers, versions, strict=True) if b._version != version]
        leaves, foreign = graph_leaves(value, first_node, params)
        if value.grad_fn is None:
            self._require_constant(t, y, value)
        hidden = [leaf for leaf in leaves if leaf is not start]
        return value.detach(), Probe(hidden, foreign, draws_random, written)

    def _require_constant(self, t: Tensor, y: Tensor, value: Tensor) -> None:
        """A result without a graph is right only if it does not depend on y."""
        moved = y.detach() + 0.01 * (1.0 + y.detach().abs())
        with torch.enable_grad():
            self.evaluations += 1
            again = self._evaluate(t, moved.requires_grad_()).detach()
        if not torch.equal(again.nan_to_num(), value.nan_to_num()):
            raise ValueError(
                "`func` depends on y but its result has no graph, so every gradient would be zero: "
                "look for .detach(), .data, numpy, or torch.autograd.grad without "
                "create_graph=True inside it"
            )

    def _check(self, tree: Any, y: Tensor) -> None:
        leaves, _ = _tree.flatten(tree)
        if self.layout.single and not isinstance(tree, Tensor):
            raise TypeError(f"`func` must return a tensor like y0, got {type(tree).__name__}")
        got = [
            tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf in leaves
        ]
        expected = [tuple(shape) for shape in self.layout.shapes]
        if got != expected:
            raise TypeError(
                f"`func` must return the structure and shapes of y0, {expected}, got {got}"
            )
        for leaf in leaves:
            if leaf.dtype != y.dtype:
                raise TypeError(
                    f"`func` must return the dtype of y0, {y.dtype}, got {leaf.dtype}; cast its "
                    "result, or y0"
                )
            if leaf.device != y.device:
                raise TypeError(
                    f"`func` must return its result on the device of y0, {y.device}, got "
                    f"{leaf.device}"
                )


@dataclass(frozen=True, eq=False)
class Probe:
    """What one evaluation of f did.

    Parameters
    ----------
    hidden : list of Tensor
        Leaves that need a gradient and are not among the parameters.
    foreign : bool
        f used a tensor with a graph of its own, computed outside, that is not among the parameters.
    draws_random : bool
        f advanced a random number generator.
    written_buffers : list of Tensor
        Buffers of the module that f wrote to.
    """

    hidden: list[Tensor]
    foreign: bool
    draws_random: bool
    written_buffers: list[Tensor]


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def graph_leaves(
    value: Tensor, first_node: Any, params: Sequence[Tensor]
) -> tuple[list[Tensor], bool]:
    """Leaves that need a gradient in the graph of `value`, and whether it leaves f's own graph.

    Nodes older than `first_node` were made before f was called: their tensors came from outside.
    `_sequence_nr` is private; used with torch 2.11 to 2.13.
    """
    known = {id(param) for param in params}
    boundary = [param.grad_fn for param in params if param.grad_fn is not None]
    seen = {id(node) for node in boundary}
    start = -1 if first_node is None else first_node._sequence_nr()
    leaves: list[Tensor] = []
    foreign = False
    keep = [*boundary]  # node wrappers must stay alive for their ids to stay theirs
    stack = [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in known:
                leaves.append(variable)
        elif node._sequence_nr() < start:
            foreign = True
        else:
            stack.extend(parent for parent, _ in node.next_functions)
    return leaves, foreign


@contextlib.contextmanager
def same_context(autocast: dict[str, tuple[bool, torch.dtype]], buffers: Sequence[Tensor]):
    """Evaluate f under the autocast state of the forward pass, and leave buffers as they were."""
    with contextlib.ExitStack() as stack:
        for device_type, (enabled, dtype) in autocast.items():
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
        saved = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, saved, strict=True):
                    buffer.copy_(value)


def autocast_state(device: torch.device) -> dict[str, tuple[bool, torch.dtype]]:
    """The autocast settings that f sees now."""
    kinds = {device.type, "cpu"}
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    }
