"""Studies of `contadj.studies`: their cells, their records, and who works on them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import contadj.studies
from contadj.config import load_study
from contadj.results import CellRecord, RecordFile, read_records, to_frame
from contadj.studies import load_module, names
from contadj.studies._run import StudyCells

SQUARES = '''
"""Squares."""
import math, os, time
from pathlib import Path
from contadj.config import Settings as Base

SOURCES = ()

class Settings(Base):
    numbers: tuple[int, ...] = (1, 2, 3)
    pause: float = 0.0

def cells(settings):
    return [[{"n": n, "pause": settings.pause}] for n in settings.numbers]

def measure(cell):
    if cell["n"] == 7:
        raise ZeroDivisionError("at seven")
    if cell["n"] == 8:
        raise RuntimeError("no eight")
    time.sleep(cell["pause"])
    return {"square": cell["n"] ** 2, "nan": math.nan, "pid": os.getpid()}

def findings(records):
    return [f"the largest square is {max(record['square'] for record in records)}"]
'''


@pytest.fixture
def squares(tmp_path, monkeypatch):
    (tmp_path / "squares.py").write_text(SQUARES)
    monkeypatch.setattr(contadj.studies, "__path__", [*contadj.studies.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("contadj.studies.squares", None)


def run(path, **settings):
    with RecordFile(path) as records:
        return StudyCells("squares", load_study(study="squares", **settings)).run(records)


def test_every_cell_gets_a_record_and_is_measured_once(squares):
    path = squares / "records.jsonl"
    first = run(path, numbers=[1, 2])
    assert [record["square"] for record in first] == [1, 4]
    both = run(path, numbers=[1, 2, 3])
    assert [record["square"] for record in both] == [1, 4, 9]
    assert both[:2] == first and len(read_records(path)) == 3


def test_a_value_that_is_not_finite_is_kept_as_none(squares):
    (record,) = run(squares / "records.jsonl", numbers=[3])
    assert record["nan"] is None and record.seconds > 0 and "numpy" in record.versions
    assert json.loads((squares / "records.jsonl").read_text())["values"]["nan"] is None


@pytest.mark.parametrize(
    ("n", "status", "message"),
    [(7, "diverged", "at seven"), (8, "failed", "RuntimeError: no eight")],
    ids=["diverged", "failed"],
)
def test_a_cell_that_cannot_be_measured_says_why(squares, n, status, message):
    (record,) = run(squares / "records.jsonl", numbers=[n])
    assert (record.status, record.message) == (status, message)


def test_a_failed_cell_is_tried_again(squares):
    path = squares / "records.jsonl"
    run(path, numbers=[8])
    run(path, numbers=[8])
    assert len(path.read_text().splitlines()) == 2 and len(read_records(path)) == 1


def test_records_become_a_table_of_axes_and_values(squares):
    frame = to_frame(run(squares / "records.jsonl", numbers=[2, 3]))
    assert list(frame["n"]) == [2, 3] and list(frame["square"]) == [4, 9]
    assert list(frame["status"]) == ["ok", "ok"]


def test_a_record_refuses_what_is_no_plain_value():
    with pytest.raises(TypeError, match="numbers, texts and lists of them"):
        CellRecord(study="x", cell={}, digest="", status="ok", values={"a": object()})


def test_the_quick_table_of_a_config_replaces_what_it_names(squares):
    config = squares / "squares.toml"
    config.write_text('study = "squares"\nnumbers = [1, 2, 3]\n[quick]\nnumbers = [1]\n')
    assert load_study(config).numbers == (1, 2, 3)
    assert load_study(config, quick=True).numbers == (1,)


def test_an_unknown_study_or_key_is_an_error_with_the_nearest_name(squares):
    with pytest.raises(ValueError, match=r"`study` must be one of .*did you mean 'squares'"):
        load_study(study="squared")
    with pytest.raises(ValueError, match="unknown key 'number'; did you mean 'numbers'"):
        load_study(study="squares", number=[1])


@pytest.mark.parametrize("name", names())
def test_every_study_states_its_question_and_can_list_its_cells(name):
    module = load_module(name)
    groups = module.cells(module.Settings(study=name))
    places = [json.dumps(cell, sort_keys=True) for group in groups for cell in group]
    assert module.__doc__ and places and len(set(places)) == len(places)
    assert callable(module.measure) and callable(module.findings)
    assert all(source.startswith("contadj.") for source in module.SOURCES)


def test_studies_and_their_cells_need_no_framework():
    code = """
        import sys
        from contadj.studies import load_module, names
        for name in names():
            module = load_module(name)
            module.cells(module.Settings(study=name))
        assert not {"torch", "jax", "diffrax", "torchdiffeq"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_cell_whose_worker_is_killed_is_measured_by_another_one(squares):
    # A Dask cluster of two workers, in a process of its own; each loads the study beforehand.
    path, script, preload = (squares / name for name in ("records.jsonl", "run.py", "preload.py"))
    preload.write_text(
        f"import contadj.studies\ncontadj.studies.__path__.append({str(squares)!r})\n"
    )
    code = f"""
        import preload
        from contadj.config import load_study
        from contadj.results import RecordFile
        from contadj.studies._run import StudyCells
        from contadj.workers import open_executor

        if __name__ == "__main__":
            settings = load_study(study="squares", numbers=range(20, 32), pause=0.3)
            cells = StudyCells("squares", settings)
            with open_executor(2, "local") as (executor, jobs):
                with RecordFile({str(path)!r}) as records:
                    cells.run(records, executor=executor, jobs=jobs)
    """
    script.write_text(textwrap.dedent(code))
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"DASK_DISTRIBUTED__WORKER__PRELOAD": str(preload)},
    )  # fmt: skip
    while not (path.exists() and path.read_text().count("\n") >= 3):
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    victim = read_records(path)[-1]["pid"]
    os.kill(victim, signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    records = read_records(path)  # raises if a cell is there twice
    assert sorted(record["n"] for record in records) == list(range(20, 32))
    assert records[-1]["pid"] != victim
