"""Where the cells of a study are worked on: here, in processes, or on a Dask cluster."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Cell = TypeVar("Cell")


class WorkerDiedError(RuntimeError):
    """A worker process ended without a result."""


class InlineExecutor(Executor):
    """Runs each call at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call and return its finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def run_groups(
    groups: Sequence[Sequence[Cell]],
    submit: Callable[[Cell], Future[Any]],
    keep: Callable[[Cell, Any], None],
    *,
    jobs: int,
) -> None:
    """Work off groups of cells, the cells of a group one after the other.

    Parameters
    ----------
    groups : sequence of sequences of cells
        A group stays on one job as long as it can, since what its cells share is compiled once for
        each process.
    submit : callable
        Hands a cell to a worker.
    keep : callable
        Takes a cell and its result, here, as soon as it is there.
    jobs : int
        Groups in work at once.
    """
    waiting = deque(deque(group) for group in groups if group)
    running: dict[Future[Any], tuple[Cell, deque[Cell]]] = {}

    def start(group: deque[Cell]) -> None:
        if not group:
            if not waiting:
                return
            group = waiting.popleft()
        cell = group.popleft()
        running[submit(cell)] = cell, group

    try:
        for _ in range(min(jobs, len(waiting))):
            start(waiting.popleft())
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell, group = running.pop(future)
                keep(cell, future.result())
                start(group)
    finally:
        for future in running:
            future.cancel()


@contextmanager
def telling_of_deaths(kept_in: Path) -> Iterator[None]:
    """Turn the death of a worker process into a `WorkerDiedError` that says what is kept where."""
    try:
        yield
    except BrokenProcessPool:
        raise WorkerDiedError(
            f"a worker process died, perhaps for want of memory; the finished cells are in "
            f"{kept_in}; run again with fewer `jobs` to continue"
        ) from None


@contextmanager
def open_executor(jobs: int, scheduler: str | None = None) -> Iterator[tuple[Executor, int]]:
    """Yield what cells are submitted to, and how many to have in work at once.

    Parameters
    ----------
    jobs : int
        Processes; one means this process, unless there is a scheduler.
    scheduler : str, optional
        "tcp://HOST:PORT" of a Dask scheduler, or "local" for a cluster of `jobs` processes here.
        Its workers need this package at the same version and, for a problem in a file, that file
        at the same path. A cell whose worker dies is given to another one.

    Raises
    ------
    ValueError
        If Dask is not installed, or there is no scheduler at the address.
    """
    if scheduler is not None:
        with _dask_executor(jobs, scheduler) as found:
            yield found
        return
    executor: Executor = InlineExecutor()
    if jobs > 1:
        executor = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=prepare_worker,
            initargs=(max(1, (os.cpu_count() or 1) // jobs),),
        )
    try:
        yield executor, jobs
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _dask_executor(jobs: int, scheduler: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ValueError(
            "`scheduler` needs Dask, which is not installed; run: pip install 'contadj[dask]'"
        ) from None
    if scheduler == "local":
        here: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None}
        cluster = LocalCluster(n_workers=jobs, **here)
    else:
        cluster = scheduler
    try:
        client: Any = Client(cluster, timeout="10s")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`scheduler` must be the address of a running Dask scheduler, such as "
            f"tcp://127.0.0.1:8786, or local; {scheduler!r} cannot be reached ({error})"
        ) from None
    try:
        threads = sum(client.nthreads().values())
        if not threads:
            raise ValueError(f"`scheduler` {scheduler} has no workers; start some: dask worker")
        yield _DaskExecutor(client), threads
    finally:
        client.close()
        if not isinstance(cluster, str):
            cluster.close()


class _DaskExecutor(Executor):
    """Submits to a cluster; each call runs anew, though it may equal an earlier one."""

    def __init__(self, client: Any):
        self._executor = client.get_executor(pure=False)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait=wait)


def prepare_worker(threads: int) -> None:
    """Set up a worker process: its share of the cores, and an end when the study ends.

    Parameters
    ----------
    threads : int
        Threads that the frameworks may use in this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends us
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
        os.environ[name] = str(threads)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the parent is killed; a pool's workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
