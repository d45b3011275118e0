"""`odeint` and `solve`: argument checks, and the choice of engine and adjoint."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Inexact
from torch import Tensor, nn
from torch.func import functional_call

from ..tableaus import TABLEAUS, get_tableau
from . import _torchdiffeq
from ._compile import CompiledRungeKutta, UnwatchedTraceError, named_params, was_watched
from ._controls import Drive
from ._errors import SolveError, SolveStats
from ._field import Probe, StateLayout, VectorField, graph_leaves, inside_transform
from ._implicit import stepper
from ._mesh import Mesh, Times
from ._options import parse_options
from ._samples import find_sample_mesh, on_samples
from ._steps import RungeKutta, StepControl, host_time, real_dtype, time_like
from ._transforms import TransformedBacksolve, transformable
from .adjoints import (
    Adjoint,
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    InterpolatingAdjoint,
)
from .adjoints._base import Integration

ENGINES = ("contadj", "torchdiffeq")
CALLBACKS = tuple(
    f"callback_{kind}{suffix}"
    for kind in ("step", "accept_step", "reject_step")
    for suffix in ("", "_adjoint")
)


@dataclass(frozen=True, eq=False)
class Solution:
    """What a solve returns.

    Parameters
    ----------
    ts : (T,) Tensor
        The observation times.
    ys : (T, *state) tensor or nest of such, optional
        The states there; None with `loss=`.
    cost : scalar Tensor, optional
        Integral of the running cost.
    loss : scalar Tensor, optional
        Sum of the loss over the observations.
    stats : SolveStats
        Statistics; those of the backward pass are there after it.
    """

    ts: Float[Tensor, " time"]
    ys: Inexact[Tensor, " time *state"] | Any
    cost: Float[Tensor, ""] | None
    loss: Float[Tensor, ""] | None
    stats: SolveStats


def odeint(
    func: Callable[..., Any],
    y0: Inexact[Tensor, "*state"] | Any,
    t: Float[Tensor, " time"],
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    adjoint: Adjoint | None = None,
    params: Iterable[Tensor] | Mapping[str, Tensor] | None = None,
    control: Any = None,
    engine: str | None = None,
    compile: bool = False,
    event_fn: Any = None,
    adjoint_method: str | None = None,
    adjoint_rtol: float | None = None,
    adjoint_atol: float | None = None,
    adjoint_options: Mapping[str, Any] | None = None,
    adjoint_params: Iterable[Tensor] | None = None,
) -> Inexact[Tensor, " time *state"] | Any:
    """Solve y' = func(t, y), y(t[0]) = y0, and return y at the times t.

    Takes the place of `torchdiffeq.odeint` and, its `adjoint_*` arguments given, of
    `torchdiffeq.odeint_adjoint`. The other arguments are those of `solve`.

    Parameters
    ----------
    adjoint_method, adjoint_rtol, adjoint_atol, adjoint_options, adjoint_params
        As in `torchdiffeq.odeint_adjoint`; they select `BacksolveAdjoint`.
    event_fn
        Refused; use `torchdiffeq.odeint_event`.

    Returns
    -------
    ys : (T, *state) tensor, or the structure of y0 with such tensors

    Raises
    ------
    ValueError, TypeError
        As `solve`.
    """
    if event_fn is not None:
        raise ValueError("`event_fn` is not served: use torchdiffeq.odeint_event")
    given = [
        name
        for name, value in (
            ("method", adjoint_method),
            ("rtol", adjoint_rtol),
            ("atol", adjoint_atol),
            ("options", adjoint_options),
        )
        if value is not None
    ]
    if adjoint_params is not None:
        if params is not None:
            raise ValueError("give `params` or `adjoint_params`, not both")
        params = adjoint_params
    if given:
        if adjoint is not None:
            raise ValueError(
                f"give `adjoint` or `adjoint_{given[0]}`, not both: write "
                f"adjoint=BacksolveAdjoint({given[0]}=...)"
            )
        own_options = dict(adjoint_options or {})
        seminorm = own_options.get("norm") == "seminorm"
        if seminorm:
            del own_options["norm"]
        adjoint = BacksolveAdjoint(
            adjoint_method, adjoint_rtol, adjoint_atol, own_options or None, seminorm
        )
    return solve(
        func, y0, t, rtol=rtol, atol=atol, method=method, options=options, adjoint=adjoint,
        params=params, control=control, engine=engine, compile=compile,
    ).ys  # fmt: skip


def solve(
    func: Callable[..., Any],
    y0: Inexact[Tensor, "*state"] | Any,
    t: Float[Tensor, " time"],
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    adjoint: Adjoint | None = None,
    params: Iterable[Tensor] | Mapping[str, Tensor] | None = None,
    control: Any = None,
    engine: str | None = None,
    compile: bool = False,
    running_cost: Callable[..., Float[Tensor, ""]] | None = None,
    loss: Callable[..., Float[Tensor, ""]] | None = None,
) -> Solution:
    """Solve y' = func(t, y), y(t[0]) = y0, with a cost, and statistics.

    Parameters
    ----------
    func : callable
        The vector field func(t, y); t a scalar tensor in the dtype of y, y with the structure of
        y0. An `nn.Module` contributes its parameters.
    y0 : tensor, or tuple, list or dict of tensors
        Initial state, floating-point or complex, one dtype and device.
    t : (T,) tensor
        Observation times, strictly monotone, T >= 2; float64 on the host internally.
    rtol, atol : float, tensor, or the structure of y0
        Tolerances of an adaptive solve; per component where they are not numbers.
    method : str
        Name of a method, "dopri5" by default.
    options : mapping
        A fixed mesh: `num_steps` (per interval of t), `step_size` or `mesh` (the step times).
        Adaptive: `first_step`, `max_num_steps`, `norm` ("batch", "sample": step sizes of its own
        for each sample of the first axis, each ending a step on every observation time; or a
        callable), `min_step`, `max_step`, `step_t`, `jump_t`, `safety`, `ifactor`, `dfactor`.
        An implicit method: `newton_rtol` (error left in a stage relative to the state's size;
        rounding by default), `max_newton_iterations`, `batch_dims` (number of leading axes of the
        state that count independent systems, each solved with a matrix of its own; 0 by default).
    adjoint : Adjoint
        How the gradient is computed, `CheckpointAdjoint()` by default (`DirectAdjoint()` for a
        method that only torchdiffeq has).
    params : iterable of tensors, or mapping of str to Tensor
        The tensors that f uses and that gradients are wanted for; by default the parameters of
        `func`, `running_cost` and `loss`, and any leaf tensor that they are seen to use when they
        are first evaluated. One that they use only later must be given here: the backward pass
        looks at every evaluation and raises ValueError otherwise. A mapping by name takes the place
        of the parameters of the module `func`.
    control : Control
        u(t) on a grid of knots, the end of a step each: func(t, y, u) and running_cost(t, y, u) are
        called with its value, and gradients reach its values. Knots are added to a mesh of
        `step_size` or `num_steps`, and must be in a given one; the step times are held fixed.
    engine : "contadj" or "torchdiffeq"
        Who takes the steps; "contadj" for every method it has a tableau of.
    compile : bool
        Compile the steps, several into one call where the problem is small, or func itself where
        the adjoint, a running cost, a control or buffers need more than them. For explicit
        methods, and a func without branches on the values of t or y. Takes 10 to 60 seconds once
        per module, method, shape, dtype and power of two above the number of times.
    running_cost : callable
        c(t, y), a scalar; its integral over the interval is `Solution.cost`. It takes no part in
        error control.
    loss : callable
        loss(i, t_i, y_i), a scalar, summed over the observations into `Solution.loss` as the solve
        passes them; the states are not kept.

    Returns
    -------
    Solution

    Raises
    ------
    ValueError
        For an unknown method, engine or option, or times that are not strictly monotone.
    TypeError
        If y0 is not floating-point, or if func returns another structure, shape, dtype or device.
    SolveError
        If the solve cannot go on: f not finite (at which t and step), step size too small, too many
        steps; its `stats` hold the statistics so far.
    """
    module, func = func, _with_params(func, params)
    layout = StateLayout(y0)
    y = layout.flatten(y0)
    times = check_times(t)
    method, engine = _choose(method, engine)
    if adjoint is None:
        adjoint = CheckpointAdjoint() if engine == "contadj" else DirectAdjoint()
    if not isinstance(adjoint, Adjoint):
        raise TypeError(
            f"`adjoint` must be an adjoint such as CheckpointAdjoint(), got {adjoint!r}"
        )
    _refuse_callbacks(func)
    stats, found = SolveStats(), 0
    _record(stats)
    drive = None if control is None else Drive(control, times)
    f = VectorField(func, layout, drive)
    f.enter_beside(float(times[0]), float(times[1]))
    cost = None if running_cost is None else _on_flat_states(running_cost, layout, drive)
    observed = None if loss is None else _loss_on_flat_states(loss, layout)
    chosen = None if params is None else _check_params(params)
    names = dict(func.named_parameters()) if isinstance(func, nn.Module) else {}
    tensors = chosen
    if tensors is None:
        tensors = _unique((*names.values(), *_own_params(running_cost, loss)))
    if drive is not None:
        tensors = _unique((*tensors, drive.control.values))
    tolerances = {
        "rtol": layout.tolerance(rtol, "rtol", y), "atol": layout.tolerance(atol, "atol", y)
    }  # fmt: skip
    if engine == "torchdiffeq":
        if drive is not None:
            raise ValueError("`control` needs engine='contadj', whose steps end on its knots")
        outputs = _torchdiffeq.solve(
            f, y, t, times, method, tolerances, options, adjoint, tensors, cost, observed, stats
        )
    else:
        step_control = StepControl(tolerances["rtol"], tolerances["atol"])
        mesh = parse_options(method, options, times, step_control)
        if isinstance(mesh, StepControl):
            _check_reachable(tolerances, y)
            if mesh.norm == "sample":
                _refuse_for_samples(t, y, method, running_cost, control, compile)
                samples = find_sample_mesh(
                    func, layout, RungeKutta(get_tableau(method)), mesh, times, y, stats
                )
                mesh, drive = samples.mesh, samples.drive(y)
                f = VectorField(on_samples(func), layout, drive)
                observed = None if observed is None else _at_times(observed, times)
                times, found = samples.ends, samples.evaluations
                f.enter_beside(0.0, 1.0)
        if control is not None and drive is not None and isinstance(mesh, Mesh):
            mesh = drive.on_knots(mesh, "mesh" in (options or {}))
        if cost is not None:
            cost = partial(f.watched, "running_cost", cost)
        if observed is not None:
            observed = partial(f.watched, "loss", observed)
        stepped = stepper(get_tableau(method), options, layout)
        integration = Integration(f, stepped, mesh, times, cost, observed, stats)
        transformed = inside_transform()
        if transformed:
            adjoint = transformable(adjoint, mesh, get_tableau(method))
        watches = torch.is_grad_enabled() and not transformed
        trusted = (
            watches and compile and was_watched(func) and cost is None and observed is None
            and drive is None and isinstance(mesh, StepControl) and mesh.norm == "batch"
        )  # fmt: skip

        def run(trusted: bool):
            needed, clean = tensors, False
            if watches and not trusted:
                needed, clean = _watch(integration, y, tensors, adjoint, chosen is not None)
            needed = tuple(param for param in needed if param.requires_grad)
            if compile:
                integration.method = stepped
                _compiled(integration, func, layout, y, needed, names, adjoint, trusted)
            if trusted and not isinstance(integration.method, CompiledRungeKutta):
                raise UnwatchedTraceError
            if transformed and isinstance(adjoint, BacksolveAdjoint):
                return _backsolve_in_transform(integration, module, layout, y, params, tensors)
            outputs = adjoint.solve(integration, y, t, needed)
            if clean and isinstance(integration.method, CompiledRungeKutta):
                integration.method.keep_watched()
            return outputs

        try:
            outputs = run(trusted)
        except UnwatchedTraceError:
            outputs = run(False)
        # Error control takes no step that is not finite; its slopes are all that is observed.
        controlled = (
            isinstance(mesh, StepControl) and mesh.norm == "batch" and cost is None
            and observed is None and stepped.fsal and stepped.interpolates
        )  # fmt: skip
        if not (transformed or controlled):
            _check_finite(integration, y, outputs)
    stats.f_evaluations_forward += found
    ys, total, value = outputs
    states = None if ys is None else layout.unflatten(ys, (len(times),))
    return Solution(t, states, total, value, stats)


def _watch(
    integration: Integration,
    y: Tensor,
    tensors: tuple[Tensor, ...],
    adjoint: Adjoint,
    explicit: bool,
) -> tuple[tuple[Tensor, ...], bool]:
    """Evaluate f once, watched: the parameters and what else it uses, and whether that was all."""
    replays = not isinstance(adjoint, DirectAdjoint)
    costs = _costs(integration.running_cost, integration.loss) if replays else {}
    integration.first, probe = integration.f.probe(
        time_like(integration.times[0], y), y, tensors, costs, keep_graph=not replays
    )
    if not replays:
        return tensors, False
    found = _complete_params(tensors, probe, adjoint, explicit)
    _refuse_dependent(found)
    integration.buffers = probe.written_buffers
    return found, len(found) == len(tensors) and not costs


def _refuse_for_samples(
    t: Tensor, y: Tensor, method: str, running_cost: Any, control: Any, compile: bool
) -> None:
    """Raise for what step sizes of the samples' own do not serve."""
    reasons = {
        "an implicit `method`": not get_tableau(method).explicit,
        "a `running_cost`": running_cost is not None,
        "a `control`": control is not None,
        "`compile`": compile,
        "a gradient with respect to `t`": t.requires_grad and torch.is_grad_enabled(),
        f"a state in {y.dtype}": real_dtype(y) not in (torch.float32, torch.float64),
        "torch.func transforms": inside_transform(),
    }
    for what, asked in reasons.items():
        if asked:
            raise ValueError(f"`norm` = 'sample' does not serve {what}: use norm='batch'")


def _at_times(loss: Callable[..., Tensor], times: Times) -> Callable[..., Tensor]:
    """The loss, told the time of an observation where it is given a number of steps."""
    return lambda i, s, y: loss(i, time_like(float(times[i]), y), y)


def _check_reachable(tolerances: Mapping[str, float | Tensor], y: Tensor) -> None:
    """Raise for tolerances that rounding keeps every step from meeting."""
    rtol, atol = (
        float(x.max()) if isinstance(x, Tensor) and x.numel() else x for x in tolerances.values()
    )
    if rtol == 0.0 and atol == 0.0:
        raise ValueError("`rtol` and `atol` are both 0, which no step can meet: give one of them")
    eps = torch.finfo(y.dtype).eps
    if rtol >= 0.25 * eps:
        return
    # A state that does not change any more to its last digit passes any test of its error.
    scale = float(y.detach().abs().max()) if y.numel() else 0.0
    if atol < 0.25 * eps * scale:
        raise ValueError(
            f"`rtol` = {rtol:.1e} and `atol` = {atol:.1e} are below the rounding of {y.dtype}, "
            f"{eps:.1e}: give larger ones, or solve in a wider dtype"
        )


def _backsolve_in_transform(
    integration: Integration,
    func: Any,
    layout: StateLayout,
    y0: Tensor,
    params: Any,
    needed: tuple[Tensor, ...],
):
    """(ys, None, None) by the backsolve that torch.func transforms can differentiate."""
    if integration.running_cost is not None or integration.loss is not None:
        raise ValueError(
            "inside torch.func transforms BacksolveAdjoint serves neither `running_cost` nor `loss`"
        )
    if not isinstance(params, Mapping) and needed:
        raise ValueError(
            "inside torch.func transforms BacksolveAdjoint must be handed what f depends on: give "
            "an nn.Module as `func` and its parameters by name, params=dict(...)"
        )
    assert isinstance(integration.mesh, Mesh)
    names = list(params) if isinstance(params, Mapping) else []

    def field(t: Tensor, y: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        integration.f.evaluations += 1
        tree = layout.unflatten(y)
        if not names:
            return layout.flatten(func(t, tree))
        return layout.flatten(
            functional_call(func, dict(zip(names, tensors, strict=True)), (t, tree))
        )

    backsolve = TransformedBacksolve(
        field, integration.method, integration.mesh.times, integration.times
    )
    return backsolve(y0, list(params.values()) if names else []), None, None


def _compiled(
    integration: Integration,
    func: Any,
    layout: StateLayout,
    y: Tensor,
    params: tuple[Tensor, ...],
    named: Mapping[str, Tensor],
    adjoint: Adjoint,
    trusted: bool,
) -> None:
    """Compile the steps where that serves, else the vector field."""
    names = named_params(named, params)
    whole = isinstance(adjoint, CheckpointAdjoint | BacksolveAdjoint | InterpolatingAdjoint)
    tableau = integration.method.tableau
    if not tableau.explicit:
        # Newton's method pulls back through one graph several times; a compiled one serves once.
        raise ValueError(
            f"`compile` does not serve the implicit method {tableau.name!r}: leave it out, or use "
            "an explicit method"
        )
    plain = integration.running_cost is None and integration.f.drive is None
    writes = bool(integration.buffers)
    if not torch.is_grad_enabled() and isinstance(func, nn.Module) and func.training:
        # Nobody watched the first evaluation.
        writes = next(func.buffers(), None) is not None
    # A compiled step may evaluate f more often than is counted, which buffers would show.
    if whole and names is not None and plain and not writes:
        times = integration.times if integration.loss is None else None
        integration.method = CompiledRungeKutta(tableau, func, layout, names, y, times, trusted)
    else:
        integration.f.func = torch.compile(func)


def _refuse_callbacks(func: Any) -> None:
    """Raise if func has the attributes that torchdiffeq calls at each step."""
    # A module asked for what it lacks formats an error message each time.
    own, kind = getattr(func, "__dict__", {}), type(func)
    found = [name for name in CALLBACKS if name in own or hasattr(kind, name)]
    if found:
        raise ValueError(
            f"`func` has {found[0]!r}, which torchdiffeq would call: callbacks are not served; "
            "read `Solution.stats`, or pass loss= to see each observation"
        )


def check_times(t: Any) -> Times:
    """The observation times as a float64 host array.

    Raises
    ------
    TypeError
        If t is no floating-point tensor.
    ValueError
        If t is not one-dimensional with two entries at least, finite and strictly monotone.
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"`t` must be a tensor, got {type(t).__name__}")
    if not t.is_floating_point():
        raise TypeError(f"`t` must be floating-point, got {t.dtype}; convert it with t.double()")
    if t.ndim != 1 or len(t) < 2:
        raise ValueError(f"`t` must have shape (T,) with T >= 2, got {tuple(t.shape)}")
    times = np.array(t.tolist(), dtype=np.float64)  # reads t inside torch.func transforms too
    steps = times[1:] - times[:-1]
    if not np.isfinite(steps.sum()):
        raise ValueError(f"`t` must be finite, got {times}")
    if not ((steps > 0.0).all() or (steps < 0.0).all()):
        raise ValueError("`t` must be strictly increasing or strictly decreasing")
    return times


def _choose(method: str | None, engine: str | None) -> tuple[str, str]:
    method = "dopri5" if method is None else method
    own = method in TABLEAUS
    if engine not in (None, *ENGINES):
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}")
    if method not in TABLEAUS and method not in _torchdiffeq.METHODS:
        known = sorted({*TABLEAUS, *_torchdiffeq.METHODS})
        close = difflib.get_close_matches(str(method), known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`method` must be one of {', '.join(known)}, got {method!r}{hint}")
    if engine is None:
        engine = "contadj" if own else "torchdiffeq"
    if engine == "contadj" and not own:
        raise ValueError(f"`method` = {method!r} has no tableau here: use engine='torchdiffeq'")
    if engine == "torchdiffeq" and method not in _torchdiffeq.METHODS:
        raise ValueError(
            f"torchdiffeq has no method {method!r}; it has {', '.join(_torchdiffeq.METHODS)}"
        )
    return method, engine


def _on_flat_states(cost: Callable[..., Tensor], layout: StateLayout, drive: Drive | None):
    if drive is None:
        return lambda t, y: _scalar(cost(t, layout.unflatten(y)), "running_cost")
    return lambda t, y: _scalar(cost(t, layout.unflatten(y), drive(t)), "running_cost")


def _loss_on_flat_states(loss: Callable[..., Tensor], layout: StateLayout):
    return lambda i, t, y: _scalar(loss(i, t, layout.unflatten(y)), "loss")


def _scalar(value: Any, argument: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`{argument}` must return a scalar tensor, got {came}")
    return value.reshape(())


def _with_params(func: Callable[..., Any], params: Any) -> Callable[..., Any]:
    """func with the parameters of a mapping in the place of its own."""
    if not isinstance(params, Mapping):
        return func
    if not isinstance(func, nn.Module):
        raise TypeError(
            "`params` by name needs an nn.Module as `func`, got "
            f"{type(func).__name__}: give the tensors alone"
        )
    unknown = sorted(set(params) - {name for name, _ in func.named_parameters()})
    if unknown:
        raise ValueError(f"`params` has {unknown[0]!r}, which is no parameter of `func`")
    return lambda *inputs: functional_call(func, dict(params), inputs)


def _check_params(params: Iterable[Tensor] | Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    tensors = tuple(params.values() if isinstance(params, Mapping) else params)
    for param in tensors:
        if not isinstance(param, Tensor):
            raise TypeError(f"`params` must be tensors, got {type(param).__name__}")
    return _unique(tensors)


def _own_params(*functions: Any) -> tuple[Tensor, ...]:
    modules = [function for function in functions if isinstance(function, nn.Module)]
    return _unique(param for module in modules for param in module.parameters())


def _unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _complete_params(
    params: tuple[Tensor, ...], probe: Probe, adjoint: Adjoint, explicit: bool
) -> tuple[Tensor, ...]:
    """The parameters and what else f was seen to use, or an error."""
    if probe.draws_random:
        raise ValueError(
            f"`func` draws random numbers, and {type(adjoint).__name__} evaluates it again in the "
            "backward pass with other ones: draw the noise once outside `func` (or call .eval()), "
            "or use DirectAdjoint()"
        )
    if probe.foreign:
        raise ValueError(
            f"`{probe.foreign[0]}` uses a tensor that was computed outside it and needs a "
            "gradient: pass it in `params=(..., that_tensor)`, or use DirectAdjoint()"
        )
    hidden = [leaf for leaves in probe.hidden.values() for leaf in leaves]
    if hidden and explicit:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in hidden)
        raise ValueError(
            f"`{next(iter(probe.hidden))}` uses {len(hidden)} tensor(s) that need a gradient and "
            f"are not in `params` (shapes {shapes}): add them, or call .requires_grad_(False) on "
            "them"
        )
    return _unique((*params, *hidden))


def _costs(
    running_cost: Callable[..., Tensor] | None, loss: Callable[..., Tensor] | None = None
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The costs as functions of (t, y), by the name of their argument."""
    costs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    if running_cost is not None:
        costs["running_cost"] = running_cost
    if loss is not None:
        costs["loss"] = lambda t, y: loss(0, t, y)
    return costs


def _refuse_dependent(params: tuple[Tensor, ...]) -> None:
    """Raise if one parameter was computed from another, whose gradient would count twice."""
    for param in params:
        if param.grad_fn is None:
            continue
        others = [other for other in params if other is not param]
        if graph_leaves(param, None, others)[2]:
            raise ValueError(
                f"`params` (or a control) has a tensor of shape {tuple(param.shape)} that was "
                "computed from another one of them, which would count twice: give params=(...) "
                "without the earlier one, or compute the later one inside `func`"
            )


def _check_finite(integration: Integration, y0: Tensor, outputs: tuple) -> None:
    """Raise if a fixed-mesh solve is not finite, after looking for the step."""
    with torch.no_grad():
        # The largest entry is NaN where an entry is.
        found = [x for x in outputs if x is not None and x.numel()]
        if all(np.isfinite(float(torch.linalg.vector_norm(x, float("inf")))) for x in found):
            return
        evaluations = integration.f.evaluations
        replay = Integration(
            integration.f, integration.method, integration.mesh, integration.times, None, None,
            SolveStats(),
        )  # fmt: skip
        for n, step in enumerate(replay.steps(y0.detach())):
            if not bool(torch.isfinite(step.y_next).all()):
                field_fails = [
                    float(time)
                    for time, slope in zip(step.times, step.slopes, strict=False)
                    if not bool(torch.isfinite(slope).all())
                ]
                where = f"step {n} from t = {host_time(step.t):.8g} to {host_time(step.t_next):.8g}"
                integration.f.evaluations = evaluations
                if field_fails:
                    raise SolveError(
                        f"`func` is not finite at t = {field_fails[0]:.8g}, in {where}",
                        integration.stats,
                    )
                raise SolveError(
                    f"the state overflows in {where}: take smaller steps", integration.stats
                )
    raise SolveError(
        "the states are finite, the running cost, the loss or an interpolated state is not",
        integration.stats,
    )


_collectors: ContextVar[tuple[list[SolveStats], ...]] = ContextVar("collectors", default=())


def _record(stats: SolveStats) -> None:
    for collector in _collectors.get():
        collector.append(stats)


@contextlib.contextmanager
def collect_stats() -> Iterator[list[SolveStats]]:
    """The statistics of all solves begun inside the context."""
    collected: list[SolveStats] = []
    token = _collectors.set((*_collectors.get(), collected))
    try:
        yield collected
    finally:
        _collectors.reset(token)
