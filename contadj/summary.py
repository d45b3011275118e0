"""What a step-size study found, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .convergence import OrderRow, floor
from .results import Record

GRADIENTS = ("discrete", "continuous")


@dataclass(frozen=True)
class Place:
    """A number of steps, and where it comes from.

    Parameters
    ----------
    num_steps : int
        Steps between neighbouring breakpoints of the problem.
    h : float
        The longest step.
    measured : bool
        Whether it is one of the study, and not extrapolated by the observed order.
    """

    num_steps: int
    h: float
    measured: bool

    def __str__(self) -> str:
        about = "" if self.measured else "about "
        return f"{about}{self.num_steps:,} steps, h = {self.h:.2g}"


@dataclass(frozen=True)
class Line:
    """One gradient of one method against the step size.

    Parameters
    ----------
    steps : sequence of int
        Numbers of steps, increasing.
    h, errors, floors : sequences of float, of one length
        The longest steps, relative errors, and what round-off may be at each; an error may be None.
    order : float, optional
        The order seen above round-off.
    """

    steps: Sequence[int]
    h: Sequence[float]
    errors: Sequence[float | None]
    floors: Sequence[float]
    order: float | None

    def _extrapolated(self, error: float, order: float) -> Place | None:
        """Where an error that falls with this order would be reached."""
        above = [
            i for i, (e, low) in enumerate(zip(self.errors, self.floors, strict=True))
            if e is not None and e > low
        ]  # fmt: skip
        if not above or self.order is None or self.order < 0.1:
            return None
        last, reached = above[-1], self.errors[above[-1]]
        assert reached is not None
        wanted = self.steps[last] * max(1.0, (reached / error) ** (1 / order))
        # Two digits are what an extrapolation is worth.
        digits = 10 ** max(0, math.floor(math.log10(wanted)) - 1)
        num_steps = math.ceil(wanted / digits) * digits
        return Place(num_steps, self.h[last] * self.steps[last] / num_steps, False)

    @property
    def round_off(self) -> Place | None:
        """Where round-off starts: the longest step whose error is no more; None where not known."""
        for n, h, error, low in zip(self.steps, self.h, self.errors, self.floors, strict=True):
            if error is not None and error <= low:
                return Place(n, h, True)
        if self.order is None:
            return None
        # Round-off grows with the square root of the number of steps.
        return self._extrapolated(self.floors[-1], self.order + 0.5)

    def reaches(self, tolerance: float) -> Place | None:
        """Where the error is at most the tolerance; None where round-off is in the way."""
        for n, h, error in zip(self.steps, self.h, self.errors, strict=True):
            if error is not None and error <= tolerance:
                return Place(n, h, True)
        if self.order is None:
            return None
        place, round_off = self._extrapolated(tolerance, self.order), self.round_off
        if place is None or round_off is None or place.num_steps > round_off.num_steps:
            return None
        return place


def line_of(records: Iterable[Record], row: OrderRow) -> Line:
    """Return the errors behind a row of orders.

    Parameters
    ----------
    records : iterable of Record
        Of the study the row comes from.
    row : OrderRow
        Of the discrete or the continuous gradient.
    """
    names = ("problem", "framework", "engine", "method", "dtype", "device")
    cells = [
        record for record in records
        if record.h and all(getattr(record, name) == getattr(row, name) for name in names)
    ]  # fmt: skip
    cells.sort(key=lambda record: record.num_steps)
    return Line(
        [cell.num_steps for cell in cells],
        [cell.h or math.nan for cell in cells],
        [cell.relative(row.quantity) for cell in cells],
        [floor(cell, row.quantity) for cell in cells],
        row.observed.order,
    )


def in_words(records: Sequence[Record], row: OrderRow, tolerance: float | None = None) -> str:
    """Say what a line of errors shows: its order, where round-off starts, where it is good enough.

    Parameters
    ----------
    records : sequence of Record
        Of the study.
    row : OrderRow
        Of the discrete or the continuous gradient.
    tolerance : float, optional
        The relative error wanted.
    """
    line, observed = line_of(records, row), row.observed
    if observed.order is None:
        words = [f"no order seen, {observed.reason}"]
    else:
        expected = "" if row.expected is None else f", {row.expected.order:g} expected"
        words = [f"order {observed.order:.2f}{expected}"]
    place = line.round_off
    if place is not None:
        where = "" if place.measured else "beyond the study, "
        words.append(f"round-off {where}from {place} on")
    if tolerance is not None:
        place = line.reaches(tolerance)
        if place is None:
            words.append(f"error {tolerance:g} not reached above round-off")
        else:
            where = "" if place.measured else "beyond the study, by the order seen "
            words.append(f"error {tolerance:g} {where}with {place}")
    return f"{row.method} {row.quantity}: {'; '.join(words)}"


def steps_for_adjoints(
    records: Sequence[Record], rows: Iterable[OrderRow], tolerance: float | None
) -> dict[tuple[str, str, str, str], int]:
    """Return the number of steps at which adjoints are compared, by (problem, framework, engine,
    method): where the discrete gradient reaches the tolerance, or the largest of the study.
    """
    found = {}
    for row in rows:
        if row.quantity != "discrete" or not row.steps:
            continue
        place = None if tolerance is None else line_of(records, row).reaches(tolerance)
        here = place is not None and place.measured
        key = (row.problem, row.framework, row.engine, row.method)
        found[key] = place.num_steps if place is not None and here else max(row.steps)
    return found


def adjoint_columns(record: Any) -> tuple[str, ...]:
    """Return a row of the table of adjoints, from a record of the study `adjoints`: adjoint, error,
    reversal error, evaluations of f forward and backward, time and peak bytes of one gradient.
    """
    if record.status != "ok":
        return record["adjoint"], record.status, "", "", "", ""
    counts = (record["f_evaluations_forward"], record["f_evaluations_backward"])
    evaluations = " + ".join("?" if count is None else str(count) for count in counts)
    reversal = record["reversal_error"]
    return (
        record["adjoint"],
        f"{record['error']:.1e}",
        "-" if reversal is None else f"{reversal:.1e}",
        evaluations,
        _quantity(record["gradient_seconds"], ("s", "ms", "µs"), 1e-3),
        "-" if record["peak_bytes"] is None
        else _quantity(record["peak_bytes"] / 1e9, ("GB", "MB", "kB", "B"), 1e-3),
    )  # fmt: skip


def _quantity(value: float, units: Sequence[str], ratio: float) -> str:
    """A value in the first unit, written in the one that makes it at least 1."""
    for unit in units[:-1]:
        if value >= 1:
            return f"{value:.3g} {unit}"
        value /= ratio
    return f"{value:.3g} {units[-1]}"
