"""One suite for both backends: what a gradient must be, whatever the framework."""

import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import contadj.jax
import contadj.torch
from contadj import GradientProblem
from contadj.jax import _study as jax_study
from contadj.problems import BUILT_IN
from contadj.torch import _study as torch_study

BACKENDS = {
    "torch": SimpleNamespace(
        name="torch", xp=torch, study=torch_study, array=torch.from_numpy, public=contadj.torch
    ),
    "jax": SimpleNamespace(
        name="jax", xp=jnp, study=jax_study, array=jnp.asarray, public=contadj.jax
    ),
}
ADJOINTS = ("DirectAdjoint", "BacksolveAdjoint")


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def backend(request):
    return request.param


def measure(backend, problem, method, adjoint, n):
    if isinstance(problem, str):
        problem = backend.study.builtin_problem(problem)
    return backend.study.gradient_function(problem, method=method, adjoint=adjoint, max_steps=n)(n)


def random(backend, seed, *shape):
    return backend.array(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("problem", ["lin", "nonaut", "pend"])
def test_the_gradient_of_the_table_is_reproduced(backend, problem, adjoint):
    exact = BUILT_IN[problem]().gradient
    got = measure(backend, problem, "dopri8", adjoint, 128).gradient
    np.testing.assert_allclose(got.cost, exact.cost, rtol=1e-13)
    np.testing.assert_allclose(got.vector, exact.vector, rtol=2e-12)


@pytest.mark.parametrize("problem", ["lin", "nonaut"])
def test_lambda_is_the_closed_form(backend, problem):
    exact = BUILT_IN[problem]().adjoint
    got = measure(backend, problem, "dopri8", "DirectAdjoint", 64)
    want = np.stack([exact(t) for t in got.mesh])
    np.testing.assert_allclose(got.adjoint, want, rtol=1e-11)


@pytest.mark.parametrize("snapshots", [None, 2])
def test_the_scalar_rollout_has_the_numbers_worked_out_by_hand(backend, snapshots):
    one = backend.array(np.array(1.0))
    got = backend.public.rollout_adjoint(
        lambda i, x, u, theta: 0.9 * x + theta, 0 * one, backend.array(np.zeros(3)), one,
        terminal_cost=lambda x, theta: (x - 2.0) ** 2, snapshots=snapshots,
    )  # fmt: skip
    assert float(got.cost) == pytest.approx(0.5041, rel=1e-14)
    np.testing.assert_allclose(got.adjoints, [1.03518, 1.1502, 1.278, 1.42], rtol=1e-14)
    assert float(got.params) == pytest.approx(3.8482, rel=1e-14)
    assert float(got.z0) == float(got.adjoints[0])


@pytest.mark.parametrize("snapshots", [None, 3])
def test_the_derivatives_of_a_rollout_pass_a_taylor_remainder_test(backend, snapshots):
    xp = backend.xp
    at = [random(backend, 0, 2), random(backend, 1, 7, 2), random(backend, 2, 2, 2)]
    along = [random(backend, 3, 2), random(backend, 4, 7, 2), random(backend, 5, 2, 2)]
    functions = {
        "stage_cost": lambda i, z, a, p: (z * a).sum() * (i + 1),
        "terminal_cost": lambda z, p: (z**2).sum() * p.sum(),
    }

    def step(i, z, a, p):
        return xp.sin(p @ z) + a * z

    def cost(e):
        moved = [x + e * v for x, v in zip(at, along, strict=True)]
        return float(backend.public.rollout(step, *moved, **functions)[0])

    got = backend.public.rollout_adjoint(step, *at, **functions, snapshots=snapshots)
    slope = sum(
        float((g * v).sum()) for g, v in zip((got.z0, got.actions, got.params), along, strict=True)
    )
    remainders = [cost(e) - cost(0.0) - e * slope for e in (1e-3, 5e-4)]
    assert np.log2(abs(remainders[0] / remainders[1])) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_cost_at_observation_times_with_nested_params_and_state(backend, adjoint):
    # y' = 0: y stays y0, and the gradient is the sum of the weights.
    weights = backend.array(np.array([1.0, 10.0, 100.0]))
    problem = GradientProblem(
        "steps", backend.name, lambda t, y, p: {"a": 0 * y["a"], "b": 0 * y["b"]},
        {"a": np.zeros(1), "b": np.ones((1, 1))}, {"deep": (np.array([2.0]), {"k": np.array(3.0)})},
        0.0, 2.0, observation_times=(0.0, 0.5, 2.0),
        observation_cost=lambda i, t, y, p: weights[i] * y["b"].sum() * p["deep"][1]["k"],
    )  # fmt: skip
    got = measure(backend, problem, "rk4", adjoint, 4)
    np.testing.assert_allclose(got.gradient.y0, [0, 333], rtol=1e-14)
    np.testing.assert_allclose(got.gradient.params, [0, 111], rtol=1e-14)
    np.testing.assert_allclose(got.gradient.cost, 333, rtol=1e-14)


def test_reversal_errors_fall_one_order_faster_than_an_even_method(backend):
    coarse, fine = (
        measure(backend, "pend", "rk4", "BacksolveAdjoint", n).reversal_error for n in (64, 128)
    )
    assert np.log2(coarse / fine) == pytest.approx(5, abs=0.2)


def test_a_problem_of_the_other_framework_is_refused_by_name(backend):
    other = "jax" if backend.name == "torch" else "torch"
    problem = BACKENDS[other].study.builtin_problem("lin")
    with pytest.raises(ValueError, match=f"'lin' is written in {other}"):
        measure(backend, problem, "rk4", "DirectAdjoint", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "rk5"}, "`method` "),
        ({"adjoint": "Direct"}, "`adjoint` must be one of DirectAdjoint"),
        ({"dtype": "int8"}, "`dtype` must be one of"),
        ({"device": "cuda:99"}, "`device` 'cuda:99' is not there for"),
        ({"engine": "other"}, "`engine` must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unknown_name_is_refused_with_the_argument(backend, change, message):
    arguments = {"method": "rk4", "adjoint": "DirectAdjoint", "max_steps": 4} | change
    with pytest.raises(ValueError, match=message):
        backend.study.gradient_function(backend.study.builtin_problem("lin"), **arguments)


def test_both_backends_offer_the_same_names():
    # What one framework has and the other does not: torchdiffeq's functions, diffrax's solvers.
    only = {"torch": {"odeint", "solve"}, "jax": {"get_solver"}}
    for name in ("rollout", "rollout_adjoint", "RolloutGradient", *ADJOINTS, "CheckpointAdjoint"):
        assert hasattr(contadj.torch, name) and hasattr(contadj.jax, name)
    for framework, names in only.items():
        for name in names:
            assert hasattr(BACKENDS[framework].public, name)


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("contadj.torch", "jax"), ("contadj.torch._study", "jax"),
        ("contadj.jax", "torch"), ("contadj.jax._study", "torch"),
    ],
)  # fmt: skip
def test_importing_one_backend_does_not_load_the_other(module, other):
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] == '{other}'])"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:contadj", "-c", code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
