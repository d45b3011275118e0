"""The study of the adjoints: its reference, its cells, and what its quick grids show."""

import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from contadj import backends
from contadj.config import load_study
from contadj.studies import adjoints as study

CELL = {
    "problem": "slow_fast(K=20)", "engine": "contadj", "method": "rk4_classic",
    "adjoint": "BacksolveAdjoint", "dtype": "float64", "device": "cpu", "costs": False,
    "reference_steps": 64, "num_steps": 512, "max_steps": 512,
}  # fmt: skip
ENGINES = ("contadj", "diffrax")


def measure(**changes):
    return study.measure(CELL | changes)


def slow_fast_cost(K, c, y0):
    def rates(t, y):
        return [-K * (y[0] - np.cos(y[1])), -y[1] + c * y[0]]

    end = solve_ivp(rates, (0, 1), y0, "Radau", rtol=1e-12, atol=1e-13).y[:, -1]
    return (end[1] - 1) ** 2


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_reference_of_slow_fast_is_the_difference_quotient_of_scipys_solution(framework):
    point = np.array([20.0, 1.0, 2.0, 1.0])  # K, c, y0
    quotients = []
    for i, size in enumerate(np.array([1e-2, 1e-3, 1e-3, 1e-3])):
        ends = [slow_fast_cost(*(p := point + s * size * np.eye(4)[i])[:2], p[2:]) for s in (1, -1)]
        quotients.append((ends[0] - ends[1]) / (2 * size))
    found = study.reference("slow_fast(K=20)", framework, "cpu", 64)
    wanted = np.array([*quotients[2:], *quotients[:2]])
    np.testing.assert_allclose(found.gradient.vector, wanted, rtol=3e-5, atol=1e-7)
    assert found.error < 1e-11


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("K", [20, 30, 40, 50])
def test_backsolve_is_wrong_by_what_was_expected_of_it(engine, K):
    error = measure(problem=f"slow_fast(K={K})", engine=engine)["error"]
    assert 0.3 < error / study.EXPECTED_ERRORS[K] < 3


@pytest.mark.parametrize("engine", ENGINES)
def test_restarts_keep_backsolve_right_where_it_would_be_worthless(engine):
    found = measure(
        problem="slow_fast(K=50)", engine=engine, adjoint="BacksolveAdjoint(restart_every=32)"
    )
    assert 0.3 < found["error"] / study.EXPECTED_RESTARTED[50] < 3
    assert found["reversal_error"] < 1e-6


def test_restarts_are_the_same_in_both_backends():
    cell = {"adjoint": "BacksolveAdjoint(restart_every=24)", "num_steps": 100, "max_steps": 100}
    ours, theirs = (measure(engine=engine, **cell) for engine in ENGINES)
    assert ours["reversal_error"] == pytest.approx(theirs["reversal_error"], rel=1e-6)
    assert ours["error"] == pytest.approx(theirs["error"], rel=1e-6)


@pytest.mark.parametrize("adjoint", ["CheckpointAdjoint", "InterpolatingAdjoint", "GaussAdjoint"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_adjoints_that_keep_y_do_not_care_about_contraction(adjoint, dtype):
    found = measure(problem="slow_fast(K=50)", engine="diffrax", adjoint=adjoint, dtype=dtype)
    assert found["error"] < {"float64": 2e-8, "float32": 1e-5}[dtype]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_method_of_even_order_retraces_its_steps_to_one_order_more(engine):
    steps = (64, 128, 256)
    errors = [measure(engine=engine, num_steps=n, max_steps=256)["reversal_error"] for n in steps]
    order = math.log2(errors[1] / errors[2])
    wanted = study.retrace_order(4)
    assert wanted.order == 5 and abs(order - wanted.order) < wanted.tolerance


@pytest.mark.parametrize("mu", [2.0, 5.0])
def test_the_contraction_of_van_der_pol_is_minus_the_divergence_along_the_solution(mu):
    # ln det dy(T)/dy0 is the integral of the divergence (Liouville).
    def end(start):
        rates = lambda t, y: [y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]]  # noqa: E731
        return solve_ivp(rates, (0, 1), start, "DOP853", rtol=1e-12, atol=1e-14).y[:, -1]

    h = 1e-4
    columns = [(end([2 + h, 0]) - end([2 - h, 0])), (end([2, h]) - end([2, -h]))]
    determinant = np.linalg.det(np.array(columns).T / (2 * h))
    problem = backends.load_problem(f"van_der_pol(mu={mu})", "torch")
    assert study.contraction(problem) == pytest.approx(-math.log(determinant), rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_gradient_costs_is_measured_of_the_adjoint_itself(engine):
    def cost(adjoint, n):
        return measure(engine=engine, adjoint=adjoint, num_steps=n, max_steps=n, costs=True)

    few, many = cost("CheckpointAdjoint", 64), cost("CheckpointAdjoint", 128)
    # A state of two doubles more for each step; PyTorch also keeps what is saved for the mesh.
    assert 64 * 16 <= many["peak_bytes"] - few["peak_bytes"] < 64 * 128
    assert many["gradient_seconds"] > 0
    assert measure(num_steps=8, max_steps=8)["peak_bytes"] is None


def test_a_gradient_that_is_not_finite_has_diverged():
    with pytest.raises(FloatingPointError, match="not finite"):
        measure(problem="slow_fast(K=50)", adjoint="ReversibleAdjoint", dtype="float32")


def test_cells_share_a_compiled_function_unless_costs_are_measured():
    groups = study.cells(study.Settings(steps=(8, 16), adjoints=("GaussAdjoint",)))
    assert [[cell["max_steps"] for cell in group] for group in groups] == [[16, 16]] * 2
    groups = study.cells(study.Settings(steps=(8, 16), adjoints=("GaussAdjoint",), costs=True))
    assert [[cell["max_steps"] for cell in group] for group in groups] == [[8, 16]] * 2


def test_an_engine_may_take_fewer_steps_and_a_definition_makes_a_cell_of_its_own():
    settings = study.Settings(
        steps=(8, 16, 32), most_steps={"contadj": 16}, definitions={"slow_fast(K=20)": "abc"},
        adjoints=("DirectAdjoint",),
    )  # fmt: skip
    ours, theirs = study.cells(settings)
    assert [cell["num_steps"] for cell in ours] == [8, 16]
    assert [cell["num_steps"] for cell in theirs] == [8, 16, 32]
    assert {cell["definition"] for cell in ours + theirs} == {"abc"}


def test_a_misspelt_adjoint_of_a_config_is_an_error_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'GaussAdjoint'"):
        load_study(study="adjoints", adjoints=["gaussAdjoint"])
