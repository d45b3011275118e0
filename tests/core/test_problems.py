"""Problem data against the stated reference values and an integration that shares no code."""

import numpy as np
import pytest
from scipy.integrate import quad, solve_ivp

from contadj.problems import BUILT_IN, Gradient, GradientProblem, problem_data

# L, dL/dy0, dL/dtheta as published with the problems; theta in the order of the sorted names.
REFERENCES = {
    "lin": (
        0.19456082729084975,
        [0.17810927127164713],
        [0.75488169666724292, 0.88008965552775809],
    ),
    "nonaut": (0.78785624983744795, [0.8328721502702594], [2.5508159013849485]),
    "pend": (
        2.5163076029908411,
        [4.0148221024091919, 1.5599533751186352],
        [-3.02072405013184, -0.12226617254457035],
    ),
    "hare_lynx": (
        5.9221244805,
        [-22.791347113, -16.706112314],
        [-54.261453101, -402.53423034, -760.37581799, -38.244574429],
    ),
}


def lin(t, y, p):
    return [p["a"] * y[0] + p["theta"]], [[p["a"]]], [[y[0], 1]]


def nonaut(t, y, p):
    return [np.cos(t) * y[0] + p["theta"]], [[np.cos(t)]], [[1]]


def pend(t, y, p):
    # Third component: the running cost.
    x, v, _ = y
    b, k = p["b"], p["k"]
    f = [v, -b * v - k * np.sin(x), x**2 + 0.1 * v**2]
    f_y = [[0, 1, 0], [-k * np.cos(x), -b, 0], [2 * x, 0.2 * v, 0]]
    return f, f_y, [[0, 0], [-v, -np.sin(x)], [0, 0]]


def hare_lynx(t, y, p):
    eu, ev = np.exp(y)
    f = [p["alpha"] - p["beta"] * ev, -p["gamma"] + p["delta"] * eu]
    f_y = [[0, -p["beta"] * ev], [p["delta"] * eu, 0]]
    return f, f_y, [[1, -ev, 0, 0], [0, 0, eu, -1]]


def forward_sensitivities(field, y0, params, times):
    """States and their derivatives with respect to (y0, theta) at the given times."""
    n, width = len(y0), len(y0) + len(params)

    def augmented(t, z):
        y, s = z[:n], z[n:].reshape(n, width)
        f, f_y, f_p = (np.array(part, float) for part in field(t, y, params))
        return np.concatenate([f, (f_y @ s + np.hstack([np.zeros((n, n)), f_p])).ravel()])

    start = np.concatenate([y0, np.eye(n, width).ravel()])
    z = solve_ivp(
        augmented, (times[0], times[-1]), start, "DOP853", times, rtol=1e-13, atol=1e-13
    ).y.T
    return z[:, :n], z[:, n:].reshape(len(times), n, width)


def integrated_gradient(name):
    data = problem_data(name)
    params = {key: float(data.params[key]) for key in sorted(data.params)}
    if name == "hare_lynx":
        states, s = forward_sensitivities(hare_lynx, data.y0, params, data.observation_times)
        residual = states - data.constants["log_pelts"]
        return np.sum(residual**2), np.einsum("tn,tnw->w", 2 * residual, s), 2
    field, y0 = {"lin": lin, "nonaut": nonaut, "pend": pend}[name], data.y0
    if name == "pend":
        y0 = np.append(y0, 0.0)
    states, s = forward_sensitivities(field, y0, params, [data.t0, data.t1])
    y, s = states[-1], s[-1]
    if name == "pend":
        cost = y[2] + (y[0] - 0.2) ** 2 + y[1] ** 2 / 2
        gradient = np.array([2 * (y[0] - 0.2), y[1], 1.0]) @ s
        return cost, np.delete(gradient, 2), 2
    return (y[0] - 0.3) ** 2, 2 * (y[0] - 0.3) * s[0], 1


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_values_agree_with_forward_sensitivities_by_scipy(name):
    cost, gradient, n = integrated_gradient(name)
    expected_cost, d_y0, d_params = REFERENCES[name]
    # hare_lynx's values have 11 digits; the integration's tolerance is 1e-13 per step.
    tolerance = 3e-10 if name == "hare_lynx" else 2e-11
    np.testing.assert_allclose(cost, expected_cost, rtol=tolerance)
    np.testing.assert_allclose(gradient[:n], d_y0, rtol=tolerance)
    np.testing.assert_allclose(gradient[n:], d_params, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["lin", "nonaut", "pend"])
def test_the_package_states_the_reference_values(name):
    cost, d_y0, d_params = REFERENCES[name]
    gradient = problem_data(name).gradient
    # Closed forms: a few roundings of numbers of size 1.
    np.testing.assert_allclose(gradient.cost, cost, rtol=4e-15)
    np.testing.assert_allclose(gradient.y0, d_y0, rtol=4e-15)
    np.testing.assert_allclose(gradient.params, d_params, rtol=4e-15)


@pytest.mark.parametrize(("name", "rate"), [("lin", lambda t: -0.8), ("nonaut", np.cos)])
def test_closed_form_adjoints_solve_the_adjoint_equation(name, rate):
    data = problem_data(name)
    adjoint = data.adjoint
    np.testing.assert_allclose(adjoint(data.t0), data.gradient.y0, rtol=4e-15)
    for t in np.linspace(data.t0 + 0.01, data.t1 - 0.01, 7):
        derivative = (adjoint(t + 1e-5) - adjoint(t - 1e-5)) / 2e-5
        # Central differences: 1e-10 of truncation and 1e-11 of round-off.
        np.testing.assert_allclose(derivative, -rate(t) * adjoint(t), rtol=1e-8)


def test_the_integral_in_nonaut_agrees_with_adaptive_quadrature():
    integral = quad(lambda s: np.exp(-np.sin(s)), 0, 4, epsabs=1e-12, epsrel=1e-12)[0]
    gradient = problem_data("nonaut").gradient
    np.testing.assert_allclose(gradient.params / gradient.y0, integral, rtol=1e-13)


def test_the_small_network_is_the_stated_one():
    p = problem_data("mlp").params
    assert list(p) == ["W1", "W2", "b1", "b2"]
    assert p["W1"].shape == (4, 2) and p["W2"].shape == (2, 4)
    assert p["W1"][3, 1] == np.sin(1 + 3 + 2)
    assert p["W2"][1, 3] == 0.8 * np.cos(2 - 3)
    np.testing.assert_allclose(p["b1"], [-0.15, -0.05, 0.05, 0.15], atol=1e-16)


def test_hare_and_lynx_is_the_published_table():
    data = problem_data("hare_lynx")
    pelts = np.exp(data.constants["log_pelts"])
    assert pelts.shape == (21, 2)
    np.testing.assert_allclose(pelts[[0, 3, 20]], [[30, 4], [77.4, 35.2], [24.7, 8.6]], rtol=1e-14)
    # Totals of the two columns, added by hand.
    np.testing.assert_allclose(pelts.sum(axis=0), [715.7, 423.5], rtol=1e-12)
    assert data.observation_times == tuple(range(21))


@pytest.mark.parametrize("name", BUILT_IN)
def test_names_of_built_in_problems_are_those_they_are_found_by(name):
    data = problem_data(name)
    assert data.name == name
    assert list(data.params) == sorted(data.params), "flattening sorts the names"


def test_options_of_a_problem_reach_it():
    data = problem_data("slow_fast", K=40.0, t1=2.0)
    assert data.params["K"] == 40 and data.t1 == 2


def test_an_unknown_problem_is_refused_with_the_list_of_those_there_are():
    with pytest.raises(ValueError, match=r"`problem` must be one of lin, nonaut.*got 'linear'"):
        problem_data("linear")


def problem(**changes):
    values = dict(
        name="mine", framework="torch", f=lambda t, y, p: y, y0=1.0, params=None, t0=0.0, t1=2.0,
        terminal_cost=lambda y, p: y,
    )  # fmt: skip
    return GradientProblem(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (dict(framework="numpy"), ValueError, "`framework` must be 'torch' or 'jax', got 'numpy'"),
        (dict(f=3), TypeError, "`f` must be callable, got 3"),
        (dict(f=None), TypeError, "`f` must be callable, got None"),
        (dict(running_cost=1.0), TypeError, "`running_cost` must be callable, got 1.0"),
        (dict(t1=0.0), ValueError, "`t0` < `t1` must be finite, got t0 = 0.0, t1 = 0.0"),
        (dict(t1=np.inf), ValueError, "`t0` < `t1` must be finite"),
        (dict(observation_times=[1.0]), ValueError, "must be given together"),
        (dict(observation_cost=lambda *_: 0), ValueError, "must be given together"),
        (dict(terminal_cost=None), ValueError, "at least one of `terminal_cost`"),
        (
            dict(observation_times=[1.0, 1.0], observation_cost=lambda *_: 0),
            ValueError,
            "`observation_times` must be strictly increasing",
        ),
        (
            dict(observation_times=[1.0, 3.0], observation_cost=lambda *_: 0),
            ValueError,
            r"`observation_times` must lie in \[0.0, 2.0\], got \[1.0, 3.0\]",
        ),
    ],
)
def test_a_bad_problem_is_refused(changes, kind, message):
    assert problem().name == "mine"
    with pytest.raises(kind, match=message):
        problem(**changes)


def test_the_mesh_steps_on_every_observation_time_and_ends_exactly_at_t1():
    mine = problem(observation_times=[0.0, 0.5, 2.0], observation_cost=lambda *_: 0)
    assert mine.breakpoints == (0.0, 0.5, 2.0)
    np.testing.assert_allclose(mine.mesh(2), [0, 0.25, 0.5, 1.25, 2], rtol=1e-15)
    assert mine.mesh(3)[-1] == 2.0 and 0.5 in mine.mesh(3)


def test_a_mesh_of_no_steps_is_refused():
    with pytest.raises(ValueError, match=r"`num_steps` must be at least 1, got 0"):
        problem().mesh(0)


def test_a_gradient_is_flat_in_double_precision():
    gradient = Gradient(np.float32(1.5), 2, np.array([3, 4], np.float32))
    assert gradient.vector.dtype == np.float64
    assert gradient.vector.tolist() == [2, 3, 4] and gradient.cost == 1.5
