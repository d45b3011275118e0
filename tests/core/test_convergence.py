import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import fake_backend
import numpy as np
import pytest

from contadj.convergence import (
    DISCRETE,
    Failure,
    Measurement,
    Reference,
    Series,
    compare,
    complete_reference,
    floor,
    order_rows,
    run_study,
    solve_reference,
)
from contadj.problems import Gradient
from contadj.results import RecordFile, read_records
from contadj.workers import WorkerDiedError

STEPS = (8, 16, 32)


def series(method="rk4", problem="lin", steps=STEPS, **changes):
    values = dict(
        problem=problem, framework="torch", engine="fake", method=method, dtype="float64",
        device="cpu", steps=steps, digest="0", reference_engine="fake",
        versions={"fake": "1.0"}, device_description="no device",
    )  # fmt: skip
    return Series(**(values | changes))


def problems(*study):
    return {(s.problem, s.framework): fake_backend.builtin_problem(s.problem) for s in study}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


def run(path, *study, make=fake_backend.make, **arguments):
    with RecordFile(path) as records:
        return run_study(study, problems(*study), make, records, **arguments)


def test_each_cell_gets_its_errors_gap_and_adjoint_error(path):
    cells = run(path, series("heun2"))
    assert [cell.num_steps for cell in cells] == [8, 16, 32]
    cell = cells[0]
    h = 2.0 / 8  # lin runs to T = 2
    # Two of the three entries of the unit gradient are off by the fake error.
    part = np.sqrt(2 / 3)
    assert cell.status == "ok" and cell.h == h and cell.mesh_size == 8
    assert cell.discrete_error == pytest.approx(part * h**2, rel=1e-12)
    assert cell.continuous_error == pytest.approx(part * (h**2 + h**3 / 2), rel=1e-12)
    assert cell.gap_error == pytest.approx(part * h**3 / 2, rel=1e-12)
    assert cell.adjoint_error == pytest.approx(h**2, rel=1e-12)
    assert cell.adjoint_relative == pytest.approx(h**2, rel=1e-12)  # lambda(0) = 1
    assert cell.reversal_error == h**2 and cell.cost == 2 + h**2
    assert cell.discrete_evaluations_forward == 16 and cell.discrete_evaluations_backward == 32
    assert cell.reference == "closed form" and cell.reference_error == 0
    assert cell.versions == {"fake": "1.0"} and cell.time.endswith("+00:00")


def test_the_file_holds_what_is_returned(path):
    cells = run(path, series("heun2"), series("rk4"))
    assert read_records(path) == cells


def test_orders_are_found_per_quantity(path):
    rows = order_rows(run(path, series("heun2", steps=(16, 32, 64))))
    assert {row.quantity: row.observed.state for row in rows} == dict.fromkeys(
        ("discrete", "continuous", "gap", "adjoint"), "as expected"
    )
    assert {row.quantity: round(row.observed.order) for row in rows} == {
        "discrete": 2, "continuous": 2, "gap": 3, "adjoint": 2,
    }  # fmt: skip


def test_a_method_of_the_wrong_order_is_marked(path):
    cells = [replace(cell, method="euler") for cell in run(path, series("heun2"))]
    rows = {row.quantity: row.observed for row in order_rows(cells)}
    assert rows["discrete"].state == "deviates"
    assert rows["discrete"].reason == "converges faster than 1: 2.00, 2.00"


def test_a_deviation_of_an_unstable_backward_solve_says_so(path):
    cells = [
        replace(cell, continuous_relative=10.0**k, reversal_error=30.0)
        for k, cell in enumerate(run(path, series("heun2")))
    ]
    rows = {row.quantity: row.observed for row in order_rows(cells)}
    assert "y rebuilt backward is off by 3e+01 of its size: unstable" in rows["continuous"].reason
    assert rows["discrete"].state == "as expected"


@pytest.mark.parametrize(
    ("method", "status", "message"),
    [
        ("diverges", "diverged", "DirectAdjoint: the gradient is not finite; BacksolveAdjoint: "),
        ("raises", "failed", "DirectAdjoint: TypeError: no luck at all; BacksolveAdjoint: "),
    ],
)
def test_a_bad_cell_is_a_record_and_the_study_goes_on(path, method, status, message):
    cells = run(path, series(method), series("rk4"))
    assert sorted(cell.status for cell in cells) == sorted(["ok"] * 5 + [status])
    bad = next(cell for cell in cells if cell.status != "ok")
    assert bad.message.startswith(message) and "\n" not in bad.message
    assert bad.discrete_error is None and bad.gap_error is None


def test_a_cell_keeps_the_discrete_gradient_where_only_the_continuous_one_diverges():
    one = series("heun2")
    problem = fake_backend.builtin_problem("lin")
    discrete = fake_backend.make(
        problem="lin", framework="torch", engine="fake", method="heun2", adjoint=DISCRETE,
        dtype="float64", device="cpu", max_steps=8,
    )(8)  # fmt: skip
    reference = complete_reference(problem, None)
    record = compare(one, 8, discrete, Failure("diverged", "nan at step 3"), reference)
    assert record.status == "diverged" and record.message == "BacksolveAdjoint: nan at step 3"
    assert record.discrete_error > 0 and record.adjoint_error > 0
    assert record.continuous_error is None and record.gap_error is None


def test_a_floating_point_error_counts_as_divergence(path):
    def make(**arguments):
        def gradient_at(num_steps):
            raise FloatingPointError("f is not finite at t = 0.5, step 3")

        return gradient_at

    cells = run(path, series(steps=(8,)), make=make)
    assert cells[0].status == "diverged" and "f is not finite at t = 0.5" in cells[0].message


def test_cells_already_in_the_file_are_not_computed_again(path):
    run(path, series("rk4", steps=(8, 16)))
    fake_backend.CALLS.clear()
    before = path.read_bytes()
    cells = run(path, series("rk4", steps=(8, 16, 32)))
    assert {n for _, n in fake_backend.CALLS} == {32}
    assert path.read_bytes().startswith(before) and len(cells) == 3


def test_a_cell_of_another_digest_is_computed_again(path):
    run(path, series("rk4"))
    fake_backend.CALLS.clear()
    cells = run(path, series("rk4", digest="changed"))
    assert {n for _, n in fake_backend.CALLS} == set(STEPS)
    assert {cell.digest for cell in cells} == {"changed"}


def test_a_failed_cell_is_tried_again_and_appears_once(path):
    run(path, series("raises"))
    fake_backend.CALLS.clear()
    run(path, series("raises"))
    assert {n for _, n in fake_backend.CALLS} == {16}
    assert sorted(one.num_steps for one in read_records(path)) == [8, 16, 32]


class ReversedExecutor(Executor):
    """Ends calls in the reverse order of their submission, four at a time."""

    def __init__(self):
        self.waiting, self.calls = [], 0

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.calls += 1
        self.waiting.append((future, fn, args))
        if len(self.waiting) == 4:
            for future_, fn_, args_ in reversed(self.waiting):
                future_.set_result(fn_(*args_))
            self.waiting = []
        return future


def test_results_may_arrive_in_any_order(path):
    study = [series(method) for method in ("euler", "heun2", "midpoint", "rk4")]
    executor = ReversedExecutor()
    cells = run(path, *study, executor=executor, jobs=4)
    assert executor.calls == 12
    assert [(c.method, c.num_steps) for c in cells] == [(s.method, n) for s in study for n in STEPS]
    assert sorted(map(str, read_records(path))) == sorted(map(str, cells))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_cells_can_be_spread_over_any_executor(path, kind):
    study = [series(method) for method in ("euler", "heun2", "diverges", "rk4")]
    with (
        ThreadPoolExecutor(2)
        if kind == "threads"
        else ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    ) as executor:
        cells = run(path, *study, executor=executor, jobs=2)
    alone = run(path.with_name("alone.jsonl"), *study)
    strip = {"time": "", "seconds": None}
    assert [replace(c, **strip) for c in cells] == [replace(c, **strip) for c in alone]
    assert len(read_records(path)) == 12


class OldestFirst(Executor):
    """Holds calls back until the next one arrives, then lets the older one end."""

    def __init__(self, held_back):
        self.held_back, self.waiting, self.started, self.most = held_back, [], [], 0

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.waiting.append((future, fn, args))
        self.started.append((args[1].method, args[2]))
        self.most = max(self.most, len(self.waiting))
        while len(self.waiting) > 1 or (self.waiting and len(self.started) > self.held_back):
            done, call, arguments = self.waiting.pop(0)
            done.set_result(call(*arguments))
        return future


def test_each_job_works_through_one_series_at_a_time(path):
    executor = OldestFirst(held_back=6)
    study = [series("euler"), series("heun2"), series("rk4")]
    run(path, *study, executor=executor, jobs=2)
    assert executor.most == 2
    assert executor.started == [
        ("euler", 8), ("heun2", 8), ("euler", 16), ("heun2", 16), ("euler", 32), ("heun2", 32),
        ("rk4", 8), ("rk4", 16), ("rk4", 32),
    ]  # fmt: skip


def dies(**arguments):
    os._exit(3)


def test_a_dead_worker_is_one_line_and_what_was_written_is_kept(path):
    run(path, series("euler"))
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(WorkerDiedError, match=r"worker process died.*records.jsonl.*run again"),
    ):
        run(path, series("rk4"), make=dies, executor=executor)
    assert len(read_records(path)) == 3


# A test run in the background of a shell ignores Ctrl-C, and its children inherit that.
SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import fake_backend
from contadj.results import RecordFile
from contadj.convergence import run_study
from test_convergence import problems, series

study = [series(m, steps=(4, 8, 16, 32)) for m in ("euler", "heun2", "midpoint", "rk4")]
with RecordFile(sys.argv[1]) as records:
    print("computing", 16 - len(records.records), flush=True)
    run_study(study, problems(*study), fake_backend.make_slow, records)
"""


def start(path):
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_study_continues_where_it_stopped(path, kill, capfd):
    process = start(path)
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(kill)
    process.communicate()
    assert process.returncode != 0
    kept = path.read_bytes()
    complete = kept[: kept.rfind(b"\n") + 1]
    done = complete.count(b"\n")
    assert 3 <= done < 16
    again = start(path)
    assert again.communicate(timeout=60)[0] == f"computing {16 - done}\n"
    assert again.returncode == 0
    assert path.read_bytes().startswith(complete)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({(line["method"], line["num_steps"]) for line in lines}) == len(lines) == 16


# A problem without closed forms: the fake dopri8 stands in.


def without_closed_forms(problem="lin"):
    return replace(fake_backend.builtin_problem(problem), gradient=None, adjoint=None)


def test_a_reference_is_solved_on_finer_meshes_until_it_stops_improving():
    fake_backend.CALLS.clear()
    reference = solve_reference(fake_backend.make, series(steps=(8, 16, 32)))
    # h^8 with h = 2/N falls to 1e-16 between N = 128 and 256.
    exact = fake_backend.exact_gradient({"a": 0.0, "theta": 0.0}).vector
    assert np.linalg.norm(reference.gradient.vector - exact) < 1e-15
    assert 0 < reference.error < 1e-13 and reference.adjoint_error < 1e-13
    assert reference.description.startswith("dopri8, ")
    calls = [n for _, n in fake_backend.CALLS]
    assert len(calls) == len(set(calls)), "no mesh is solved twice"
    assert {adjoint for adjoint, _ in fake_backend.CALLS} == {"DirectAdjoint"}


def noisy_make(**arguments):
    """dopri8 with round-off that grows: 1e-9, 2e-9, ... on the doubled meshes."""
    gradient_at = fake_backend.make(**arguments)

    def noisy(num_steps):
        measurement = gradient_at(num_steps)
        gradient = measurement.gradient
        noise = 1e-9 * num_steps / 8 * (-1) ** int(np.log2(num_steps))
        return replace(measurement, gradient=Gradient(0, gradient.y0 + noise, gradient.params))

    return noisy


def test_the_error_estimate_of_a_reference_includes_its_round_off():
    reference = solve_reference(noisy_make, series(steps=(8, 16)))
    exact = fake_backend.exact_gradient({"a": 0.0, "theta": 0.0}).vector
    true_error = np.linalg.norm(reference.gradient.vector - exact)
    assert 1e-9 < true_error < reference.error < 20 * true_error


@pytest.mark.parametrize("steps", [(8, 16), (6, 12, 24), (10, 15), (7,), (1, 2), (100, 300)])
def test_the_reference_mesh_contains_every_mesh_of_the_study(steps):
    reference = solve_reference(fake_backend.make, series(steps=steps))
    problem = fake_backend.builtin_problem("lin")
    for num_steps in steps:
        mesh = problem.mesh(num_steps)
        exact = np.exp(-mesh)[:, None]
        np.testing.assert_allclose(reference.adjoint_on(mesh, num_steps), exact, rtol=1e-12)


def test_a_solved_reference_is_shared_by_all_methods_and_recorded(path):
    fake_backend.CALLS.clear()
    study = [series("euler"), series("heun2")]
    with RecordFile(path) as records:
        by_name = {("lin", "torch"): without_closed_forms()}
        cells = run_study(study, by_name, fake_backend.make, records)
    solved = [n for adjoint, n in fake_backend.CALLS if adjoint == DISCRETE and n not in STEPS]
    assert len(solved) == len(set(solved))
    alone = run(path.with_name("closed.jsonl"), *study)
    for cell, exact in zip(cells, alone, strict=True):
        assert cell.reference.startswith("dopri8, ") and 0 < cell.reference_error < 1e-13
        assert cell.discrete_error == pytest.approx(exact.discrete_error, rel=1e-9)
        assert cell.adjoint_error == pytest.approx(exact.adjoint_error, rel=1e-9)


def test_a_closed_form_gradient_without_a_closed_form_adjoint_uses_both(path):
    problem = replace(fake_backend.builtin_problem("lin"), adjoint=None)
    with RecordFile(path) as records:
        cells = run_study([series()], {("lin", "torch"): problem}, fake_backend.make, records)
    assert cells[0].reference.startswith("closed form; lambda: dopri8, ")
    assert cells[0].reference_error == 0 and cells[0].reference_adjoint_error > 0
    assert cells[0].adjoint_relative == pytest.approx(0.25**4, rel=1e-6)


def test_without_a_reference_the_gap_is_still_there_and_the_cell_says_why(path):
    def make(*, method, **arguments):
        if method == "dopri8":
            raise ValueError("no dopri8 today")
        return fake_backend.make(method=method, **arguments)

    with RecordFile(path) as records:
        cells = run_study([series()], {("lin", "torch"): without_closed_forms()}, make, records)
    assert {cell.status for cell in cells} == {"failed"}
    assert cells[0].message == "no reference (none: no dopri8 today)"
    assert cells[0].gap_error > 0 and cells[0].discrete_error is None


def test_a_reference_that_diverges_on_coarse_meshes_is_found_on_finer_ones():
    def make(**arguments):
        gradient_at = fake_backend.make(**arguments)

        def fragile(num_steps):
            if num_steps < 64:
                raise FloatingPointError("too coarse")
            return gradient_at(num_steps)

        return fragile

    reference = solve_reference(make, series(steps=(8, 16)))
    assert reference.gradient is not None and reference.error < 1e-12


def test_errors_below_ten_times_the_reference_error_are_not_used(path):
    cell = run(path, series(steps=(8,)))[0]
    cell = replace(cell, reference_error=1e-9, reference_adjoint_error=1e-8)
    assert floor(cell, "discrete") == floor(cell, "continuous") == 1e-8
    assert floor(cell, "adjoint") == 1e-7
    assert floor(cell, "gap") < 1e-12, "the gap needs no reference"


def test_a_gradient_of_zero_has_no_relative_scale_but_an_error():
    zero = Gradient(0.0, [0.0], [0.0])
    measured = Measurement(Gradient(0.0, [3.0], [4.0]), np.array([0.0, 1.0]), None, 1, 1, None, 0.1)
    record = compare(series(), 1, measured, measured, Reference("closed form", zero))
    assert record.discrete_error == record.discrete_relative == 5 and record.gap_error == 0


def test_a_module_beside_a_users_problem_is_part_of_its_digest(tmp_path):
    """A helper that the problem's file imports changes the numbers as much as the file itself."""
    (tmp_path / "mine.py").write_text(
        "from contadj import GradientProblem\n"
        "from beside import rate\n"
        "problem = GradientProblem('mine', 'torch', lambda t, y, p: rate * y, y0=1.0, params={},\n"
        "    t0=0.0, t1=1.0, terminal_cost=lambda y, p: y)\n"
    )
    code = (
        "from contadj.backends import definition_digest, load_problem\n"
        "print(definition_digest('mine.py:problem', load_problem('mine.py:problem'), 'rk4'))\n"
    )

    def digest(rate):
        (tmp_path / "beside.py").write_text(f"rate = {rate}\n")
        run = [sys.executable, "-B", "-c", code]
        return subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    first = digest(1.0)
    assert digest(0.5) != first
    assert digest(1.0) == first
