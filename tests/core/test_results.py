import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from contadj.results import Record, RecordFile, read_records, to_frame


def record(num_steps=8, **changes):
    values = dict(
        problem="mine", framework="torch", engine="fake", method="rk4",
        discrete_adjoint="DirectAdjoint", continuous_adjoint="BacksolveAdjoint",
        num_steps=num_steps, dtype="float64", device="cpu", digest="abc", status="ok", h=1 / 3,
        gap_error=1e-300, versions={"numpy": "2.0"},
    )  # fmt: skip
    return Record(**(values | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "records.jsonl"


def write(path, *records):
    with RecordFile(path) as file:
        for one in records:
            file.append(one)


def test_records_come_back_as_they_were_written(path):
    written = [record(8), record(16, status="diverged", message="nan at t = 0.5, λ")]
    write(path, *written)
    assert read_records(path) == written


def test_a_second_run_appends(path):
    write(path, record(8))
    before = path.read_bytes()
    write(path, record(16))
    assert path.read_bytes().startswith(before)
    assert [one.num_steps for one in read_records(path)] == [8, 16]


def test_numpy_scalars_are_stored_as_plain_numbers(path):
    write(path, record(h=np.float32(0.5), mesh_size=np.int64(3)))
    assert repr(read_records(path)[0].h) == "0.5" and read_records(path)[0].mesh_size == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_missing_and_the_file_is_plain_json(path, value):
    write(path, record(gap_error=value))
    line = path.read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["gap_error"] is None
    assert read_records(path)[0].gap_error is None


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_last_line_torn_by_a_kill_is_cut_off_and_the_rest_kept(path, kept):
    write(path, record(8), record(16))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    assert read_records(path) == [record(8)]
    write(path, record(32))
    assert path.read_bytes().startswith(first)
    assert [one.num_steps for one in read_records(path)] == [8, 32]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"problem": "mi\n', "Invalid control character"),
        (b"\n", "Expecting value"),
        (b"\x00\x00\x00\n", "Expecting value"),
        (b"[1, 2]\n", "not a JSON object"),
        (b'{"problem": "mine"}\n', "without continuous_adjoint, device"),
    ],
    ids=["half", "empty", "zeros", "list", "incomplete"],
)
def test_a_corrupt_line_in_the_middle_is_an_error_that_names_the_line(path, line, reason):
    write(path, record(8), record(16))
    first, second = path.read_bytes().splitlines(keepends=True)
    content = first + line + second
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"records.jsonl, line 2: expected a record.*{reason}"):
        read_records(path)
    with pytest.raises(ValueError, match=r"line 2"):
        RecordFile(path)
    assert path.read_bytes() == content


def test_an_unknown_field_is_an_error_that_names_it(path):
    write(path, record())
    path.write_text(path.read_text().replace('"h":', '"H":'))
    with pytest.raises(ValueError, match=r"line 1.*unknown H"):
        read_records(path)


def test_a_status_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match=r"`status` must be one of ok, diverged, failed; got 'bad'"
    ):
        record(status="bad")


def test_a_cell_that_appears_twice_is_an_error_that_names_the_line(path):
    write(path, record(8))
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(ValueError, match=r"line 2: expected each cell once"):
        read_records(path)


def test_a_failed_cell_computed_again_appears_once_as_it_was_last(path):
    write(path, record(8, status="failed", h=None), record(16), record(8))
    assert [(one.num_steps, one.status) for one in read_records(path)] == [(16, "ok"), (8, "ok")]


@pytest.mark.parametrize(
    "change", [{"num_steps": 9}, {"method": "euler"}, {"dtype": "float32"}, {"digest": "new"}]
)
def test_another_key_or_digest_is_another_cell(change):
    assert replace(record(), **change).identity != record().identity
    assert replace(record(), h=0.5, time="later").identity == record().identity


def test_two_runs_cannot_write_to_one_file(path):
    with RecordFile(path), pytest.raises(ValueError, match=r"is being written by another run"):
        RecordFile(path)
    write(path, record())


def test_a_killed_run_leaves_every_appended_record_and_no_lock(path):
    script = (
        "import os, sys\n"
        "from contadj.results import RecordFile\n"
        "from test_results import record\n"
        "file = RecordFile(sys.argv[1])\n"
        "for n in (8, 16, 32): file.append(record(n))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )
    assert done.returncode == -9
    with RecordFile(path) as file:
        assert [one.num_steps for one in file.records] == [8, 16, 32]


@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_a_full_disk_is_an_error_that_leaves_the_file_as_it_was(path, monkeypatch, moment):
    write(path, record(8))
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordFile(path) as file:
        with monkeypatch.context() as patch:
            if moment == "fsync":
                patch.setattr(os, "fsync", full)
            else:
                patch.setattr(file, "_file", HalfWriter(file._file, full))
            with pytest.raises(OSError, match=r"No space left"):
                file.append(record(16))
        assert path.read_bytes() == before
        file.append(record(32))
    assert [one.num_steps for one in read_records(path)] == [8, 32]


class HalfWriter:
    """A file that takes 10 bytes and then raises."""

    def __init__(self, file, fail):
        self.file, self.fail, self.room = file, fail, 10

    def write(self, content):
        if not self.room:
            self.fail()
        self.room = 0
        return self.file.write(content[:10])

    def fileno(self):
        return self.file.fileno()

    def truncate(self, size):
        return self.file.truncate(size)


def test_short_writes_are_continued(path):
    with RecordFile(path) as file:
        whole = file._file
        file._file = ShortWriter(whole)
        file.append(record(8))
        file._file = whole
    assert read_records(path) == [record(8)]


class ShortWriter(HalfWriter):
    def __init__(self, file):
        self.file = file

    def write(self, content):
        return self.file.write(content[:7])


def test_a_directory_that_cannot_be_written_is_an_oserror(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        RecordFile(tmp_path / "file" / "records.jsonl")


def test_records_become_a_table_with_a_column_for_every_field():
    frame = to_frame([record(8), record(16, gap_error=None)])
    assert isinstance(frame, pd.DataFrame)
    assert frame["num_steps"].tolist() == [8, 16]
    assert math.isnan(frame["gap_error"][1]) and frame["gap_error"][0] == 1e-300


def test_no_records_are_a_table_without_rows():
    assert to_frame([]).shape[0] == 0 and "gap_error" in to_frame([]).columns
