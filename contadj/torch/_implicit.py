"""Equations solved inside a step, and the implicit Runge-Kutta methods made of them.

A root x of R(x, inputs) = 0 is found by Newton's method without a graph. Its derivative is that of
the implicit function theorem, dx = -J^{-1} R_inputs d(inputs), J = R_x, and costs one transposed
linear solve. Inputs may hide in the closure of R (the parameters of a module): R is evaluated again
at the root with a graph, and only what comes before that graph is done by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..tableaus import Tableau
from . import _tree
from ._errors import SolveError, SolveStats
from ._field import StateLayout, inside_transform
from ._options import NEWTON
from ._steps import (
    Row,
    RungeKutta,
    StageError,
    Step,
    VectorField,
    combine,
    enter,
    host_time,
    time_like,
)

# Up to this size one vector-Jacobian product after another is faster than a batch of them.
_LOOP_SIZE = 8
# (value, argument) tensors: the Jacobian of a residual is built from those of the pairs.
Pair = tuple[Tensor, Tensor]


class NewtonError(StageError, SolveError):
    """Newton's method that did not converge."""

    def __init__(self, message: str):
        SolveError.__init__(self, message, SolveStats())


@dataclass(frozen=True, eq=False)
class NewtonOptions:
    """When Newton's iteration ends, and which parts of the state are systems of their own.

    Parameters
    ----------
    rtol : float, optional
        The error left in x relative to its scale; None goes to the rounding of the dtype.
    atol : float
        An error that is always small enough.
    max_iterations : int
    samples : Samples
    given : mapping
        The options as the user gave them.
    """

    rtol: float | None
    atol: float
    max_iterations: int
    samples: Samples
    given: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(options: Mapping[str, Any] | None, layout: StateLayout) -> NewtonOptions:
        """The options of a solve that are Newton's.

        Raises
        ------
        ValueError
            For a tolerance or a count that is not positive, or a state without these batch axes.
        """
        given = {name: value for name, value in (options or {}).items() if name in NEWTON}
        return NewtonOptions(
            _tolerance("newton_rtol", given.get("newton_rtol")),
            0.0,
            _count("max_newton_iterations", given.get("max_newton_iterations", 50)),
            Samples.of(layout, given.get("batch_dims", 0)),
            given,
        )


def _tolerance(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(f"`{name}` must be a number in [0, 1), got {value!r}")
    return float(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {value!r}")
    return int(value)


@dataclass(frozen=True, eq=False)
class Samples:
    """The independent systems in a flat state: real vectors, (batch, n).

    Parameters
    ----------
    count : int
        Number of systems.
    order : (count, n) integer Tensor, optional
        Where their components lie in the flat state, if not one after another.
    """

    count: int = 1
    order: Tensor | None = None

    @staticmethod
    def of(layout: StateLayout, batch_dims: Any) -> Samples:
        """The systems along the first `batch_dims` axes of every leaf."""
        if isinstance(batch_dims, bool) or not isinstance(batch_dims, int) or batch_dims < 0:
            raise ValueError(f"`batch_dims` must be a non-negative integer, got {batch_dims!r}")
        if batch_dims == 0:
            return Samples()
        batches = {tuple(shape[:batch_dims]) for shape in layout.shapes}
        if len(batches) != 1 or len(next(iter(batches))) < batch_dims:
            shapes = ", ".join(str(tuple(shape)) for shape in layout.shapes)
            raise ValueError(
                f"`batch_dims` = {batch_dims} needs states that share their first {batch_dims} "
                f"axes, got shapes {shapes}"
            )
        count = int(np.prod(next(iter(batches))))
        if layout.single:
            return Samples(count)
        parts, start = [], 0
        for shape in layout.shapes:
            size = shape.numel()
            parts.append(torch.arange(start, start + size).reshape(count, -1))
            start += size
        return Samples(count, torch.cat(parts, 1))

    def vectors(self, x: Tensor, lead: int = 0) -> Tensor:
        """States with `lead` leading axes as real vectors, (*lead, batch, n)."""
        shape = x.shape[:lead]
        if self.order is not None:
            x = x.reshape(*shape, -1)[..., self.order.to(x.device)]
        elif self.count:
            x = x.reshape(*shape, self.count, -1)
        else:
            x = x.reshape(*shape, 0, 1)
        return torch.view_as_real(x).flatten(-2) if x.is_complex() else x

    def states(self, vectors: Tensor, like: Tensor) -> Tensor:
        """The inverse of `vectors`: states of the shape of `like`, with the same leading axes."""
        lead = vectors.shape[:-2]
        if like.is_complex():
            vectors = torch.view_as_complex(vectors.unflatten(-1, (-1, 2)).contiguous())
        if self.order is not None:
            flat = vectors.new_empty(*lead, like.numel())
            flat[..., self.order.to(like.device)] = vectors
            return flat.reshape(*lead, *like.shape)
        return vectors.reshape(*lead, *like.shape)


def jacobian(value: Tensor, at: Tensor, samples: Samples) -> Tensor:
    """d value / d at of every sample, real, (batch, n, n), by vector-Jacobian products.

    One product serves all samples: they must not depend on each other.
    """
    zero = samples.vectors(torch.zeros_like(value.detach()))
    batch, n = zero.shape
    if not value.requires_grad:
        return zero.new_zeros(batch, n, n)
    units = torch.eye(n, dtype=zero.dtype, device=zero.device)[:, None].expand(n, batch, n)
    directions = samples.states(units, value)
    rows = None
    if n > _LOOP_SIZE:
        try:
            (rows,) = torch.autograd.grad(
                value, at, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except RuntimeError:
            rows = None  # an operation that cannot be batched, or an error the loop shows again
    if rows is None:
        found = [
            torch.autograd.grad(value, at, unit, retain_graph=True, allow_unused=True)[0]
            for unit in directions
        ]
        if not found or found[0] is None:
            return zero.new_zeros(batch, n, n)
        rows = torch.stack(found)
    return samples.vectors(rows, 1).transpose(0, 1)


class Factors:
    """The LU factors of a matrix per sample; in single precision at least."""

    def __init__(self, matrix: Tensor):
        half = matrix.dtype in (torch.float16, torch.bfloat16)
        self._dtype = torch.float32 if half else matrix.dtype
        matrix = matrix.detach().to(self._dtype)
        self._lu, self._pivots, _ = torch.linalg.lu_factor_ex(matrix)
        self.norm = matrix.abs().amax() if matrix.numel() else matrix.new_zeros(())

    def solve(self, right: Tensor, transposed: bool = False) -> Tensor:
        """M^{-1} or M^{-T} times vectors, (batch, n); differentiable in them."""
        if not right.numel():
            return right
        column = right.to(self._dtype)[..., None]
        found = torch.linalg.lu_solve(self._lu, self._pivots, column, adjoint=transposed)
        return found[..., 0].to(right.dtype)


@dataclass(frozen=True, eq=False)
class Equation:
    """R(x) = 0 for x with leading axes beside those of a state.

    Parameters
    ----------
    evaluate : callable
        evaluate(x) -> (R(x), pairs).
    matrix : callable
        matrix(pairs) -> J, (batch, m, m), from the Jacobians of the pairs.
    vectors : callable
        vectors(x) -> (batch, m).
    states : callable
        The inverse of `vectors`.
    scale : callable
        scale(x) -> (batch,), the size that errors in x are relative to.
    unit : float
        What an error in x is multiplied with before it is compared to that size.
    """

    evaluate: Callable[[Tensor], tuple[Tensor, list[Pair]]]
    matrix: Callable[[list[Pair]], Tensor]
    vectors: Callable[[Tensor], Tensor]
    states: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    unit: float = 1.0


def find_root(equation: Equation, x: Tensor, options: NewtonOptions, where: str) -> Tensor:
    """Newton's method without a graph.

    The Jacobian is kept while an iteration leaves at most a fiftieth of the error. The iteration
    ends when the error estimated to be left, |dx| theta / (1 - theta), theta the ratio of the last
    two updates, is below the tolerance, or when updates are rounding and shrink no more.

    Raises
    ------
    NewtonError
        After `max_iterations`, or if x is no longer finite.
    """
    eps = torch.finfo(x.dtype).eps
    rtol = 4.0 * eps if options.rtol is None else max(options.rtol, eps)
    factors = None
    before = change = np.inf
    residual = x
    for _ in range(options.max_iterations):
        fresh = factors is None
        if factors is None:
            with torch.enable_grad():
                residual, pairs = equation.evaluate(x.detach().requires_grad_())
            factors = Factors(equation.matrix(pairs))
            residual = residual.detach()
            del pairs
        else:
            residual, _ = equation.evaluate(x)
        update = factors.solve(equation.vectors(residual))
        x = x - equation.states(update)
        if not update.numel():
            return x
        size = equation.unit * update.abs().amax(1)
        scale = equation.scale(x)
        # 0 / 0 is no error at all; one number is read back for all samples.
        relative = torch.where(size <= options.atol, 0.0, size / scale)
        change = float(relative.amax())
        if not np.isfinite(change):
            raise NewtonError(
                f"Newton's iteration {where} is no longer finite: the residual is "
                f"{float(residual.abs().max()):.1e} (not a number where its function is not) or "
                "its Jacobian singular"
            )
        theta = change / before if np.isfinite(before) else 1.0
        if change == 0.0 or (theta < 1.0 and change * theta / (1.0 - theta) <= rtol):
            return x
        if fresh and theta > 0.1 and before < np.inf and change <= min(1e4 * eps, eps**0.5):
            return x
        if theta > 0.02 and before < np.inf:
            factors = None
        before = change
    raise NewtonError(
        f"Newton's iteration {where} did not converge in {options.max_iterations} iterations: the "
        f"residual is {float(residual.abs().max()):.1e}, the last update {change:.1e} of the "
        f"state's size (wanted {rtol:.1e}); take smaller steps, give a better guess, or loosen "
        "the tolerance"
    )


def differentiable_root(root: Tensor, equation: Equation) -> Tensor:
    """The root with the derivatives of the implicit function theorem, first and second.

    With J held fixed, x_1 = x - J^{-1} R(x, inputs) has the right first derivative, and
    x_2 = x_1 - J^{-1} R(x_1, inputs) the second. R is zero at both, so nothing is computed forward
    but its graph, and J is built in the backward pass. A first derivative takes the last of the two
    updates alone.
    """
    if not torch.is_grad_enabled():
        return root
    residual, _ = equation.evaluate(root)
    if not residual.requires_grad:
        return root
    link = _Link(equation)
    first = _FirstUpdate.apply(link, root, residual)
    residual, pairs = equation.evaluate(first)
    return _LastUpdate.apply(link, first, residual, *(x for pair in pairs for x in pair))


@dataclass(eq=False)
class _Link:
    """What the two updates of a root share in the backward pass; it holds no graph."""

    equation: Equation
    factors: Factors | None = None
    higher: bool = False
    scale: Tensor | None = None

    def pull(self, cotangent: Tensor) -> Tensor:
        """-J^{-T} cotangent."""
        assert self.factors is not None
        vectors = self.equation.vectors(cotangent)
        return -self.equation.states(self.factors.solve(vectors, transposed=True))


class _LastUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, first, residual, *flat_pairs):  # type: ignore[override]
        ctx.link = link
        ctx.save_for_backward(residual, *flat_pairs)
        return first.clone()

    @staticmethod
    def backward(ctx, cotangent):  # type: ignore[override]
        link = ctx.link
        residual, *flat = ctx.saved_tensors
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        with torch.no_grad():
            link.factors = Factors(link.equation.matrix(pairs))
        if torch.is_grad_enabled():
            link.higher = True
            cotangent = _SecondOrder.apply(cotangent, residual)
        pulled = link.pull(cotangent)
        if not link.higher and pulled.numel():
            link.scale = link.factors.norm * pulled.abs().amax()
        return None, cotangent, pulled, *[None] * len(flat)


class _FirstUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, root, residual):  # type: ignore[override]
        ctx.link = link
        ctx.set_materialize_grads(False)
        return root.clone()

    @staticmethod
    def backward(ctx, remainder):  # type: ignore[override]
        link = ctx.link
        if remainder is None:
            return None, None, None
        if link.higher:
            return None, None, link.pull(remainder)
        # What arrives here is v - J^T J^{-T} v: zero if J is the Jacobian.
        if link.scale is not None:
            check_solved(remainder, link.scale)
        return None, None, None


def check_solved(remainder: Tensor, scale: Tensor) -> None:
    """Raise if a linear solve left more than rounding: then the matrix was not the Jacobian."""
    if not remainder.numel():
        return
    eps = torch.finfo(remainder.dtype).eps
    wrong = remainder.abs().amax() > eps**0.5 * scale
    try:
        refused = bool(wrong)
    except RuntimeError:
        return  # a batch of cotangents inside vmap has no single answer
    if refused:
        raise ValueError(
            "the Jacobian found sample by sample is not that of the whole: with `batch_dims` no "
            "sample may depend on another (look for batch normalisation, a mean over the batch); "
            "leave `batch_dims` out"
        )


class _SecondOrder(torch.autograd.Function):
    """Marks a cotangent of a backward pass that is recorded; its own must not be.

    `residual` depends on whatever the root depends on, so that no third derivative gets past.
    """

    @staticmethod
    def forward(ctx, cotangent, residual):  # type: ignore[override]
        return cotangent.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "an implicit step has first and second derivatives, not third ones: leave "
                "create_graph=True out of the second pass"
            )
        return grad, None


def _check_like(tree: Any, layout: StateLayout, guess: Tensor) -> None:
    leaves = _tree.flatten(tree)[0]
    got = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]
    wanted = [(tuple(shape), guess.dtype) for shape in layout.shapes]
    if got != wanted or layout.single != isinstance(tree, Tensor):
        raise TypeError(
            f"`residual` must return the structure, shapes and dtype of `guess`, {wanted}, got "
            f"{got}"
        )


def implicit_step(
    residual: Callable[..., Float[Tensor, "*state"] | Any],
    guess: Float[Tensor, "*state"] | Any,
    *args: Any,
    rtol: float | None = None,
    atol: float = 0.0,
    max_iterations: int = 50,
    batch_dims: int = 0,
) -> Float[Tensor, "*state"] | Any:
    """Solve residual(x, *args) = 0 for x by Newton's method, differentiably.

    The derivative is that of the implicit function theorem: one linear solve with the transposed
    Jacobian in the backward pass, whatever the number of iterations.

        dx/dtheta = -(dR/dx)^{-1} dR/dtheta

    Parameters
    ----------
    residual : callable
        `residual(x, *args)`, with the structure, shapes and dtype of x. Gradients reach the tensors
        in `args` and those that it closes over, such as the parameters of a module.
    guess : floating-point tensor or nest of such
        Where the iteration starts; nothing depends on it.
    *args
        Passed on.
    rtol : float, optional
        The error left in x, relative to the largest of |x| and |guess|; None, the default, goes to
        the rounding of the dtype.
    atol : float
        An error that is always small enough.
    max_iterations : int
        Iterations after which the solve is given up.
    batch_dims : int
        Number of leading axes of every leaf of x that count independent systems. Each is solved
        with a matrix of its own; the residual of one must not depend on another.

    Returns
    -------
    x : like `guess`
        The root, with first and second derivatives. Third ones are refused.

    Raises
    ------
    SolveError
        If the iteration does not converge; the message has the iterations and the residual.
    TypeError, ValueError
        If `residual` does not return what x is, for an option out of range, or, in the backward
        pass, if samples depend on each other.

    References
    ----------
    Christianson 1994, Reverse accumulation and attractive fixed points,
    doi:10.1080/10556789408805572. Blondel et al. 2022, arXiv:2105.15183.
    """
    if inside_transform():
        raise ValueError(
            "`implicit_step` iterates until it has converged and does not serve inside torch.func "
            "transforms: use torch.autograd, and `batch_dims` for a batch"
        )
    layout = StateLayout(guess, "guess")
    start = layout.flatten(guess).detach()
    if isinstance(atol, bool) or not isinstance(atol, int | float) or not atol >= 0.0:
        raise ValueError(f"`atol` must be a non-negative number, got {atol!r}")
    samples = Samples.of(layout, batch_dims)
    options = NewtonOptions(
        _tolerance("rtol", rtol), float(atol), _count("max_iterations", max_iterations), samples
    )

    def evaluate(x: Tensor) -> tuple[Tensor, list[Pair]]:
        tree = residual(layout.unflatten(x), *args)
        _check_like(tree, layout, start)
        value = layout.flatten(tree)
        return value, [(value, x)]

    def matrix(pairs: list[Pair]) -> Tensor:
        return jacobian(*pairs[0], samples)

    largest = samples.vectors(start).abs().amax(1) if start.numel() else start.real.reshape(0)

    def scale(x: Tensor) -> Tensor:
        nonlocal largest
        largest = torch.maximum(largest, samples.vectors(x).abs().amax(1))
        return largest

    equation = Equation(
        evaluate, matrix, samples.vectors, lambda vectors: samples.states(vectors, start), scale
    )
    with torch.no_grad():
        root = find_root(equation, start, options, "of `implicit_step`")
    return layout.unflatten(differentiable_root(root, equation))


class ImplicitRungeKutta(RungeKutta):
    """A Runge-Kutta step whose stages are solved for: one by one where the tableau is lower
    triangular, all together where it is not.

        k_i = f(t + c_i h, y + h sum_j a_ij k_j)

    The matrix of the equations is I - h A (x) f_y, with f_y at every stage and for every sample.

    Parameters
    ----------
    tableau : Tableau
    newton : NewtonOptions

    References
    ----------
    Hairer & Wanner, Solving Ordinary Differential Equations II, IV.8 (1996),
    doi:10.1007/978-3-642-05221-7.
    """

    def __init__(self, tableau: Tableau, newton: NewtonOptions):
        super().__init__(tableau)
        self.newton = newton
        self.fsal = False
        s = tableau.stages
        coupled = np.any(np.triu(tableau.a, 1))
        self._blocks = [range(s)] if coupled else [range(i, i + 1) for i in range(s)]
        # The slopes at both ends of the step follow those of the stages.
        rows = np.outer(np.append(tableau.b, [0.0, 0.0]), [0.0, 3.0, -2.0])
        rows[-2] += [1.0, -2.0, 1.0]
        rows[-1] += [0.0, -1.0, 1.0]
        self._interpolant, self._interpolant_stages = rows, s + 2
        self.interpolates = tableau.order <= 4

    def _check(self, tableau: Tableau) -> None:
        pass

    def take(
        self,
        f: VectorField,
        t: float | Tensor,
        t_next: float | Tensor,
        y: Tensor,
        *,
        times: Tensor | Sequence[Tensor] | None = None,
        first: Tensor | None = None,
        last: bool = False,
    ) -> Step:
        """Take one step; the parameters are those of `RungeKutta.take`."""
        h, times = self.size_and_times(t, t_next, y, times)
        enter(f, t, t_next)
        step = Step(t, t_next, y, y, [], [], times)
        slopes, stages = step.slopes, step.stages
        for block in self._blocks:
            i = block[0]
            bases = [combine(y, h, self._known(i, block), slopes) for i in block]
            if len(block) == 1 and self.tableau.a[i, i] == 0.0:
                known = first is not None and self.nodes[i] == 0.0 and not self._rows[i]
                stages.append(bases[0])
                slopes.append(first if known and first is not None else f(times[i], bases[0]))
                continue
            found = self._solve(f, block, bases, times, h, host_time(t))
            slopes.extend(found)
            stages.extend(
                combine(base, h, self._unknown(i, block), found)
                for i, base in zip(block, bases, strict=True)
            )
        step.y_next = combine(y, h, self._b, slopes)
        return step

    def _known(self, i: int, block: range) -> Row:
        return tuple((j, weight) for j, weight in self._rows[i] if j < block[0])

    def _unknown(self, i: int, block: range) -> Row:
        return tuple((j - block[0], weight) for j, weight in self._rows[i] if j >= block[0])

    def block_matrix(self, block: range, h: float, jacobians: Sequence[Tensor]) -> Tensor:
        """I - h A (x) J_i over the stages of a block, (batch, m n, m n)."""
        batch, n = jacobians[0].shape[:2]
        m = len(block)
        a = self.tableau.a[block[0] : block[-1] + 1, block[0] : block[-1] + 1]
        weights = torch.as_tensor(-h * a, dtype=jacobians[0].dtype, device=jacobians[0].device)
        # (batch, i, row, j, column)
        matrix = weights[:, None, :, None] * torch.stack(list(jacobians), 1)[:, :, :, None, :]
        matrix = matrix.reshape(batch, m * n, m * n)
        return matrix + torch.eye(m * n, dtype=matrix.dtype, device=matrix.device)

    def block_vectors(self, x: Tensor) -> Tensor:
        """Stages (m, *state) as vectors, (batch, m n)."""
        return self.newton.samples.vectors(x, 1).transpose(0, 1).flatten(1)

    def block_states(self, vectors: Tensor, block: range, like: Tensor) -> Tensor:
        """The inverse of `block_vectors`."""
        parts = vectors.unflatten(1, (len(block), -1)).transpose(0, 1)
        return self.newton.samples.states(parts, like)

    def _solve(
        self,
        f: VectorField,
        block: range,
        bases: Sequence[Tensor],
        times: Sequence[Tensor],
        h: float | Tensor,
        start: float,
    ) -> Sequence[Tensor]:
        """The slopes of the stages of a block."""
        samples = self.newton.samples
        rows = [self._unknown(i, block) for i in block]
        like = bases[0].detach()

        def equation(bases: Sequence[Tensor], times: Sequence[Tensor], h: float | Tensor):
            def evaluate(x: Tensor) -> tuple[Tensor, list[Pair]]:
                slopes = x.unbind()
                pairs = []
                for i, base, row in zip(block, bases, rows, strict=True):
                    stage = combine(base, h, row, slopes)
                    pairs.append((f(times[i], stage), stage))
                return x - torch.stack([value for value, _ in pairs]), pairs

            return evaluate

        size = host_time(h.detach()) if isinstance(h, Tensor) else h

        def matrix(pairs: list[Pair]) -> Tensor:
            return self.block_matrix(block, size, [jacobian(*pair, samples) for pair in pairs])

        start_size = samples.vectors(like).abs()
        start_size = start_size.amax(1) if start_size.numel() else start_size.flatten()

        def scale(x: Tensor) -> Tensor:
            return torch.maximum(start_size, abs(size) * self.block_vectors(x).abs().amax(1))

        def states(vectors: Tensor) -> Tensor:
            return self.block_states(vectors, block, like)

        system = Equation(
            equation([base.detach() for base in bases], [time.detach() for time in times], size),
            matrix,
            self.block_vectors,
            states,
            scale,
            abs(size),
        )
        with torch.no_grad():
            root = find_root(
                system,
                like.new_zeros(len(block), *like.shape),
                self.newton,
                f"in the step of size {size:.3g} from t = {start:.8g}",
            )
        if not torch.is_grad_enabled():
            return root.unbind()
        graph = Equation(equation(bases, times, h), matrix, self.block_vectors, states, scale)
        return differentiable_root(root, graph).unbind()

    def start_slope(self, f: VectorField, step: Step) -> Tensor:
        """f at the start of a step."""
        s = self.tableau.stages
        if len(step.slopes) > s:
            return step.slopes[s]
        if not self._rows[0]:
            return step.slopes[0]
        enter(f, step.t, step.t_next)
        return f(time_like(step.t, step.y), step.y)

    def complete(self, f: VectorField, step: Step) -> None:
        """Append f at both ends of the step to the slopes."""
        if len(step.slopes) < self._interpolant_stages:
            first = self.start_slope(f, step)
            step.slopes.append(first)
            enter(f, step.t, step.t_next)
            step.slopes.append(f(time_like(step.t_next, step.y), step.y_next))

    def evaluate(self, f: VectorField, step: Step, t: float | Tensor) -> Tensor:
        """The solution at a time t inside a step."""
        if not self.interpolates:
            return self.take(f, step.t, t, step.y).y_next
        return super().evaluate(f, step, t)


def newton_options(method: RungeKutta) -> dict[str, Any]:
    """The options of Newton's method that a step was made with."""
    if not isinstance(method, ImplicitRungeKutta):
        return {}
    return dict(method.newton.given)


def stepper(tableau: Tableau, options: Mapping[str, Any] | None, layout: StateLayout) -> RungeKutta:
    """The step of a method, explicit or implicit.

    Parameters
    ----------
    tableau : Tableau
    options : mapping, optional
        The options of the solve; those of Newton's method count here.
    layout : StateLayout
        Of the state that is stepped.
    """
    if tableau.explicit:
        return RungeKutta(tableau)
    return ImplicitRungeKutta(tableau, NewtonOptions.parse(options, layout))
