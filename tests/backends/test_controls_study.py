"""The study of control gradients: its statements, its reference, its twins, and what it shows."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp

import contadj.torch as ct
from contadj.orders import observed_order
from contadj.results import RecordFile
from contadj.studies import controls
from contadj.studies._run import StudyCells
from contadj.tableaus import get_tableau

STATED = {
    "heun2": [2, 2],
    "rk4_classic": [3, 2, 2, 4],
    "rk4": [2, 2, 2, 4],
    "gl4": [3, 3],
    "radauIIA3": [2, 2],
    "trapezoid": [1, 1],
    "ralston": [1, 1],
    "bosh3": [1, 1, 1, None],
    "sdirk2": [1, 1],
    "midpoint": [None, 1],
    "heun3": [1, None, 1],
    "dopri5": [2, None, 2, 2, 2, 5, None],
}


@pytest.mark.parametrize("method", STATED)
def test_the_conditions_on_a_tableau_give_the_orders_stated_stage_by_stage(method):
    tableau = get_tableau(method)
    orders = [controls.stage_order(tableau, i) for i in range(tableau.stages)]
    assert orders == STATED[method]


def pendulum(t, y, u):
    x, v, _ = y
    return np.array([v, -0.3 * v - 2 * np.sin(x) + u, x**2 + 0.1 * v**2 + 0.05 * u**2])


def total(y):
    x, v, cost = y
    return cost + (x - 0.2) ** 2 + v**2 / 2


def test_the_exact_gradient_is_the_derivative_of_the_cost_along_a_change_of_the_torque():
    def change(t):
        return np.exp(-t) * np.sin(5 * t)

    def cost(eps):
        def f(t, y):
            return pendulum(t, y, 0.8 * np.cos(2 * t) + eps * change(t))

        return total(solve_ivp(f, (0, 3), [1, 0.5, 0], rtol=1e-12, atol=1e-12).y[:, -1])

    integral, _ = quad(lambda t: controls.exact_gradient(t) * change(t), 0, 3, epsabs=1e-12)
    difference = (cost(1e-3) - cost(-1e-3)) / 2e-3
    assert difference == pytest.approx(integral, rel=1e-6)


def own_cost(tableau, h, u):
    """The cost by an explicit method, in NumPy; u has a value per step and stage."""
    y = np.array([1.0, 0.5, 0.0])
    for values in u:
        k = np.zeros((tableau.stages, 3))
        for i in range(tableau.stages):
            k[i] = pendulum(0.0, y + h * tableau.a[i] @ k, values[i])
        y = y + h * tableau.b @ k
    return total(y)


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("method", ["midpoint", "rk4_classic"])
def test_the_gradient_of_each_stage_value_is_its_difference_quotient(backend, method):
    tableau, h, eps = get_tableau(method), 0.3, 1e-5
    u = np.random.default_rng(0).normal(size=(10, tableau.stages))
    _, gradients = controls.sweep(backend, tableau, h, u[:, None, :])
    for n, i in [(0, 0), (4, tableau.stages - 1), (9, 0)]:
        unit = np.zeros_like(u)
        unit[n, i] = eps
        quotient = (own_cost(tableau, h, u + unit) - own_cost(tableau, h, u - unit)) / (2 * eps)
        assert gradients[n, 0, i] == pytest.approx(quotient, rel=1e-7, abs=1e-9), (n, i)


@pytest.mark.parametrize("method", ["heun3", "sdirk2", "gl4"])
def test_both_backends_give_the_same_gradients(method):
    tableau = get_tableau(method)
    u = np.random.default_rng(1).normal(size=(8, 2, tableau.stages))
    ours, theirs = (controls.sweep(name, tableau, 0.25, u) for name in ("torch", "jax"))
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one - other).max() < 1e-13 * np.abs(one).max()


@pytest.mark.parametrize("method", ["heun2", "rk4_classic"])
def test_the_gradient_per_step_is_that_of_a_held_control_of_the_package(method):
    tableau, knots = get_tableau(method), np.linspace(0, 3, 13)
    u = controls.torque(knots[:-1])
    _, gradients = controls.sweep("torch", tableau, 0.25, np.tile(u[:, None, None], tableau.stages))
    values = torch.tensor(u, requires_grad=True)
    solution = ct.solve(
        lambda t, y, u: torch.stack([y[1], -0.3 * y[1] - 2 * torch.sin(y[0]) + u]),
        torch.tensor([1.0, 0.5]).double(),
        torch.tensor([0.0, 3.0]).double(),
        method=method,
        options={"mesh": knots},
        control=ct.Control(knots, values, kind="hold"),
        running_cost=lambda t, y, u: y[0] ** 2 + 0.1 * y[1] ** 2 + 0.05 * u**2,
    )
    x, v = solution.ys[-1]
    (solution.cost + (x - 0.2) ** 2 + v**2 / 2).backward()
    assert values.grad.numpy() == pytest.approx(gradients[:, 0].sum(axis=1), rel=1e-13)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    settings = controls.Settings(
        study="controls",
        backends=("torch",),
        methods=("midpoint", "rk4_classic"),
        steps=(16, 32, 64),
        traced=("midpoint",),
        traced_steps=(64,),
    )
    with RecordFile(tmp_path_factory.mktemp("controls") / "records.jsonl") as file:
        return StudyCells("controls", settings).run(file)


@pytest.mark.parametrize(
    ("method", "quantity", "order"),
    [
        ("rk4_classic", "held_start", 1),
        ("rk4_classic", "held_middle", 2),
        ("rk4_classic", "nodal", 4),
        ("rk4_classic", "nodal_held_start", 1),
        ("rk4_classic", "nodal_held_middle", 2),
        ("rk4_classic", "stage_1", 3),
        ("rk4_classic", "stage_2", 2),
        ("rk4_classic", "stage_3", 2),
        ("rk4_classic", "stage_4", 4),
        ("midpoint", "nodal", 2),
        ("midpoint", "unweighted_1", 1),
        ("midpoint", "stage_2", 1),
    ],
)
def test_a_short_study_shows_the_order(records, method, quantity, order):
    expected = controls.expected(method, quantity)
    assert expected.order == order
    line = controls.line(controls.series(records)["torch", method], quantity)
    assert observed_order(*line, expected).order == pytest.approx(order, abs=0.15)


def test_no_quotient_is_formed_where_the_weight_is_zero(records):
    (one,) = [r for r in records if r["method"] == "midpoint" and r.cell["num_steps"] == 16]
    assert "stage_1" not in one.values and "unweighted_1" in one.values
    assert controls.expected("midpoint", "stage_1") is None
    findings = controls.findings(records)
    assert "no quotient is formed where the weight is zero: midpoint stage 1" in findings


def test_the_gradient_of_values_at_the_stage_times_of_midpoint_saws_between_none_and_twice(records):
    (trace,) = controls.finest_traces(records)
    low, high = controls.saw(trace)
    assert low == pytest.approx(0, abs=0.12) and high == pytest.approx(2, abs=0.12)
    assert trace["weight"] == pytest.approx([0, 2] * 64)
