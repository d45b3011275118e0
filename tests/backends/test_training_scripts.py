"""The training scripts run, resume where they stopped, and reach what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = {
    "train_hare_lynx_torch": ["--num-steps", "1", "--hidden", "2"],
    "train_digits_torch": ["--num-steps", "1", "--channels", "4", "--limit", "96"],
    "train_hare_lynx_jax": ["--num-steps", "1", "--hidden", "2"],
    "train_digits_jax": ["--num-steps", "1", "--channels", "4", "--limit", "96"],
}
COST = {
    "torch": r"checkpoint: peak [\d.]+ [KM]iB live, [\d.]+ ms and \d+ f evaluations per gradient",
    "jax": r"checkpoint: [\d.]+ [KM]iB of temporaries, [\d.]+ ms per gradient, [\d.]+ s to compile",
}
scripts = pytest.mark.parametrize("script", SMALL)
hare_and_lynx = pytest.mark.parametrize("script", ["train_hare_lynx_torch", "train_hare_lynx_jax"])
digits = pytest.mark.parametrize("script", ["train_digits_torch", "train_digits_jax"])


def backend(script):
    return script.rpartition("_")[2]


def run(script, *arguments, code=0):
    # Wide enough that no line of the output is broken.
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    threads = ["--threads", "1"] if backend(script) == "torch" else []
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / f"{script}.py", *threads, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def checkpoint(script, out):
    """Epoch, losses and parameters of a checkpoint."""
    if backend(script) == "torch":
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        return state["epoch"], state["history"], [x.numpy() for x in state["model"].values()]
    with (out / "checkpoint.eqx").open("rb") as file:
        record = json.loads(file.readline())
        leaves = []
        while file.peek(1):
            leaves.append(np.load(file))
    return record["epoch"], record["history"], leaves


@scripts
def test_a_resumed_run_ends_where_an_unbroken_one_does(script, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*SMALL[script], "--epochs", "4"]
    output = run(script, *options, "--out", whole)
    assert re.search(COST[backend(script)], output)
    assert ("first step, compilation included" in output) == (backend(script) == "jax")
    assert "out" in output
    assert (whole / "loss.png").stat().st_size > 1000
    run(script, *options, "--out", parts, "--stop-after", "2")
    assert checkpoint(script, parts)[0] == 2
    run(script, *options, "--out", parts, "--resume")
    epoch, history, parameters = checkpoint(script, whole)
    resumed = checkpoint(script, parts)
    assert resumed[:2] == (epoch, history) == (4, history)
    assert len(history) == 4
    assert not list(parts.glob("*.part"))
    assert len(parameters) >= 4
    for first, second in zip(parameters, resumed[2], strict=True):
        np.testing.assert_array_equal(first, second)


@hare_and_lynx
def test_a_run_is_not_resumed_with_other_settings(script, tmp_path):
    options = [*SMALL[script], "--epochs", "1", "--out", tmp_path]
    output = run(script, *options, "--resume", code=1)
    assert re.search(r"checkpoint\.\w+, which is not there", output)
    run(script, *options, "--adjoint", "checkpoint-2")
    output = run(
        script, *options, "--adjoint", "checkpoint-2", "--resume", "--seed", "7", code=1
    )  # fmt: skip
    assert "was made with seed = 0, got 7" in output
    output = run(script, *options, "--resume", code=1)
    assert "was made with adjoint = 'checkpoint-2', got 'checkpoint'" in output


@hare_and_lynx
def test_an_unknown_adjoint_is_an_error(script):
    output = run(script, "--adjoint", "checkpoint-0", code=2)
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
    bytes_used = {name: float(rows[name][2]) for name in names}
    assert bytes_used["direct"] > 2 * bytes_used["backsolve"]
    if backend(script) == "torch":
        # JAX's DirectAdjoint is a tree of rematerialised loops, whose bytes hardly grow.
        assert float(rows["direct"][3]) > 2.0
    difference = {name: float(rows[name][-1]) for name in names}
    assert difference["checkpoint"] < 1e-5
    assert difference["checkpoint-4"] < 1e-5
    assert 0.0 < difference["backsolve"] < 0.5


@pytest.mark.slow
@hare_and_lynx
def test_hare_and_lynx_are_forecast_better_than_by_the_decade_before(script, tmp_path):
    output = run(script, "--out", tmp_path)
    held = float(re.search(r"years held out: ([\d.]+)", output)[1])
    decade = float(re.search(r"ten years before: ([\d.]+)", output)[1])
    assert held < decade


@pytest.mark.slow
@digits
def test_digits_are_read_with_97_percent_accuracy(script, tmp_path):
    output = run(script, "--out", tmp_path)
    assert float(re.search(r"held-out accuracy: ([\d.]+) %", output)[1]) >= 97.0
