"""Implicit steps: their orders, their equations, the implicit function theorem, and refusals."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from contadj.orders import expected_order
from contadj.tableaus import TABLEAUS
from contadj.torch import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
    SolveError,
    implicit_step,
    odeint,
    rollout,
    rollout_adjoint,
    solve,
)
from contadj.torch._field import StateLayout
from contadj.torch._implicit import stepper
from contadj.torch._study import builtin_problem, gradient_function

METHODS = tuple(name for name, tableau in TABLEAUS.items() if not tableau.explicit)
# One solved stage by stage, one as a whole; with and without an explicit stage or an interpolant.
SOME = ("implicit_midpoint", "trbdf2", "radauIIA5", "gl4")
SELF_ADJOINT = ("implicit_midpoint", "gl4", "gl6")
PAIRS = {"implicit_euler": (64, 128), "radauIIA5": (8, 16), "gl6": (4, 8)}


@cache
def measured(problem, method, adjoint, num_steps):
    return gradient_function(builtin_problem(problem), method=method, adjoint=adjoint)(num_steps)


def error(problem, method, quantity, num_steps):
    exact = measured(problem, "dopri8", "DirectAdjoint", 128)
    if quantity == "continuous":
        got = measured(problem, method, "BacksolveAdjoint", num_steps).gradient.vector
        return np.linalg.norm(got - exact.gradient.vector)
    discrete = measured(problem, method, "DirectAdjoint", num_steps)
    if quantity == "discrete":
        return np.linalg.norm(discrete.gradient.vector - exact.gradient.vector)
    if quantity == "gap":
        other = measured(problem, method, "BacksolveAdjoint", num_steps)
        return np.linalg.norm(other.gradient.vector - discrete.gradient.vector)
    want = exact.adjoint[:: 128 // num_steps]
    return np.max(np.linalg.norm(discrete.adjoint - want, axis=1))


# Orders.


@pytest.mark.parametrize("quantity", ["discrete", "continuous", "adjoint"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("problem", ["nonaut", "pend", "mlp"])
def test_every_quantity_converges_at_the_order_of_the_method(problem, method, quantity):
    pair = PAIRS.get(method, (16, 32))
    if (method, quantity) == ("gl6", "adjoint"):
        pair = (8, 16)  # a maximum over few steps still grows with their number
    coarse, fine = (error(problem, method, quantity, n) for n in pair)
    expected = expected_order(method, quantity)
    assert np.log2(coarse / fine) == pytest.approx(expected.order, abs=0.3)


@pytest.mark.parametrize("num_steps", [4, 32])
@pytest.mark.parametrize("method", SELF_ADJOINT)
@pytest.mark.parametrize("problem", ["nonaut", "pend", "mlp"])
def test_backsolve_equals_bptt_where_the_method_is_symplectic_and_symmetric(
    problem, method, num_steps
):
    scale = np.linalg.norm(measured(problem, method, "DirectAdjoint", num_steps).gradient.vector)
    assert error(problem, method, "gap", num_steps) < 5e-14 * scale
    assert measured(problem, method, "BacksolveAdjoint", num_steps).reversal_error < 5e-14


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(SELF_ADJOINT)))
def test_backsolve_differs_from_bptt_where_it_is_not(method):
    pair = PAIRS.get(method, (16, 32))
    coarse, fine = (error("pend", method, "gap", n) for n in pair)
    assert np.log2(coarse / fine) == pytest.approx(TABLEAUS[method].order, abs=0.3)


def test_the_trapezoid_rule_retraces_the_state_but_has_a_gap_of_order_two():
    for problem in ("pend", "mlp"):
        coarse, fine = (error(problem, "trapezoid", "gap", n) for n in (16, 32))
        assert np.log2(coarse / fine) == pytest.approx(2.0, abs=0.1)
        assert measured(problem, "trapezoid", "BacksolveAdjoint", 32).reversal_error < 5e-14


# The equations that a step solves.


def layout_of(y):
    return StateLayout(y)


@pytest.mark.parametrize("method", METHODS)
def test_the_stages_satisfy_their_equations_to_rounding(method):
    tableau = TABLEAUS[method]
    y = torch.tensor([1.0, 0.5])

    def f(t, y):
        return torch.stack([y[1] * torch.cos(t), -2 * torch.sin(y[0]) - 0.3 * y[1] ** 3])

    step = stepper(tableau, None, layout_of(y)).take(f, 0.3, 0.7, y)
    k = torch.stack(step.slopes)
    for i in range(tableau.stages):
        stage = y + 0.4 * (torch.tensor(tableau.a[i]) @ k)
        torch.testing.assert_close(step.stages[i], stage, rtol=1e-15, atol=1e-15)
        want = f(torch.tensor(0.3 + 0.4 * tableau.c[i]), stage)
        torch.testing.assert_close(k[i], want, rtol=5e-15, atol=5e-15)


@pytest.mark.parametrize("method", METHODS)
def test_linear_problems_take_the_stability_function_and_its_derivative(method):
    # y1 = R(h A) y0, R(z) = 1 + z b^T (1 - z a)^{-1} e; dL/dA by perturbing the closed form.
    tableau, h = TABLEAUS[method], 0.5
    s = tableau.stages

    def advance(matrix):
        system = np.eye(2 * s) - h * np.kron(tableau.a, matrix)
        slopes = np.linalg.solve(system, np.tile(matrix @ start, s)).reshape(s, 2)
        return start + h * tableau.b @ slopes

    start = np.array([1.0, -0.7])
    a = torch.tensor([[-3.0, 1.0], [0.5, -40.0]], requires_grad=True)
    end = odeint(
        lambda t, y: a @ y, torch.as_tensor(start), torch.tensor([0.0, h]), method=method,
        options={"num_steps": 1}, params=[a],
    )[-1]  # fmt: skip
    np.testing.assert_allclose(end.detach(), advance(a.detach().numpy()), rtol=1e-12)
    (got,) = torch.autograd.grad(end.sum(), a)
    for i in range(2):
        for j in range(2):
            shift = np.zeros((2, 2))
            shift[i, j] = 1e-5
            ahead, behind = (advance(a.detach().numpy() + sign * shift) for sign in (1, -1))
            assert float(got[i, j]) == pytest.approx((ahead - behind).sum() / 2e-5, abs=1e-9)


@pytest.mark.parametrize(("method", "steps"), [("radauIIA5", 400), ("gl6", 400)])
def test_a_stiff_oscillator_agrees_with_scipys_radau(method, steps):
    mu = 20.0

    def f(t, y):
        return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    want = solve_ivp(
        lambda t, y: [y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]], [0, 4], [2.0, 0.0],
        method="Radau", rtol=1e-10, atol=1e-12,
    ).y[:, -1]  # fmt: skip
    with torch.no_grad():
        got = odeint(
            f, torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0]), method=method,
            options={"num_steps": steps},
        )[-1]  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_very_stiff_decay_is_stepped_over_without_blowing_up():
    y = torch.tensor([1.0], requires_grad=True)
    for method in ("implicit_euler", "sdirk2", "trbdf2", "radauIIA3", "radauIIA5"):
        end = odeint(
            lambda t, y: -1e8 * (y - torch.cos(t)), y, torch.tensor([0.0, 1.0]), method=method,
            options={"num_steps": 10},
        )[-1]  # fmt: skip
        assert float(end.detach()) == pytest.approx(np.cos(1.0), abs=1e-7)
        assert abs(float(torch.autograd.grad(end.sum(), y)[0])) < 1e-7


# All adjoints.


def forced(k):
    def f(t, y):
        x, v = y.unbind(-1)
        force = -k[0] * v - k[1] * torch.sin(x) + torch.cos(2 * t)
        return torch.stack([v, force], -1)

    return f


def batch_loss(adjoint, method, options, y0, k, t, **more):
    solution = solve(
        forced(k), y0, t, method=method, options=options, adjoint=adjoint, params=[k],
        running_cost=lambda t, y: (y[:, 0] ** 2 * (1 + t)).sum(), **more,
    )  # fmt: skip
    return solution.cost + (solution.ys[1:] ** 3).sum()


def batch_inputs():
    return (
        torch.tensor([[1.0, 0.5], [0.2, -0.4]], requires_grad=True),
        torch.tensor([0.3, 2.0], requires_grad=True),
        torch.tensor([0.0, 0.7, 1.1, 2.0], requires_grad=True),
    )


@pytest.mark.parametrize(
    "options",
    [{"num_steps": 2}, {"step_size": 0.3}, {"step_size": 0.3, "batch_dims": 1}],
    ids=["on the mesh", "between step times", "per sample"],
)
@pytest.mark.parametrize("method", SOME)
def test_discrete_gradients_agree_and_are_those_of_the_numerical_solution(method, options):
    inputs = batch_inputs()
    want = torch.autograd.grad(batch_loss(DirectAdjoint(), method, options, *inputs), inputs)
    for adjoint in (CheckpointAdjoint(), CheckpointAdjoint(2), ForwardSensitivity()):
        got = torch.autograd.grad(batch_loss(adjoint, method, options, *inputs), inputs)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for x, grad in zip(inputs, want, strict=True):
        direction = torch.linspace(0.5, 1.0, x.numel()).reshape(x.shape)
        values = []
        for sign in (1.0, -1.0):
            moved = [y + sign * 1e-5 * direction if y is x else y for y in inputs]
            with torch.no_grad():
                values.append(float(batch_loss(DirectAdjoint(), method, options, *moved)))
        assert float((grad * direction).sum()) == pytest.approx(
            (values[0] - values[1]) / 2e-5, rel=1e-7, abs=1e-7
        )


@pytest.mark.parametrize("adjoint", [BacksolveAdjoint, InterpolatingAdjoint, GaussAdjoint])
@pytest.mark.parametrize("method", ["trapezoid", "trbdf2", "radauIIA5", "gl4"])
def test_continuous_gradients_approach_the_discrete_one(method, adjoint):
    inputs = batch_inputs()
    errors = []
    for n in (4, 8):
        options = {"num_steps": n, "batch_dims": 1}
        want = torch.autograd.grad(batch_loss(DirectAdjoint(), method, options, *inputs), inputs)
        got = torch.autograd.grad(batch_loss(adjoint(), method, options, *inputs), inputs)
        errors.append(max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)))
    # The gap in the times themselves has the order of the method too.
    floor = 3 if method == "radauIIA5" and adjoint is not BacksolveAdjoint else 0
    assert errors[1] < 2e-13 or np.log2(errors[0] / errors[1]) > (
        TABLEAUS[method].order - 0.4 - floor
    )


@pytest.mark.parametrize("method", ["trbdf2", "gl4"])
def test_nested_states_and_their_samples_are_solved_like_flat_ones(method):
    k = torch.tensor([0.3, 2.0], requires_grad=True)
    x, v = (torch.tensor(a, requires_grad=True) for a in ([1.0, 0.2], [[0.5], [-0.4]]))

    def f(t, y):
        slope = forced(k)(t, torch.stack([y["x"], y["v"][:, 0]], -1))
        return {"x": slope[:, 0], "v": slope[:, 1:]}

    t = torch.tensor([0.0, 1.0])
    flat = torch.stack([x, v[:, 0]], -1)
    want = odeint(forced(k), flat, t, method=method, options={"num_steps": 5}, params=[k])[-1]
    wanted = torch.autograd.grad((want**2).sum(), [x, v, k])
    for adjoint in (CheckpointAdjoint(), DirectAdjoint(), BacksolveAdjoint()):
        for batch_dims in (0, 1):
            end = odeint(
                f, {"x": x, "v": v}, t, method=method, params=[k], adjoint=adjoint,
                options={"num_steps": 5, "batch_dims": batch_dims},
            )  # fmt: skip
            torch.testing.assert_close(end["x"][-1], want[:, 0], rtol=1e-13, atol=1e-13)
            loss = (end["x"][-1] ** 2).sum() + (end["v"][-1] ** 2).sum()
            got = torch.autograd.grad(loss, [x, v, k])
            tolerance = 0.02 if method == "trbdf2" and adjoint == BacksolveAdjoint() else 1e-12
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "adjoint",
    [CheckpointAdjoint(), CheckpointAdjoint(3), BacksolveAdjoint(), InterpolatingAdjoint(),
     GaussAdjoint()],
    ids=lambda adjoint: type(adjoint).__name__,
)  # fmt: skip
def test_trbdf2_adapts_its_steps(adjoint):
    # y' = -a (y - cos t), in closed form.
    a = torch.tensor(2.0, requires_grad=True)
    t = torch.tensor([0.0, 0.5, 2.0])
    solution = solve(
        lambda t, y: -a * (y - torch.cos(t)), torch.ones(1), t, method="trbdf2", rtol=1e-6,
        atol=1e-8, params=[a], adjoint=adjoint,
    )  # fmt: skip

    def closed(a, t):
        particular = a * (a * np.cos(t) + np.sin(t)) / (a * a + 1)
        return particular + (1 - a * a / (a * a + 1)) * np.exp(-a * t)

    np.testing.assert_allclose(
        solution.ys[:, 0].detach(), [closed(2.0, s) for s in t.tolist()], atol=2e-5
    )
    (got,) = torch.autograd.grad(solution.ys[-1].sum(), a)
    want = (closed(2.0 + 1e-6, 2.0) - closed(2.0 - 1e-6, 2.0)) / 2e-6
    assert float(got) == pytest.approx(want, abs=2e-5)


def test_a_step_whose_equations_are_not_solved_is_tried_again_with_a_smaller_one():
    solution = solve(
        lambda t, y: -100 * y**3 + torch.exp(y), torch.ones(1), torch.tensor([0.0, 1.0]),
        method="trbdf2", rtol=1e-4, atol=1e-6,
        options={"first_step": 1.0, "max_newton_iterations": 4},
    )  # fmt: skip
    want = solve_ivp(
        lambda t, y: -100 * y**3 + np.exp(y), [0, 1], [1.0], method="Radau", rtol=1e-9, atol=1e-11
    ).y[0, -1]
    assert solution.stats.steps_rejected > 0
    assert float(solution.ys[-1]) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    ("forward", "adjoint"),
    [
        ("rk4", BacksolveAdjoint(method="gl4", options={"num_steps": 40})),
        ("gl6", BacksolveAdjoint(method="rk4", options={"num_steps": 40})),
        ("gl6", BacksolveAdjoint(restart_every=3)),
        ("gl6", GaussAdjoint(method="gl6", options={"num_steps": 10})),
        ("gl6", InterpolatingAdjoint(method="radauIIA5", options={"num_steps": 20})),
    ],
)
def test_the_reverse_solve_may_have_another_method_or_restart(forward, adjoint):
    y0, k, _ = batch_inputs()
    t = torch.tensor([0.0, 1.0, 2.0])
    want = torch.autograd.grad(
        batch_loss(CheckpointAdjoint(), "dopri8", {"num_steps": 20}, y0, k, t), [y0, k]
    )
    value = batch_loss(adjoint, forward, {"num_steps": 40}, y0, k, t)
    got = torch.autograd.grad(value, [y0, k])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", SOME)
def test_a_hessian_vector_product_is_right(method):
    y0, k, t = batch_inputs()
    options = {"num_steps": 2}
    results = []
    for adjoint in (DirectAdjoint(), CheckpointAdjoint()):
        loss = batch_loss(adjoint, method, options, y0, k, t)
        (grad,) = torch.autograd.grad(loss, y0, create_graph=True)
        results.append(torch.autograd.grad(grad.sum(), [y0, k, t]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)
    direction = torch.tensor([0.6, -0.8])
    ahead, behind = (
        torch.autograd.grad(
            batch_loss(CheckpointAdjoint(), method, options, y0, k + s * direction, t), y0
        )[0].sum()
        for s in (1e-5, -1e-5)
    )
    want = float((ahead - behind) / 2e-5)
    assert float(results[0][1] @ direction) == pytest.approx(want, rel=1e-7)


def test_continuous_adjoints_refuse_second_derivatives_of_implicit_steps_too():
    y0, k, t = batch_inputs()
    loss = batch_loss(BacksolveAdjoint(), "gl4", {"num_steps": 2}, y0, k, t)
    with pytest.raises(NotImplementedError, match="BacksolveAdjoint has no second derivative"):
        torch.autograd.grad(loss, y0, create_graph=True)


# The implicit function theorem.


def test_a_root_has_the_gradient_of_the_implicit_function_theorem():
    # x = tanh(W x + b) + a; the dense Jacobian gives dL/da, dL/dW and dL/db.
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(0.4 * torch.randn(param.shape, generator=generator))
    a = torch.randn(3, generator=generator, requires_grad=True)
    x = implicit_step(lambda x, a: x - torch.tanh(module(x)) - a, torch.zeros(3), a)
    torch.testing.assert_close(x, torch.tanh(module(x)) + a, rtol=1e-15, atol=1e-15)
    got = torch.autograd.grad((x**2).sum(), [a, module.weight, module.bias])
    with torch.no_grad():
        gain = 1 - torch.tanh(module(x)) ** 2
        w = torch.linalg.solve((torch.eye(3) - gain[:, None] * module.weight).T, 2 * x)
        want = (w, torch.outer(w * gain, x), w * gain)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def cubic_root(c, guess=1.0, **more):
    return implicit_step(
        lambda x, c: x**3 + x * c.square() - 1, torch.full_like(c, guess), c, **more
    )


def test_first_and_second_derivatives_pass_gradcheck():
    c = torch.tensor([0.3, 1.2], requires_grad=True)
    assert torch.autograd.gradcheck(cubic_root, (c,))
    assert torch.autograd.gradgradcheck(cubic_root, (c,))


def test_a_gradient_is_the_same_before_during_and_after_a_recorded_pass():
    c = torch.tensor([0.3, 1.2], requires_grad=True)
    loss = cubic_root(c).pow(3).sum()
    passes = [
        torch.autograd.grad(loss, c, retain_graph=True, create_graph=create)[0]
        for create in (False, True, False)
    ]
    torch.testing.assert_close(passes[0], passes[1], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(passes[0], passes[2], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("vectorize", [False, True])
def test_whole_jacobians_and_hessians_can_be_asked_for(vectorize):
    c = torch.tensor([0.3, 1.2])
    x = cubic_root(c)
    jacobian = torch.autograd.functional.jacobian(cubic_root, c, vectorize=vectorize)
    torch.testing.assert_close(jacobian, torch.diag(-2 * c * x / (3 * x**2 + c**2)))
    hessian = torch.autograd.functional.hessian(
        lambda c: cubic_root(c).sum(), c, vectorize=vectorize
    )
    slopes = [
        torch.autograd.functional.jacobian(cubic_root, c + shift).diagonal()
        for shift in (1e-5, -1e-5)
    ]
    torch.testing.assert_close(
        hessian, torch.diag((slopes[0] - slopes[1]) / 2e-5), rtol=1e-8, atol=1e-9
    )


def test_third_derivatives_are_refused():
    c = torch.tensor([0.3], requires_grad=True)
    (first,) = torch.autograd.grad(cubic_root(c).sum(), c, create_graph=True)
    with pytest.raises(NotImplementedError, match="first and second derivatives, not third"):
        torch.autograd.grad(first, c, create_graph=True)


def test_complex_equations_that_are_not_holomorphic_are_solved_as_real_ones():
    c = torch.tensor([1 + 1j, 0.5 - 2j], requires_grad=True)

    def root(c):
        return implicit_step(lambda x: x * x * x.conj() + x - c, torch.zeros(2, dtype=c.dtype))

    x = root(c)
    torch.testing.assert_close(x * x * x.conj() + x, c, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(root, (c,))
    assert torch.autograd.gradgradcheck(root, (c,))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-2), (torch.bfloat16, 1e-1)]
)
def test_lower_precision_goes_to_its_own_rounding(dtype, tolerance):
    c = torch.tensor([1.2], dtype=dtype, requires_grad=True)
    x = cubic_root(c)
    assert x.dtype == dtype
    want = cubic_root(c.detach().double())
    assert float(x.detach()) == pytest.approx(float(want), rel=tolerance)
    (got,) = torch.autograd.grad(x.sum(), c)
    wanted = -2 * 1.2 * float(want) / (3 * float(want) ** 2 + 1.44)
    assert float(got) == pytest.approx(wanted, rel=5 * tolerance)


class Spy:
    """Counts linear solves, and the sizes of the matrices."""

    def __init__(self, monkeypatch):
        self.shapes, self.transposed = [], 0
        factor, solve_with = torch.linalg.lu_factor_ex, torch.linalg.lu_solve

        def lu_factor_ex(matrix):
            self.shapes.append(tuple(matrix.shape))
            return factor(matrix)

        def lu_solve(*arguments, adjoint=False):
            self.transposed += adjoint
            return solve_with(*arguments, adjoint=adjoint)

        monkeypatch.setattr(torch.linalg, "lu_factor_ex", lu_factor_ex)
        monkeypatch.setattr(torch.linalg, "lu_solve", lu_solve)


@pytest.mark.parametrize("guess", [0.7, 500.0])
def test_the_gradient_takes_one_transposed_solve_whatever_the_iterations(monkeypatch, guess):
    c = torch.tensor([0.3], requires_grad=True)
    x = cubic_root(c, guess)
    spy = Spy(monkeypatch)
    torch.autograd.grad(x.sum(), c)
    assert spy.transposed == 1 and len(spy.shapes) == 1


@pytest.mark.parametrize(("method", "solves"), [("gl6", 1), ("implicit_euler", 1), ("sdirk2", 2)])
def test_a_step_takes_one_transposed_solve_per_system_of_stages(monkeypatch, method, solves):
    y0, k, _ = batch_inputs()
    end = odeint(
        forced(k), y0, torch.tensor([0.0, 1.0]), method=method, options={"num_steps": 5},
        params=[k],
    )[-1]  # fmt: skip
    spy = Spy(monkeypatch)
    torch.autograd.grad(end.sum(), [y0, k])
    assert spy.transposed == 5 * solves


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), BacksolveAdjoint()])
def test_no_matrix_couples_the_samples(monkeypatch, adjoint):
    k = torch.tensor([0.3, 2.0], requires_grad=True)
    y0 = torch.linspace(-1, 1, 14).reshape(7, 2).requires_grad_()
    spy = Spy(monkeypatch)
    end = odeint(
        forced(k), y0, torch.tensor([0.0, 1.0]), method="gl6", adjoint=adjoint, params=[k],
        options={"num_steps": 2, "batch_dims": 1},
    )[-1]  # fmt: skip
    torch.autograd.grad(end.sum(), [y0, k])
    assert set(spy.shapes) == {(7, 6, 6)}


def test_samples_that_depend_on_each_other_are_refused_in_the_backward_pass():
    c = torch.rand(5, 1, requires_grad=True)
    x = implicit_step(
        lambda x: x**3 + x + 0.1 * x.mean() - c, torch.ones(5, 1), batch_dims=1,
        max_iterations=200,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no sample may depend on another"):
        torch.autograd.grad(x.sum(), c)
    for adjoint in (CheckpointAdjoint(), BacksolveAdjoint()):
        y = odeint(
            lambda t, y: y.mean() - y, c, torch.tensor([0.0, 1.0]), method="implicit_midpoint",
            options={"num_steps": 4, "batch_dims": 1}, adjoint=adjoint,
        )  # fmt: skip
        with pytest.raises(ValueError, match="no sample may depend on another"):
            torch.autograd.grad((y[-1] * c.detach()).sum(), c)


def test_an_empty_batch_has_an_empty_gradient():
    y0 = torch.zeros(0, 2, requires_grad=True)
    k = torch.tensor([0.3, 2.0], requires_grad=True)
    for adjoint in (CheckpointAdjoint(), BacksolveAdjoint(), DirectAdjoint()):
        end = odeint(
            forced(k), y0, torch.tensor([0.0, 1.0]), method="gl4", adjoint=adjoint, params=[k],
            options={"num_steps": 2, "batch_dims": 1},
        )[-1]  # fmt: skip
        grads = torch.autograd.grad(end.sum(), [y0, k], allow_unused=True)
        assert grads[0].shape == (0, 2)


def test_many_unknowns_take_batched_vector_jacobian_products():
    n = 12
    matrix = torch.randn(n, n, generator=torch.Generator().manual_seed(0)) / 4
    c = torch.linspace(-1, 1, n, requires_grad=True)
    x = implicit_step(lambda x: x - torch.sin(matrix @ x) - c, torch.zeros(n))
    (got,) = torch.autograd.grad(x.sum(), c)
    jacobian = torch.eye(n) - torch.cos(matrix @ x)[:, None] * matrix
    torch.testing.assert_close(got, torch.linalg.solve(jacobian.T, torch.ones(n)))


def test_a_nested_root_keeps_its_structure():
    c = torch.tensor(2.0, requires_grad=True)
    root = implicit_step(
        lambda x: {"u": x["u"] ** 2 - x["v"].sum(), "v": (x["v"] - c * torch.ones(2),)[0]},
        {"u": torch.ones(1), "v": torch.zeros(2)},
    )
    torch.testing.assert_close(root["u"], torch.tensor([2.0]))
    (got,) = torch.autograd.grad(root["u"].sum(), c)
    assert float(got) == pytest.approx(0.5)  # u = sqrt(2 c)


# Rollouts.


def implicit_euler_rollout(snapshots=None, adjoint=False):
    a, theta = torch.tensor(-0.8, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    z0 = torch.tensor([1.2], requires_grad=True)
    actions = torch.linspace(0, 1, 6).reshape(6, 1).requires_grad_()

    def step(i, z, u, p):
        return implicit_step(
            lambda x, z: x - z - 0.1 * (p[0] * x + p[1] + u - 0.2 * x**3), z.detach(), z
        )

    arguments = (step, z0, actions, (a, theta))
    costs = {"terminal_cost": lambda z, p: ((z - 0.3) ** 2).sum(), "snapshots": snapshots}
    if adjoint:
        return rollout_adjoint(*arguments, **costs)
    cost, _ = rollout(*arguments, **costs)
    return cost.detach(), torch.autograd.grad(cost, [z0, actions, a, theta])


def test_an_implicit_step_sits_in_a_rollout():
    cost, want = implicit_euler_rollout()
    # By hand: dx/dz = 1 / (1 - h (a - 0.6 x^2)), the same factor times h for an action.
    x, xs = 1.2, []
    for u in np.linspace(0, 1, 6):
        roots = np.roots([0.02, 0, 1 + 0.08, -(x + 0.1 * (0.5 + u))])
        x = float(roots[np.argmin(abs(roots.imag))].real)
        xs.append(x)
    gains = [1 / (1 - 0.1 * (-0.8 - 0.6 * x * x)) for x in xs]
    assert float(cost) == pytest.approx((xs[-1] - 0.3) ** 2, rel=1e-12)
    adjoint = 2 * (xs[-1] - 0.3)
    assert float(want[0]) == pytest.approx(adjoint * np.prod(gains), rel=1e-12)
    assert float(want[1][2]) == pytest.approx(0.1 * adjoint * np.prod(gains[2:]), rel=1e-12)
    for snapshots in (1, 3):
        torch.testing.assert_close(implicit_euler_rollout(snapshots)[1], want)
    swept = implicit_euler_rollout(adjoint=True)
    torch.testing.assert_close((swept.z0, swept.actions, *swept.params), want)


# Refusals.


def test_a_root_that_is_not_found_is_an_error_with_iterations_and_residual():
    with pytest.raises(SolveError, match=r"did not converge in 20 iterations: the residual is \d"):
        implicit_step(lambda x: x**2 + 1, torch.ones(1), max_iterations=20)
    with pytest.raises(SolveError, match="no longer finite"):
        implicit_step(lambda x: 0 * x + 1, torch.ones(1))
    with pytest.raises(SolveError, match="no longer finite: the residual is nan"):
        implicit_step(lambda x: torch.nan * x, torch.ones(1))


@pytest.mark.parametrize("adjoint", [DirectAdjoint(), CheckpointAdjoint(), BacksolveAdjoint()])
def test_a_step_that_is_not_solved_is_an_error_with_its_time(adjoint):
    # y = 1 + h y^2 has no root for h > 1/4.
    y0 = torch.ones(1, requires_grad=True)
    with pytest.raises(SolveError, match=r"in the step of size 0.333 from t = 0 did not converge"):
        odeint(
            lambda t, y: y**2, y0, torch.tensor([0.0, 1.0]), method="implicit_euler",
            options={"num_steps": 3}, adjoint=adjoint,
        )  # fmt: skip


def test_a_loose_tolerance_is_honoured():
    calls = []

    def residual(x):
        calls.append(1)
        return x**3 - 2

    counts = []
    for rtol in (1e-2, 1e-6, None):
        calls.clear()
        root = implicit_step(residual, torch.ones(1), rtol=rtol)
        counts.append(len(calls))
        assert float(root) == pytest.approx(2 ** (1 / 3), rel=1e-15 if rtol is None else rtol)
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gl4", {"num_steps": 2, "newton_tol": 1e-3}, "did you mean 'newton_rtol'"),
        ("rk4", {"num_steps": 2, "newton_rtol": 1e-3}, "`options` has no 'newton_rtol'"),
        ("gl4", {"num_steps": 2, "newton_rtol": -1.0}, "`newton_rtol` must be a number in"),
        ("gl4", {"num_steps": 2, "max_newton_iterations": 0}, "must be a positive integer, got 0"),
        ("gl4", {"num_steps": 2, "batch_dims": 2}, "`batch_dims` = 2 needs states that share"),
        ("gl4", {"num_steps": 2, "batch_dims": -1}, "must be a non-negative integer, got -1"),
        ("gl4", None, "takes fixed steps"),
    ],
)
def test_a_wrong_option_raises(method, options, message):
    with pytest.raises(ValueError, match=message):
        odeint(
            lambda t, y: -y, torch.ones(3), torch.tensor([0.0, 1.0]), method=method,
            options=options,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("residual", "guess", "more", "error", "message"),
    [
        (lambda x: x[:1], torch.ones(2), {}, TypeError, "must return the structure, shapes"),
        (lambda x: x.half(), torch.ones(2), {}, TypeError, "must return the structure, shapes"),
        (lambda x: x, torch.ones(2, dtype=torch.int64), {}, TypeError, "`guess` must be floating"),
        (lambda x: x, torch.ones(2), {"rtol": 2.0}, ValueError, r"`rtol` must be a number in"),
        (lambda x: x, torch.ones(2), {"atol": -1}, ValueError, "`atol` must be a non-negative"),
        (lambda x: x, torch.ones(2), {"max_iterations": 0}, ValueError, "`max_iterations` must"),
        (lambda x: x, torch.ones(2), {"batch_dims": 2}, ValueError, "`batch_dims` = 2 needs"),
    ],
)
def test_a_wrong_argument_of_implicit_step_raises(residual, guess, more, error, message):
    with pytest.raises(error, match=message):
        implicit_step(residual, guess, **more)


def test_what_cannot_serve_an_implicit_method_says_so():
    t = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match="must be explicit here"):
        odeint(
            lambda t, y: -y, torch.ones(1, requires_grad=True), t, method="gl4",
            options={"num_steps": 2}, adjoint=ReversibleAdjoint(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="torchdiffeq has no method 'gl4'"):
        odeint(lambda t, y: -y, torch.ones(1), t, method="gl4", engine="torchdiffeq")
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(
            lambda y: odeint(lambda t, y: -y, y, t, method="gl4", options={"num_steps": 2}).sum()
        )(torch.ones(1))
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda c: implicit_step(lambda x: x - c, torch.ones(1)).sum())(
            torch.ones(1)
        )
