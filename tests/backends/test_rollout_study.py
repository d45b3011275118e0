"""The rollout's study: what it measures, held against what shares no code with it."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

from contadj.results import read_records
from contadj.studies import rollout as study

RECORDS = Path(__file__).parents[2] / "experiments" / "results" / "rollout.jsonl"
# PyTorch compiles its formulas for forward mode by what it calls deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
both = pytest.mark.parametrize("framework", ["torch", "jax"])


def twin(framework):
    return importlib.import_module(f"contadj.studies._rollout_{framework}")


@both
def test_the_scalar_example_gives_the_numbers_worked_out_by_hand(framework):
    values = study.measure({"part": "sweep", "framework": framework, "horizon": 3})
    np.testing.assert_allclose(values["states"], [0, 1, 1.9, 2.71], rtol=1e-15)
    np.testing.assert_allclose(values["adjoints"], [1.03518, 1.1502, 1.278, 1.42], rtol=1e-14)
    assert values["cost"] == pytest.approx(0.5041, rel=1e-14)
    assert values["gradient"] == pytest.approx(3.8482, rel=1e-14)
    assert values["difference"] == pytest.approx(3.8482, rel=1e-11)


@both
def test_eight_steps_of_the_scalar_example_agree_with_their_closed_form_and_differences(framework):
    values = study.measure({"part": "sweep", "framework": framework, "horizon": 8})
    last = (1 - 0.9**8) / 0.1
    assert values["gradient"] == pytest.approx(2 * (last - 2) * last, rel=1e-14)
    assert values["difference"] == pytest.approx(values["gradient"], rel=1e-11)
    errors = [values[name] for name in ("states_error", "adjoints_error", "gradient_error")]
    assert max(errors) < 1e-13


@both
@pytest.mark.parametrize(
    ("mode", "work", "error"),
    [("adjoint", 4, 1e-9), ("forward", 3 * 48, 1e-9), ("differences", 48 + 1, 1e-5)],
    ids=["adjoint", "forward", "differences"],
)
def test_a_gradient_is_right_and_takes_the_multiplications_stated(framework, mode, work, error):
    place = {"part": "cost", "framework": framework, "mode": mode}
    values = study.measure({**place, "hidden": 3, "parameters": 48})
    assert values["work"] == work
    assert values["directional_error"] < error


@both
def test_the_matrix_products_of_a_rollout_are_counted_one_by_one(framework):
    module = twin(framework)
    with module.double_precision():
        run = module.NetworkGradient("adjoint", *study.network(3))
        # A row of 8 states times an 8 x 3 and a 3 x 8 matrix, 50 times.
        assert run.multiplications_of_a_rollout == 50 * (8 * 3 + 3 * 8)


def test_every_mode_of_both_frameworks_gives_the_same_gradient():
    found = {}
    for framework in ("torch", "jax"):
        for mode in ("adjoint", "forward", "differences"):
            with twin(framework).double_precision():
                run = twin(framework).NetworkGradient(mode, *study.network(1))
                found[framework, mode] = run.gradient()
    exact = found["torch", "adjoint"]
    size = np.linalg.norm(exact)
    for (_, mode), gradient in found.items():
        error = np.linalg.norm(gradient - exact) / size
        assert error < (1e-5 if mode == "differences" else 1e-13)


@both
@pytest.mark.parametrize("radius", [0.9, 1.0, 1.1])
def test_normal_dynamics_attain_the_bound_of_their_spectral_radius(framework, radius):
    place = {"part": "profile", "framework": framework, "dynamics": "normal", "radius": radius}
    values = study.measure(place)
    np.testing.assert_allclose(values["profile"], values["bound"], rtol=1e-13)
    assert values["error"] < 1e-14


@both
def test_a_shear_exceeds_the_bound_of_its_spectral_radius_and_keeps_that_of_its_norm(framework):
    place = {"part": "profile", "framework": framework, "dynamics": "shear", "radius": 0.9}
    values = study.measure(place)
    profile, bound, of_norm = (
        np.array(values[name]) for name in ("profile", "bound", "bound_of_norm")
    )
    assert values["error"] < 1e-14
    assert np.all(profile[:-1] > bound[:-1]) and np.all(profile <= of_norm * (1 + 1e-14))
    # It grows over the last steps before the cost, backward, and decays before those.
    peak = int(np.argmax(profile))
    assert abs(len(profile) - 1 - peak + 1 / math.log(0.9)) < 3 and profile[peak] > 2 * profile[-1]
    assert profile[0] < profile[peak] / 2


@both
@pytest.mark.parametrize("radius", [0.9, 1.1])
def test_saturated_dynamics_have_the_profile_of_differences_below_the_bound(framework, radius):
    matrix = study.dynamics_matrix("tanh", radius)
    with twin(framework).double_precision():
        by_action, last = twin(framework).action_gradients(matrix, True, 5)

    def cost(actions):
        z = np.ones(4)
        for a in actions:
            z = matrix @ np.tanh(z) + a
        return np.sum((z - 2) ** 2) / 2

    differences = np.zeros((5, 4))
    for place in np.ndindex(5, 4):
        unit = np.zeros((5, 4), complex)
        unit[place] = 1e-30j
        differences[place] = cost(unit).imag / 1e-30
    np.testing.assert_allclose(by_action, differences, rtol=1e-13, atol=1e-15)
    bound = radius ** np.arange(4.0, -1, -1) * np.linalg.norm(last)
    assert np.all(np.linalg.norm(by_action, axis=1) <= bound * (1 + 1e-14))


@both
def test_the_plan_has_the_gradient_of_its_cost(framework):
    actions = np.random.default_rng(0).standard_normal(study.PLAN_HORIZON)
    with twin(framework).double_precision():
        plan = twin(framework).Plan()
        cost, gradient = plan.value_and_gradient(actions)
        angles, speeds = plan.states(actions)

    def by_hand(actions):
        z, paid = (0.0, 0.0), 0.0
        for torque in 0.5 * np.tanh(actions):
            z, paid = study.swing(np.sin, *z, torque), paid + 0.01 * 0.1 * torque**2
        return paid + 1 + np.cos(z[0]) + z[1] ** 2 / 2

    assert cost == pytest.approx(by_hand(actions), rel=1e-13)
    ends = 1 + math.cos(angles[-1]) + speeds[-1] ** 2 / 2
    effort = 0.001 * np.sum((0.5 * np.tanh(actions)) ** 2)
    assert ends + effort == pytest.approx(cost, rel=1e-13)
    unit = 1e-30j * np.eye(len(actions))
    complex_steps = [by_hand(actions + one).imag / 1e-30 for one in unit]
    np.testing.assert_allclose(gradient, complex_steps, rtol=1e-10, atol=1e-14)


def test_the_pendulum_is_swung_up_by_its_action_gradients():
    place = {"part": "planning", "framework": "jax", "optimiser": "L-BFGS", "iterations": 60}
    values = study.measure(place)
    assert values["costs"][0] > 1.9 and values["costs"][-1] < 0.02
    assert np.max(np.abs(values["torques"])) <= study.TORQUE_LIMIT
    # The integration of the torques shares no code with the rollout.
    assert values["integrated_off_upright"] < 0.05 and abs(values["speed"]) < 0.05
    assert values["integration_error"] < 1e-4
    # It swings back before it goes up.
    angles = np.array(values["angles"]) * np.sign(values["angles"][-1])
    assert angles.min() < -0.5 and angles[-1] > 3


def test_what_was_found_is_what_was_expected():
    records = read_records(RECORDS)
    assert {record.status for record in records} == {"ok"}
    planned = [record for record in records if record["part"] == "planning"]
    assert max(record["integration_error"] for record in planned) < 1e-4
    final = {r["optimiser"]: r["costs"][-1] for r in planned if r["framework"] == "torch"}
    assert final["L-BFGS"] < final["Adam"] < final["gradient descent"]
    sweeps = [r for r in records if r["part"] == "cost" and r["mode"] == "adjoint"]
    assert {record["work"] for record in sweeps} == {4.0}
    assert max(record["parameters"] for record in sweeps) >= 10**6
    # Sixty thousand times the parameters, and still a few rollouts of time.
    assert max(record["time"] for record in sweeps) < 30
    found = study.findings(records)
    assert len(found) == 4 + 1 + 6 + 18 + 6
    assert any("32640 multiplications" in line and "255 in one sweep" in line for line in found)
