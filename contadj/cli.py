"""The command line: `contadj converge`, `contadj figures`, `contadj list`.

Neither torch nor jax is imported before a study asks for it.
"""

from __future__ import annotations

import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    track,
)
from rich.table import Table
from rich.text import Text

from . import __version__, backends, figures, studies
from .config import Settings, Study, load_study
from .convergence import OrderRow, Series, order_rows, run_study
from .plotting import convergence_figure
from .problems import BUILT_IN, GradientProblem
from .results import CellRecord, Record, RecordFile
from .studies._run import StudyCells
from .summary import GRADIENTS, adjoint_columns, in_words, steps_for_adjoints
from .tableaus import TABLEAUS
from .workers import WorkerDiedError, open_executor

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
_SCHEDULER_HELP = (
    "Work on a Dask cluster: tcp://HOST:PORT of its scheduler, or local for one of JOBS processes."
)
_CONVERGE_HELP = f"""Measure how gradients converge as the step size goes to zero.

For each problem, engine, method and number of steps: the discrete gradient (backpropagation
through the solver), the continuous one (the adjoint ODE solved backward at the same step size)
and the exact one. A table then holds the observed orders against the expected ones.

A study that is interrupted and started again continues where it stopped.

Examples:

- contadj converge {_ONE} {_TWO} --method rk4 --method heun2

- contadj converge {_ONE} --backend torch --steps 64,128,256 --dtype float32

- contadj converge my_model.py:problem --jobs 2

- contadj converge my_model.py:problem --tolerance 1e-6 --adjoint CheckpointAdjoint
  --adjoint GaussAdjoint

- contadj converge --config experiments/quickstart.toml

- contadj converge --config experiments/quickstart.toml --scheduler tcp://127.0.0.1:8786
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
    adjoint: Annotated[
        list[str] | None,
        typer.Option(
            help="An adjoint, or ADJOINT(OPTION=VALUE,...), whose error, time and memory are "
            "shown; repeat for more."
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="The relative error of the gradient that is wanted, 1e-6 say."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with these settings; options given here replace its."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for records and figures. Default: out.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: 1.")] = None,
    scheduler: Annotated[str | None, typer.Option(help=_SCHEDULER_HELP)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A reduced run: the config's table [quick].")
    ] = False,
) -> None:
    """Run a study and show what it found."""
    console = _console()
    try:
        study = load_study(
            config, quick=quick, problems=problems or None, backends=backend or None,
            engines=engine or None, methods=method or None, steps=_integers(steps), dtype=dtype,
            device=device, adjoints=adjoint or None, tolerance=tolerance, out=out, jobs=jobs,
        )  # fmt: skip
    except ValueError as error:
        raise typer.Exit(_complain(error)) from None
    path = study.out / "records.jsonl"
    cells = _measure(study, path, scheduler, console)
    if isinstance(study, Study):
        try:
            paths = _save_figures(cells, study.out)
        except OSError as error:
            message = f"{error}; the finished cells are in {path}"
            raise typer.Exit(_complain(message)) from None
        rows = order_rows(cells)
        _print_tables(console, rows)
        _print_summary(console, cells, rows)
        _print_words(console, cells, rows, study.tolerance)
        if study.adjoints:
            compared = _compare_adjoints(study, cells, rows, scheduler)
            _print_adjoints(console, compared, study.tolerance)
        console.print()
    else:
        paths = []
        _print_findings(console, str(study.study), cells)
    console.print(f"records  {path}", soft_wrap=True)
    if isinstance(study, Study) and study.adjoints:
        console.print(f"adjoints {study.out / 'adjoints.jsonl'}", soft_wrap=True)
    for figure in paths:
        console.print(f"figure   {figure}", soft_wrap=True)
    if all(cell.status != "ok" for cell in cells):
        raise typer.Exit(_complain("no cell of the study has a value", 1))


def _measure(study: Settings, path: Path, scheduler: str | None, console: Console) -> list[Any]:
    """Run a study and return its records, those of earlier runs included."""
    series: list[Series] = []
    by_name: dict[tuple[str, str], GradientProblem] = {}
    try:
        if isinstance(study, Study):
            series, by_name, notes = backends.plan(study)
            for note in notes:
                console.print(f"note: {note}", style="yellow")
        records = RecordFile(path)
    except (ValueError, OSError) as error:
        raise typer.Exit(_complain(error)) from None
    with records:
        try:
            _try_problems(series, by_name, records)
            with open_executor(study.jobs, scheduler) as (executor, at_once):
                if isinstance(study, Study):
                    return _run_grid(series, by_name, records, executor, at_once)
                return _run_cells(study, records, executor, at_once)
        except ValueError as error:
            raise typer.Exit(_complain(error)) from None
        except KeyboardInterrupt as stop:
            done = len(records.records)
            code = 143 if isinstance(stop, _Terminated) else 130
            message = f"interrupted; {done} records are in {path}: run again to continue"
            raise typer.Exit(_complain(message, code)) from None
        except WorkerDiedError as error:
            raise typer.Exit(_complain(error, 1)) from None
        except OSError as error:
            message = f"{error}; the finished cells are in {path}"
            raise typer.Exit(_complain(message)) from None


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


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; yields what moves it on by one cell."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with progress:
        bar = progress.add_task("starting", total=total, completed=done)
        yield lambda description: progress.update(bar, advance=1, description=description)


def _run_grid(
    series: list[Series],
    problems: dict[tuple[str, str], GradientProblem],
    records: RecordFile,
    executor: Executor,
    jobs: int,
) -> list[Record]:
    there = {record.identity for record in records.records if record.status != "failed"}
    total = [one.identity(n) for one in series for n in one.steps]
    with _progress(len(total), sum(cell in there for cell in total)) as advance:
        return run_study(
            series, problems, backends.gradient_function, records, executor=executor, jobs=jobs,
            on_record=lambda record: advance(f"{record.problem} {record.method}"),
        )  # fmt: skip


def _run_cells(
    study: Settings, records: RecordFile, executor: Executor, jobs: int
) -> list[CellRecord]:
    grid = StudyCells(str(study.study), study)
    with _progress(len(grid), grid.count_in(records)) as advance:
        return grid.run(
            records, executor=executor, jobs=jobs,
            on_record=lambda one: advance(" ".join(map(str, one.cell.values()))[:40]),
        )  # fmt: skip


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


def _print_words(
    console: Console, cells: list[Record], rows: list[OrderRow], tolerance: float | None
) -> None:
    # Engines agree to rounding: each line once, with all its engines.
    lines: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.quantity in GRADIENTS:
            words = in_words(cells, row, tolerance)
            place = f"{row.framework}/{row.engine}"
            lines.setdefault(row.problem, {}).setdefault(words, []).append(place)
    for problem, said in lines.items():
        console.print()
        console.print(f"{problem}, gradient", style="bold", markup=False)
        for words, places in said.items():
            console.print(f"{words}  [{', '.join(places)}]", markup=False)


def _compare_adjoints(
    study: Study, cells: list[Record], rows: list[OrderRow], scheduler: str | None
) -> list[CellRecord]:
    """Measure the adjoints of a study, each method at one number of steps; one cell at a time,
    since they are timed."""
    chosen = steps_for_adjoints(cells, rows, study.tolerance)
    digests = {(cell.problem, cell.method): cell.digest for cell in cells}
    path = study.out / "adjoints.jsonl"
    grids = [
        StudyCells(
            "adjoints",
            studies.load_module("adjoints").Settings(
                study="adjoints", problems=(problem,), engines=(engine,), methods=(method,),
                adjoints=study.adjoints, dtypes=(study.dtype,), steps=(steps,),
                device=study.device, costs=True, reference_steps=steps,
                definitions={problem: digests[problem, method]},
            ),
        )
        for (problem, _, engine, method), steps in chosen.items()
    ]  # fmt: skip
    try:
        with RecordFile(path) as records, open_executor(study.jobs, scheduler) as (executor, _):
            found = []
            with _progress(sum(map(len, grids)), sum(g.count_in(records) for g in grids)) as move:
                for grid in grids:
                    found += grid.run(
                        records, executor=executor, on_record=lambda one: move(one["adjoint"])
                    )
            return found
    except (ValueError, OSError) as error:
        raise typer.Exit(_complain(error)) from None
    except KeyboardInterrupt as stop:
        code = 143 if isinstance(stop, _Terminated) else 130
        message = f"interrupted; the finished records are in {path}: run again to continue"
        raise typer.Exit(_complain(message, code)) from None
    except WorkerDiedError as error:
        raise typer.Exit(_complain(error, 1)) from None


def _print_adjoints(console: Console, found: list[CellRecord], tolerance: float | None) -> None:
    """One table per problem, engine and method."""
    names = ("problem", "engine", "method", "num_steps", "dtype")
    places: dict[tuple[Any, ...], list[CellRecord]] = {}
    for one in found:
        places.setdefault(tuple(one[name] for name in names), []).append(one)
    for (problem, engine, method, steps, dtype), ones in places.items():
        console.print()
        title = f"{problem}   {engine}   {method}   {steps} steps   {dtype}"
        console.print(title, style="bold", markup=False)
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("adjoint", no_wrap=True)
        for column in ("error", "reversal error", "f forward + backward", "time", "memory"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in ones:
            table.add_row(*map(Text, adjoint_columns(one)))
        console.print(table)
        for one in ones:
            if one.status != "ok":
                message = f"! {one['adjoint']} {one.status}: {one.message}"
                console.print(message, style="red", markup=False)
        if missing := [
            one["adjoint"]
            for one in ones
            if one.status == "ok" and tolerance is not None and one["error"] > tolerance
        ]:
            message = f"~ error {tolerance:g} not reached here by {', '.join(missing)}"
            console.print(message, style="yellow", markup=False)


def _print_findings(console: Console, name: str, cells: list[CellRecord]) -> None:
    console.print()
    for finding in studies.load_module(name).findings(cells):
        console.print(f"- {finding}", markup=False)
    for cell in cells:
        if cell.status != "ok":
            place = " ".join(map(str, cell.cell.values()))
            console.print(f"! {place} {cell.status}: {cell.message}", style="red", markup=False)
    console.print(f"cells    {_counts(Counter(cell.status for cell in cells))}")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


_FIGURES_HELP = """Draw the figures of the study from its records.

Reads experiments/results and the scripts of paper_figures in this directory; writes PDF, PNG and
caption of each figure into paper_figures/out, and the table of paper_figures/README.md.

Examples:

- contadj figures

- contadj figures contact controls

- contadj figures --recompute

- contadj figures --recompute --quick
"""


@app.command("figures", help=_FIGURES_HELP)
def draw_figures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Figures. Default: all.")
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Measure again first; an interrupted run continues."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="With --recompute: the configs' reduced grids. Records and figures go to "
            "out/quick; those of the study stay as they are.",
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Processes of --recompute. Default: the configs'.")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help=_SCHEDULER_HELP)] = None,
) -> None:
    """Draw figures, after measuring again if asked to."""
    console = _console()
    chosen = names or figures.script_names()
    if not chosen:
        message = f"no scripts in {figures.DIRECTORY}; run this where the study's directory is"
        raise typer.Exit(_complain(message))
    if not recompute and (quick or jobs or scheduler):
        raise typer.Exit(_complain("`--quick`, `--jobs` and `--scheduler` need `--recompute`"))
    results = Path("out/quick") if quick else figures.RESULTS
    out = results if quick else figures.DIRECTORY / "out"
    try:
        if recompute:
            for name in dict.fromkeys(n for one in chosen for n in figures.records_of(one)):
                _recompute(name, results / f"{name}.jsonl", quick, jobs, scheduler, console)
        scripts = [figures.Script(name, results=results) for name in chosen]
        for script in track(scripts, "drawing", console=Console(stderr=True), transient=True):
            for path in script.save(out):
                console.print(str(path), soft_wrap=True)
        if not quick and not names:
            (figures.DIRECTORY / "README.md").write_text(figures.readme(scripts), "utf-8")
    except (ValueError, OSError) as error:
        raise typer.Exit(_complain(error)) from None
    console.print()
    for script in scripts:
        console.print(f"{script.name}: {script.finding}", soft_wrap=True, markup=False)


def _recompute(
    name: str, path: Path, quick: bool, jobs: int | None, scheduler: str | None, console: Console
) -> None:
    """Measure a config anew; the records there are replaced once all new ones are."""
    new = path.with_name(f"{name}.new.jsonl")
    study = load_study(figures.CONFIGS / f"{name}.toml", quick=quick, jobs=jobs)
    console.print(f"measuring {name}")
    _measure(study, new, scheduler, console)
    new.replace(path)


@app.command("list")
def list_everything() -> None:
    """List backends, problems, adjoints, methods, studies and the configs of this directory."""
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
    console.print("\nstudies beyond a grid of step sizes", style="bold")
    for name in studies.names():
        question = (studies.load_module(name).__doc__ or "").strip().partition("\n")[0]
        console.print(f"  {name}: {question}", soft_wrap=True, markup=False)
    console.print("\nconfigs", style="bold")
    for path in sorted(figures.CONFIGS.glob("*.toml")):
        console.print(f"  {path}: {_first_comment(path)}", soft_wrap=True, markup=False)


def _first_comment(path: Path) -> str:
    """What a config says of itself: its first comment beside the command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = (line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return next((line for line in comments if not line.startswith("contadj ")), "")


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
