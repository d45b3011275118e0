"""The user's vector field on a flat state: checked once, counted, and guarded.

A backward pass that evaluates f again gets a wrong gradient, without any error, when f is not the
same function any more, or when f uses tensors that nobody told it about. The first evaluation is
therefore watched: which leaves its graph reaches, whether it draws random numbers, whether it
writes to buffers. The evaluations with a graph in the backward pass are watched for leaves that f
did not use at first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import _tree
from ._controls import Drive

Edge = tuple[Any, int]  # a node of a graph, and which of its outputs


class StateLayout:
    """How a nested state lies in one flat tensor.

    A single tensor is kept as it is; several leaves are raveled and concatenated.

    Raises
    ------
    TypeError
        If a leaf is no floating-point or complex tensor, or if leaves differ in dtype or device.
    """

    def __init__(self, y0: Any, argument: str = "y0"):
        leaves, self._unflatten = _tree.flatten(y0)
        if not leaves:
            raise TypeError(f"`{argument}` must hold at least one tensor, got none")
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(f"`{argument}` must be made of tensors, got {type(leaf).__name__}")
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(
                    f"`{argument}` must be floating-point or complex, got {leaf.dtype}; convert it "
                    "with .float()"
                )
        first = leaves[0]
        if any(leaf.dtype != first.dtype or leaf.device != first.device for leaf in leaves):
            kinds = ", ".join(f"{leaf.dtype} on {leaf.device}" for leaf in leaves)
            raise TypeError(
                f"the leaves of `{argument}` must share one dtype and device, got {kinds}"
            )
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
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, int | float | np.number):
            number = float(value)
            if not number >= 0.0:
                raise ValueError(f"`{argument}` must be non-negative, got {value!r}")
            return number
        if isinstance(value, Tensor) and (self.single or value.ndim == 0):
            tensor = value.detach().to(like.device, like.real.dtype)
            if self.single:
                torch.broadcast_shapes(tensor.shape, self.shapes[0])
            return _non_negative(tensor, argument)
        parts, _ = _tree.flatten(value)
        if len(parts) != len(self.shapes):
            raise ValueError(
                f"`{argument}` must be a number, a tensor, or have the structure of `y0` "
                f"({len(self.shapes)} leaves), got {len(parts)} leaves"
            )
        whole = torch.cat([
            torch.as_tensor(part).to(like.device, like.real.dtype).expand(shape).ravel()
            for part, shape in zip(parts, self.shapes, strict=True)
        ])  # fmt: skip
        return _non_negative(whole, argument)


def _non_negative(tolerance: Tensor, argument: str) -> Tensor:
    if not bool((tolerance >= 0.0).all()):
        raise ValueError(f"`{argument}` must be non-negative, got {tolerance}")
    return tolerance


def modules_of(func: Any) -> list[nn.Module]:
    """The modules that a function is, is bound to, or closes over."""
    if isinstance(func, nn.Module):
        return [func]
    if isinstance(func, functools.partial):
        inner = [func.func, *func.args, *func.keywords.values()]
        return [module for part in inner for module in modules_of(part)]
    held = [getattr(func, "__self__", None)]
    for cell in getattr(func, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            held.append(cell.cell_contents)
    names = getattr(getattr(func, "__code__", None), "co_names", ())
    scope = getattr(func, "__globals__", {})
    held += [scope[name] for name in names if name in scope]
    return [module for module in held if isinstance(module, nn.Module)]


class VectorField:
    """f(t, y) on flat states, with a count of its evaluations.

    Parameters
    ----------
    func : callable
        The user's f(t, y), on the nested state.
    layout : StateLayout
        How the nested state lies in a flat tensor.
    drive : Drive, optional
        The control: f is the user's f(t, y, u) then.

    Raises
    ------
    TypeError
        From `probe`, if f returns anything but the structure, shape, dtype and device of y.
    """

    def __init__(self, func: Callable[..., Any], layout: StateLayout, drive: Drive | None = None):
        if not callable(func):
            raise TypeError(f"`func` must be callable as func(t, y), got {type(func).__name__}")
        self.drive = drive
        self.knots: tuple[float, ...] = () if drive is None else tuple(drive.knots.tolist())
        self.jumps: frozenset[float] = frozenset() if drive is None else drive.jumps
        self.func = func
        self.layout = layout
        self.evaluations = 0
        self._calls_autograd = False
        self._checked = False
        self._allowed: Sequence[Tensor] | None = None
        self._known: frozenset[Edge] | None = None

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.evaluations += 1
        if torch.is_grad_enabled():
            return self.watched("func", self._evaluate, t, y)
        if y.requires_grad:
            # Its views would ask for a gradient even here, and f may look at that.
            y = y.detach()
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
        if self.drive is not None:
            return self.layout.flatten(self.func(t, self.layout.unflatten(y), self.drive(t)))
        if self.layout.single:
            return self.func(t, y)
        return self.layout.flatten(self.func(t, self.layout.unflatten(y)))

    @contextlib.contextmanager
    def watching(self, params: Sequence[Tensor] | None):
        """A tensor used here with a graph must be an input or one of `params`; None takes any."""
        before = self._allowed, self._known
        self._allowed, self._known = params, None
        try:
            yield
        finally:
            self._allowed, self._known = before

    def watched(self, argument: str, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """function(*inputs), where `watching` refused if it uses a tensor that nobody knows of.

        Raises
        ------
        ValueError
            If it does: the gradient of that tensor would be lost.
        """
        value = function(*inputs)
        if self._allowed is None:
            return value
        if self._known is None:
            self._known = frozenset([(None, 0), *map(_edge, self._allowed)])
        found = _unknown_leaves(value, inputs, self._known)
        if found:
            # A leaf that f makes for itself is another one in each evaluation.
            self.evaluations += argument == "func"
            again = _unknown_leaves(function(*inputs), inputs, self._known)
            found = [leaf for leaf in found if id(leaf) in map(id, again)]
        if found:
            raise ValueError(
                f"`{argument}` uses a tensor of shape {tuple(found[0].shape)} that needs a "
                "gradient and that it did not use when it was first evaluated: its gradient would "
                "be lost. Name in `params` all that needs one, params=(..., that_tensor), or use "
                "DirectAdjoint()"
            )
        return value

    def enter(self, t: float | Tensor, t_next: float | Tensor) -> None:
        """The next evaluations belong to the step from t to t_next."""
        if self.drive is not None:
            self.drive.enter(*(x.item() if isinstance(x, Tensor) else x for x in (t, t_next)))

    def enter_beside(self, t: float, toward: float) -> None:
        """The next evaluations are limits at t, from the side of `toward`."""
        if self.drive is not None:
            self.drive.enter_beside(t, toward)

    @contextlib.contextmanager
    def elsewhere(self):
        """Evaluations that belong to another step than those before and after."""
        piece = None if self.drive is None else self.drive.piece
        try:
            yield
        finally:
            if self.drive is not None and piece is not None:
                self.drive.piece = piece

    def _checked_once(self, t: Tensor, y: Tensor) -> Tensor:
        inputs = () if self.drive is None else (self.drive(t),)
        tree = self.func(t, self.layout.unflatten(y), *inputs)
        self._check(tree, y)
        self._checked = True
        return self.layout.flatten(tree)

    def probe(
        self,
        t: Tensor,
        y: Tensor,
        params: Sequence[Tensor],
        costs: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
        keep_graph: bool = False,
    ) -> tuple[Tensor, Probe]:
        """Evaluate f, and the costs, with a graph and report what they did.

        Parameters
        ----------
        t : scalar Tensor
        y : Tensor
            Flat state.
        params : sequence of Tensor
            The tensors that gradients are asked for already; the walk through the graph ends there.
        costs : mapping of str to callable
            Scalar functions of (t, y), by the name of their argument.
        keep_graph : bool
            Return f(t, y) with its graph, back to y too.

        Returns
        -------
        value : Tensor
            f(t, y).
        Probe

        Raises
        ------
        ValueError
            If f depends on y in a way that its graph does not show.
        """
        start = y.view_as(y) if keep_graph and y.requires_grad else y.detach().requires_grad_()
        buffers = [buffer for module in modules_of(self.func) for buffer in module.buffers()]
        versions = [buffer._version for buffer in buffers]
        random_before = _random_state(y.device)
        differentiates: list[bool] = []  # whether f's own derivative in y has a graph
        # A weight that autocast has cast before would count as computed outside.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            first_node = (start.real * 1).grad_fn
            hook = start.register_hook(lambda grad: differentiates.append(torch.is_grad_enabled()))
            self.evaluations += 1
            value = self._checked_once(t, start)
            hook.remove()
        draws_random = any(
            not torch.equal(before, after)
            for before, after in zip(random_before, _random_state(y.device), strict=True)
        )
        # A batch norm's running statistics are written without a new version, its counter is not.
        changed = any(b._version != v for b, v in zip(buffers, versions, strict=True))
        written = buffers if changed else []
        known = (*params, start)
        leaves, foreign, reached = graph_leaves(value, first_node, known)
        if leaves and not keep_graph:
            # A leaf that f makes for itself is another one in each evaluation.
            with torch.enable_grad(), same_context({}, buffers):
                self.evaluations += 1
                again, *_ = graph_leaves(self._evaluate(t, start), first_node, known)
            leaves = [leaf for leaf in leaves if id(leaf) in map(id, again)]
        hidden = {"func": leaves}
        if id(start) not in reached:
            self._require_constant(t, y, value.detach())
        elif False in differentiates:
            self._require_derivative(t, start, value)
        outside = ["func"] if foreign else []
        for name, cost in costs.items():
            with torch.enable_grad():
                hidden[name], foreign, _ = graph_leaves(cost(t, start), first_node, known)
            outside += [name] if foreign else []
        probe = Probe(
            {name: found for name, found in hidden.items() if found}, outside, draws_random, written
        )
        # Where y needs no gradient, the graph back to `start` alone leads nowhere.
        useful = y.requires_grad or leaves or outside or reached - {id(start)}
        return (value if keep_graph and useful else value.detach()), probe

    def _require_constant(self, t: Tensor, y: Tensor, value: Tensor) -> None:
        """A result whose graph does not reach y is right only if it does not depend on y."""
        moved = y.detach() + 0.01 * (1.0 + y.detach().abs())
        with torch.enable_grad():
            self.evaluations += 1
            again = self._evaluate(t, moved.requires_grad_()).detach()
        if not torch.equal(again.nan_to_num(), value.nan_to_num()):
            raise ValueError(
                "`func` depends on y but the graph of its result does not reach y, so the gradient "
                "would be wrong: look for .detach(), .data, numpy, or torch.autograd.grad without "
                "create_graph=True inside it"
            )

    def _require_derivative(self, t: Tensor, y: Tensor, value: Tensor) -> None:
        """Where f differentiates something without a graph, try its derivative along y."""
        eps = torch.finfo(value.dtype).eps ** (1 / 3)
        with torch.enable_grad():
            self.evaluations += 2
            step = eps * (1.0 + y.detach().abs())
            ahead, behind = (
                self._evaluate(t, (y.detach() + sign * step).requires_grad_()).detach()
                for sign in (1.0, -1.0)
            )
            (got,) = torch.autograd.grad(value, y, torch.ones_like(value), retain_graph=True)
        want = (ahead - behind).sum() / 2
        slope = (got.conj() * step).sum()
        size = (ahead - behind).abs().sum() + (got * step).abs().sum()
        if bool((want.real - slope.real).abs() > 0.01 * size):
            raise ValueError(
                "`func` calls torch.autograd.grad without create_graph=True, so that part of its "
                "dependence on y has no graph and the gradient would be wrong: pass "
                "create_graph=True"
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
    """What one evaluation of f and the costs did.

    Parameters
    ----------
    hidden : dict of str to list of Tensor
        Leaves that need a gradient and are not among the parameters, by the argument that used
        them.
    foreign : list of str
        The arguments that used a tensor with a graph of its own, computed outside, that is not
        among the parameters.
    draws_random : bool
        f advanced a random number generator.
    written_buffers : list of Tensor
        Buffers of the module, if f wrote to any.
    """

    hidden: dict[str, list[Tensor]]
    foreign: list[str]
    draws_random: bool
    written_buffers: list[Tensor]


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _edge(tensor: Tensor) -> Edge:
    """Where a graph that uses the tensor leaves for it."""
    if tensor.grad_fn is None:
        return torch.autograd.graph.get_gradient_edge(tensor).node, 0
    return tensor.grad_fn, tensor.output_nr


# What a graph ends in at a leaf.
_AccumulateGrad = type(_edge(torch.empty(0, requires_grad=True))[0])


def _unknown_leaves(value: Tensor, inputs: Sequence[Any], known: frozenset[Edge]) -> list[Tensor]:
    """Leaves that need a gradient in the graph of a value, beyond its inputs and what is known.

    It runs at every evaluation with a graph and is written for speed: 10 microseconds where a small
    network and its vector-Jacobian product take 160.
    """
    root = value.grad_fn
    if root is None:
        foreign = value.requires_grad and _edge(value) not in known
        leaves = [value] if foreign else []
    else:
        seen = set(known)
        for x in inputs:
            node = getattr(x, "grad_fn", None)
            if node is not None:
                seen.add((node, x.output_nr))
        nodes: list[Any] = [] if (root, value.output_nr) in seen else [root]
        for node in nodes:
            for edge in node.next_functions:
                if edge not in seen:
                    seen.add(edge)
                    nodes.append(edge[0])
        leaves = [node.variable for node in nodes if type(node) is _AccumulateGrad]
    return [leaf for leaf in leaves if not any(leaf is x for x in inputs)]


def graph_leaves(
    value: Tensor, first_node: Any, params: Sequence[Tensor]
) -> tuple[list[Tensor], bool, set[int]]:
    """Leaves that need a gradient in a graph, whether it leaves f's own, and the params it reaches.

    Nodes older than `first_node` were made before f was called: their tensors came from outside.
    The params reached are given by their `id`. `_sequence_nr` is private; used with torch 2.11 to
    2.13.
    """
    known = {id(param) for param in params}
    # An output of a node is a param, not the node: `unbind` makes several.
    boundary = {
        (id(param.grad_fn), param.output_nr): id(param)
        for param in params
        if param.grad_fn is not None
    }
    start = -1 if first_node is None else first_node._sequence_nr()
    leaves: list[Tensor] = []
    reached: set[int] = set()
    foreign = False
    seen: set[int] = set()
    keep: list[Any] = []  # node wrappers must stay alive for their ids to stay theirs
    keep.extend(param.grad_fn for param in params)
    stack = [(value.grad_fn, value.output_nr)]
    if value.grad_fn is None and value.requires_grad:
        leaf = [value] if id(value) not in known else []
        return leaf, False, {id(value)} & known
    while stack:
        node, output = stack.pop()
        if node is None:
            continue
        keep.append(node)
        if (id(node), output) in boundary:
            reached.add(boundary[id(node), output])
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in known:
                reached.add(id(variable))
            else:
                leaves.append(variable)
        elif node._sequence_nr() < start:
            foreign = True
        else:
            stack.extend(node.next_functions)
    return leaves, foreign, reached


def inside_transform() -> bool:
    """Whether a torch.func transform is running.

    `_are_functorch_transforms_active` is private; used with torch 2.11 to 2.13.
    """
    return torch._C._are_functorch_transforms_active()


def pull(
    outs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    **more: Any,
) -> list[Tensor | None]:
    """The vector-Jacobian product of what was recorded; None is zero on either side.

    What was recorded says in which precision each part of it runs: autocast is for f alone, and
    would round the rest.
    """
    if not inputs:
        return []
    kind = outs[0].device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return pull(outs, cotangents, inputs, **more)
    given = cotangents[: len(outs)]
    wanted = [g is not None and out.requires_grad for out, g in zip(outs, given, strict=True)]
    if not all(wanted):
        outs, given = list(compress(outs, wanted)), list(compress(given, wanted))
        if not outs:
            return [None] * len(inputs)
    return list(torch.autograd.grad(outs, inputs, given, allow_unused=True, **more))


@contextlib.contextmanager
def same_context(autocast: dict[str, tuple[bool, torch.dtype]], buffers: Sequence[Tensor]):
    """Evaluate f under the autocast state of the forward pass, and leave buffers as they were."""
    with contextlib.ExitStack() as stack:
        for kind, state in autocast.items():
            if state != _autocast(kind):
                stack.enter_context(torch.autocast(kind, enabled=state[0], dtype=state[1]))
        torch.clear_autocast_cache()  # a weight cast in the forward pass belongs to its graph
        saved = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, saved, strict=True):
                    buffer.copy_(value)


def autocast_state(device: torch.device) -> dict[str, tuple[bool, torch.dtype]]:
    """The autocast settings that f sees now."""
    return {kind: _autocast(kind) for kind in {device.type, "cpu"}}


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
