"""The study of tolerances: its references, its prediction, and what it claims on a small grid."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from contadj.studies import tolerance

TIGHT, LOOSE = 1e-8, 1e-3


def measure(problem, adjoint, method, at):
    return tolerance.measure(
        {"problem": problem, "adjoint": adjoint, "method": method, "tolerance": at}
    )


def test_the_reference_of_balance_is_the_matrix_exponential():
    _, gradient = tolerance.reference("balance")
    expected = expm(5 * np.array([[1.0, -1.0], [-1.0, 1.0]]))[0]
    np.testing.assert_allclose(gradient, expected, rtol=1e-13)


def test_the_reference_of_driven_is_the_slope_of_the_cost():
    def cost(inputs):
        b, g, k = inputs[2:]
        end = solve_ivp(
            lambda t, y: [y[1], -b * y[1] - k * np.sin(y[0]) + g * np.cos(2 * t)],
            (0, 3), inputs[:2], "DOP853", rtol=1e-13, atol=1e-14,
        ).y[:, -1]  # fmt: skip
        return (end[0] - 0.2) ** 2 + end[1] ** 2 / 2

    _, gradient = tolerance.reference("driven")
    point, h = np.array([1.0, 0.5, 0.3, 0.8, 2.0]), 1e-3
    unit = np.eye(5) * h
    # Fourth-order central differences: error about h^4 and 1e-13 / h.
    slopes = [
        (8 * (cost(point + e) - cost(point - e)) - cost(point + 2 * e) + cost(point - 2 * e))
        / (12 * h)
        for e in unit
    ]
    np.testing.assert_allclose(gradient, slopes, atol=1e-9)


@pytest.mark.parametrize(
    ("adjoint", "method"),
    [
        ("contadj.torch.CheckpointAdjoint", "dopri5"),
        ("contadj.torch.CheckpointAdjoint", "tsit5"),
        ("diffrax.RecursiveCheckpointAdjoint", "tsit5"),
    ],
    ids=["torch dopri5", "torch tsit5", "Diffrax Tsit5"],
)
def test_the_discrete_gradient_of_a_constant_solution_is_the_predicted_wrong_one(adjoint, method):
    loose, tight = (measure("balance", adjoint, method, at) for at in (LOOSE, TIGHT))
    assert loose["state_error"] == tight["state_error"] == 0.0
    predicted = tolerance.expected_ratio(adjoint, method)
    np.testing.assert_allclose([loose["ratio"], tight["ratio"]], predicted, rtol=1e-6)
    assert predicted < 0.4


def test_a_solver_that_interpolates_beyond_the_end_is_wrong_by_hundreds():
    found = [measure("balance", "torchdiffeq.odeint", "dopri8", at) for at in (LOOSE, TIGHT)]
    assert found[0]["ratio"] == pytest.approx(found[1]["ratio"], rel=1e-9)
    assert 300 < found[0]["ratio"] < 1000


@pytest.mark.parametrize("problem", tolerance.PROBLEMS)
@pytest.mark.parametrize(
    ("adjoint", "method"),
    [
        ("contadj.torch.BacksolveAdjoint", "dopri5"),
        ("contadj.torch.GaussAdjoint", "tsit5"),
        ("torchdiffeq.odeint_adjoint", "dopri5"),
        ("contadj.jax.GaussAdjoint", "tsit5"),
    ],
    ids=["torch backsolve", "torch Gauss", "torchdiffeq", "JAX Gauss"],
)
def test_a_continuous_gradient_follows_its_own_tolerance(problem, adjoint, method):
    assert measure(problem, adjoint, method, TIGHT)["error"] < 10 * TIGHT


@pytest.mark.parametrize(
    ("adjoint", "method"),
    [("contadj.torch.CheckpointAdjoint", "dopri5"), ("contadj.jax.CheckpointAdjoint", "tsit5")],
    ids=["torch", "JAX"],
)
def test_on_a_generic_problem_the_discrete_gradient_follows_the_tolerance(adjoint, method):
    coarse, fine = (measure("driven", adjoint, method, at)["error"] for at in (1e-4, TIGHT))
    assert np.log(coarse / fine) / np.log(1e-4 / TIGHT) == pytest.approx(1, abs=0.25)


def test_an_adjoint_that_the_study_does_not_know_is_an_error():
    with pytest.raises(ValueError, match=r"must be of contadj\.torch\.CheckpointAdjoint"):
        tolerance.Settings(study="tolerance", adjoints=("torch.BacksolveAdjoint",))
