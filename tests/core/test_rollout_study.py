"""The framework-free parts of the rollout's study: counted products, closed forms, the pendulum."""

import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from contadj.studies import rollout as study
from contadj.studies.rollout import (
    DAMPING,
    STEP,
    TORQUE_LIMIT,
    CountingFloat,
    by_products,
    by_sweep,
    count_multiplications,
    linearised_rollout,
    minimise,
    scalar_solution,
    swing,
    swung,
)


@pytest.mark.parametrize("horizon", [1, 2, 3, 8, 33])
def test_products_on_their_own_take_half_of_h_times_h_minus_one_and_a_sweep_h_minus_one(horizon):
    counted = count_multiplications(horizon)
    assert counted["products"] == sum(range(horizon))
    assert counted["sweep"] == horizon - 1
    assert counted["difference"] == 0


def test_a_counting_number_counts_each_multiplication_and_keeps_its_value():
    CountingFloat.multiplications = 0
    product = CountingFloat(2.5) * CountingFloat(3.0) * 2.0
    assert product == 15.0 and CountingFloat.multiplications == 2


@pytest.mark.parametrize("way", [by_products, by_sweep])
def test_both_ways_give_the_derivatives_of_the_rollout_in_its_actions(way):
    horizon = 6

    def cost(actions):
        x = 1.0
        for a in actions:
            x = np.sin(x) + a
        return x**2

    unit = np.eye(horizon)
    start = np.full(horizon, 0.5)
    expected = [cost(start + 1e-30j * unit[t]).imag / 1e-30 for t in range(horizon)]
    np.testing.assert_allclose(way(*linearised_rollout(horizon)), expected, rtol=1e-14)


@pytest.mark.parametrize("horizon", [1, 3, 8])
def test_the_closed_form_of_the_scalar_example_is_its_recursion(horizon):
    x = [0.0]
    for _ in range(horizon):
        x.append(0.9 * x[-1] + 1.0)
    adjoints = [2 * (x[-1] - 2.0)]
    for _ in range(horizon):
        adjoints.insert(0, 0.9 * adjoints[0])
    states, found, gradient = scalar_solution(horizon)
    np.testing.assert_allclose(states, x, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(found, adjoints, rtol=1e-13)
    assert gradient == pytest.approx(sum(adjoints[1:]), rel=1e-13)


def test_the_matrices_of_the_profile_have_their_spectral_radius_and_only_the_shear_exceeds_it():
    for radius in (0.9, 1.1):
        normal, shear = (study.dynamics_matrix(name, radius) for name in ("normal", "shear"))
        for matrix in (normal, shear):
            assert max(abs(np.linalg.eigvals(matrix))) == pytest.approx(radius, rel=1e-7)
        assert np.linalg.norm(normal, 2) == pytest.approx(radius, rel=1e-14)
        assert np.linalg.norm(shear, 2) == pytest.approx(radius * (1 + math.sqrt(5)) / 2, rel=1e-14)


def test_a_step_of_the_pendulum_has_a_local_error_of_the_fifth_order():
    def error(step, monkeypatch):
        monkeypatch.setattr(study, "STEP", step)
        exact = solve_ivp(
            lambda t, y: (y[1], 0.4 - math.sin(y[0]) - DAMPING * y[1]),
            (0, step), (1.0, 0.5), method="DOP853", rtol=1e-13, atol=1e-15,
        ).y[:, -1]  # fmt: skip
        return np.linalg.norm(np.subtract(swing(math.sin, 1.0, 0.5, 0.4), exact))

    with pytest.MonkeyPatch.context() as monkeypatch:
        ratio = error(0.4, monkeypatch) / error(0.2, monkeypatch)
    assert math.log2(ratio) == pytest.approx(5, abs=0.3)


def test_the_pendulum_under_torques_is_integrated_as_its_small_swings_have_it():
    torque, damping = 1e-4, DAMPING / 2
    frequency, t = math.sqrt(1 - damping**2), 3.0
    decay = math.exp(-damping * t)
    wave = math.cos(frequency * t) + damping / frequency * math.sin(frequency * t)
    angle, speed = swung(np.full(round(t / STEP), torque))
    assert angle == pytest.approx(torque * (1 - decay * wave), rel=1e-7)
    assert speed == pytest.approx(torque * decay * math.sin(frequency * t) / frequency, rel=1e-7)


@pytest.mark.parametrize(("torque", "over"), [(TORQUE_LIMIT, False), (0.9, True)], ids=str)
def test_a_steady_push_gets_the_pendulum_over_only_where_its_work_suffices(torque, over):
    assert (torque > max((1 - np.cos(s)) / s for s in np.linspace(0.1, math.pi, 999))) == over
    angle = speed = 0.0
    reached = []
    for _ in range(400):
        angle, speed = swing(math.sin, angle, speed, torque)
        reached.append(angle)
    assert (max(reached) > math.pi) == over


@pytest.mark.parametrize("optimiser", ["gradient descent", "Adam", "L-BFGS"])
def test_an_optimiser_finds_the_minimum_of_a_quadratic(optimiser, monkeypatch):
    monkeypatch.setitem(study.RATES, "gradient descent", 0.4)
    scale, centre = np.array([1.0, 2.0]), np.array([0.3, -0.4])

    def value_and_gradient(x):
        return float(scale @ (x - centre) ** 2) / 2, scale * (x - centre)

    start = np.zeros(2)
    costs, found = minimise(value_and_gradient, start, optimiser, 300)
    np.testing.assert_allclose(found, centre, atol=1e-5)
    assert costs[0] == value_and_gradient(np.zeros(2))[0]
    assert costs[-1] == pytest.approx(value_and_gradient(found)[0], abs=1e-15) and not start.any()
