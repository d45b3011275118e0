"""Gradients of a problem on a given mesh, compiled once for every number of steps.

The sweeps of DirectAdjoint and BacksolveAdjoint are written out here, to keep what the study asks
for and a solve does not return: lambda_n at every step. The other adjoints are measured as users
meet them, in `diffrax.diffeqsolve`. The mesh is a padded buffer and its length a traced number, so
that one compilation serves every number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from ..adjoints import parse_adjoint
from ..convergence import CONTINUOUS, DISCRETE, Measurement
from ..multistep import METHODS as WITH_HISTORY
from ..multistep import MULTISTEP
from ..problems import Gradient, GradientProblem
from ..tableaus import TABLEAUS
from . import _tree
from ._library import CARRYING, SOLVERS, carrying_step, library_solver
from ._multistep import HistoryStep, history_step
from ._problems import builtin_problem
from ._steps import evaluations, fresh_step, get_solver
from ._times import PaddedMesh
from ._value_grad_and_stats import value_grad_and_stats
from .adjoints import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
)

__all__ = [
    "ENGINES",
    "adjoints",
    "builtin_problem",
    "describe_device",
    "gradient_function",
    "methods",
    "versions",
]

ENGINES = ("diffrax",)
_DTYPES = ("float32", "float64")


def methods(engine: str | None = None) -> tuple[str, ...]:
    """Names of the methods that the engine steps, those of Diffrax's own solvers last."""
    _check_engine(engine)
    return (*TABLEAUS, *WITH_HISTORY, *SOLVERS)


def adjoints() -> tuple[str, ...]:
    """Names of the adjoints that the study can measure."""
    return tuple(_ADJOINTS)


def versions() -> dict[str, str]:
    """Versions of the libraries that the numbers depend on."""
    return {name: version(name) for name in ("jax", "jaxlib", "diffrax", "equinox")}


def describe_device(device: str) -> str:
    """Describe a device.

    Parameters
    ----------
    device : str
        "cpu", "cuda" or "cuda:1" for instance.

    Raises
    ------
    ValueError
        If there is no such device.
    """
    found = _find_device(device)
    return f"{found.platform}:{found.id} {found.device_kind}"


def _find_device(device: str) -> Any:
    platform, _, index = device.partition(":")
    try:
        found = jax.devices(platform)
        return found[int(index or 0)]
    except (RuntimeError, IndexError, ValueError):
        have = ", ".join(sorted({f"{d.platform}:{d.id}" for d in jax.devices()}))
        raise ValueError(f"`device` {device!r} is not there for JAX; it has {have}") from None


def _check_engine(engine: str | None) -> None:
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}; got {engine!r}")


class _Flat(NamedTuple):
    """A problem on flat vectors: the augmented state is (y, q), q' = running cost."""

    f: Callable
    terminal: Callable
    observation: Callable | None
    y0: Any
    params: Any


def _flatten(problem: GradientProblem, dtype) -> _Flat:
    """Write the problem on a flat y and check what `f` and the costs return."""
    where = f"problem {problem.name!r}"

    def as_array(x):
        if not eqx.is_array_like(x):
            return x
        x = np.asarray(x)
        if np.issubdtype(x.dtype, np.floating):
            return jnp.asarray(x, dtype)
        return jnp.asarray(x)

    for leaf in jtu.tree_leaves(problem.y0):
        kind = np.asarray(leaf).dtype
        if not np.issubdtype(kind, np.floating):
            raise TypeError(f"{where}: `y0` must be floating point, got {kind}; write 1.0 for 1")
    for leaf in jtu.tree_leaves(problem.params):
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            raise TypeError(
                f"{where}: `params` holds the integer {leaf}, which has no gradient; write "
                f"{leaf}.0, or an integer array if none is wanted"
            )
    tree = jtu.tree_map(as_array, problem.y0)
    params = jtu.tree_map(as_array, problem.params)
    y0, unravel = ravel_pytree(tree)
    y0 = y0.astype(dtype)

    t = jax.ShapeDtypeStruct((), dtype)
    want = jtu.tree_structure(tree), [(x.shape, x.dtype) for x in jtu.tree_leaves(tree)]
    out = eqx.filter_eval_shape(problem.f, t, tree, params)
    got = jtu.tree_structure(out), [(x.shape, x.dtype) for x in jtu.tree_leaves(out)]
    if want != got:
        raise TypeError(
            f"{where}: `f` must return the structure, shapes and dtypes of y, "
            f"{eqx.tree_pformat(tree)}; got {eqx.tree_pformat(out)}"
        )

    def scalar(argument, function, *args):
        if function is None:
            return
        out = jtu.tree_leaves(eqx.filter_eval_shape(function, *args))
        if len(out) != 1 or out[0].shape != ():
            shapes = ", ".join(str(list(x.shape)) for x in out) or "nothing"
            raise TypeError(f"{where}: `{argument}` must return a scalar, got shape {shapes}")

    scalar("terminal_cost", problem.terminal_cost, tree, params)
    scalar("running_cost", problem.running_cost, t, tree, params)
    try:
        i = jax.ShapeDtypeStruct((), jnp.int32)
        scalar("observation_cost", problem.observation_cost, i, t, tree, params)
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError):
        raise TypeError(
            f"{where}: `observation_cost` must take `i` as a traced int32; index a jnp array with "
            "it, jnp.asarray(data)[i], not a NumPy array or a list"
        ) from None

    def f(t, state, params):
        y, _ = state
        y = unravel(y)
        slope = ravel_pytree(problem.f(t, y, params))[0]
        if problem.running_cost is None:
            return slope, jnp.zeros((), dtype)
        return slope, jnp.asarray(problem.running_cost(t, y, params), dtype)

    def terminal(y, params):
        if problem.terminal_cost is None:
            return jnp.zeros((), dtype)
        return jnp.asarray(problem.terminal_cost(unravel(y), params), dtype)

    cost_at = problem.observation_cost
    if cost_at is None:
        return _Flat(f, terminal, None, y0, params)

    def observation(i, t, y, params):
        return jnp.asarray(cost_at(i, t, unravel(y), params), dtype)

    return _Flat(f, terminal, observation, y0, params)


class _Sweeps(NamedTuple):
    """What one gradient leaves behind; buffers are padded.

    `ys` and `adjoints` are None where a solve returns no state and no lambda per step, and
    `evaluations` where the backward pass costs what the forward pass does. `multipliers` are
    dL/dr_n, r_n the residual of the step to t_n, where the step takes one.
    """

    cost: Any
    d_y0: Any
    d_params: Any
    ys: Any
    adjoints: Any
    reversal_error: Any
    evaluations: Any
    multipliers: Any = None


def _without_history(solver: diffrax.AbstractSolver) -> HistoryStep:
    """One step of a solver, started afresh."""
    step, per_step = fresh_step(solver), evaluations(solver)

    def take(f, t, t_next, place, y, history, nudge, params):
        return step(diffrax.ODETerm(f), t, t_next, y, params), ()

    count = None if per_step is None else lambda num_steps: per_step * num_steps
    return HistoryStep(lambda y: (), take, count)


def _forward(flat: _Flat, step: HistoryStep, mesh, count, interval):
    """States y_0 ... y_N and the history of every step in buffers; the running cost's integral."""
    start = flat.y0, jnp.zeros((), flat.y0.dtype)
    nudge = _tree.zeros(start)
    history = step.empty(start)

    def body(n, carry):
        state, history, ys, histories = carry
        histories = _tree.write(histories, n, history)
        state, history = step.take(
            flat.f, mesh[n], mesh[n + 1], n % interval, state, history, nudge, flat.params
        )
        return state, history, ys.at[n + 1].set(state[0]), histories

    capacity = mesh.shape[0]
    ys = jnp.zeros((capacity, flat.y0.shape[0]), flat.y0.dtype).at[0].set(flat.y0)
    carry = (start, history, ys, _tree.buffer(capacity, history))
    (_, integral), _, ys, histories = lax.fori_loop(0, count, body, carry)
    return ys, integral, histories


def _costs(flat: _Flat, mesh, ys, integral, count, observed):
    """The cost, its jumps dC/dy at the mesh, and its direct derivative in the parameters."""
    y1 = ys[count]
    terminal, pull = _tree.vjp(flat.terminal, y1, flat.params)
    one = jnp.ones((), y1.dtype)
    d_y, d_params = pull(one)
    d_params = _tree.materialise(d_params, flat.params)
    jumps = jnp.zeros_like(ys).at[count].set(_tree.materialise(d_y, y1))
    observation = flat.observation
    if observation is None:
        return terminal + integral, jumps, d_params

    def body(carry, i):
        cost, jumps, d_params = carry
        n = observed[i]
        paid, pull = _tree.vjp(lambda y, p: observation(i, mesh[n], y, p), ys[n], flat.params)
        d_y, d_p = pull(one)
        return (cost + paid, jumps.at[n].add(d_y), _tree.add(d_params, d_p)), None

    start = (terminal + integral, jumps, d_params)
    return lax.scan(body, start, jnp.arange(observed.shape[0], dtype=jnp.int32))[0]


def _discrete(flat: _Flat, step: HistoryStep, mesh, count, observed, pieces) -> _Sweeps:
    """DirectAdjoint: lambda_n = jump_n + (dy_{n+1}/dy_n)^T lambda_{n+1}, and the same of what the
    later steps take from their history."""
    interval = count // (pieces.shape[0] - 1)
    ys, integral, histories = _forward(flat, step, mesh, count, interval)
    cost, jumps, d_params = _costs(flat, mesh, ys, integral, count, observed)
    zero, one = jnp.zeros((), flat.y0.dtype), jnp.ones((), flat.y0.dtype)
    nudge = (jnp.zeros_like(flat.y0), zero)

    def body(k, carry):
        adjoint, from_history, d_params, adjoints, multipliers = carry
        n = count - 1 - k
        _, pull = _tree.vjp(
            lambda state, history, nudge, p: step.take(
                flat.f, mesh[n], mesh[n + 1], n % interval, state, history, nudge, p
            ),
            (ys[n], zero),
            _tree.read(histories, n),
            nudge,
            flat.params,
        )
        # The adjoint of the integral is 1 only where steps have no history.
        (adjoint, of_integral), from_history, multiplier, d_p = pull((adjoint, from_history))
        adjoint = adjoint + jumps[n]
        return (
            (adjoint, of_integral),
            from_history,
            _tree.add(d_params, d_p),
            adjoints.at[n].set(adjoint),
            multipliers.at[n + 1].set(multiplier[0]),
        )

    buffer = jnp.zeros_like(ys)
    nothing = _tree.zeros(_tree.read(histories, 0))
    carry = ((jumps[count], one), nothing, d_params, buffer.at[count].set(jumps[count]), buffer)
    _, _, d_params, adjoints, multipliers = lax.fori_loop(0, count, body, carry)
    return _Sweeps(cost, adjoints[0], d_params, ys, adjoints, None, None, multipliers)


def _backsolve(
    flat: _Flat,
    step: HistoryStep,
    mesh,
    count,
    observed,
    pieces,
    *,
    restart_every: int | None = None,
) -> _Sweeps:
    """BacksolveAdjoint: (y, lambda, theta-bar) in reverse time on the same mesh.

    y is set back to the stored state at the ends of the pieces, where lambda jumps, and every so
    many steps.
    """
    interval = count // (pieces.shape[0] - 1)
    ys, integral, _ = _forward(flat, step, mesh, count, interval)
    cost, jumps, d_params = _costs(flat, mesh, ys, integral, count, observed)
    zero, one = jnp.zeros((), flat.y0.dtype), jnp.ones((), flat.y0.dtype)

    def augmented(t, state, params):
        y, adjoint, _ = state
        (slope, _), pull = _tree.vjp(lambda y, p: flat.f(t, (y, zero), p), y, params)
        d_y, d_p = pull((adjoint, one))
        d_p = _tree.materialise(d_p, params)
        return slope, -d_y, jtu.tree_map(jnp.negative, d_p)

    def body(k, carry):
        state, history, adjoints, error = carry
        n = count - 1 - k
        (y, adjoint, d_params), history = step.take(
            augmented, mesh[n + 1], mesh[n], k % interval, state, history, nudge, flat.params
        )
        end = jnp.any(pieces == n)
        if restart_every is not None:
            end |= n % restart_every == 0
        error = jnp.maximum(error, jnp.where(end, jnp.linalg.norm(y - ys[n]), 0))
        y = jnp.where(end, ys[n], y)
        adjoint = adjoint + jumps[n]
        return (y, adjoint, d_params), history, adjoints.at[n].set(adjoint), error

    adjoint = jumps[count]
    adjoints = jnp.zeros_like(ys).at[count].set(adjoint)
    state = (ys[count], adjoint, d_params)
    nudge = _tree.zeros(state)
    carry = (state, step.empty(state), adjoints, zero)
    (_, _, d_params), _, adjoints, error = lax.fori_loop(0, count, body, carry)
    # Entries of the buffer beyond the last step are zero.
    largest = jnp.max(jnp.linalg.norm(ys, axis=1))
    return _Sweeps(cost, adjoints[0], d_params, ys, adjoints, error / largest, None)


def _through_solve(adjoint: diffrax.AbstractAdjoint) -> Callable:
    """The gradient of a `diffeqsolve` with the adjoint, on the same mesh."""

    def sweep(flat: _Flat, solver, mesh, count, observed, pieces) -> _Sweeps:
        observation = flat.observation
        times = None if observation is None else mesh[observed]

        def cost(inputs, adjoint):
            y0, params = inputs
            sol: Any = diffrax.diffeqsolve(
                diffrax.ODETerm(flat.f), solver, mesh[0], mesh[-1], None,
                (y0, jnp.zeros((), y0.dtype)), params, adjoint=adjoint, throw=False,
                stepsize_controller=PaddedMesh(mesh, count), max_steps=len(mesh) - 1,
                saveat=diffrax.SaveAt(ts=times, t1=True),
            )  # fmt: skip
            ys, integrals = sol.ys
            total = flat.terminal(ys[-1], params) + integrals[-1]
            if times is None or observation is None:
                return total
            numbers = jnp.arange(len(times), dtype=jnp.int32)
            paid = jax.vmap(observation, (0, 0, 0, None))(numbers, times, ys[:-1], params)
            return total + jnp.sum(paid)

        inputs = (flat.y0, flat.params)
        if hasattr(adjoint, "probe"):
            value, (d_y0, d_params), stats = value_grad_and_stats(cost, adjoint)(inputs)
            rebuilds = isinstance(adjoint, ReversibleAdjoint | BacksolveAdjoint)
            reversal = stats.reversal_error if rebuilds else None
            return _Sweeps(value, d_y0, d_params, None, None, reversal, stats.f_evaluations)
        value, (d_y0, d_params) = eqx.filter_value_and_grad(cost)(inputs, adjoint)
        return _Sweeps(value, d_y0, d_params, None, None, None, jnp.zeros(()))

    return sweep


_ADJOINTS: dict[str, Callable[..., diffrax.AbstractAdjoint]] = {
    "DirectAdjoint": DirectAdjoint,
    "CheckpointAdjoint": CheckpointAdjoint,
    "ReversibleAdjoint": partial(ReversibleAdjoint, coupling=0.999, reversal_tolerance=np.inf),
    "BacksolveAdjoint": partial(BacksolveAdjoint, reversal_tolerance=np.inf),
    "InterpolatingAdjoint": InterpolatingAdjoint,
    "GaussAdjoint": GaussAdjoint,
    "ForwardSensitivity": ForwardSensitivity,
}
_SWEEPS: dict[str, Callable[..., _Sweeps]] = {
    "DirectAdjoint": _discrete,
    "BacksolveAdjoint": _backsolve,
}


def _peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    """What XLA says that the function needs beside its arguments; None where it does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def _first_failure(problem: GradientProblem, ys, mesh) -> None:
    finite = np.isfinite(ys).all(axis=1)
    if not finite.all():
        n = int(np.argmin(finite))
        raise FloatingPointError(
            f"problem {problem.name!r}: the state is not finite at t = {mesh[n]:.17g}, after step "
            f"{n} of {len(mesh) - 1}; take more steps, or mend `f` there"
        )


def gradient_function(
    problem: GradientProblem,
    *,
    method: str,
    adjoint: str,
    engine: str | None = None,
    dtype: str = "float64",
    device: str = "cpu",
    max_steps: int,
    costs: bool = False,
) -> Callable[[int], Measurement]:
    """Return a function from the number of steps to one measured gradient.

    Parameters
    ----------
    problem : GradientProblem
        Written in JAX.
    method : str
        One of `methods(engine)`.
    adjoint : str
        One of `adjoints()`, with options where it has some (`contadj.adjoints`); DirectAdjoint or
        BacksolveAdjoint for a method with a history.
    engine : str, optional
        "diffrax", the only one.
    dtype : "float64" or "float32"
    device : str
        "cpu", "cuda", "cuda:1", ...
    max_steps : int
        The largest number of steps per interval that will be asked for. The first call compiles
        for it; later ones do not compile.
    costs : bool
        Whether to measure what the gradient costs a user: time and peak bytes of the adjoint's own
        code in a solve of at most `max_steps` steps; then without `adjoint`.

    Returns
    -------
    callable
        `measure(num_steps) -> Measurement`, `num_steps` equal steps between neighbouring
        breakpoints of the problem; a method with a history starts afresh at the breakpoints.

    Raises
    ------
    ValueError
        If the problem is written in another framework, or a name is unknown, or the device is
        absent.
    TypeError
        If `f` or a cost does not return what it must.
    FloatingPointError
        On a call, if the solution stops being finite; the message has the step and its time.
    """
    _check_engine(engine)
    if problem.framework != "jax":
        raise ValueError(
            f"problem {problem.name!r} is written in {problem.framework}: run it on the backend "
            f"{problem.framework!r}, or write its `f` in JAX"
        )
    name, settings = parse_adjoint(adjoint)
    if dtype not in _DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    if not isinstance(max_steps, int) or max_steps < 1:
        raise ValueError(f"`max_steps` must be an int of at least 1, got {max_steps!r}")
    if method in WITH_HISTORY and adjoint not in (DISCRETE, CONTINUOUS):
        raise ValueError(
            f"`adjoint` must be {DISCRETE} or {CONTINUOUS} with `method` {method}, whose steps use "
            f"more than one state; got {adjoint!r}"
        )
    stepped = name in _SWEEPS and (method in WITH_HISTORY or not costs)
    if method in WITH_HISTORY:
        solver, step = None, history_step(method)
    else:
        solver = library_solver(method) if method in SOLVERS else get_solver(method)
        step = carrying_step(solver) if method in CARRYING else _without_history(solver)
    slope_sum = float(MULTISTEP[method].slope_sum) if method in MULTISTEP else None
    where = _find_device(device)
    points = problem.breakpoints
    capacity = max_steps * (len(points) - 1)
    times = problem.observation_times or ()
    observed_pieces = np.array([points.index(t) for t in times], dtype=np.int32)

    with jax.enable_x64(True), jax.default_device(where):
        flat = _flatten(problem, jnp.dtype(dtype))
        if stepped:
            sweep = partial(_SWEEPS[name], **settings)
        else:
            sweep = _through_solve(_ADJOINTS[name](**settings))
        compiled = []

    arrays_of_params, rest = eqx.partition(flat.params, eqx.is_array)

    def run(mesh, count, observed, pieces, y0, params):
        problem = flat._replace(y0=y0, params=eqx.combine(params, rest))
        out = sweep(problem, step if stepped else solver, mesh, count, observed, pieces)
        return out._replace(d_params=eqx.filter(out.d_params, eqx.is_inexact_array))

    def measure(num_steps: int) -> Measurement:
        if not 1 <= num_steps <= max_steps:
            raise ValueError(f"`num_steps` must be in 1 ... {max_steps}, got {num_steps}")
        mesh = problem.mesh(num_steps)
        count = len(mesh) - 1
        padded = np.full(capacity + 1, mesh[-1])
        padded[: count + 1] = mesh
        with jax.enable_x64(True), jax.default_device(where):
            arrays = (
                jnp.asarray(padded, dtype),
                jnp.int32(count),
                jnp.asarray(observed_pieces * num_steps),
                jnp.arange(len(points), dtype=jnp.int32) * num_steps,
                flat.y0,
                arrays_of_params,
            )
            if not compiled:
                # Not `eqx.filter_jit`, which keeps every program for as long as the process lives:
                # some hundred memory maps each, of which Linux allows a process 65,530.
                compiled.append(jax.jit(run).lower(*arrays).compile())
                jax.block_until_ready(compiled[0](*arrays))
            start = time.perf_counter()
            out: _Sweeps = jax.block_until_ready(compiled[0](*arrays))
            seconds = time.perf_counter() - start
        if out.ys is not None:
            _first_failure(problem, np.asarray(out.ys)[: count + 1], mesh)
        elif not np.isfinite(out.cost):
            raise FloatingPointError(
                f"problem {problem.name!r}: the cost is not finite with {num_steps} steps; take "
                "more of them, or find the step with `adjoint` DirectAdjoint"
            )
        d_params = [np.ravel(np.asarray(x, np.float64)) for x in jtu.tree_leaves(out.d_params)]
        gradient = Gradient(
            float(out.cost),
            np.asarray(out.d_y0),
            np.concatenate(d_params) if d_params else np.zeros(0),
        )
        adjoints = out.adjoints
        intervals = len(points) - 1
        forward = None if step.evaluations is None else intervals * step.evaluations(num_steps)
        multipliers = None
        if slope_sum is not None and out.multipliers is not None:
            # In NumPy: outside of `enable_x64` JAX would multiply in single precision.
            multipliers = slope_sum * np.asarray(out.multipliers, np.float64)[1 : count + 1]
        backward = forward
        if out.evaluations is not None:
            backward = int(out.evaluations) if np.isfinite(out.evaluations) else None
        return Measurement(
            gradient,
            mesh,
            None if adjoints is None else np.asarray(adjoints, np.float64)[: count + 1],
            forward,
            backward,
            None if out.reversal_error is None else float(out.reversal_error),
            seconds,
            multipliers,
            _peak_bytes(compiled[0]) if costs else None,
        )

    return measure
