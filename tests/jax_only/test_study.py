"""The study's gradients: orders of convergence, reference values, Taylor tests, wrong input."""

import gc
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contadj import TABLEAUS, GradientProblem
from contadj.jax._study import (
    adjoints,
    builtin_problem,
    describe_device,
    gradient_function,
    methods,
    versions,
)
from contadj.orders import expected_order
from contadj.problems import BUILT_IN

METHODS = [name for name in methods("diffrax") if name in TABLEAUS and TABLEAUS[name].explicit]
SWEPT = ("DirectAdjoint", "BacksolveAdjoint")  # with lambda at every step
# The finest pair above round-off, (64, 128) where not said otherwise. Where leading terms
# nearly cancel, the order shows further out.
PAIRS = {
    ("dopri8", None): (8, 16),
    ("tsit5", None): (32, 64),
    ("midpoint", "continuous"): (512, 1024),
    ("midpoint", "gap"): (512, 1024),
    ("ralston", "continuous"): (512, 1024),
    ("rk4_classic", "continuous"): (256, 512),
}
# Not yet asymptotic where float64 still resolves the error: bounds instead of a value. The error
# constant of tsit5 is far below that of its next order, and dopri8 takes 16 steps to round-off.
EARLY = {"tsit5": (4.6, 7.8), "dopri8": (7.6, 9.2)}
# On an affine scalar problem these have no gap in y0 and an additive parameter.
NO_GAP = ("heun2", "rk4", "rk4_classic")


@cache
def function(problem, method, adjoint):
    return gradient_function(
        builtin_problem(problem), method=method, adjoint=adjoint, max_steps=1024
    )


@cache
def measured(problem, method, adjoint, num_steps):
    return function(problem, method, adjoint)(num_steps)


@cache
def reference(problem):
    return measured(problem, "dopri8", "DirectAdjoint", 512)


def error(problem, method, quantity, num_steps):
    exact = reference(problem)
    discrete = measured(problem, method, "DirectAdjoint", num_steps)
    if quantity == "discrete":
        return np.linalg.norm(discrete.gradient.vector - exact.gradient.vector)
    if quantity == "adjoint":
        stride = 512 // num_steps if num_steps <= 512 else None
        want = exact.adjoint[::stride] if stride else None
        got = discrete.adjoint if stride else discrete.adjoint[:: num_steps // 512]
        return np.max(np.linalg.norm(got - (exact.adjoint if want is None else want), axis=1))
    continuous = measured(problem, method, "BacksolveAdjoint", num_steps)
    other = exact if quantity == "continuous" else discrete
    return np.linalg.norm(continuous.gradient.vector - other.gradient.vector)


@pytest.mark.parametrize("quantity", ["discrete", "continuous", "gap", "adjoint"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("problem", ["nonaut", "pend", "mlp"])
def test_every_quantity_converges_at_its_stated_order(problem, method, quantity):
    pair = PAIRS.get((method, quantity), PAIRS.get((method, None), (64, 128)))
    coarse, fine = (error(problem, method, quantity, n) for n in pair)
    if problem == "nonaut" and quantity == "gap" and method in NO_GAP:
        assert fine < 1e-13 * np.linalg.norm(reference(problem).gradient.vector)
        return
    order = np.log2(coarse / fine)
    if method in EARLY:
        low, high = EARLY[method]
        assert low < order < high
    else:
        expected = expected_order(method, quantity)
        assert order == pytest.approx(expected.order, abs=expected.tolerance)


@pytest.mark.parametrize("adjoint", SWEPT)
@pytest.mark.parametrize("problem", ["lin", "nonaut", "pend"])
def test_the_reference_gradients_are_reproduced(problem, adjoint):
    exact = BUILT_IN[problem]().gradient
    got = measured(problem, "dopri8", adjoint, 512).gradient
    np.testing.assert_allclose(got.cost, exact.cost, rtol=1e-13)
    np.testing.assert_allclose(got.vector, exact.vector, rtol=1e-12)


# The last two are limited by the steps of dopri5 and its dense output, of order 4.
@pytest.mark.parametrize(
    ("adjoint", "method", "rtol"),
    [
        ("CheckpointAdjoint", "dopri8", 1e-12),
        ("ForwardSensitivity", "dopri8", 1e-12),
        ("ReversibleAdjoint", "dopri8", 1e-11),
        ("InterpolatingAdjoint", "dopri5", 1e-7),
        ("GaussAdjoint", "dopri5", 1e-7),
    ],
)
@pytest.mark.parametrize("problem", ["pend", "hare_lynx"])
def test_every_other_adjoint_reaches_the_reference_gradient(problem, adjoint, method, rtol):
    n = {"pend": 128, "hare_lynx": 16}[problem]
    exact = measured(problem, "dopri8", "DirectAdjoint", n).gradient
    got = gradient_function(builtin_problem(problem), method=method, adjoint=adjoint, max_steps=n)(
        n
    )
    np.testing.assert_allclose(got.gradient.cost, exact.cost, rtol=rtol)
    np.testing.assert_allclose(got.gradient.vector, exact.vector, rtol=rtol)
    assert got.adjoint is None


def test_every_adjoint_that_diffrax_is_given_is_in_the_study():
    assert set(adjoints()) == {
        "DirectAdjoint", "CheckpointAdjoint", "BacksolveAdjoint", "ReversibleAdjoint",
        "InterpolatingAdjoint", "GaussAdjoint", "ForwardSensitivity",
    }  # fmt: skip


@pytest.mark.parametrize("adjoint", ["CheckpointAdjoint", "ForwardSensitivity"])
def test_the_discrete_adjoints_agree_to_rounding_on_every_mesh(adjoint):
    run = gradient_function(builtin_problem("mlp"), method="bosh3", adjoint=adjoint, max_steps=64)
    for n in (3, 16, 64):
        want = measured("mlp", "bosh3", "DirectAdjoint", n).gradient.vector
        np.testing.assert_allclose(run(n).gradient.vector, want, rtol=1e-12, atol=1e-13)


def test_a_gradient_function_lets_its_program_go():
    """Kept programs would end a study of some hundred gradients in a crash of XLA."""
    client = jax.devices()[0].client
    problem = builtin_problem("pend")
    seen = []
    for n in (5, 6, 7):
        run = gradient_function(problem, method="heun2", adjoint="CheckpointAdjoint", max_steps=n)
        run(n)
        while_held = len(client.live_executables())
        del run
        gc.collect()
        seen.append((while_held, len(client.live_executables())))
    assert seen[2] == seen[1], "the number of programs grows"
    assert seen[2][0] == seen[2][1] + 1, "the program of the gradient was not among those counted"


def test_the_mlp_gradient_is_that_of_the_table():
    got = measured("mlp", "dopri8", "DirectAdjoint", 512).gradient
    np.testing.assert_allclose(got.cost, 4.0799093974856708, rtol=1e-13)
    np.testing.assert_allclose(got.y0, [11.235094924475975, 1.8628006667359749], rtol=1e-12)
    np.testing.assert_allclose(got.params[0], 3.7546798922124509, rtol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(got.params), 18.064733740425876, rtol=1e-12)


def test_hare_and_lynx_with_costs_at_the_years_give_the_reference_gradient():
    for adjoint in SWEPT:
        got = gradient_function(
            builtin_problem("hare_lynx"), method="dopri8", adjoint=adjoint, max_steps=8
        )(8).gradient
        np.testing.assert_allclose(got.cost, 5.9221244805, rtol=1e-10)
        np.testing.assert_allclose(got.y0, [-22.791347113, -16.706112314], rtol=1e-10)
        # alphabetical: alpha, beta, delta, gamma
        want = [-54.261453101, -402.53423034, -760.37581799, -38.244574429]
        np.testing.assert_allclose(got.params, want, rtol=1e-10)


@pytest.mark.parametrize("problem", ["lin", "nonaut"])
def test_lambda_at_every_step_is_the_closed_form(problem):
    exact = BUILT_IN[problem]().adjoint
    for adjoint in SWEPT:
        got = measured(problem, "dopri8", adjoint, 64)
        want = np.stack([exact(t) for t in got.mesh])
        np.testing.assert_allclose(got.adjoint, want, rtol=1e-11)


@pytest.mark.parametrize("problem", ["pend", "mlp", "slow_fast", "van_der_pol"])
def test_the_discrete_gradient_passes_a_taylor_remainder_test(problem):
    # |J(p + e v) - J(p) - e g.v| is O(e^2), with J evaluated by the same method at other data.
    base = builtin_problem(problem)
    gradient = function(problem, "rk4", "DirectAdjoint")(16).gradient
    rng = np.random.default_rng(1)
    v_y, v_p = rng.normal(size=gradient.y0.shape), rng.normal(size=gradient.params.shape)

    def cost(e):
        leaves, structure = jax.tree.flatten(base.params)
        moved, k = [], 0
        for x in leaves:
            moved.append(x + e * v_p[k : k + x.size].reshape(x.shape))
            k += x.size
        shifted = GradientProblem(
            "shifted", "jax", base.f, base.y0 + e * v_y, jax.tree.unflatten(structure, moved),
            base.t0, base.t1, terminal_cost=base.terminal_cost, running_cost=base.running_cost,
        )  # fmt: skip
        return gradient_function(shifted, method="rk4", adjoint="DirectAdjoint", max_steps=16)(
            16
        ).gradient.cost

    slope = gradient.y0 @ v_y + gradient.params @ v_p
    remainders = [abs(cost(e) - gradient.cost - e * slope) for e in (1e-3, 5e-4)]
    assert np.log2(remainders[0] / remainders[1]) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("adjoint", ["DirectAdjoint", "BacksolveAdjoint"])
def test_a_cost_at_observation_times_makes_lambda_jump_there(adjoint):
    # y' = 0: y stays y0, and lambda(t) = sum of the later weights; nested params, a pytree state.
    weights = jnp.array([1.0, 10.0, 100.0])
    problem = GradientProblem(
        "steps", "jax", lambda t, y, p: {"a": 0 * y["a"], "b": 0 * y["b"]},
        {"a": np.zeros(1), "b": np.ones((1, 1))}, {"deep": (np.array([2.0]), {"k": np.array(3.0)})},
        0.0, 2.0, observation_times=(0.0, 0.5, 2.0),
        observation_cost=lambda i, t, y, p: weights[i] * jnp.sum(y["b"]) * p["deep"][1]["k"],
    )  # fmt: skip
    got = gradient_function(problem, method="rk4", adjoint=adjoint, max_steps=4)(4)
    np.testing.assert_allclose(got.mesh, [0, 0.125, 0.25, 0.375, 0.5, 0.875, 1.25, 1.625, 2])
    np.testing.assert_allclose(got.adjoint[:, 0], 0)
    np.testing.assert_allclose(got.adjoint[:, 1], [333, 330, 330, 330, 330, 300, 300, 300, 300])
    np.testing.assert_allclose(got.gradient.params, [0, 111])
    np.testing.assert_allclose(got.gradient.cost, 333)


def test_the_running_cost_is_integrated_with_the_weights_of_the_method():
    # y' = 1 from 0, cost t y = t^2 over [0, 1]: Heun's weights are the trapezoid rule, 1/3 + h^2/6.
    problem = GradientProblem(
        "quadrature", "jax", lambda t, y, p: jnp.ones_like(y), np.zeros(1), {}, 0.0, 1.0,
        running_cost=lambda t, y, p: t * y[0],
    )  # fmt: skip
    got = gradient_function(problem, method="heun2", adjoint="DirectAdjoint", max_steps=4)(4)
    np.testing.assert_allclose(got.gradient.cost, 1 / 3 + 1 / 96, rtol=1e-14)
    # dJ/dy0 = int t dt, which the trapezoid rule gets exactly.
    np.testing.assert_allclose(got.gradient.y0, [0.5], rtol=1e-14)


def test_float32_gives_the_same_gradient_to_its_precision():
    got = gradient_function(
        builtin_problem("pend"), method="rk4", adjoint="DirectAdjoint", dtype="float32",
        max_steps=64,
    )(64)  # fmt: skip
    want = measured("pend", "rk4", "DirectAdjoint", 64)
    # 64 steps of rounding errors of 6e-8, grown by the solution's own sensitivity of about 4.
    np.testing.assert_allclose(got.gradient.vector, want.gradient.vector, rtol=2e-5)
    assert not np.array_equal(got.gradient.vector, want.gradient.vector)


def test_evaluations_are_counted_and_the_reversal_error_is_measured():
    got = measured("pend", "rk4", "BacksolveAdjoint", 64)
    assert (got.f_evaluations_forward, got.f_evaluations_backward) == (256, 256)
    assert 0 < got.reversal_error < 1e-6
    assert measured("pend", "rk4", "DirectAdjoint", 64).reversal_error is None
    finer = measured("pend", "rk4", "BacksolveAdjoint", 128).reversal_error
    # Retracing a step of even order p leaves O(h^(p+1)).
    assert np.log2(got.reversal_error / finer) == pytest.approx(5, abs=0.2)


def test_one_function_serves_every_number_of_steps_without_compiling_again():
    measure = gradient_function(
        builtin_problem("lin"), method="euler", adjoint="DirectAdjoint", max_steps=32
    )
    measure(32)
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *a, **k: compiles.append(name) if "backend_compile" in name else None
    )
    costs = [measure(n).gradient.cost for n in (1, 7, 31)]
    assert compiles == []
    assert len(set(costs)) == 3


def problem_with(**change):
    arguments = {
        "f": lambda t, y, p: -y, "y0": np.ones(2), "params": {},
        "terminal_cost": lambda y, p: jnp.sum(y),
    } | change  # fmt: skip
    f, y0, params = (arguments.pop(k) for k in ("f", "y0", "params"))
    return GradientProblem("broken", "jax", f, y0, params, 0.0, 1.0, **arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y0": np.array([1, 2])}, TypeError, "`y0` must be floating point"),
        ({"f": lambda t, y, p: y[:1]}, TypeError, "`f` must return"),
        ({"f": lambda t, y, p: y.astype(jnp.float32)}, TypeError, "`f` must return"),
        ({"f": lambda t, y, p: {"y": y}}, TypeError, "`f` must return"),
        ({"terminal_cost": lambda y, p: y}, TypeError, "`terminal_cost` must return a scalar"),
        (
            {
                "observation_times": (0.5,),
                "observation_cost": lambda i, t, y, p: np.ones(3)[i] * y[0],
            },
            TypeError,
            "`observation_cost` must take `i` as a traced int32",
        ),
    ],
    ids=["integer state", "shape", "dtype", "structure", "vector cost", "numpy index"],
)
def test_a_broken_problem_raises_and_names_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        gradient_function(
            problem_with(**change), method="rk4", adjoint="DirectAdjoint", max_steps=4
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "rk5"}, "`method`"),
        ({"adjoint": "Direct"}, "`adjoint` must be one of DirectAdjoint"),
        ({"engine": "torchdiffeq"}, "`engine` must be one of diffrax"),
        ({"dtype": "float16"}, "`dtype`"),
        ({"device": "cuda:9"}, "`device` 'cuda:9' is not there"),
        ({"max_steps": 0}, "`max_steps`"),
    ],
)
def test_an_unknown_name_raises_with_the_names_there_are(change, message):
    arguments = {"method": "rk4", "adjoint": "DirectAdjoint", "max_steps": 4} | change
    with pytest.raises(ValueError, match=message):
        gradient_function(problem_with(), **arguments)


def test_a_problem_of_the_other_framework_is_refused_by_name():
    problem = GradientProblem(
        "foreign", "torch", lambda t, y, p: y, np.ones(1), {}, 0.0, 1.0,
        terminal_cost=lambda y, p: y.sum(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="'foreign' is written in torch"):
        gradient_function(problem, method="rk4", adjoint="DirectAdjoint", max_steps=4)


def test_a_solution_that_stops_being_finite_is_reported_with_its_time_and_step():
    # y' = nan from t = 0.5 on; euler's step 2 -> 3 of 4 is the first that sees it.
    problem = problem_with(f=lambda t, y, p: jnp.where(t >= 0.5, jnp.nan, -y))
    measure = gradient_function(problem, method="euler", adjoint="DirectAdjoint", max_steps=4)
    with pytest.raises(FloatingPointError, match=r"at t = 0.75, after step 3 of 4"):
        measure(4)


def test_the_study_says_what_it_ran_on():
    assert set(versions()) == {"jax", "jaxlib", "diffrax", "equinox"}
    assert describe_device("cpu").startswith("cpu:0")
