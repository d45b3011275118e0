import os
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from contadj import backends
from contadj.problems import GradientProblem

ORPHAN = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from contadj.workers import prepare_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), prepare_worker, (3,))
    print(pool.submit(os.getpid).result(), pool.submit(os.getenv, "OMP_NUM_THREADS").result())
    pool.submit(time.sleep, 600)
    os.sys.stdout.flush()
    os.kill(os.getpid(), 9)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
def test_a_worker_has_its_share_of_threads_and_ends_when_the_study_is_killed(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    study = subprocess.Popen(
        [sys.executable, tmp_path / "orphan.py"], stdout=subprocess.PIPE, text=True
    )
    pid, threads = study.stdout.readline().split()
    study.stdout.close()
    assert study.wait() == -9 and threads == "3"
    deadline = time.monotonic() + 60
    while alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(pid))


class Field:
    """A vector field that is an object, as modules of both frameworks are."""

    def __call__(self, t, y, p):
        return y


def problem(**changes):
    values = dict(
        name="mine", framework="torch", f=Field(), y0=np.ones(2),
        params={"b": {"w": np.ones(3)}, "a": [1.0, None]}, t0=0.0, t1=1.0,
        terminal_cost=lambda y, p: y,
    )  # fmt: skip
    return GradientProblem(**(values | changes))


@pytest.mark.parametrize("f", [partial(Field(), 0.0), partial(len), np.add, Field()])
def test_vector_fields_of_every_kind_have_a_digest(f):
    assert digest(f=f) == digest(f=f)


def digest(method="rk4", spec="own.py:problem", **changes):
    return backends.definition_digest(spec, problem(**changes), method)


def test_equal_definitions_have_equal_digests_whatever_the_order_of_names():
    params = {"a": [1.0, None], "b": {"w": np.ones(3)}}
    assert digest() == digest(params=params)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "rk4_classic"},
        {"spec": "other.py:problem"},
        {"y0": np.array([1.0, 1.0 + 1e-15])},
        {"y0": np.ones((2, 1))},
        {"y0": np.ones(2, np.float32)},
        {"t1": 2.0},
        {"params": {"b": {"w": np.ones(3)}, "a": [1.0, 2.0]}},
        {"params": {"b": {"v": np.ones(3)}, "a": [1.0, None]}},
        {"params": {"b": {"w": np.ones(3)}, "a": [[1.0], None]}},
        {"f": np.linalg.norm},
        {"observation_times": (0.5,), "observation_cost": lambda *_: 0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_definition_has_another_digest(changes):
    assert digest(**changes) != digest()
