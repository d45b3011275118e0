"""The README's examples run as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_has_an_example_of_each_backend():
    assert any("contadj.torch" in block for block in BLOCKS)
    assert any("contadj.jax" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs_without_a_warning(block):
    subprocess.run([sys.executable, "-W", "error", "-c", block], check=True, timeout=300)


@pytest.mark.parametrize("steps", ["4,8"])
def test_the_readmes_problem_file_runs(tmp_path, steps):
    (block,) = (block for block in BLOCKS if "problem = GradientProblem" in block)
    (tmp_path / "my_file.py").write_text(block, encoding="utf-8")
    command = ["my_file.py:problem", "--method", "rk4", "--steps", steps, "--engine", "contadj"]
    run = subprocess.run(
        [sys.executable, "-m", "contadj.cli", "converge", *command],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "2 ok" in run.stdout
