"""The adjoint along the way: its reference and its errors, held against SciPy's adjoint ODE."""

from functools import cache

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from contadj.studies import load_module

along = load_module("along")
B, G, K, T = 0.3, 0.8, 2.0, 3.0  # the driven pendulum


@cache
def exact():
    """lambda(t) of the driven pendulum as a dense solution, by SciPy alone."""

    def field(t, y):
        return [y[1], -B * y[1] - K * np.sin(y[0]) + G * np.cos(2 * t)]

    def backward(t, z):
        x, v, p, q = z
        return [*field(t, [x, v]), K * np.cos(x) * q, -p + B * q]

    tight = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13}
    x, v = solve_ivp(field, (0, T), [1.0, 0.5], **tight).y[:, -1]
    end = [x, v, 2 * (x - 0.2), v]
    return solve_ivp(backward, (T, 0), end, dense_output=True, **tight).sol


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_reference_is_the_solution_of_the_adjoint_ode(framework):
    gradient, fine = along.reference("driven", framework)
    want = exact()(np.linspace(0, T, along.REFERENCE_STEPS + 1))[2:].T
    np.testing.assert_allclose(fine, want, rtol=0, atol=1e-9)
    np.testing.assert_allclose(gradient[:2], want[0], rtol=0, atol=1e-9)


def test_traces_and_errors_are_those_of_the_cell():
    cell = {"problem": "driven", "framework": "torch", "method": "bdf2", "num_steps": 32,
            "max_steps": 32, "trace": 6}  # fmt: skip
    found = along.measure(cell)
    times = np.linspace(0, T, 33)
    want = exact()(times)[2:].T
    scale = np.linalg.norm(want, axis=1).max()
    ends = [*range(6), *range(27, 33)]
    np.testing.assert_allclose(found["trace_t"], times[ends], atol=1e-15)
    np.testing.assert_allclose(found["trace_exact"], want[ends, 0] / scale, atol=1e-9)
    # lambda_n of BDF2 tends to 3/2 lambda in the interior; the multiplier to lambda.
    assert found["trace_adjoint"][3] / found["trace_exact"][3] == pytest.approx(1.5, abs=0.03)
    assert found["trace_multiplier"][3] / found["trace_exact"][3] == pytest.approx(1, abs=0.02)
    assert 0.4 < found["adjoint"] < 0.6 and found["multiplier_interior"] < 0.03
    assert found["multiplier"] > 0.2


def test_a_starting_step_has_no_multiplier_and_its_lambda_another_limit():
    cell = {"problem": "driven", "framework": "torch", "method": "bdf3", "num_steps": 256,
            "max_steps": 256, "trace": 4}  # fmt: skip
    found = along.measure(cell)
    want = exact()(np.linspace(0, T, 257))[2:].T
    scale = np.linalg.norm(want, axis=1).max()
    assert np.isnan(found["trace_multiplier"]).tolist() == [True] * 3 + [False] * 5
    # The last multiplier is 6/11 dC/dy(T), and no other is as far off.
    end = 5 / 11 * np.linalg.norm(want[-1]) / scale
    assert found["multiplier"] == pytest.approx(end, rel=0.02)
    ratios = found["trace_adjoint"] / found["trace_exact"]
    np.testing.assert_allclose(ratios[:4], [1, 2 / 3, 11 / 6, 11 / 6], atol=0.01)


def test_the_backends_agree_along_the_way():
    cell = {"problem": "driven", "method": "bdf3", "num_steps": 64, "max_steps": 64, "trace": 0}
    ours, theirs = (along.measure(cell | {"framework": one}) for one in ("torch", "jax"))
    for quantity in along.QUANTITIES:
        assert ours[quantity] == pytest.approx(theirs[quantity], rel=1e-9)
