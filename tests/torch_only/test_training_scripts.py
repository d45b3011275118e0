"""The training scripts run, resume where they stopped, and reach what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = {
    "train_hare_lynx_torch": ["--num-steps", "1", "--hidden", "2"],
    "train_digits_torch": ["--num-steps", "1", "--channels", "4", "--limit", "96"],
}
scripts = pytest.mark.parametrize("script", SMALL)


def run(script, *arguments, code=0):
    # Wide enough that no line of the output is broken.
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / f"{script}.py", "--threads", "1", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@scripts
def test_a_resumed_run_ends_where_an_unbroken_one_does(script, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*SMALL[script], "--epochs", "4"]
    output = run(script, *options, "--out", whole)
    assert re.search(r"checkpoint: peak [\d.]+ [KM]iB live, [\d.]+ ms", output)
    assert "out" in output
    assert (whole / "loss.png").stat().st_size > 1000
    run(script, *options, "--out", parts, "--stop-after", "2")
    assert torch.load(parts / "checkpoint.pt", weights_only=True)["epoch"] == 2
    run(script, *options, "--out", parts, "--resume")
    first, second = (
        torch.load(directory / "checkpoint.pt", weights_only=True) for directory in (whole, parts)
    )
    assert second["epoch"] == 4
    assert second["history"] == first["history"]
    assert not list(parts.glob("*.part"))
    for name, value in first["model"].items():
        assert torch.equal(second["model"][name], value)


def test_a_run_is_not_resumed_with_other_settings(tmp_path):
    script, options = "train_hare_lynx_torch", [*SMALL["train_hare_lynx_torch"], "--epochs", "1"]
    output = run(script, *options, "--out", tmp_path, "--resume", code=1)
    assert "checkpoint.pt, which is not there" in output
    run(script, *options, "--out", tmp_path, "--adjoint", "checkpoint-2")
    output = run(script, *options, "--out", tmp_path, "--resume", "--seed", "7", code=1)
    assert "was made with seed = 0, got 7" in output


def test_an_unknown_adjoint_is_an_error():
    output = run("train_hare_lynx_torch", "--adjoint", "checkpoint-0", code=2)
    assert "expected one of direct, checkpoint" in output


@pytest.mark.slow
@scripts
def test_the_comparison_shows_every_adjoint(script):
    output = run(script, *SMALL[script], "--compare")
    names = ["direct", "checkpoint", "checkpoint-4", "reversible", "backsolve", "gauss"]
    rows = {
        cells[0]: cells
        for line in output.splitlines()
        if (cells := [cell.strip() for cell in line.split("│")[1:-1]])
    }
    assert set(names) <= set(rows)
    growth = {name: float(rows[name][3]) for name in names}
    assert growth["direct"] > 2.0
    difference = {name: float(rows[name][-1]) for name in names}
    assert difference["checkpoint"] < 1e-5
    assert difference["checkpoint-4"] < 1e-5
    assert 0.0 < difference["backsolve"] < 0.5


@pytest.mark.slow
def test_hare_and_lynx_are_forecast_better_than_by_the_decade_before(tmp_path):
    output = run("train_hare_lynx_torch", "--out", tmp_path)
    held = float(re.search(r"years held out: ([\d.]+)", output)[1])
    decade = float(re.search(r"ten years before: ([\d.]+)", output)[1])
    assert held < decade


@pytest.mark.slow
def test_digits_are_read_with_97_percent_accuracy(tmp_path):
    output = run("train_digits_torch", "--out", tmp_path)
    assert float(re.search(r"held-out accuracy: ([\d.]+) %", output)[1]) >= 97.0
