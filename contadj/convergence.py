"""The step-size study: problem x engine x method x number of steps -> records.

Nothing here knows a framework: gradients come from functions that a backend makes (`Make`).
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from .orders import (
    QUANTITIES,
    ExpectedOrder,
    ObservedOrder,
    expected_order,
    observed_order,
    round_off_floor,
)
from .problems import Gradient, GradientProblem
from .problems._problem import Array
from .results import Record, RecordFile
from .workers import InlineExecutor, run_groups, telling_of_deaths

DISCRETE, CONTINUOUS = "DirectAdjoint", "BacksolveAdjoint"
REFERENCE_METHOD = "dopri8"


@dataclass(frozen=True, eq=False)
class Measurement:
    """One gradient of one problem, by one method and adjoint, on one mesh.

    Parameters
    ----------
    gradient : Gradient
        Cost, dL/dy0 and dL/dtheta.
    mesh : (M + 1,) array
        The step times; M = steps per interval times intervals between breakpoints.
    adjoint : (M + 1, n) array, optional
        lambda_n = dL/dy_n at the mesh, the observation cost at t_n included; None where the
        adjoint does not produce it.
    f_evaluations_forward, f_evaluations_backward : int, optional
        Evaluations of the vector field in the forward and in the backward solve; None where they
        are not counted (JAX's implicit methods, whose root finder takes as many as it needs).
    reversal_error : float, optional
        max over the pieces of the backward solve of |y rebuilt - y stored| / max_n |y_n|; None
        where y is not rebuilt.
    seconds : float
        Wall time of one gradient, after warm-up and compilation.
    multipliers : (M, n) array, optional
        slope_sum dL/dr_n, r_n the residual of the equation of the step that ends at t_n, n = 1,
        ..., M; of a multistep method (`contadj.multistep`).
    peak_bytes : int, optional
        Bytes of arrays alive at one time, at most, beyond those there before; None where they were
        not counted.
    """

    gradient: Gradient
    mesh: Array
    adjoint: Array | None
    f_evaluations_forward: int | None
    f_evaluations_backward: int | None
    reversal_error: float | None
    seconds: float
    multipliers: Array | None = None
    peak_bytes: int | None = None


GradientFunction = Callable[[int], Measurement]  # number of steps per interval -> Measurement


# (problem, framework, engine, method, adjoint, dtype, device, max_steps), all by keyword and all
# plain data -> GradientFunction. Called in the workers: picklable, and it should cache.
Make = Callable[..., GradientFunction]


@dataclass(frozen=True, kw_only=True)
class Series:
    """The cells of one problem, engine and method: one for each number of steps.

    Parameters
    ----------
    problem : str
        The problem's name, as a worker can load it.
    framework, engine, method, dtype, device : str
        As in `contadj.results.Record`.
    steps : tuple of int
        Steps between neighbouring breakpoints, increasing.
    digest : str
        Of the problem's definition and the method's coefficients.
    reference_engine : str
        The engine that computes a reference where there is no closed form.
    versions : mapping of str to str
        contadj, Python and the framework's libraries.
    device_description : str
        The device in words.
    """

    problem: str
    framework: str
    engine: str
    method: str
    dtype: str
    device: str
    steps: tuple[int, ...]
    digest: str
    reference_engine: str
    versions: Mapping[str, str]
    device_description: str

    def identity(self, num_steps: int) -> tuple[Any, ...]:
        """Return what `Record.identity` is for one cell."""
        return self.record(num_steps, status="ok").identity

    def record(self, num_steps: int, **values: Any) -> Record:
        """Return the record of one cell."""
        return Record(
            problem=self.problem,
            framework=self.framework,
            engine=self.engine,
            method=self.method,
            discrete_adjoint=DISCRETE,
            continuous_adjoint=CONTINUOUS,
            num_steps=num_steps,
            dtype=self.dtype,
            device=self.device,
            digest=self.digest,
            versions=dict(self.versions),
            platform=f"{platform.system()} {platform.machine()}",
            device_description=self.device_description,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            **values,
        )


@dataclass(frozen=True, eq=False)
class Reference:
    """What gradients and lambda(t) are held against.

    Parameters
    ----------
    description : str
        Closed form, or the solve it comes from, or why there is none.
    gradient : Gradient, optional
        None where there is none.
    error : float
        Estimated relative error of `gradient`.
    adjoint : callable, optional
        Exact lambda(t), where it is known.
    num_steps : int
        Steps per interval of the solve whose lambda_n are in `adjoints`.
    adjoints : (M + 1, n) array, optional
        lambda_n of that solve.
    adjoint_error : float
        Estimated error of lambda, relative to max_t |lambda(t)|.
    """

    description: str
    gradient: Gradient | None = None
    error: float = 0.0
    adjoint: Callable[[float], Array] | None = None
    num_steps: int = 0
    adjoints: Array | None = None
    adjoint_error: float = 0.0

    def adjoint_on(self, mesh: Array, num_steps: int) -> Array | None:
        """Return lambda at the mesh of `num_steps` steps per interval, None where not known."""
        if self.adjoint is not None:
            return np.array([np.atleast_1d(self.adjoint(t)) for t in mesh])
        if self.adjoints is None or self.num_steps % num_steps:
            return None
        return self.adjoints[:: self.num_steps // num_steps]


@dataclass(frozen=True)
class Failure:
    """Why a gradient could not be computed: a status of `contadj.results.Record` and one line."""

    status: str
    message: str


Outcome = Measurement | Failure


def _attempt(function: Callable[[], Measurement]) -> Outcome:
    try:
        measurement = function()
    except ArithmeticError as error:  # a backend met a value that is not finite
        return Failure("diverged", one_line(error))
    except Exception as error:
        return Failure("failed", f"{type(error).__name__}: {one_line(error)}")
    gradient = measurement.gradient
    if not (math.isfinite(gradient.cost) and np.all(np.isfinite(gradient.vector))):
        return Failure("diverged", "the gradient is not finite")
    return measurement


def one_line(error: Exception) -> str:
    """Return an error's message on one line, shortened."""
    return " ".join(str(error).split())[:300]


def _norm(vector: Array) -> float:
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(vector))


def _largest(adjoints: Array) -> float:
    """Return max_n |lambda_n|."""
    with np.errstate(over="ignore"):
        return float(np.max(np.linalg.norm(adjoints, axis=1)))


def measure_cell(make: Make, series: Series, num_steps: int) -> tuple[Outcome, Outcome, float]:
    """Compute the discrete and the continuous gradient of one cell, and the seconds it took; runs
    in a worker.
    """
    start = time.perf_counter()

    def measure(adjoint: str) -> Measurement:
        gradient_at = make(
            problem=series.problem,
            framework=series.framework,
            engine=series.engine,
            method=series.method,
            adjoint=adjoint,
            dtype=series.dtype,
            device=series.device,
            max_steps=max(series.steps),
        )
        return gradient_at(num_steps)

    discrete, continuous = (
        _attempt(lambda adjoint=adjoint: measure(adjoint)) for adjoint in (DISCRETE, CONTINUOUS)
    )
    return discrete, continuous, time.perf_counter() - start


def solve_reference(make: Make, series: Series) -> Reference:
    """Compute a reference by a method of order 8 on finer and finer meshes; runs in a worker.

    The number of steps is doubled until the difference of two successive gradients, which bounds
    the error of the finer one, stops falling: then it is round-off. lambda comes from a mesh that
    contains every mesh of the series.

    Parameters
    ----------
    make : Make
        Makes the gradient function.
    series : Series
        Names problem, framework, device and all numbers of steps.
    """
    common = math.lcm(*series.steps)
    first = common
    while first % 2 == 0 and first >= 16:
        first //= 2
    finest = max(2 * common, 256)
    try:
        gradient_at = make(
            problem=series.problem,
            framework=series.framework,
            engine=series.reference_engine,
            method=REFERENCE_METHOD,
            adjoint=DISCRETE,
            dtype="float64",
            device=series.device,
            max_steps=finest,
        )
    except Exception as error:
        return Reference(f"none: {one_line(error)}")
    solves: dict[int, Outcome] = {}

    def solve(num_steps: int) -> Outcome:
        if num_steps not in solves:
            solves[num_steps] = _attempt(lambda: gradient_at(num_steps))
        return solves[num_steps]

    num_steps, best, error, round_off = first, 2 * first, math.inf, 0.0
    while 2 * num_steps <= finest and error > round_off:
        coarse, fine = solve(num_steps), solve(2 * num_steps)
        num_steps *= 2
        if isinstance(coarse, Failure) or isinstance(fine, Failure):
            continue
        difference = _norm(coarse.gradient.vector - fine.gradient.vector)
        difference /= _norm(fine.gradient.vector) or 1.0
        if difference >= error:
            break
        best, error = num_steps, difference
        round_off = round_off_floor("float64", len(fine.mesh) - 1) / 10
    for_adjoint = max(best, common)
    gradient, fine, coarse = solve(best), solve(for_adjoint), solve(for_adjoint // 2)
    for outcome in (gradient, fine, coarse):
        if isinstance(outcome, Failure):
            return Reference(f"none: {REFERENCE_METHOD} {outcome.status}: {outcome.message}")
    assert isinstance(gradient, Measurement)
    assert isinstance(fine, Measurement) and isinstance(coarse, Measurement)
    reference = Reference(
        f"{REFERENCE_METHOD}, {best} steps per interval", gradient.gradient, error
    )
    if fine.adjoint is None or coarse.adjoint is None:
        return reference
    return replace(
        reference,
        num_steps=for_adjoint,
        adjoints=fine.adjoint,
        adjoint_error=_largest(coarse.adjoint - fine.adjoint[::2]) / _largest(fine.adjoint),
    )


def complete_reference(problem: GradientProblem, solved: Reference | None) -> Reference:
    """Return the reference of a problem: its closed forms, and a solve for what has none."""
    if solved is None:
        return Reference("closed form", problem.gradient, adjoint=problem.adjoint)
    if problem.gradient is not None:
        description = f"closed form; lambda: {solved.description}"
        return replace(solved, description=description, gradient=problem.gradient, error=0.0)
    if problem.adjoint is not None:
        return replace(solved, adjoint=problem.adjoint, adjoint_error=0.0)
    return solved


def compare(
    series: Series, num_steps: int, discrete: Outcome, continuous: Outcome, reference: Reference
) -> Record:
    """Return the record of a cell: the two gradients held against the reference and each other."""
    values: dict[str, Any] = {
        "reference": reference.description,
        "reference_error": reference.error if reference.gradient else None,
    }
    failures = [
        (name, outcome)
        for name, outcome in ((DISCRETE, discrete), (CONTINUOUS, continuous))
        if isinstance(outcome, Failure)
    ]
    messages = [f"{name}: {failure.message}" for name, failure in failures]
    statuses = {failure.status for _, failure in failures}
    if reference.gradient is None:
        messages.append(f"no reference ({reference.description})")
        statuses.add("failed")
    status = "failed" if "failed" in statuses else "diverged" if statuses else "ok"

    def error(name: str, value: float, scale: float) -> None:
        values[f"{name}_error"], values[f"{name}_relative"] = value, value / (scale or 1.0)

    exact = reference.gradient.vector if reference.gradient else None
    for name, outcome in (("discrete", discrete), ("continuous", continuous)):
        if isinstance(outcome, Failure):
            continue
        values["h"] = float(np.max(np.diff(outcome.mesh)))
        values["mesh_size"] = len(outcome.mesh) - 1
        values[f"{name}_evaluations_forward"] = outcome.f_evaluations_forward
        values[f"{name}_evaluations_backward"] = outcome.f_evaluations_backward
        values[f"{name}_seconds"] = outcome.seconds
        if exact is not None:
            error(name, _norm(outcome.gradient.vector - exact), _norm(exact))
    if isinstance(discrete, Measurement):
        values["cost"] = discrete.gradient.cost
        adjoint = reference.adjoint_on(discrete.mesh, num_steps)
        if discrete.adjoint is not None and adjoint is not None:
            error("adjoint", _largest(discrete.adjoint - adjoint), _largest(adjoint))
            values["reference_adjoint_error"] = reference.adjoint_error
    if isinstance(continuous, Measurement):
        values["reversal_error"] = continuous.reversal_error
        if isinstance(discrete, Measurement):
            scale = _norm(exact if exact is not None else discrete.gradient.vector)
            error("gap", _norm(discrete.gradient.vector - continuous.gradient.vector), scale)
    return series.record(num_steps, status=status, message="; ".join(messages), **values)


def run_study(
    study: Sequence[Series],
    problems: Mapping[tuple[str, str], GradientProblem],
    make: Make,
    records: RecordFile,
    *,
    executor: Executor | None = None,
    jobs: int = 1,
    on_record: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Compute every cell of a study that is not in the file yet.

    Each record is appended as its cell ends, so that a kill loses the cells in work only. A cell
    that failed before is tried again.

    Parameters
    ----------
    study : sequence of Series
        The cells.
    problems : mapping
        The problem of each (problem, framework) of the study.
    make : Make
        Makes the gradient functions; called in the workers.
    records : RecordFile
        Where records go and where those of earlier runs are.
    executor : concurrent.futures.Executor, optional
        Where cells are computed; by default here, one after the other.
    jobs : int
        Cells in work at once. A series stays on one job as long as it can, since its gradient
        function is compiled once for each process.
    on_record : callable, optional
        Called with each new record.

    Returns
    -------
    list of Record
        All cells of the study, those of earlier runs included, in the order of `study`.

    Raises
    ------
    WorkerDiedError
        If a worker process dies; the finished cells are in the file.
    """
    executor = executor or InlineExecutor()
    known = {record.identity: record for record in records.records if record.status != "failed"}
    missing = [
        [(series, n) for n in series.steps if series.identity(n) not in known] for series in study
    ]

    def submit(cell: tuple[Series, int]) -> Future[Any]:
        return executor.submit(measure_cell, make, *cell)

    def keep(cell: tuple[Series, int], result: tuple[Outcome, Outcome, float]) -> None:
        series, num_steps = cell
        discrete, continuous, seconds = result
        reference = references[series.problem, series.framework]
        record = compare(series, num_steps, discrete, continuous, reference)
        record = replace(record, seconds=seconds)
        records.append(record)
        known[record.identity] = record
        on_record(record)

    with telling_of_deaths(records.path):
        lacking = [group[0][0] for group in missing if group]
        references = _references(lacking, problems, make, executor)
        run_groups(missing, submit, keep, jobs=jobs)
    return [known[series.identity(n)] for series in study for n in series.steps]


def _references(
    study: Sequence[Series],
    problems: Mapping[tuple[str, str], GradientProblem],
    make: Make,
    executor: Executor,
) -> dict[tuple[str, str], Reference]:
    """Return the reference of every (problem, framework), each computed once."""
    leads: dict[tuple[str, str], Series] = {}
    for series in study:
        key = series.problem, series.framework
        steps = {*series.steps, *(leads[key].steps if key in leads else ())}
        leads[key] = replace(series, steps=tuple(sorted(steps)))
    solves = {
        key: executor.submit(solve_reference, make, series)
        for key, series in leads.items()
        if problems[key].gradient is None or problems[key].adjoint is None
    }
    return {
        key: complete_reference(problems[key], solves[key].result() if key in solves else None)
        for key in leads
    }


@dataclass(frozen=True)
class OrderRow:
    """The order of one quantity of one series, observed beside expected.

    Parameters
    ----------
    problem, framework, engine, method, dtype, device : str
        Of the records it comes from.
    quantity : str
        One of `contadj.orders.QUANTITIES`.
    steps : tuple of int
        Numbers of steps, one more than there are pairwise orders.
    expected : ExpectedOrder, optional
        None where no statement is known.
    observed : ObservedOrder
        What the errors show.
    """

    problem: str
    framework: str
    engine: str
    method: str
    dtype: str
    device: str
    quantity: str
    steps: tuple[int, ...]
    expected: ExpectedOrder | None
    observed: ObservedOrder


def order_rows(records: Iterable[Record]) -> list[OrderRow]:
    """Return the orders that records show, one row per series and quantity."""
    names = ("problem", "framework", "engine", "method", "dtype", "device")
    series: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        series.setdefault(tuple(getattr(record, name) for name in names), []).append(record)
    rows = []
    for key, cells in series.items():
        common = dict(zip(names, key, strict=True))
        cells = sorted((cell for cell in cells if cell.h), key=lambda cell: cell.num_steps)
        for quantity in QUANTITIES:
            expected = expected_order(common["method"], quantity)
            observed = observed_order(
                [cell.h or math.nan for cell in cells],
                [cell.relative(quantity) for cell in cells],
                [floor(cell, quantity) for cell in cells],
                expected,
            )
            rebuilt = max((cell.reversal_error or 0.0 for cell in cells), default=0.0)
            if observed.state == "deviates" and quantity in ("continuous", "gap") and rebuilt > 0.1:
                reason = f"y rebuilt backward is off by {rebuilt:.0e} of its size: unstable"
                observed = replace(observed, reason=f"{observed.reason}; {reason}")
            rows.append(
                OrderRow(
                    **common,
                    quantity=quantity,
                    steps=tuple(cell.num_steps for cell in cells),
                    expected=expected,
                    observed=observed,
                )
            )
    return rows


def floor(record: Record, quantity: str) -> float:
    """Return the relative error below which a quantity of a record is round-off.

    Beside round-off itself, the reference has an error; what is less than ten times its estimate
    says nothing.
    """
    estimate = {
        "discrete": record.reference_error,
        "continuous": record.reference_error,
        "gap": None,
        "adjoint": record.reference_adjoint_error,
    }[quantity]
    return max(round_off_floor(record.dtype, record.mesh_size or 1), 10 * (estimate or 0.0))
