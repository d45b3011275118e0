"""The command line: `contadj converge`, `contadj list`.

Neither torch nor jax is imported before a study asks for it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import __version__, backends
from .config import load_study
from .convergence import (
    InlineExecutor,
    OrderRow,
    Series,
    WorkerDiedError,
    order_rows,
    run_study,
)
from .plotting import convergence_figure
from .problems import BUILT_IN, GradientProblem
from .results import Record, RecordFile
from .tableaus import TABLEAUS

# The base of the command line's own errors; typer exports the leaf only.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="contadj",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Gradients of ODE solves: how the discrete one approaches the continuous adjoint.",
)

_STATES = {  # mark and colour
    "as expected": ("", "green"),
    "at round-off": ("", "cyan"),
    "still changing": ("~ ", "yellow"),
    "not enough pairs": ("? ", "yellow"),
    "no statement": ("", "default"),
    "deviates": ("! ", "red"),
}


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a user's error, told in one line."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(args=arguments, standalone_mode=False)
    except _CommandLineError as error:
        return _complain(error.format_message())  # type: ignore[attr-defined]
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _complain(message: object, code: int = 2) -> int:
    line = " ".join(str(message).split())
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), line))
    return code


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"contadj {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _integers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`--steps` must be whole numbers separated by commas, as in 8,16,32; got {text!r}"
        ) from None


# The names in the examples are whatever problems come first.
_ONE, _TWO, *_ = BUILT_IN
_CONVERGE_HELP = f"""Measure how gradients converge as the step size goes to zero.

For each problem, engine, method and number of steps: the discrete gradient (backpropagation
through the solver), the continuous one (the adjoint ODE solved backward at the same step size)
and the exact one. A table then holds the observed orders against the expected ones.

A study that is interrupted and started again continues where it stopped.

Examples:

- contadj converge {_ONE} {_TWO} --method rk4 --method heun2

- contadj converge {_ONE} --backend torch --steps 64,128,256 --dtype float32

- contadj converge my_model.py:problem --jobs 2

- contadj converge --config experiments/quickstart.toml
"""


@app.command(help=_CONVERGE_HELP)
def converge(
    problems: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROBLEM",
            help="A built-in name, NAME(OPTION=VALUE,...), module:attribute or "
            "path/to/file.py:attribute.",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="torch or jax; repeat for both. Default: those installed."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="What does the stepping; repeat for more. Default: all."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method; repeat for more. Default: eight of orders 1 to 5."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Steps per interval, as in 8,16,32. Default: 8,16,32,64,128."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float64 (default) or float32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda, cuda:1, ...")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with these settings; options given here replace its."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for records and figures. Default: out.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: 1.")] = None,
) -> None:
    """Run a study and show what it found."""
    try:
        study = load_study(
            config, problems=problems or None, backends=backend or None, engines=engine or None,
            methods=method or None, steps=_integers(steps), dtype=dtype, device=device, out=out,
            jobs=jobs,
        )  # fmt: skip
        series, by_name, notes = backends.plan(study)
        records = RecordFile(study.out / "records.jsonl")
    except (ValueError, OSError) as error:
        raise typer.Exit(_complain(error)) from None
    console = _console()
    for note in notes:
        console.print(f"note: {note}", style="yellow")
    with records:
        try:
            _try_problems(series, by_name, records)
        except ValueError as error:
            raise typer.Exit(_complain(error)) from None
        try:
            cells = _run(series, by_name, records, study.jobs)
            figures = _save_figures(cells, study.out)
        except KeyboardInterrupt as stop:
            done = len(records.records)
            code = 143 if isinstance(stop, _Terminated) else 130
            message = f"interrupted; {done} records are in {records.path}: run again to continue"
            raise typer.Exit(_complain(message, code)) from None
        except WorkerDiedError as error:
            raise typer.Exit(_complain(error, 1)) from None
        except OSError as error:
            message = f"{error}; the finished cells are in {records.path}"
            raise typer.Exit(_complain(message)) from None
    rows = order_rows(cells)
    _print_tables(console, rows)
    _print_summary(console, cells, rows)
    console.print(f"records  {records.path}", soft_wrap=True)
    for path in figures:
        console.print(f"figure   {path}", soft_wrap=True)
    if all(cell.status != "ok" for cell in cells):
        raise typer.Exit(_complain("no cell of the study has a value", 1))


def _try_problems(
    series: list[Series], problems: dict[tuple[str, str], GradientProblem], records: RecordFile
) -> None:
    there = {record.identity for record in records.records}
    for key, problem in problems.items():
        for one in series:
            cells = (one.identity(n) for n in one.steps)
            if (one.problem, one.framework) == key and not all(cell in there for cell in cells):
                backends.try_problem(one, problem)
                break


def _run(
    series: list[Series],
    problems: dict[tuple[str, str], GradientProblem],
    records: RecordFile,
    jobs: int,
) -> list[Record]:
    executor: Executor = InlineExecutor()
    if jobs > 1:
        executor = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=backends.prepare_worker,
            initargs=(max(1, (os.cpu_count() or 1) // jobs),),
        )
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    there = {record.identity for record in records.records if record.status != "failed"}
    total = [one.identity(n) for one in series for n in one.steps]
    try:
        with progress:
            bar = progress.add_task(
                "references", total=len(total), completed=sum(cell in there for cell in total)
            )

            def advance(record: Record) -> None:
                progress.update(bar, advance=1, description=f"{record.problem} {record.method}")

            return run_study(
                series, problems, backends.gradient_function, records,
                executor=executor, jobs=jobs, on_record=advance,
            )  # fmt: skip
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _save_figures(cells: list[Record], out: Path) -> list[Path]:
    paths = []
    for framework, engine in dict.fromkeys((cell.framework, cell.engine) for cell in cells):
        path = out / f"convergence-{framework}-{engine}.png"
        chosen = [c for c in cells if (c.framework, c.engine) == (framework, engine)]
        convergence_figure(chosen).savefig(path, dpi=120)
        paths.append(path)
    return paths


def _print_tables(console: Console, rows: list[OrderRow]) -> None:
    """One table per problem and engine; orders of pairs that touch round-off in parentheses."""
    places = [(r.problem, r.framework, r.engine, r.dtype, r.device) for r in rows]
    for place in dict.fromkeys(places):
        chosen = [row for row, its in zip(rows, places, strict=True) if its == place]
        steps = sorted({n for row in chosen for n in row.steps})
        pairs = list(pairwise(steps))[-6:]  # as many as 100 columns hold
        problem, framework, engine, dtype, device = place
        console.print()
        console.print(f"{problem}   {framework}/{engine}   {dtype}   {device}", style="bold")
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("method", no_wrap=True)
        table.add_column("quantity", no_wrap=True)
        for coarse, fine in pairs:
            table.add_column(f"{coarse}-{fine}", justify="right", no_wrap=True)
        table.add_column("order", justify="right", no_wrap=True)
        table.add_column("expected", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        previous = ""
        for row in chosen:
            observed, (mark, colour) = row.observed, _STATES[row.observed.state]
            shown = dict(
                zip(
                    pairwise(row.steps),
                    zip(observed.pairwise, observed.usable, strict=True),
                    strict=True,
                )
            )
            table.add_row(
                row.method if row.method != previous else "",
                row.quantity,
                *(_order_text(*shown.get(pair, (math.nan, False))) for pair in pairs),
                "" if observed.order is None else f"{observed.order:.2f}",
                _expected_text(row),
                Text(mark + observed.state, style=colour),
            )
            previous = row.method
        console.print(table)


def _order_text(order: float, usable: bool) -> str:
    if math.isnan(order):
        return "-"
    return f"{order:.2f}" if usable else f"({order:.1f})"


def _expected_text(row: OrderRow) -> str:
    if row.expected is None:
        return "-"
    return "exact" if row.expected.exact else f"{row.expected.order:g}"


def _print_summary(console: Console, cells: list[Record], rows: list[OrderRow]) -> None:
    console.print()
    # Engines agree to rounding, and so do their lines: each line once, with all its engines.
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        mark, colour = _STATES[row.observed.state]
        if mark:
            what = f"{mark}{row.problem} {row.method} {row.quantity}: {row.observed.reason}"
            lines.setdefault((what, colour), []).append(f"{row.framework}/{row.engine}")
    for cell in cells:
        if cell.status != "ok":
            what = f"! {cell.problem} {cell.method} {cell.num_steps} steps {cell.status}"
            place = f"{cell.framework}/{cell.engine}"
            lines.setdefault((f"{what}: {cell.message}", "red"), []).append(place)
    for (what, colour), places in lines.items():
        console.print(f"{what}  [{', '.join(places)}]", style=colour, soft_wrap=True, markup=False)
    statuses = Counter(cell.status for cell in cells)
    states = Counter(row.observed.state for row in rows)
    console.print(f"cells    {_counts(statuses)}")
    console.print(f"orders   {_counts(states)}")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


@app.command("list")
def list_everything() -> None:
    """List problems, methods, adjoints, backends and the study files of this directory."""
    console = _console()
    here = backends.installed()
    engines: dict[str, tuple[str, ...]] = {}
    adjoints: dict[str, list[str]] = {}
    console.print("backends", style="bold")
    for framework in backends.FRAMEWORKS:
        if framework not in here:
            console.print(f"  {framework}  not installed: pip install 'contadj[{framework}]'")
            continue
        module = backends.load_backend(framework)
        engines |= {engine: module.methods(engine) for engine in module.ENGINES}
        for adjoint in module.adjoints():
            adjoints.setdefault(adjoint, []).append(framework)
        versions = ", ".join(f"{name} {version}" for name, version in module.versions().items())
        console.print(f"  {framework}  engines {', '.join(module.ENGINES)}; {versions}")
    console.print("\nproblems", style="bold")
    for name, make in BUILT_IN.items():
        console.print(f"  {name}: {(make.__doc__ or '').splitlines()[0]}", soft_wrap=True)
    console.print("\nadjoints", style="bold")
    for adjoint, frameworks in adjoints.items():
        console.print(f"  {adjoint}  {', '.join(frameworks)}")
    console.print("\nmethods", style="bold")
    console.print(_method_table(engines))
    console.print("\nstudy files", style="bold")
    for path in sorted(Path("experiments").glob("*.toml")):
        console.print(f"  {path}")


def _method_table(engines: dict[str, tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("method")
    table.add_column("order", justify="right")
    table.add_column("stages", justify="right")
    table.add_column("")
    for engine in engines:
        table.add_column(engine)
    names: dict[str, Any] = dict.fromkeys([*TABLEAUS, *(n for e in engines.values() for n in e)])
    for name in names:
        tableau = TABLEAUS.get(name)
        described = ("-", "-", "") if tableau is None else (
            str(tableau.order), str(tableau.stages), "explicit" if tableau.explicit else "implicit"
        )  # fmt: skip
        table.add_row(name, *described, *("x" if name in has else "" for has in engines.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
