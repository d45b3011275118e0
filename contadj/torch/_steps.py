"""One explicit Runge-Kutta step from a tableau, its dense output, and step-size control.

    Y_i     = y_n + h sum_j a_ij f(t_n + c_j h, Y_j),
    y_{n+1} = y_n + h sum_i b_i  f(t_n + c_i h, Y_i).

A step is a function of (t_n, h, y_n) alone, so that the discrete adjoint lambda_n = dL/dy_n is what
its vector-Jacobian products give. Step sizes are Python floats; they are tensors only where a
gradient with respect to time is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..tableaus import Tableau

VectorField = Callable[[Tensor, Tensor], Tensor]
Times = NDArray[np.float64]
Row = tuple[tuple[int, float], ...]


def nonzero(weights: np.ndarray) -> Row:
    """(index, weight) of the nonzero weights of a row."""
    return tuple((j, float(w)) for j, w in enumerate(weights) if w != 0.0)


def combine(y: Tensor, h: float | Tensor, row: Row, ks: Sequence[Tensor]) -> Tensor:
    """y + h sum_j w_j k_j over the nonzero weights of a row."""
    if isinstance(h, Tensor):
        for j, weight in row:
            y = y + (h * weight) * ks[j]
    else:
        for j, weight in row:
            y = torch.add(y, ks[j], alpha=h * weight)
    return y


def product(weights: Tensor, rows: Tensor) -> Tensor:
    """sum_j w_ij r_j in full precision: autocast is meant for f, and would round it."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return product(weights, rows)
    flat = rows.flatten(1) if rows.ndim > 1 else rows
    return (weights @ flat).view((*weights.shape[:-1], *rows.shape[1:]))


@cache
def dense_output(tableau: Tableau) -> tuple[np.ndarray, int]:
    """The interpolant in the slopes, and its order."""
    if tableau.interpolant is None or tableau.interpolant_order is None:
        return _hermite(tableau), 3
    return tableau.interpolant, tableau.interpolant_order


@cache
def _weights(tableau: Tableau) -> tuple[list[Row], Row, Row | None]:
    """The nonzero weights of the stages, of the solution and of its error."""
    error = None if tableau.embedded is None else nonzero(tableau.b - tableau.embedded)
    return [nonzero(row) for row in tableau.a], nonzero(tableau.b), error


@dataclass(slots=True)
class Step:
    """One accepted step from (t, y) to (t_next, y_next).

    `slopes` are the values of f at the stages, `stages` the stage states Y_i and `times` the stage
    times. `t` and `t_next` are Python floats, or scalar tensors where a gradient with respect to
    time is asked for. `next_size` is what error control proposes for the step after it,
    `error_norm` the norm of the error where it is known already. A step computed together with
    others may come with the states that they all `observed`, by observation time.
    """

    t: float | Tensor
    t_next: float | Tensor
    y: Tensor
    y_next: Tensor
    slopes: list[Tensor]
    stages: list[Tensor]
    times: Tensor | Sequence[Tensor]
    next_size: float = 0.0
    error_norm: float | None = None
    observed: Tensor | None = None

    @property
    def state(self) -> Tensor:
        """The state that is observed."""
        return self.y

    def tries(self, t: float, t_next: float, stop: float, spacing: float) -> bool:
        """Whether it is the step from t to t_next, up to the rounding of its size."""
        if self.t != t or (self.t_next == stop) != (t_next == stop):
            return False
        return abs(t_next - self.t_next) <= spacing  # type: ignore[operator]

    def release(self) -> None:
        """Let go of y and the stages, so that they do not lie beside those of the next step."""
        self.y = self.y_next
        self.slopes.clear()
        self.stages.clear()

    @property
    def h(self) -> float | Tensor:
        """The step size, in the dtype and on the device of the state if it is a tensor."""
        h = self.t_next - self.t
        return h.to(self.y.device, real_dtype(self.y)) if isinstance(h, Tensor) else h


def replay_evidence(y: Tensor, got: Tensor, expected: Tensor) -> Tensor:
    """Largest entries of the expected state, of what led there from y, and of what was missed."""
    parts = torch.stack([expected, expected - y, got - expected])
    if not parts.numel():
        return torch.zeros(3, dtype=real_dtype(y), device=y.device)
    return parts.abs().reshape(3, -1).amax(1)


def enter(f: VectorField, t: float | Tensor, t_next: float | Tensor) -> None:
    """Tell a vector field that may jump which step its next evaluations belong to."""
    announce = getattr(f, "enter", None)
    if announce is not None:
        announce(t, t_next)


def real_dtype(y: Tensor) -> torch.dtype:
    """The dtype that times and step sizes have beside a state."""
    return y.dtype.to_real() if y.dtype.is_complex else y.dtype


def time_like(t: float | Tensor, y: Tensor) -> Tensor:
    """A time as a scalar tensor beside a state."""
    return torch.as_tensor(t, dtype=real_dtype(y), device=y.device)


def host_time(t: float | Tensor) -> float:
    """A time as a Python float."""
    return t.item() if isinstance(t, Tensor) else t


class RungeKutta:
    """An explicit Runge-Kutta step made from a tableau.

    Parameters
    ----------
    tableau : Tableau
        An explicit method.

    Raises
    ------
    ValueError
        If the method is implicit.
    """

    def __init__(self, tableau: Tableau):
        self._check(tableau)
        self.tableau = tableau
        self.nodes = tableau.c
        self._rows, self._b, self._error = _weights(tableau)
        self.fsal = tableau.first_same_as_last
        # An interpolant one order below the method's is the convention; below that, an observation
        # inside a step is reached by a shortened step of the method itself.
        self._interpolant, order = dense_output(tableau)
        self.interpolates = order >= tableau.order - 1
        self._interpolant_stages = self._interpolant.shape[0]

    def _check(self, tableau: Tableau) -> None:
        if not tableau.explicit:
            raise ValueError(
                f"`method` must be explicit here, got the implicit method {tableau.name!r}"
            )

    def stage_times(self, t: ArrayLike, t_next: ArrayLike, y: Tensor) -> Tensor:
        """The times t + c_i h beside y, (..., s); never beyond t_next, where f may not exist."""
        t, t_next = np.asarray(t)[..., None], np.asarray(t_next)[..., None]
        times = np.where(self.nodes == 1.0, t_next, t + self.nodes * (t_next - t))
        return torch.from_numpy(times).to(y.device, real_dtype(y))

    def size_and_times(
        self,
        t: float | Tensor,
        t_next: float | Tensor,
        y: Tensor,
        times: Tensor | Sequence[Tensor] | None = None,
    ) -> tuple[float | Tensor, Sequence[Tensor]]:
        """The step size and the stage times of a step from y."""
        h = t_next - t
        if isinstance(h, Tensor):
            h = h.to(y.device, real_dtype(y))
        if times is None:
            if isinstance(h, Tensor) or isinstance(t, Tensor):
                start = time_like(t, y)
                end = time_like(t_next, y)
                times = [end if c == 1.0 else start + c * h for c in self.nodes]
            else:
                times = self.stage_times(t, t_next, y)
        if isinstance(times, Tensor):
            times = times.unbind()
        return h, times

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
        """Take one step.

        Parameters
        ----------
        f : callable
            The vector field f(t, y).
        t, t_next : float or scalar tensor
            Ends of the step.
        y : Tensor
            State at t.
        times : (s,) Tensor or sequence of scalar tensors, optional
            The stage times, where they are known already.
        first : Tensor, optional
            f(t, y), where it is known already.
        last : bool
            Also evaluate the stage that is f(t_next, y_next), for a first-same-as-last method.

        Returns
        -------
        Step
        """
        h, times = self.size_and_times(t, t_next, y, times)
        enter(f, t, t_next)
        step = Step(t, t_next, y, y, [], [], times)
        slopes, stages = step.slopes, step.stages
        count = len(self._rows) - self.fsal
        for i in range(count):
            stage = combine(y, h, self._rows[i], slopes)
            stages.append(stage)
            slopes.append(first if i == 0 and first is not None else f(times[i], stage))
        step.y_next = combine(y, h, self._b, slopes)
        if self.fsal and last:
            slopes.append(f(times[count], step.y_next))
        return step

    def quadrature(self, cost: VectorField, step: Step) -> Tensor:
        """h sum_i b_i c(t_n + c_i h, Y_i): the integral of a running cost over the step."""
        total = None
        for i, weight in self._b:
            term = cost(step.times[i], step.stages[i]) * weight
            total = term if total is None else total + term
        assert total is not None
        return step.h * total

    def error(self, step: Step) -> Tensor:
        """Difference between the solution and the embedded one."""
        assert self._error is not None
        return combine(torch.zeros_like(step.y), step.h, self._error, step.slopes)

    def evaluate(self, f: VectorField, step: Step, t: float | Tensor) -> Tensor:
        """The solution at a time t inside a step."""
        if not self.interpolates:
            return self.take(f, step.t, t, step.y, first=step.slopes[0]).y_next
        self.complete(f, step)
        x = (t - step.t) / (step.t_next - step.t)
        h = step.h
        if isinstance(x, Tensor):
            x = x.to(step.y.device, real_dtype(step.y))
        y = step.y
        for slope, row in zip(step.slopes, self._interpolant, strict=False):
            weight = 0.0
            for coefficient in row[::-1]:
                weight = (weight + float(coefficient)) * x
            if isinstance(weight, Tensor) or isinstance(h, Tensor):
                y = y + (h * weight) * slope
            elif weight != 0.0:
                y = torch.add(y, slope, alpha=h * weight)
        return y

    def evaluate_many(self, f: VectorField, step: Step, t: Sequence[float]) -> Tensor:
        """The solution at several times inside a step, (len(t), *state)."""
        if not self.interpolates or len(t) == 1:
            return torch.stack([self.evaluate(f, step, time) for time in t])
        self.complete(f, step)
        assert not isinstance(step.t, Tensor) and not isinstance(step.t_next, Tensor)
        weights = torch.as_tensor(
            self.dense_weights(step.t, step.t_next, t), dtype=step.y.dtype, device=step.y.device
        )
        slopes = torch.stack(step.slopes[: self._interpolant_stages])
        return step.y + product(weights, slopes)

    def dense_weights(self, start: ArrayLike, end: ArrayLike, t: ArrayLike) -> np.ndarray:
        """Weights w with y(t_j) = y_n + sum_i w_ji k_i inside the step of t_j, (len(t), slopes)."""
        h = np.subtract(end, start)
        x = np.subtract(t, start) / h
        powers = x[:, None] ** np.arange(1, self._interpolant.shape[1] + 1)
        return np.reshape(h, (-1, 1)) * (powers @ self._interpolant.T)

    def attempts(
        self,
        f: VectorField,
        control: StepControl,
        attempt: Attempt,
        y: Tensor,
        first: Tensor | None,
    ) -> Iterator[Step]:
        """The step that is tried from y, and maybe what would be tried after it."""
        yield self.take(f, attempt.t, attempt.t_next, y, first=first, last=True)

    def begin(
        self,
        f: VectorField,
        control: StepControl,
        t: float,
        stop: float,
        y: Tensor,
        first: Tensor | None,
    ) -> tuple[float, Tensor | None, Iterator[Step]]:
        """The size of the first step, f(t, y) if known, and maybe the attempts that follow."""
        if first is None:
            first = f(time_like(t, y), y)
        ends = torch.tensor([t, stop], dtype=torch.float64, device=y.device)
        with torch.no_grad():
            size = first_size(
                control, self.tableau.order, f, ends[0], ends[1], y.detach(), first.detach()
            )
        return float(size), first, iter(())

    def start_slope(self, f: VectorField, step: Step) -> Tensor:
        """f at the start of a step."""
        return step.slopes[0]

    def complete(self, f: VectorField, step: Step) -> None:
        """Append f(t_next, y_next) to the slopes where the interpolant needs it."""
        if len(step.slopes) < self._interpolant_stages:
            enter(f, step.t, step.t_next)
            step.slopes.append(f(time_like(step.t_next, step.y), step.y_next))


def _hermite(tableau: Tableau) -> np.ndarray:
    """The cubic Hermite interpolant in the slopes, f at the end of the step as the last one."""
    slopes = tableau.b if tableau.first_same_as_last else np.append(tableau.b, 0.0)
    rows = np.outer(slopes, [0.0, 3.0, -2.0])
    rows[0] += [1.0, -2.0, 1.0]
    rows[-1] += [0.0, -1.0, 1.0]
    return rows


@dataclass(frozen=True)
class StepControl:
    """Adaptive step-size control.

    A step is accepted when the norm of error / (atol + rtol max(|y_n|, |y_{n+1}|)) is at most 1.
    The next step size follows the PI rule of Gustafsson, with the exponents that Hairer and
    Wanner (II, IV.2) use: h_new = h safety err^(-0.85/q) err_old^(0.2/q), q the order of the
    embedded solution plus one.
    """

    rtol: float | Tensor = 1e-7
    atol: float | Tensor = 1e-9
    first_step: float | None = None
    max_num_steps: int = 2**31 - 1
    norm: str | Callable[[Tensor], Tensor] = "batch"
    min_step: float = 0.0
    max_step: float = float("inf")
    safety: float = 0.9
    ifactor: float = 10.0
    dfactor: float = 0.2
    step_t: tuple[float, ...] = ()
    jump_t: tuple[float, ...] = ()

    def error_norm(self, error: Tensor, y: Tensor, y_next: Tensor) -> Tensor:
        """Norm of the scaled error; at most 1 for an acceptable step."""
        return self._norm(error / (self.atol + self.rtol * torch.maximum(y.abs(), y_next.abs())))

    def scaled_norm(self, value: Tensor, y: Tensor) -> Tensor:
        """Norm of a value scaled by the tolerances at y."""
        return self._norm(value / (self.atol + self.rtol * y.abs()))

    def _norm(self, scaled: Tensor) -> Tensor:
        if callable(self.norm):
            return self.norm(scaled)
        return torch.linalg.vector_norm(scaled) / max(scaled.numel(), 1) ** 0.5


class StepError(Exception):
    """Why an adaptive solve cannot go on; turned into a `SolveError` with the statistics."""


class StageError(StepError):
    """The equations of a step that were not solved; a smaller step may do."""


def first_size(
    control: StepControl, order: int, f: VectorField, t: Tensor, t1: Tensor, y: Tensor, f0: Tensor
) -> Tensor:
    """The size of the first step (Hairer, Norsett & Wanner I, II.4), at most the interval's."""
    span = (t1 - t).abs()
    d0, d1 = control.scaled_norm(y, y).double(), control.scaled_norm(f0, y).double()
    tiny = (d0 < 1e-5) | (d1 < 1e-5)
    h0 = torch.minimum(torch.where(tiny, 1e-6, 0.01 * d0 / d1), span)
    ahead = torch.sign(t1 - t) * h0
    f1 = f((t + ahead).to(real_dtype(y)), y + ahead.to(real_dtype(y)) * f0)
    d2 = control.scaled_norm(f1 - f0, y).double() / h0
    slope = torch.maximum(d1, d2)
    h1 = torch.where(
        slope > 1e-15, (0.01 / slope) ** (1.0 / (order + 1)), (1e-3 * h0).clamp(min=1e-6)
    )
    return torch.minimum(torch.minimum(100.0 * h0, h1), span)


def next_size(
    control: StepControl,
    tableau: Tableau,
    error: Tensor,
    before: Tensor,
    planned: Tensor,
    size: Tensor,
    lands: Tensor,
    rejected: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `adaptive_steps` decides on host numbers, on tensors: after an attempt of size `planned`
    with the norm `error`, whether it is accepted, the next size, and the last accepted error.
    """
    exponent = error_exponent(tableau)
    finite = torch.isfinite(error)
    accepted = (error <= 1.0) | ((planned <= control.min_step) & finite)
    factor = error.clamp(min=1e-10) ** (-0.85 / exponent) * before ** (0.2 / exponent)
    factor = (control.safety * factor).clamp(control.dfactor, control.ifactor)
    factor = torch.where(rejected, factor.clamp(max=1.0), factor)
    grown = torch.maximum(planned * factor, torch.where(lands, size, 0.0))
    factor = torch.where(finite, control.safety * error ** (-1.0 / exponent), 0.0)
    shrunk = planned * factor.clamp(min=control.dfactor).clamp(max=1.0)
    size = torch.where(accepted, grown, shrunk).clamp(control.min_step, control.max_step)
    return accepted, size, torch.where(accepted, error.clamp(min=0.1), before)


def error_exponent(tableau: Tableau) -> float:
    """The power of h that the error of a step is proportional to."""
    assert tableau.embedded_order is not None
    return min(tableau.order, tableau.embedded_order) + 1.0


@dataclass(slots=True)
class Attempt:
    """What decides the size of an adaptive step that is about to be tried, and of the next ones.

    Parameters
    ----------
    t, t_next : float
        Ends of the step.
    size : float
        The size that was planned, before the step was fitted to `stop`.
    stop : float
        The time at which a step must end next.
    error_before : float
        Norm of the error of the last accepted step.
    rejected : bool
        Whether the attempt before was rejected.
    """

    t: float
    t_next: float
    size: float
    stop: float
    error_before: float
    rejected: bool


def adaptive_steps(
    method: RungeKutta,
    control: StepControl,
    f: VectorField,
    t0: float,
    t1: float,
    y: Tensor,
    first: Tensor | None,
    on_reject: Callable[[], None],
) -> Iterator[Step]:
    """Accepted steps from t0 to t1, the last one ending exactly on t1.

    A step has its stages until the next one is asked for. f is never evaluated outside [t0, t1].
    Each attempt reads one number back from the device.

    Raises
    ------
    StepError
        If f is not finite, if the step size falls below the spacing of floating-point times, or
        after `max_num_steps` attempts.
    """
    exponent = error_exponent(method.tableau)
    direction = 1.0 if t1 > t0 else -1.0
    knots = getattr(f, "knots", ())
    stops = sorted(
        {
            s
            for s in (*control.step_t, *control.jump_t, *knots)
            if 0 < direction * (s - t0) < abs(t1 - t0)
        },
        key=lambda s: direction * s,
    )
    jumps = {*control.jump_t, *getattr(f, "jumps", ())}
    stops.append(t1)
    # Below a few units in the last place of the interval no step makes progress.
    spacing = 4 * np.finfo(np.float64).eps * max(abs(t0), abs(t1))
    size = control.first_step
    guesses: Iterator[Step] = iter(())
    enter(f, t0, stops[0])
    if size is None:
        size, first, guesses = method.begin(f, control, t0, stops[0], y, first)
    size = min(max(size, control.min_step), control.max_step)
    t, error_before, attempts, rejected, stop = t0, 1.0, 0, False, 0
    while t != t1:
        if attempts == control.max_num_steps:
            raise StepError(
                f"`max_num_steps` = {control.max_num_steps} steps were tried and t = {t:.8g} of "
                f"{t1:.8g} is reached"
            )
        attempts += 1
        # A step that would leave a sliver before the stop is stretched onto it.
        left = abs(stops[stop] - t)
        lands = 1.01 * size >= left
        h = left if lands else size
        t_next = stops[stop] if lands else t + direction * h
        if t_next == t or (h < spacing and not lands):
            raise StepError(
                f"the step size fell to {h:.1e} at t = {t:.8g}, below the spacing of times there: "
                "the problem is stiff or f is not smooth; use an implicit method or larger "
                "tolerances"
            )
        try:
            step = next(guesses, None)
            if step is None or not step.tries(t, t_next, stops[stop], spacing):
                attempt = Attempt(t, t_next, size, stops[stop], error_before, rejected)
                guesses = method.attempts(f, control, attempt, y, first)
                step = next(guesses)
            t_next = host_time(step.t_next)
        except StageError:
            if h < 1e-13 * max(abs(t), abs(t1 - t0)) or h <= control.min_step:
                raise
            on_reject()
            size, rejected = max(0.25 * h, control.min_step), True
            continue
        error = step.error_norm
        if error is None:
            with torch.no_grad():
                error = float(control.error_norm(method.error(step), y, step.y_next))
        if not math.isfinite(error):
            if not bool(torch.isfinite(step.slopes[0]).all()):
                raise StepError(f"f is not finite at t = {t:.8g}")
            if h < 1e-13 * max(abs(t), abs(t1 - t0)):
                raise StepError(f"f is not finite just after t = {t:.8g}")
        at_minimum = h <= control.min_step and math.isfinite(error)
        if error <= 1.0 or at_minimum:
            factor = max(error, 1e-10) ** (-0.85 / exponent) * error_before ** (0.2 / exponent)
            factor = min(control.ifactor, max(control.dfactor, control.safety * factor))
            # Far below the tolerance the last error says nothing about stability.
            error_before = max(error, 0.1)
            # A step cut short by a stop says nothing against the size that was planned.
            size = max(h * (min(factor, 1.0) if rejected else factor), size if lands else 0.0)
            step.next_size = size = min(max(size, control.min_step), control.max_step)
            rejected = False
            yield step
            y, t = step.y_next, t_next
            if t == t1:
                return
            stop += lands
            first = step.slopes[-1] if method.fsal and t not in jumps else None
            step.release()
        else:
            on_reject()
            first = step.slopes[0]
            step.release()
            factor = control.safety * error ** (-1.0 / exponent) if math.isfinite(error) else 0.0
            size = h * min(1.0, max(control.dfactor, factor))
            size = min(max(size, control.min_step), control.max_step)
            rejected = True
