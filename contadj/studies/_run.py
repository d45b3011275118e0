"""Runs the cells of a study, in any order, and keeps each one's record once."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__
from ..config import Settings
from ..convergence import one_line
from ..digests import code_digest
from ..results import CellRecord, RecordFile, _plain
from ..workers import InlineExecutor, run_groups, telling_of_deaths
from . import load_module

_PACKAGES = ("numpy", "scipy", "torch", "torchdiffeq", "torchode", "jax", "diffrax", "equinox")

Cell = dict[str, Any]


def study_digest(name: str) -> str:
    """Return a digest of the code that a study's numbers come from."""
    module = load_module(name)
    beside = (f"{__package__}._{name}_torch", f"{__package__}._{name}_jax")
    return code_digest([module.__name__, *beside, *module.SOURCES])


def measure_cell(name: str, cell: Cell) -> dict[str, Any]:
    """Return the fields of a cell's record; runs in a worker."""
    start = time.perf_counter()
    result: dict[str, Any] = {"status": "ok", "message": "", "values": {}}
    try:
        result["values"] = load_module(name).measure(cell)
    except ArithmeticError as error:  # a value is not finite
        result |= {"status": "diverged", "message": one_line(error)}
    except Exception as error:
        result |= {"status": "failed", "message": f"{type(error).__name__}: {one_line(error)}"}
    return result | {"values": _plain(result["values"]), "seconds": time.perf_counter() - start}


class StudyCells:
    """The cells of a study, and what runs them.

    Parameters
    ----------
    name : str
        The module of `contadj.studies`.
    settings : Settings
        Of that module.
    """

    def __init__(self, name: str, settings: Settings):
        self._name = name
        self._digest, self._versions = study_digest(name), _versions()
        self._groups: list[list[Cell]] = load_module(name).cells(settings)
        self._order = [self._identity(cell) for group in self._groups for cell in group]

    def __len__(self) -> int:
        return len(self._order)

    def count_in(self, records: RecordFile) -> int:
        """Return how many of the cells are in a file."""
        return len(self._known(records).keys() & self.identities)

    @property
    def identities(self) -> set[tuple[Any, ...]]:
        """`CellRecord.identity` of every cell."""
        return set(self._order)

    def _known(self, records: RecordFile) -> dict[tuple[Any, ...], CellRecord]:
        return {one.identity: one for one in records.records if one.status != "failed"}

    def _record(self, cell: Cell, **fields: Any) -> CellRecord:
        return CellRecord(
            study=self._name,
            cell=cell,
            digest=self._digest,
            versions=self._versions,
            platform=f"{platform.system()} {platform.machine()}",
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            **fields,
        )

    def _identity(self, cell: Cell) -> tuple[Any, ...]:
        return self._record(cell, status="ok").identity

    def run(
        self,
        records: RecordFile,
        *,
        executor: Executor | None = None,
        jobs: int = 1,
        on_record: Callable[[CellRecord], None] = lambda record: None,
    ) -> list[CellRecord]:
        """Measure every cell that is not in the file yet.

        Parameters
        ----------
        records : RecordFile
            Where records go and where those of earlier runs are.
        executor : concurrent.futures.Executor, optional
            Where cells are measured; by default here, one after the other.
        jobs : int
            Groups of cells in work at once.
        on_record : callable, optional
            Called with each new record.

        Returns
        -------
        list of CellRecord
            All cells of the study, in its order.

        Raises
        ------
        WorkerDiedError
            If a worker process dies; the finished cells are in the file.
        """
        executor = executor or InlineExecutor()
        known = self._known(records)
        missing = [
            [cell for cell in group if self._identity(cell) not in known] for group in self._groups
        ]

        def submit(cell: Cell) -> Future[Any]:
            return executor.submit(measure_cell, self._name, cell)

        def keep(cell: Cell, result: dict[str, Any]) -> None:
            one = self._record(cell, **result)
            records.append(one)
            known[one.identity] = one
            on_record(one)

        with telling_of_deaths(records.path):
            run_groups(missing, submit, keep, jobs=jobs)
        return [known[one] for one in self._order]


def _versions() -> dict[str, str]:
    found = {"contadj": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
