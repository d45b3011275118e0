"""Orders of convergence of every method and quantity, reference values, and injected mistakes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from contadj import GradientProblem
from contadj.orders import expected_order
from contadj.problems import BUILT_IN
from contadj.tableaus import TABLEAUS, Tableau
from contadj.torch._study import (
    adjoints,
    builtin_problem,
    describe_device,
    gradient_function,
    methods,
    versions,
)
from contadj.torch.adjoints._reverse import AdjointSystem, ReverseSolve

# The implicit ones have tests of their own.
METHODS = tuple(name for name in methods("contadj") if name in TABLEAUS and TABLEAUS[name].explicit)
QUANTITIES = ("discrete", "continuous", "gap", "adjoint")
# Few steps reach round-off at order 5 and 8. The error constant of tsit5 is far below that of its
# next order, so that its errors still fall like a mixture there; dopri8's do on pend (8.98).
PAIRS = {
    "tsit5": (32, 64), "dopri5": (32, 64), "dopri8": (8, 16),
    # Leading terms nearly cancel: 3.5, 4.6, then 4.9.
    ("nonaut", "dopri5", "gap"): (64, 128),
}  # fmt: skip
BOUNDS = {"tsit5": (4.6, 7.8), "dopri8": (7.6, 9.2)}
# On scalar affine problems there is no gap in y0 and an additive parameter (nonaut has no other).
NO_GAP = ("heun2", "rk4", "rk4_classic")


@cache
def measured(problem, method, adjoint, num_steps):
    return gradient_function(builtin_problem(problem), method=method, adjoint=adjoint)(num_steps)


def reference(problem):
    return measured(problem, "dopri8", "DirectAdjoint", 256)


def error(problem, method, quantity, num_steps, measure=measured):
    exact = reference(problem)
    if quantity == "continuous":
        got = measure(problem, method, "BacksolveAdjoint", num_steps).gradient.vector
        return np.linalg.norm(got - exact.gradient.vector)
    discrete = measure(problem, method, "DirectAdjoint", num_steps)
    if quantity == "discrete":
        return np.linalg.norm(discrete.gradient.vector - exact.gradient.vector)
    if quantity == "gap":
        other = measure(problem, method, "BacksolveAdjoint", num_steps)
        return np.linalg.norm(other.gradient.vector - discrete.gradient.vector)
    want = exact.adjoint[:: 256 // num_steps]
    return np.max(np.linalg.norm(discrete.adjoint - want, axis=1))


def order(problem, method, quantity, pair, measure=measured):
    coarse, fine = (error(problem, method, quantity, n, measure) for n in pair)
    return np.log2(coarse / fine)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("problem", ["nonaut", "pend", "driven", "mlp", "lin"])
def test_every_quantity_converges_at_its_stated_order(problem, method, quantity):
    if problem == "nonaut" and quantity == "gap" and method in NO_GAP:
        assert error(problem, method, "gap", 16) < 1e-13 * np.linalg.norm(
            reference(problem).gradient.vector
        )
        return
    pair = PAIRS.get((problem, method, quantity), PAIRS.get(method, (128, 256)))
    if problem == "lin" and method == "dopri8":
        pair = (4, 8)  # already at round-off with 16 steps, and one order better before
        assert order(problem, method, quantity, pair) > 7.6
        return
    found = order(problem, method, quantity, pair)
    if method in BOUNDS:
        low, high = BOUNDS[method]
        assert low < found < high
    else:
        expected = expected_order(method, quantity)
        assert found == pytest.approx(expected.order, abs=expected.tolerance)


@pytest.mark.parametrize("adjoint", adjoints())
@pytest.mark.parametrize("problem", ["lin", "nonaut", "pend"])
def test_the_reference_gradients_are_reproduced(problem, adjoint):
    exact = BUILT_IN[problem]().gradient
    got = measured(problem, "dopri8", adjoint, 128).gradient
    np.testing.assert_allclose(got.cost, exact.cost, rtol=1e-13)
    np.testing.assert_allclose(got.vector, exact.vector, rtol=2e-12)


@pytest.mark.parametrize("adjoint", adjoints())
def test_the_mlp_gradient_is_that_of_the_table(adjoint):
    got = measured("mlp", "dopri8", adjoint, 128).gradient
    np.testing.assert_allclose(got.cost, 4.0799093974856708, rtol=1e-13)
    np.testing.assert_allclose(got.y0, [11.235094924475975, 1.8628006667359749], rtol=1e-12)
    np.testing.assert_allclose(got.params[0], 3.7546798922124509, rtol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(got.params), 18.064733740425876, rtol=1e-12)


@pytest.mark.parametrize("adjoint", adjoints())
def test_hare_and_lynx_give_the_reference_gradient(adjoint):
    got = measured("hare_lynx", "dopri8", adjoint, 8).gradient
    np.testing.assert_allclose(got.cost, 5.9221244805, rtol=1e-10)
    np.testing.assert_allclose(got.y0, [-22.791347113, -16.706112314], rtol=1e-10)
    # alphabetical: alpha, beta, delta, gamma
    want = [-54.261453101, -402.53423034, -760.37581799, -38.244574429]
    np.testing.assert_allclose(got.params, want, rtol=1e-10)


@pytest.mark.parametrize("problem", ["lin", "nonaut"])
def test_lambda_at_every_step_is_the_closed_form(problem):
    exact = BUILT_IN[problem]().adjoint
    got = measured(problem, "dopri8", "DirectAdjoint", 64)
    want = np.stack([exact(t) for t in got.mesh])
    np.testing.assert_allclose(got.adjoint, want, rtol=1e-11)


def test_the_gradient_in_y0_is_lambda_at_the_first_step():
    for method in ("heun2", "dopri5"):
        got = measured("hare_lynx", method, "DirectAdjoint", 8)
        np.testing.assert_allclose(got.adjoint[0], got.gradient.y0, rtol=1e-12)


def test_reversal_errors_have_the_order_of_the_method_or_one_more_where_it_is_even():
    for method, expected in (("euler", 1), ("heun2", 3), ("heun3", 3), ("rk4", 5)):
        coarse, fine = (
            measured("pend", method, "BacksolveAdjoint", n).reversal_error for n in (64, 128)
        )
        assert np.log2(coarse / fine) == pytest.approx(expected, abs=0.2)


def test_evaluations_are_stages_times_steps():
    for method in METHODS:
        per_step = TABLEAUS[method].evaluations
        got = measured("pend", method, "BacksolveAdjoint", 32)
        # A first-same-as-last stage is evaluated afresh at the first step only, never at the end.
        assert got.f_evaluations_forward == 32 * per_step
        # One more looks whether f is still the function it was.
        assert got.f_evaluations_backward == 32 * per_step + 1


# Injected mistakes: each must be seen by the checks above.


def measure_with(method="rk4_classic"):
    return lambda problem, _, adjoint, n: gradient_function(
        builtin_problem(problem), method=method, adjoint=adjoint
    )(n)


def test_a_wrong_node_in_a_tableau_is_seen_on_a_problem_that_depends_on_time(monkeypatch):
    wrong = Tableau.__new__(Tableau)  # the constructor would refuse it
    for name, value in vars(TABLEAUS["rk4_classic"]).items():
        object.__setattr__(wrong, name, value)
    object.__setattr__(wrong, "c", np.array([0, 0.5, 0.55, 1.0]))
    monkeypatch.setitem(TABLEAUS, "rk4_classic", wrong)
    assert order("nonaut", "rk4_classic", "discrete", (64, 128), measure_with()) < 1.5
    # Without explicit time nothing would be noticed.
    assert order("mlp", "rk4_classic", "discrete", (64, 128), measure_with()) > 3.8


def test_a_wrong_node_is_refused_on_construction():
    with pytest.raises(ValueError, match="the row sums of `a` must equal the nodes `c`"):
        replace(TABLEAUS["rk4_classic"], c=np.array([0, 0.5, 0.55, 1.0]))


def test_a_dropped_jump_at_the_observations_is_seen(monkeypatch):
    want = measured("hare_lynx", "rk4", "DirectAdjoint", 16).gradient.vector
    got = measured("hare_lynx", "rk4", "BacksolveAdjoint", 16).gradient.vector
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    jump = ReverseSolve._jump

    def last_only(self, i):
        if i == len(self.integration.times) - 1:
            jump(self, i)

    monkeypatch.setattr(ReverseSolve, "_jump", last_only)
    broken = gradient_function(
        builtin_problem("hare_lynx"), method="rk4", adjoint="BacksolveAdjoint"
    )(16).gradient.vector
    assert np.linalg.norm(broken - want) > 0.1 * np.linalg.norm(want)


def test_a_flipped_sign_in_the_adjoint_equation_is_seen(monkeypatch):
    want = measured("pend", "rk4", "DirectAdjoint", 64).gradient.vector
    pull = AdjointSystem.pull

    def flipped(self, *arguments, **more):
        slope, grads = pull(self, *arguments, **more)
        return slope, [-grads[0], *grads[1:]]

    monkeypatch.setattr(AdjointSystem, "pull", flipped)
    broken = gradient_function(builtin_problem("pend"), method="rk4", adjoint="BacksolveAdjoint")(
        64
    ).gradient.vector
    assert np.linalg.norm(broken - want) > 0.1 * np.linalg.norm(want)


# The study's seam: names, refusals, precision.


def problem_with(**change):
    arguments = {
        "f": lambda t, y, p: -y, "y0": np.ones(2), "params": {},
        "terminal_cost": lambda y, p: y.sum(),
    } | change  # fmt: skip
    f, y0, params = (arguments.pop(k) for k in ("f", "y0", "params"))
    return GradientProblem("broken", "torch", f, y0, params, 0.0, 1.0, **arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y0": np.array([1, 2])}, TypeError, "`y0` must be floating point, got"),
        ({"f": lambda t, y, p: y[:1]}, TypeError, "`func` must return the structure and shapes"),
        ({"f": lambda t, y, p: y.float()}, TypeError, "`func` must return the dtype of y0"),
        ({"f": lambda t, y, p: {"y": y}}, TypeError, "`func` must return a tensor like y0"),
    ],
    ids=["integer state", "shape", "dtype", "structure"],
)
def test_a_broken_problem_raises_and_names_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        gradient_function(problem_with(**change), method="rk4", adjoint="DirectAdjoint")(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "rk5"}, "`method` must be one of euler"),
        ({"adjoint": "Direct"}, "`adjoint` must be one of DirectAdjoint"),
        ({"engine": "diffrax"}, "`engine` must be one of contadj, torchdiffeq"),
        ({"dtype": "int8"}, "`dtype` must be one of float64"),
        ({"device": "cuda:99"}, "`device` 'cuda:99' is not there for PyTorch; it has cpu"),
        ({"device": "gpu"}, "`device` 'gpu' is not there for PyTorch; it has cpu"),
    ],
)
def test_an_unknown_name_raises_with_the_names_there_are(change, message):
    arguments = {"method": "rk4", "adjoint": "DirectAdjoint"} | change
    with pytest.raises(ValueError, match=message):
        gradient_function(problem_with(), **arguments)


def test_a_problem_of_the_other_framework_is_refused_by_name():
    problem = GradientProblem(
        "foreign", "jax", lambda t, y, p: y, np.ones(1), {}, 0.0, 1.0,
        terminal_cost=lambda y, p: y.sum(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="'foreign' is written in jax"):
        gradient_function(problem, method="rk4", adjoint="DirectAdjoint")


def test_a_solution_that_stops_being_finite_is_reported_with_its_time_and_step():
    problem = problem_with(f=lambda t, y, p: torch.where(t >= 0.5, torch.nan, -y))
    measure = gradient_function(problem, method="euler", adjoint="DirectAdjoint")
    with pytest.raises(
        FloatingPointError, match=r"not finite at t = 0.5, in step 2 from t = 0.5 to 0.75"
    ):
        measure(4)


@pytest.mark.parametrize("engine", ["contadj", "torchdiffeq"])
@pytest.mark.parametrize("adjoint", ["DirectAdjoint", "BacksolveAdjoint"])
def test_a_cost_at_observation_times_makes_lambda_jump_there(adjoint, engine):
    # y' = 0: lambda(t) is the sum of the later weights; nested params, a nested state.
    weights = [1.0, 10.0, 100.0]
    problem = GradientProblem(
        "steps", "torch", lambda t, y, p: {"a": 0 * y["a"], "b": 0 * y["b"]},
        {"a": np.zeros(1), "b": np.ones((1, 1))}, {"deep": (np.array([2.0]), {"k": np.array(3.0)})},
        0.0, 2.0, observation_times=(0.0, 0.5, 2.0),
        observation_cost=lambda i, t, y, p: weights[i] * y["b"].sum() * p["deep"][1]["k"],
    )  # fmt: skip
    got = gradient_function(problem, method="rk4", adjoint=adjoint, engine=engine)(4)
    np.testing.assert_allclose(got.mesh, [0, 0.125, 0.25, 0.375, 0.5, 0.875, 1.25, 1.625, 2])
    np.testing.assert_allclose(got.gradient.y0, [0, 333])
    np.testing.assert_allclose(got.gradient.params, [0, 111])
    np.testing.assert_allclose(got.gradient.cost, 333)
    if adjoint == "DirectAdjoint":
        np.testing.assert_allclose(got.adjoint[:, 0], 0)
        np.testing.assert_allclose(
            got.adjoint[:, 1], [333, 330, 330, 330, 330, 300, 300, 300, 300]
        )  # fmt: skip


def test_the_running_cost_is_integrated_with_the_weights_of_the_method():
    # y' = 1 from 0, cost t y = t^2 over [0, 1]: Heun's weights are the trapezoid rule, 1/3 + h^2/6.
    problem = problem_with(
        f=lambda t, y, p: torch.ones_like(y), y0=np.zeros(1), terminal_cost=None,
        running_cost=lambda t, y, p: t * y[0],
    )  # fmt: skip
    got = gradient_function(problem, method="heun2", adjoint="DirectAdjoint")(4)
    np.testing.assert_allclose(got.gradient.cost, 1 / 3 + 1 / 96, rtol=1e-14)
    np.testing.assert_allclose(got.gradient.y0, [0.5], rtol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.2)])
def test_a_lower_precision_gives_the_same_gradient_to_its_precision(dtype, tolerance):
    steps = 64 if dtype == "float32" else 16
    got = gradient_function(
        builtin_problem("pend"), method="rk4", adjoint="DirectAdjoint", dtype=dtype
    )(steps)
    want = measured("pend", "rk4", "DirectAdjoint", steps).gradient.vector
    # Rounding errors of every step, grown by the solution's own sensitivity of about 4.
    assert np.linalg.norm(got.gradient.vector - want) < tolerance * np.linalg.norm(want)
    assert not np.array_equal(got.gradient.vector, want)


def test_the_study_runs_on_the_device_it_is_asked_for(device):
    got = gradient_function(
        builtin_problem("pend"), method="rk4", adjoint="CheckpointAdjoint", device=str(device)
    )(32)
    want = measured("pend", "rk4", "DirectAdjoint", 32).gradient.vector
    np.testing.assert_allclose(got.gradient.vector, want, rtol=1e-12)


def test_the_study_does_not_change_the_problem_it_is_given():
    problem = builtin_problem("mlp")
    before = {name: value.copy() for name, value in problem.params.items()}
    gradient_function(problem, method="rk4", adjoint="DirectAdjoint")(4)
    for name, value in problem.params.items():
        np.testing.assert_array_equal(value, before[name])


def test_a_module_as_vector_field_contributes_its_parameters_by_sorted_name():
    class Field(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.b = torch.nn.Parameter(torch.tensor([2.0]))
            self.a = torch.nn.Parameter(torch.tensor([-0.5]))

        def forward(self, t, y, p):
            return self.a * y + self.b

    problem = problem_with(f=Field(), y0=np.ones(1))
    got = gradient_function(problem, method="dopri8", adjoint="BacksolveAdjoint")(32).gradient
    a, b, e = -0.5, 2.0, np.exp(-0.5)
    # y(1) = e + b (e - 1) / a.
    d_a = e + b * (a * e - (e - 1)) / a**2
    np.testing.assert_allclose(got.params, [d_a, (e - 1) / a], rtol=1e-12)


def test_the_study_says_what_it_ran_on():
    assert set(versions()) == {"torch", "torchdiffeq"}
    assert describe_device("cpu") == "cpu"
    assert {"DirectAdjoint", "CheckpointAdjoint", "BacksolveAdjoint"} <= set(adjoints())
    assert "scipy_solver" not in methods("torchdiffeq") and "gl4" in methods("contadj")
