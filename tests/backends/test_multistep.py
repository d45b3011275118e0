"""Methods with a history: gradients, lambda_n and multipliers, in both backends.

What they are held against is written here in NumPy, coefficients included: a solve that can be
disturbed at one step, so that lambda_n and the multipliers are central differences.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from contadj.backends import load_problem
from contadj.jax import _study as jax_study
from contadj.multistep import METHODS, MULTISTEP
from contadj.orders import ALONG, QUANTITIES, expected_order
from contadj.torch import _study as torch_study

STUDIES = {"torch": torch_study, "jax": jax_study}
HERE = Path(__file__).parent
OWN = {framework: f"{HERE}/own_{framework}.py:problem" for framework in STUDIES}
BACKENDS = list(STUDIES)
FEW = ("ab3", "bdf2", "reversible_heun")  # on a second problem; the rest is slow
MAX_STEPS = 512


@cache
def function(backend, problem, method, adjoint):
    made = load_problem(OWN[backend] if problem == "own" else problem, backend)
    return STUDIES[backend].gradient_function(
        made, method=method, adjoint=adjoint, max_steps=MAX_STEPS
    )


@cache
def measured(backend, problem, method, adjoint, num_steps):
    return function(backend, problem, method, adjoint)(num_steps)


# y_{n+1} = a.(y_n, y_{n-1}, ...) + h b.(f_n, f_{n-1}, ...) + h b_next f_{n+1}
FORMULAS = {
    "ab2": ([1], [1.5, -0.5], 0),
    "ab3": ([1], [23 / 12, -4 / 3, 5 / 12], 0),
    "ab4": ([1], [55 / 24, -59 / 24, 37 / 24, -3 / 8], 0),
    "am3": ([1], [2 / 3, -1 / 12], 5 / 12),
    "am4": ([1], [19 / 24, -5 / 24, 1 / 24], 3 / 8),
    "bdf2": ([4 / 3, -1 / 3], [], 2 / 3),
    "bdf3": ([18 / 11, -9 / 11, 2 / 11], [], 6 / 11),
    "leapfrog": ([0, 1], [2], 0),
}


def rk4(f, t, y, h):
    k1 = f(t, y)
    k2 = f(t + h / 2, y + h / 2 * k1)
    k3 = f(t + h / 2, y + h / 2 * k2)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(t + h, y + h * k3))


def numpy_steps(method, f, y, times):
    """Yields a function from a residual to y_{n+1}, and is sent y_{n+1}: one interval."""
    h = times[1] - times[0]
    if method == "reversible_heun":
        z = y
        for t in times[:-1]:
            slope = f(t, z)
            z = 2 * y - z + h * slope
            mean = (slope + f(t + h, z)) / 2
            y = yield lambda r, y=y, mean=mean: y + h * mean + r
        return
    a, b, b_next = FORMULAS[method]
    ys, fs = [y], [f(times[0], y)]
    for n, t in enumerate(times[:-1]):
        if n + 1 < max(len(a), len(b)):
            y = yield lambda r, t=t: rk4(f, t, ys[0], h) + r
        else:
            known = sum(w * x for w, x in zip(a, ys, strict=False))
            known = known + h * sum(w * x for w, x in zip(b, fs, strict=False))

            def solved(r, t=t, known=known):
                x = ys[0]
                for _ in range(60 if b_next else 1):  # a contraction, h |f_y| < 1
                    x = known + r + h * b_next * f(t + h, x)
                return x

            y = yield solved
        ys.insert(0, y)
        fs.insert(0, f(t + h, y))


def numpy_cost(problem, method, num_steps, *, y0=(1.0, 0.5), params=None, at=(), by=None, how=""):
    """The cost, with y_n (`how` = "state") or the residual of the step to t_n disturbed."""
    if problem == "own":
        points, p = [0.0, 0.7, 1.5, 3.0], [0.3, 0.8, 1.7, 2.0] if params is None else params
        force = lambda t, x, v: p[1] * np.cos(p[2] * t) - p[3] * np.sin(x) - p[0] * v  # noqa: E731
        running = lambda x, v: 0.0  # noqa: E731
    else:
        points, p = [0.0, 3.0], [0.3, 2.0] if params is None else params
        force = lambda t, x, v: -p[0] * v - p[1] * np.sin(x)  # noqa: E731
        running = lambda x, v: x**2 + 0.1 * v**2  # noqa: E731

    def f(t, z):
        x, v, _ = z
        return np.array([v, force(t, x, v), running(x, v)])

    def disturbed(z, n, kind):
        return z + np.append(by, 0.0) if (how, n) == (kind, at) else z

    z, n, cost = disturbed(np.array([*y0, 0.0]), 0, "state"), 0, 0.0
    for i, (start, end) in enumerate(pairwise(points)):
        steps = numpy_steps(method, f, z, np.linspace(start, end, num_steps + 1))
        take = next(steps)
        for k in range(num_steps):
            n += 1
            z = disturbed(take(disturbed(np.zeros(3), n, "residual")), n, "state")
            if k < num_steps - 1:
                take = steps.send(z)
        if problem == "own":
            cost += (z[0] - 0.1 * (i + 1)) ** 2 + 0.5 * z[1] ** 2
    if problem == "own":
        return cost
    return z[2] + (z[0] - 0.2) ** 2 + 0.5 * z[1] ** 2


def central(function, size, eps=1e-4):
    """Central differences with one extrapolation: the error is O(eps^4)."""

    def slope(unit, eps):
        return (function(eps * unit) - function(-eps * unit)) / (2 * eps)

    return np.array([(4 * slope(u, eps) - slope(u, 2 * eps)) / 3 for u in np.eye(size)])


def each(problem, methods=METHODS, now=METHODS):
    marks = [pytest.param(problem, m, marks=() if m in now else pytest.mark.slow) for m in methods]
    return [pytest.param(*p.values, marks=p.marks, id="-".join(p.values)) for p in marks]


CASES = pytest.mark.parametrize(("problem", "method"), each("pend") + each("own", now=FEW))
ON_BOTH = pytest.mark.parametrize("backend", BACKENDS)
STEPS = {"pend": 12, "own": 6}  # per interval; lambda jumps and methods start afresh in between


@CASES
@ON_BOTH
def test_lambda_n_is_the_derivative_by_y_n_with_the_history_held_fixed(backend, problem, method):
    n = STEPS[problem]
    got = measured(backend, problem, method, "DirectAdjoint", n).adjoint
    want = [
        central(lambda by, at=at: numpy_cost(problem, method, n, at=at, by=by, how="state"), 2)
        for at in range(len(got))
    ]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 * np.abs(want).max())


@CASES
@ON_BOTH
def test_a_multiplier_is_the_derivative_by_the_residual_of_its_step(backend, problem, method):
    n = STEPS[problem]
    got = measured(backend, problem, method, "DirectAdjoint", n).multipliers
    if method == "reversible_heun":
        assert got is None
        return
    scale = 2 if method == "leapfrog" else sum(FORMULAS[method][1]) + FORMULAS[method][2]
    want = scale * np.array([
        central(lambda by, at=at: numpy_cost(problem, method, n, at=at, by=by, how="residual"), 2)
        for at in range(1, len(got) + 1)
    ])  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 * np.abs(want).max())


@CASES
@ON_BOTH
def test_cost_and_gradient_are_those_of_the_numpy_solve(backend, problem, method):
    n = STEPS[problem]
    got = measured(backend, problem, method, "DirectAdjoint", n).gradient
    p = np.array([0.3, 0.8, 1.7, 2.0] if problem == "own" else [0.3, 2.0])
    assert got.cost == pytest.approx(numpy_cost(problem, method, n), rel=1e-13)
    y0 = np.array([1.0, 0.5])
    d_y0 = central(lambda by: numpy_cost(problem, method, n, y0=y0 + by), 2)
    d_p = central(lambda by: numpy_cost(problem, method, n, params=p + by), len(p))
    want = np.concatenate([d_y0, d_p])
    np.testing.assert_allclose(got.vector, want, rtol=0, atol=1e-9 * np.abs(want).max())


@pytest.mark.parametrize("adjoint", ["DirectAdjoint", "BacksolveAdjoint"])
@CASES
def test_the_backends_agree_in_every_number(problem, method, adjoint):
    n = STEPS[problem]
    ours, theirs = (measured(backend, problem, method, adjoint, n) for backend in BACKENDS)
    np.testing.assert_array_equal(ours.mesh, theirs.mesh)
    assert ours.gradient.cost == pytest.approx(theirs.gradient.cost, rel=1e-13)
    a, b = ours.gradient.vector, theirs.gradient.vector
    assert np.linalg.norm(a - b) <= 1e-13 * np.linalg.norm(b)
    if adjoint == "DirectAdjoint":
        assert np.abs(ours.adjoint - theirs.adjoint).max() <= 1e-13 * np.abs(theirs.adjoint).max()
    else:
        assert ours.reversal_error == pytest.approx(theirs.reversal_error, rel=1e-9)
    if adjoint == "DirectAdjoint" and method in MULTISTEP:
        a, b = ours.multipliers, theirs.multipliers
        assert np.abs(a - b).max() <= 1e-13 * np.abs(b).max()
    if method not in MULTISTEP or MULTISTEP[method].explicit:
        assert ours.f_evaluations_forward == theirs.f_evaluations_forward
        assert ours.f_evaluations_backward == theirs.f_evaluations_backward


@pytest.mark.parametrize("method", ["bdf2", "leapfrog"])
def test_numbers_are_in_double_precision_where_jax_is_left_at_its_default(method):
    with jax.enable_x64(False):
        got = function("jax", "pend", method, "DirectAdjoint")(12)
    want = measured("torch", "pend", method, "DirectAdjoint", 12)
    for a, b in ((got.adjoint, want.adjoint), (got.multipliers, want.multipliers)):
        assert np.abs(a - b).max() <= 1e-13 * np.abs(b).max()


@cache
def reference(problem):
    return measured("jax", problem, "dopri8", "DirectAdjoint", MAX_STEPS)


def errors(problem, method, num_steps):
    """Every quantity of `contadj.orders` at one number of steps, absolute."""
    exact = reference(problem)
    discrete, continuous = (
        measured("jax", problem, method, adjoint, num_steps)
        for adjoint in ("DirectAdjoint", "BacksolveAdjoint")
    )
    gradients = [one.gradient.vector for one in (discrete, continuous, exact)]
    adjoint = exact.adjoint[:: MAX_STEPS // num_steps]
    along = np.linalg.norm(discrete.adjoint - adjoint, axis=1)
    middle = slice(num_steps // 4, 3 * num_steps // 4 + 1)
    found = {
        "discrete": np.linalg.norm(gradients[0] - gradients[2]),
        "continuous": np.linalg.norm(gradients[1] - gradients[2]),
        "gap": np.linalg.norm(gradients[0] - gradients[1]),
        "adjoint": along.max(),
        "adjoint_interior": along[middle].max(),
    }
    if discrete.multipliers is not None:
        # The first multipliers belong to the starting steps.
        multipliers = np.vstack([adjoint[:1], discrete.multipliers])
        along = np.linalg.norm(multipliers - adjoint, axis=1)
        found["multiplier"] = along[MULTISTEP[method].steps :].max()
        found["multiplier_interior"] = along[middle].max()
    return found


@pytest.mark.parametrize("quantity", [*QUANTITIES, *ALONG])
@pytest.mark.parametrize(("problem", "method"), each("pend") + each("driven", now=("ab4", "bdf3")))
def test_every_quantity_has_the_stated_order(problem, method, quantity):
    expected = expected_order(method, quantity)
    coarse, fine = (errors(problem, method, n) for n in (256, 512))
    if expected is None:
        assert method == "reversible_heun" and quantity not in fine
        return
    order = np.log2(coarse[quantity] / fine[quantity])
    assert order == pytest.approx(expected.order, abs=expected.tolerance)


@pytest.mark.parametrize(("method", "ratio"), [("bdf2", 3 / 2), ("bdf3", 11 / 6)])
@pytest.mark.parametrize("problem", ["pend", "driven"])
def test_lambda_n_of_bdf_tends_to_a_multiple_of_lambda_at_first_order(problem, method, ratio):
    exact = reference(problem).adjoint

    def off(num_steps):
        got = measured("jax", problem, method, "DirectAdjoint", num_steps).adjoint
        middle = slice(num_steps // 4, 3 * num_steps // 4 + 1)
        want = ratio * exact[:: MAX_STEPS // num_steps]
        return np.abs(got - want)[middle].max() / np.abs(want).max()

    assert off(512) < 0.02
    assert np.log2(off(256) / off(512)) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("method", FEW)
@ON_BOTH
def test_one_interval_shorter_than_the_history_is_the_starting_method(backend, method):
    got = measured(backend, "own", method, "DirectAdjoint", 1)
    assert got.gradient.cost == pytest.approx(numpy_cost("own", method, 1), rel=1e-13)
    if method != "reversible_heun":
        starter = measured(backend, "own", "rk4_classic", "DirectAdjoint", 1)
        np.testing.assert_allclose(got.adjoint, starter.adjoint, rtol=1e-13)


@ON_BOTH
def test_an_adjoint_that_takes_one_state_per_step_is_refused(backend):
    with pytest.raises(ValueError, match=r"`adjoint` must be DirectAdjoint or BacksolveAdjoint"):
        function(backend, "pend", "ab2", "CheckpointAdjoint")


@ON_BOTH
def test_a_solution_that_is_no_longer_finite_is_told_with_its_step(backend):
    study = STUDIES[backend]
    problem = study.builtin_problem("van_der_pol", mu=500.0)
    measure = study.gradient_function(problem, method="ab2", adjoint="DirectAdjoint", max_steps=16)
    with pytest.raises(FloatingPointError, match=r"not finite at t = 0\.\d+, after step \d+ of 16"):
        measure(16)


def test_each_engine_lists_the_methods_that_it_can_step():
    for study, engine in ((torch_study, "contadj"), (jax_study, "diffrax")):
        assert set(METHODS) <= set(study.methods(engine))
    assert not set(METHODS) & set(torch_study.methods("torchdiffeq"))
