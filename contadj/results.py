"""One record per cell of a study, as JSON lines: appended, never rewritten, safe to interrupt."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

STATUSES = ("ok", "diverged", "failed")
KEY = (
    "problem", "framework", "engine", "method", "discrete_adjoint", "continuous_adjoint",
    "num_steps", "dtype", "device",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one cell of a study gave: one problem, engine, method and number of steps.

    Errors are 2-norms over the whole gradient, dL/dy0 and dL/dtheta together; relative ones are
    divided by the norm of the reference gradient (`adjoint`: by max_t |lambda(t)|). A value that
    does not exist, or is not finite, is None.

    Parameters
    ----------
    problem : str
        The problem as named on the command line.
    framework, engine, method : str
        "torch" or "jax"; what does the stepping; the method.
    discrete_adjoint, continuous_adjoint : str
        Classes of the two adjoints compared.
    num_steps : int
        Steps between neighbouring breakpoints of the problem.
    dtype, device : str
        "float32" or "float64"; "cpu", "cuda", "cuda:1", ...
    digest : str
        Of the problem's definition and the method's coefficients.
    status : str
        "ok", "diverged" (a value is not finite) or "failed".
    message : str
        Why the cell is not "ok"; one line.
    h : float, optional
        The longest step.
    mesh_size : int, optional
        Number of steps in all.
    cost : float, optional
        The problem's cost from the discrete solution.
    discrete_error, continuous_error, gap_error, adjoint_error : float, optional
        |discrete - reference|, |continuous - reference|, |discrete - continuous|,
        max_n |lambda_n - lambda(t_n)|.
    discrete_relative, continuous_relative, gap_relative, adjoint_relative : float, optional
        The same, relative.
    reversal_error : float, optional
        Of the continuous adjoint's backward solve.
    discrete_evaluations_forward, discrete_evaluations_backward : int, optional
    continuous_evaluations_forward, continuous_evaluations_backward : int, optional
        Evaluations of the vector field for each gradient.
    discrete_seconds, continuous_seconds : float, optional
        Wall time of each gradient, compilation left out.
    reference : str
        What the errors are measured against.
    reference_error, reference_adjoint_error : float, optional
        Estimated relative errors of the reference gradient and of the reference lambda(t).
    seconds : float, optional
        Wall time of the whole cell, compilation included.
    versions : dict of str to str
        contadj, Python and the framework's libraries.
    platform, device_description : str
        Operating system and processor; the device in words.
    time : str
        UTC, ISO 8601.
    """

    problem: str
    framework: str
    engine: str
    method: str
    discrete_adjoint: str
    continuous_adjoint: str
    num_steps: int
    dtype: str
    device: str
    digest: str
    status: str
    message: str = ""
    h: float | None = None
    mesh_size: int | None = None
    cost: float | None = None
    discrete_error: float | None = None
    continuous_error: float | None = None
    gap_error: float | None = None
    adjoint_error: float | None = None
    discrete_relative: float | None = None
    continuous_relative: float | None = None
    gap_relative: float | None = None
    adjoint_relative: float | None = None
    reversal_error: float | None = None
    discrete_evaluations_forward: int | None = None
    discrete_evaluations_backward: int | None = None
    continuous_evaluations_forward: int | None = None
    continuous_evaluations_backward: int | None = None
    discrete_seconds: float | None = None
    continuous_seconds: float | None = None
    reference: str = ""
    reference_error: float | None = None
    reference_adjoint_error: float | None = None
    seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    device_description: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"`status` must be one of {', '.join(STATUSES)}; got {self.status!r}")
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value := value.item())
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes the cell unique: its key and the digest of what was computed."""
        return (*(getattr(self, name) for name in KEY), self.digest)

    def relative(self, quantity: str) -> float | None:
        """Return the relative error of one of `contadj.orders.QUANTITIES`."""
        return getattr(self, f"{quantity}_relative")


@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """What one cell of a study of `contadj.studies` gave.

    Parameters
    ----------
    study : str
        The module of `contadj.studies`.
    cell : dict of str to str, int, float or bool
        The cell's place on the axes of the study.
    digest : str
        Of the code that the study's numbers come from.
    status : str
        "ok", "diverged" (a value is not finite) or "failed".
    message : str
        Why the cell is not "ok"; one line.
    values : dict
        What was measured: numbers, texts, lists of them; None where a value does not exist or is
        not finite.
    seconds : float, optional
        Wall time of the whole cell, compilation included.
    versions : dict of str to str
        contadj, Python and the libraries that the numbers depend on.
    platform : str
        Operating system and processor.
    time : str
        UTC, ISO 8601.
    """

    study: str
    cell: dict[str, Any]
    digest: str
    status: str
    message: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"`status` must be one of {', '.join(STATUSES)}; got {self.status!r}")
        object.__setattr__(self, "cell", _plain(self.cell))
        object.__setattr__(self, "values", _plain(self.values))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes the cell unique: its place and the digest of what was computed."""
        return (self.study, json.dumps(self.cell, sort_keys=True), self.digest)

    def __getitem__(self, name: str) -> Any:
        """An axis of the cell or a value of it."""
        return self.cell[name] if name in self.cell else self.values[name]


def _plain(value: Any) -> Any:
    """The value as JSON has it: no arrays, None for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(f"a record holds numbers, texts and lists of them, got {value!r}")
    return value


AnyRecord = Record | CellRecord
_FIELDS = {kind: {f.name for f in fields(kind)} for kind in (Record, CellRecord)}
_REQUIRED = {
    Record: {*KEY, "digest", "status"},
    CellRecord: {"study", "cell", "digest", "status"},
}


class RecordFile:
    """A file of records, open for appending by one process.

    A last line torn by a kill is cut off on opening; each appended record is on the disk when
    `append` returns.

    Parameters
    ----------
    path : path
        Created with its directory where missing.

    Raises
    ------
    ValueError
        If another process writes to the file, or a line of it is no record.
    OSError
        If the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = self.path.open("ab+", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{self.path} is being written by another run; wait for it or choose another `out`"
            ) from None
        try:
            self._cut_torn_line()
            self.records = read_records(self.path)
        except BaseException:
            self._file.close()
            raise

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            self._file.truncate(complete)

    def append(self, record: AnyRecord) -> None:
        """Write a record; it is on the disk when this returns, or the file is as it was."""
        line = json.dumps(asdict(record), allow_nan=False, ensure_ascii=False) + "\n"
        rest = line.encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(size)
            raise
        self.records.append(record)

    def close(self) -> None:
        """Close the file and let others write to it."""
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: str | Path) -> list[Any]:
    """Read a file of records, each a `Record` or a `CellRecord`.

    A torn last line is left out. A cell that failed and was computed again appears once, as it was
    last.

    Parameters
    ----------
    path : path
        JSON lines, one record each.

    Raises
    ------
    ValueError
        If a line is no record, or a cell appears twice; the message names file and line.
    """
    path = Path(path)
    records: dict[tuple[Any, ...], Any] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = _record(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a record, got {line[:40]!r} ({error}); remove "
                "the line and run again"
            ) from None
        earlier = records.pop(record.identity, None)
        if earlier is not None and earlier.status != "failed":
            raise ValueError(
                f"{path}, line {number}: expected each cell once, but this one is there already; "
                "remove the line"
            )
        records[record.identity] = record
    return list(records.values())


def _record(values: Any) -> Any:
    if not isinstance(values, dict):
        raise TypeError("not a JSON object")
    kind = CellRecord if "study" in values else Record
    if missing := _REQUIRED[kind] - values.keys():
        raise ValueError(f"without {', '.join(sorted(missing))}")
    if unknown := values.keys() - _FIELDS[kind]:
        raise ValueError(f"with unknown {', '.join(sorted(unknown))}")
    return kind(**values)


def to_frame(records: Iterable[Any]) -> pd.DataFrame:
    """Return the records as a table, one row each.

    A `Record` gives one column per field; a `CellRecord` one per axis and value of its study,
    beside `study`, `status`, `message` and `seconds`.
    """
    records = list(records)
    if any(isinstance(record, CellRecord) for record in records):
        beside = ("study", "status", "message", "seconds")
        return pd.DataFrame(
            [{**r.cell, **{name: getattr(r, name) for name in beside}, **r.values} for r in records]
        )
    return pd.DataFrame(
        [asdict(record) for record in records], columns=[f.name for f in fields(Record)]
    )
