"""The command line on the fake backend: what it prints, refuses and writes."""

import importlib
import inspect
import re

import fake_backend
import pytest

from contadj import __version__, backends, cli
from contadj.problems import BUILT_IN
from contadj.results import read_records

OWN = """
import numpy as np
import fake_backend
from contadj.problems import GradientProblem

def f(t, y, p):
    return y

def make(framework="torch", name="mine"):
    params = {"layers": {"b": np.ones(2), "a": np.ones((2, 3))}, "scale": np.array(1.0)}
    return GradientProblem(
        name, framework, f, np.ones(1), params, 0.0, 3.0,
        observation_times=(0.0, 0.5, 1.0, 3.0), observation_cost=lambda i, t, y, p: y,
        gradient=fake_backend.exact_gradient(params), adjoint=fake_backend.exact_adjoint,
    )

problem = make()
in_jax = make("jax")
number = 3

def broken():
    raise KeyError("data")
"""


@pytest.fixture(autouse=True)
def fake(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "installed", lambda: ("torch",))
    monkeypatch.setattr(backends, "load_backend", lambda framework: fake_backend)
    monkeypatch.chdir(tmp_path)
    for cached in (backends.load_problem, backends.gradient_function):
        cached.cache_clear()
    yield
    for cached in (backends.load_problem, backends.gradient_function):
        cached.cache_clear()


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def run(*arguments):
    return cli.main(["converge", *map(str, arguments)])


def test_a_study_prints_orders_and_writes_records_and_a_figure(capsys, tmp_path):
    assert run("lin", "--method", "heun2", "--method", "rk4", "--steps", "16,32,64") == 0
    out, err = capsys.readouterr()
    assert "lin   torch/fake   float64   cpu" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("heun2"))
    assert row == ["heun2", "discrete", "2.00", "2.00", "2.00", "2", "as", "expected"]
    gap = [line.split() for line in out.splitlines() if line.split()[:1] == ["gap"]]
    assert [line[-4:] for line in gap] == [["3.00", "3", "as", "expected"]] + [
        ["4.00", "4", "as", "expected"]
    ]
    assert "cells    6 ok" in out and "orders   8 as expected" in out
    assert "records  out/records.jsonl" in out
    assert "figure   out/convergence-torch-fake.png" in out
    assert (tmp_path / "out/convergence-torch-fake.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_records(tmp_path / "out/records.jsonl")) == 6
    assert err == "", "no progress bar where there is no terminal"


def test_output_in_a_pipe_is_plain_and_at_most_100_columns_wide(capsys):
    run("lin", "pend", "--steps", "1,2,4,8,16,32,64,128,256")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_summary_says_in_words_what_was_seen(capsys):
    # The fake method's relative error is (2/3)^(1/2) h^4, h = 3 / N; 1e-8 at 285.2 steps.
    arguments = ["pend", "--method", "rk4", "--steps", "8,16,32", "--tolerance", "1e-3"]
    assert run(*arguments) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "rk4 discrete: order 4.00, 4 expected; round-off beyond the study, from " in output
    assert "error 0.001 with 32 steps, h = 0.094 [torch/fake]" in output
    assert run(*arguments[:-2], "--tolerance", "1e-8") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "beyond the study, by the order seen with about 290 steps, h = 0.01" in output


def test_without_options_all_default_methods_of_the_engine_run(capsys):
    assert run("lin") == 0
    assert {record.method for record in read_records("out/records.jsonl")} == {
        "euler", "heun2", "midpoint", "rk4",
    }  # fmt: skip


def test_a_deviation_is_marked_with_a_reason_of_one_line(capsys, monkeypatch):
    monkeypatch.setitem(fake_backend._ORDERS, "rk4", 3)
    assert run("lin", "--method", "rk4") == 0
    out = capsys.readouterr().out
    assert out.count("! deviates") == 4
    assert "! lin rk4 discrete: converges slower than 4: 3.00, 3.00  [torch/fake]\n" in out
    assert "orders   4 deviates" in out


def test_cells_that_fail_are_listed_and_the_study_ends_well(capsys):
    assert run("lin", "--method", "diverges", "--method", "raises", "--method", "rk4") == 0
    out = capsys.readouterr().out
    assert "! lin diverges 8 steps diverged: DirectAdjoint: the gradient is not" in out
    assert "! lin raises 16 steps failed: DirectAdjoint: TypeError: no luck at all" in out
    assert "cells    13 ok, 1 diverged, 1 failed" in out


def test_a_study_run_again_computes_nothing_and_prints_the_same(capsys):
    run("lin", "--method", "rk4")
    first = capsys.readouterr().out
    fake_backend.CALLS.clear()
    run("lin", "--method", "rk4")
    assert capsys.readouterr().out == first and fake_backend.CALLS == []


def test_records_of_other_studies_in_the_directory_stay_and_are_not_shown(capsys):
    run("lin", "--method", "heun2")
    run("lin", "--method", "rk4")
    out = capsys.readouterr().out.split("figure")[-2]
    assert "rk4" in out and "heun2" not in out
    assert len(read_records("out/records.jsonl")) == 10


def test_a_problem_from_a_file_with_nested_params_and_observations_runs(capsys, own):
    assert run(f"{own}:problem", "--method", "rk4") == 0
    out = capsys.readouterr().out
    assert "orders   4 as expected" in out
    cell = read_records("out/records.jsonl")[0]
    assert cell.problem == f"{own}:problem"
    assert cell.mesh_size == 3 * 8 and cell.h == 2.0 / 8  # three pieces, the longest [1, 3]


def test_a_function_that_returns_a_problem_and_a_module_on_the_path_run_too(own):
    assert run(f"{own}:make", "--method", "rk4") == 0
    assert run("own:problem", "--method", "rk4") == 0


def test_options_of_a_built_in_problem_are_spelt_one_way(capsys):
    name = next(n for n, f in BUILT_IN.items() if f.__defaults__ and len(f.__defaults__) == 2)
    first, second = BUILT_IN[name].__code__.co_varnames[:2]
    assert run(f"{name}( {second}=2, {first} = 40.0 )", "--method", "rk4") == 0
    assert f"{name}({first}=40,{second}=2)   torch/fake" in capsys.readouterr().out


def test_changing_the_file_of_a_problem_computes_its_cells_again(own):
    run(f"{own}:problem", "--method", "rk4", "--steps", "8")
    own.write_text(OWN + "\nCHANGED = True\n")
    backends.load_problem.cache_clear()
    fake_backend.CALLS.clear()
    run(f"{own}:problem", "--method", "rk4", "--steps", "8")
    assert fake_backend.CALLS[1:] == [("DirectAdjoint", 8), ("BacksolveAdjoint", 8)]
    assert len({record.digest for record in read_records("out/records.jsonl")}) == 2


def test_a_comment_in_the_file_of_a_problem_computes_nothing_again(own):
    run(f"{own}:problem", "--method", "rk4", "--steps", "8")
    own.write_text("# a comment\n" + OWN)
    backends.load_problem.cache_clear()
    run(f"{own}:problem", "--method", "rk4", "--steps", "8")
    assert len(read_records("out/records.jsonl")) == 1


def test_a_problem_that_cannot_take_a_step_is_an_error_before_the_study(capsys, monkeypatch):
    run("lin", "--method", "rk4", "--steps", "8")

    def refuse(problem, **arguments):
        raise TypeError(f"problem {problem.name!r}: `f` must return the shape of y, (2,); got (3,)")

    monkeypatch.setattr(fake_backend, "gradient_function", refuse)
    capsys.readouterr()
    assert run("pend", "--method", "rk4") == 2
    err = capsys.readouterr().err
    assert "`problem` pend cannot run on torch: TypeError: problem 'pend': `f` must" in err
    assert err.count("\n") == 1 and len(read_records("out/records.jsonl")) == 1


def test_lines_that_engines_share_are_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(fake_backend, "ENGINES", ("fake", "second"))
    monkeypatch.setattr(fake_backend, "methods", lambda engine: tuple(fake_backend._ORDERS))
    monkeypatch.setitem(fake_backend._ORDERS, "rk4", 3)
    assert run("lin", "--method", "rk4") == 0
    out = capsys.readouterr().out
    assert out.count("converges slower than 4: 3.00, 3.00  [torch/fake, torch/second]") == 4


def test_a_problem_can_have_steps_of_its_own(tmp_path):
    (tmp_path / "study.toml").write_text(
        'problems = ["lin", "pend"]\nmethods = ["rk4"]\nsteps = [8]\n[steps_of]\npend = [4, 2]\n'
    )
    assert run("--config", "study.toml") == 0
    steps = [(record.problem, record.num_steps) for record in read_records("out/records.jsonl")]
    assert steps == [("lin", 8), ("pend", 2), ("pend", 4)]


def test_a_method_can_have_steps_of_its_own_where_the_problem_has_none(tmp_path):
    (tmp_path / "study.toml").write_text(
        'problems = ["lin", "pend"]\nmethods = ["rk4", "heun2"]\nsteps = [8]\n'
        "[steps_of]\npend = [2]\n[steps_of_method]\nrk4 = [5, 3]\neuler = [1]\n"
    )
    assert run("--config", "study.toml") == 0
    steps = {(r.problem, r.method, r.num_steps) for r in read_records("out/records.jsonl")}
    assert steps == {
        ("lin", "rk4", 3), ("lin", "rk4", 5), ("lin", "heun2", 8), ("pend", "rk4", 2),
        ("pend", "heun2", 2),
    }  # fmt: skip


def test_an_engine_can_have_methods_of_its_own_and_method_picks_among_them(tmp_path):
    (tmp_path / "study.toml").write_text(
        'problems = ["lin"]\nsteps = [8]\n[methods_of_engine]\nfake = ["rk4", "heun2"]\n'
    )
    assert run("--config", "study.toml") == 0
    assert [record.method for record in read_records("out/records.jsonl")] == ["rk4", "heun2"]
    assert run("--config", "study.toml", "--method", "rk4", "--out", "there") == 0
    assert [record.method for record in read_records("there/records.jsonl")] == ["rk4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('fake = ["rk5"]', "`methods_of_engine` must name methods that fake has"),
        ('fke = ["rk4"]', "`methods_of_engine` must name engines, of fake; got 'fke'"),
    ],
    ids=["method", "engine"],
)
def test_methods_of_an_engine_must_be_its(capsys, tmp_path, line, message):
    text = f'problems = ["lin"]\n[methods_of_engine]\n{line}\n'
    (tmp_path / "study.toml").write_text(text)
    assert run("--config", "study.toml") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "did you mean" in error


def test_steps_of_an_unknown_method_are_refused(capsys, tmp_path):
    (tmp_path / "study.toml").write_text('problems = ["lin"]\n[steps_of_method]\nrk5 = [5]\n')
    assert run("--config", "study.toml") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "`steps_of_method` must name methods" in message and "did you mean 'rk4'" in message


def test_a_config_file_is_run_and_options_replace_its_settings(capsys, tmp_path):
    (tmp_path / "study.toml").write_text(
        'problems = ["lin"]\nmethods = ["rk4"]\nsteps = [8, 16, 32]\nout = "there"\n'
    )
    assert run("--config", "study.toml", "--method", "heun2") == 0
    assert {record.method for record in read_records("there/records.jsonl")} == {"heun2"}


ERRORS = {
    "no problem": ([], "`problems` is missing"),
    "problem": (["line"], "`problem` must be one of lin, .*got 'line'; did you mean 'lin'?"),
    "problem syntax": (["lin("], r"`problem` must be NAME, NAME\(OPTION=VALUE,...\)"),
    "option name": (["slow_fast(k=3)"], r"must be among \(K, t1\); got 'k'"),
    "option value": (["slow_fast(K=big)"], "option K of .* must be a number; got 'big'"),
    "method": (
        ["lin", "--method", "rk5"],
        "`method` must be one of .*got 'rk5'; did you mean 'rk4'",
    ),
    "method in capitals": (["lin", "--method", "RK4"], "got 'RK4'; did you mean 'rk4'"),
    "backend's other name": (
        ["lin", "--backend", "pytorch"],
        "got 'pytorch'; did you mean 'torch'",
    ),
    "adjoint": (["lin", "--adjoint", "Gauss"], "got 'Gauss'; did you mean 'GaussAdjoint'"),
    "adjoint's option": (
        ["lin", "--adjoint", "BacksolveAdjoint(restart=3)"],
        "got 'restart'; did you mean 'restart_every'",
    ),
    "tolerance": (["lin", "--tolerance", "-1"], "`tolerance`: Input should be greater than 0"),
    "engine": (["lin", "--engine", "fke"], "`engine` must be one of fake; got 'fke'; did you mean"),
    "backend": (["lin", "--backend", "tensorflow"], "`backends`: Input should be 'torch' or 'jax'"),
    "steps": (["lin", "--steps", "8,x"], "`--steps` must be whole numbers .*got '8,x'"),
    "no steps": (["lin", "--steps", "0"], "`steps`: Input should be greater than or equal to 1"),
    "dtype": (["lin", "--dtype", "float16"], "`dtype`: Input should be 'float64' or 'float32'"),
    "device": (
        ["lin", "--device", "cuda"],
        "`device` must be one of cpu; got 'cuda'; use --device",
    ),
    "misspelt option": (["lin", "--stpes", "8"], "No such option: --stpes"),
    "jobs": (["lin", "--jobs", "two"], "Invalid value for '--jobs'"),
    "config": (["--config", "none.toml"], "config none.toml: No such file"),
    "out is a file": (["lin", "--out", "own.py"], "File exists: 'own.py'"),
    "missing file": (["gone.py:problem"], "gone.py cannot be loaded .*there is no such file"),
    "missing module": (["nowhere:problem"], "nowhere cannot be loaded .*No module named 'nowhere'"),
    "attribute": (["own.py:problm"], "own.py has no 'problm'; did you mean 'problem'?"),
    "not a problem": (["own.py:number"], "must be a GradientProblem or a function.*got int"),
    "function raises": (["own.py:broken"], r"broken\(\) must return .* raised KeyError: 'data'"),
    "other framework": (
        ["own.py:in_jax", "--backend", "torch"],
        "own.py:in_jax is written in jax and cannot run on the torch backend; use --backend jax",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_users_error_is_one_line_with_exit_code_2(capsys, own, case):
    arguments, message = ERRORS[case]
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(message, err), err


def test_an_unknown_command_is_one_line(capsys):
    assert cli.main(["convrge"]) == 2
    assert capsys.readouterr().err == "error: No such command 'convrge'. Did you mean 'converge'?\n"


def test_a_corrupt_record_is_one_line_and_nothing_is_lost(capsys, tmp_path):
    run("lin", "--method", "rk4", "--steps", "8,16")
    path = tmp_path / "out/records.jsonl"
    content = path.read_bytes().replace(b'"ok"', b'"odd"', 1)
    path.write_bytes(content)
    capsys.readouterr()
    assert run("lin", "--method", "rk4") == 2
    err = capsys.readouterr().err
    assert "records.jsonl, line 1: expected a record" in err and err.count("\n") == 1
    assert path.read_bytes() == content


def test_a_full_disk_is_one_line_and_what_was_written_is_kept(capsys, monkeypatch):
    run("lin", "--method", "rk4", "--steps", "8")
    capsys.readouterr()

    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("contadj.results.RecordFile.append", full)
    assert run("lin", "--method", "rk4") == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and err.count("\n") == 1
    assert len(read_records("out/records.jsonl")) == 1


@pytest.mark.parametrize(
    ("stop", "code"), [(KeyboardInterrupt, 130), (cli._Terminated, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupted_study_says_how_to_continue(capsys, monkeypatch, stop, code):
    original = fake_backend.gradient_function

    def interrupted(problem, **arguments):
        gradient_at = original(problem, **arguments)

        def at(num_steps):
            if num_steps == 32:
                raise stop
            return gradient_at(num_steps)

        return at

    monkeypatch.setattr(fake_backend, "gradient_function", interrupted)
    assert run("lin", "--method", "rk4") == code
    err = capsys.readouterr().err
    assert "interrupted; 2 records are in out/records.jsonl: run again to continue" in err
    monkeypatch.setattr(fake_backend, "gradient_function", original)
    backends.gradient_function.cache_clear()
    assert run("lin", "--method", "rk4") == 0
    assert [one.num_steps for one in read_records("out/records.jsonl")] == [8, 16, 32, 64, 128]


def test_a_method_that_one_engine_lacks_is_noted_and_left_out(capsys, monkeypatch):
    monkeypatch.setattr(fake_backend, "ENGINES", ("fake", "small"))
    original = fake_backend.methods
    monkeypatch.setattr(
        fake_backend,
        "methods",
        lambda engine: ("euler",) if engine == "small" else original("fake"),
    )
    assert run("lin", "--method", "euler", "--method", "rk4") == 0
    assert "note: engine small has no method rk4: left out" in capsys.readouterr().out
    pairs = {(record.engine, record.method) for record in read_records("out/records.jsonl")}
    assert pairs == {("fake", "euler"), ("fake", "rk4"), ("small", "euler")}


def test_without_a_backend_the_fix_is_named(capsys, monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda: ())
    assert run("lin") == 2
    assert "no backend is installed; run: pip install 'contadj[torch]'" in capsys.readouterr().err


def test_a_backend_that_is_not_installed_is_refused_with_the_fix(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(backends, "installed", lambda: ("torch",))
    with pytest.raises(
        ValueError, match=r"jax needs jax and diffrax.*pip install 'contadj\[jax\]'"
    ):
        backends.load_backend("jax")


def test_the_list_names_everything_there_is(capsys, tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/study.toml").write_text("")
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for name in (*BUILT_IN, "BacksolveAdjoint", "engines fake", "experiments/study.toml"):
        assert name in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["rk4"] == ["4", "4", "explicit", "x"]
    assert rows["gl6"] == ["6", "3", "implicit"]
    assert rows["jax"][:2] == ["not", "installed:"]


def test_the_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"contadj {__version__}\n"


@pytest.mark.parametrize(
    "module", ["convergence", "cli", "orders", "plotting", "results", "config"]
)
def test_no_built_in_problem_is_named_outside_the_problems(module):
    text = inspect.getsource(importlib.import_module(f"contadj.{module}"))
    for name in BUILT_IN:
        assert not re.search(rf"\b{name}\b", text), name
