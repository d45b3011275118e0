"""A user's problem from the command line: the adjoints asked for, their errors and costs."""

import re
from pathlib import Path

import pytest

from contadj import cli
from contadj.results import read_records

HERE = Path(__file__).parent


def converge(out, framework, *arguments):
    spec = f"{HERE}/own_{framework}.py:problem"
    engine = {"torch": "contadj", "jax": "diffrax"}[framework]
    return cli.main([
        "converge", spec, "--engine", engine, "--method", "rk4", "--steps", "4,8,16",
        "--out", str(out), *arguments,
    ])  # fmt: skip


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_adjoints_are_compared_where_the_tolerance_is_reached(capsys, tmp_path, framework):
    arguments = [
        "--tolerance", "1e-4", "--adjoint", "CheckpointAdjoint", "--adjoint", "BacksolveAdjoint",
    ]  # fmt: skip
    assert converge(tmp_path, framework, *arguments) == 0
    output = capsys.readouterr().out
    cells = {cell.num_steps: cell for cell in read_records(tmp_path / "records.jsonl")}
    wanted = min(n for n, cell in cells.items() if cell.discrete_relative <= 1e-4)
    ones = read_records(tmp_path / "adjoints.jsonl")
    assert [(one["adjoint"], one["num_steps"]) for one in ones] == [
        ("CheckpointAdjoint", wanted), ("BacksolveAdjoint", wanted)
    ]  # fmt: skip
    discrete, continuous = ones
    # The study's own errors, whose reference is from other meshes.
    assert discrete["error"] == pytest.approx(cells[wanted].discrete_relative, rel=1e-3)
    assert continuous["error"] == pytest.approx(cells[wanted].continuous_relative, rel=1e-3)
    assert continuous["reversal_error"] == pytest.approx(cells[wanted].reversal_error, rel=1e-9)
    for one in ones:
        shown = re.search(rf"^{one['adjoint']} +(\S+) .* [mµ]?s +[\d.]+ k?B$", output, re.M)
        assert shown and float(shown[1]) == pytest.approx(one["error"], rel=0.05)
        assert one["gradient_seconds"] > 0 and one["peak_bytes"] > 0

    before = (tmp_path / "adjoints.jsonl").read_text()
    assert converge(tmp_path, framework, *arguments) == 0
    assert (tmp_path / "adjoints.jsonl").read_text() == before
    assert f"rk4   {wanted} steps" in capsys.readouterr().out


def test_an_adjoint_that_does_not_fit_the_method_is_told_and_the_others_are_shown(capsys, tmp_path):
    code = cli.main([
        "converge", f"{HERE}/own_torch.py:problem", "--engine", "contadj", "--method", "ab3",
        "--steps", "8,16", "--adjoint", "GaussAdjoint", "--adjoint", "DirectAdjoint",
        "--out", str(tmp_path),
    ])  # fmt: skip
    output = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "! GaussAdjoint failed: ValueError: `adjoint` must be DirectAdjoint or" in output
    assert [one.status for one in read_records(tmp_path / "adjoints.jsonl")] == ["failed", "ok"]
