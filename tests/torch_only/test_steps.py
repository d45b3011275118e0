"""One Runge-Kutta step: its order, its dense output, its stage times, its evaluations."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from contadj.tableaus import TABLEAUS
from contadj.torch import _torchdiffeq, odeint, solve
from contadj.torch._steps import RungeKutta

EXPLICIT = [name for name, tableau in TABLEAUS.items() if tableau.explicit]
T0, T1 = 0.3, 1.9
Y0 = (0.5, -0.4)


def field(t, y):
    """A forced pendulum with a time-dependent quadratic term."""
    x, v = y.unbind(-1)
    return torch.stack(
        [v + 0.3 * torch.sin(2 * t) * x, torch.cos(1.7 * t) * x**2 - torch.sin(x)], -1
    )


@cache
def exact(t):
    """By SciPy, which shares no code with the package; near rounding."""

    def f(t, y):
        return [
            y[1] + 0.3 * np.sin(2 * t) * y[0], np.cos(1.7 * t) * y[0] ** 2 - np.sin(y[0])
        ]  # fmt: skip

    if t == T0:
        return np.array(Y0)
    return solve_ivp(f, (T0, t), Y0, method="DOP853", rtol=1e-13, atol=1e-15).y[:, -1]


def end(method, num_steps, t=(T0, T1)):
    return odeint(
        field, torch.from_numpy(exact(t[0])), torch.tensor(t), method=method,
        options={"num_steps": num_steps},
    )[-1].numpy()  # fmt: skip


@pytest.mark.parametrize("times", [(T0, T1), (T1, T0)], ids=["forward", "backward"])
@pytest.mark.parametrize("method", EXPLICIT)
def test_the_solution_converges_at_the_order_of_the_tableau(method, times):
    order = TABLEAUS[method].order
    pair = (128, 256) if order < 5 else (32, 64) if order < 8 else (4, 8)
    want = exact(times[1])
    coarse, fine = (np.linalg.norm(end(method, n, times) - want) for n in pair)
    # Orders 5 and 8 are met with few steps, before round-off, and not yet asymptotic there.
    assert np.log2(coarse / fine) == pytest.approx(order, abs=0.15 if order < 5 else 0.6)


@pytest.mark.parametrize("method", EXPLICIT)
def test_one_step_is_the_sum_of_the_tableau_written_out(method):
    tableau = TABLEAUS[method]
    t, h, y = 0.7, 0.31, np.array([0.4, -0.2])
    slopes = np.zeros((tableau.stages, 2))
    for i in range(tableau.stages):
        stage = y + h * tableau.a[i] @ slopes
        slopes[i] = field(torch.tensor(t + tableau.c[i] * h), torch.from_numpy(stage)).numpy()
    want = y + h * tableau.b @ slopes
    step = RungeKutta(tableau).take(field, t, t + h, torch.from_numpy(y))
    np.testing.assert_allclose(step.y_next, want, rtol=1e-13)


@pytest.mark.parametrize("method", EXPLICIT)
def test_stage_times_stay_inside_the_step(method):
    generator = np.random.default_rng(2)
    stepper = RungeKutta(TABLEAUS[method])
    for t, t_next in generator.uniform(-1, 1, (300, 2)) * [[1e-3, 1.0]]:
        times = stepper.stage_times(t, t_next, torch.zeros(1)).numpy()
        assert min(t, t_next) <= times.min() and times.max() <= max(t, t_next)


@pytest.mark.parametrize("method", EXPLICIT)
def test_dense_output_has_the_order_it_is_said_to_have(method):
    tableau = TABLEAUS[method]
    # The local error of an interpolant of order q is O(h^(q+1)).
    stepper = RungeKutta(tableau)

    def worst(h):
        y = torch.tensor(Y0)
        errors = []
        for x in (0.25, 0.5, 0.8):
            step = stepper.take(field, T0, T0 + h, y)
            got = stepper.evaluate(field, step, T0 + x * h).numpy()
            errors.append(np.linalg.norm(got - exact(T0 + x * h)))
        return max(errors)

    q = min(tableau.interpolant_order or 3, tableau.order)
    q = q if stepper.interpolates else tableau.order
    # A step may be better than its order here; it may not be worse.
    h = 0.2 if q < 8 else 0.8  # far from round-off
    assert np.log2(worst(h) / worst(h / 2)) > q + 1 - 0.3


@pytest.mark.parametrize("method", EXPLICIT)
def test_dense_output_joins_the_step_at_both_ends(method):
    stepper = RungeKutta(TABLEAUS[method])
    y = torch.tensor(Y0)
    step = stepper.take(field, T0, T0 + 0.2, y)
    np.testing.assert_allclose(stepper.evaluate(field, step, T0), y, rtol=1e-15)
    # The interpolants' printed coefficients sum to `b` within 1e-11 (checked on construction).
    np.testing.assert_allclose(
        stepper.evaluate(field, step, T0 + 0.2), step.y_next, rtol=1e-12
    )  # fmt: skip


@pytest.mark.parametrize("method", EXPLICIT)
def test_many_times_in_one_step_give_what_each_gives_alone(method):
    stepper = RungeKutta(TABLEAUS[method])
    step = stepper.take(field, T0, T0 + 0.2, torch.rand(3, 2, generator=torch.manual_seed(0)))
    times = [T0 + 0.01, T0 + 0.1, T0 + 0.15]
    many = stepper.evaluate_many(field, step, times)
    alone = torch.stack([stepper.evaluate(field, step, t) for t in times])
    torch.testing.assert_close(many, alone, rtol=1e-14, atol=0)


def counted(method, steps, **more):
    calls = []

    def f(t, y):
        calls.append(float(t))
        return field(t, y)

    with torch.no_grad():
        odeint(
            f, torch.tensor(Y0), torch.tensor([T0, T1]), method=method,
            options={"num_steps": steps}, **more,
        )  # fmt: skip
    return calls


@pytest.mark.parametrize("method", EXPLICIT)
def test_a_fixed_mesh_evaluates_f_as_often_as_the_tableau_says(method):
    tableau = TABLEAUS[method]
    # A carried-over last stage is evaluated once per step, but never after the last one.
    expected = 7 * tableau.evaluations
    assert len(counted(method, 7)) == expected


@pytest.mark.parametrize("method", EXPLICIT)
def test_a_step_agrees_with_torchdiffeqs_where_it_has_the_method(method):
    if method not in _torchdiffeq.METHODS:
        pytest.skip(f"torchdiffeq has no {method}")
    y0, t = torch.tensor(Y0), torch.tensor([T0, T1])
    ours, theirs = (
        odeint(field, y0, t, method=method, options={"num_steps": 8}, engine=engine)
        for engine in ("contadj", "torchdiffeq")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def test_an_implicit_tableau_makes_no_explicit_step():
    with pytest.raises(ValueError, match="`method` must be explicit here, got the implicit"):
        RungeKutta(TABLEAUS["gl4"])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["step_size", "mesh"])
def test_an_observation_one_rounding_away_from_a_step_time_is_that_step(kind, reverse):
    # 3 * 0.1 is 0.30000000000000004: neither a step of 4e-17 nor an interpolation in between.
    t, step_times = torch.tensor([0.0, 0.3, 1.0]).double(), [n * 0.1 for n in range(10)] + [1.0]
    if reverse:
        t, step_times = t.flip(0), step_times[::-1]
    options = {"step_size": 0.1} if kind == "step_size" else {"mesh": step_times}
    calls = []

    def f(t, y):
        calls.append(float(t))
        return -y

    y0 = torch.ones(1, dtype=torch.float64)
    solution = solve(f, y0, t, method="midpoint", options=options)
    assert len(calls) == 2 * 10 and solution.stats.steps_accepted == 10
    factor = 1 - 0.1 + 0.005 if not reverse else 1 + 0.1 + 0.005
    torch.testing.assert_close(solution.ys[1], y0 * factor ** (7 if reverse else 3))
