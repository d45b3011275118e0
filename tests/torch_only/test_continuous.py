"""InterpolatingAdjoint and GaussAdjoint: the adjoint ODE along the stored forward solution."""

import math
from functools import cache

import pytest
import torch

import contadj.torch as ct
from contadj.torch._problems import builtin_problem

ALONG = [ct.InterpolatingAdjoint, ct.GaussAdjoint]
F64 = torch.float64


def field(p):
    return lambda t, y: torch.stack([y[1], -p[0] * y[1] - p[1] * torch.sin(y[0]) + torch.cos(t)])


def gradient(adjoint, *, times=(0.0, 0.7, 2.0), cost=True, loss=False, **options):
    """dL/d(y0, p, t) of a driven pendulum with observations, a running cost and parameters."""
    y0 = torch.tensor([1.0, 0.5], dtype=F64, requires_grad=True)
    p = torch.tensor([0.3, 2.0], dtype=F64, requires_grad=True)
    t = torch.tensor(times, dtype=F64, requires_grad=True)
    running_cost = (lambda t, y: y[0] ** 2 * torch.cos(t) + p[1] * y[1] ** 2) if cost else None
    observed = (lambda i, t, y: (i + 1) * t * p[0] * (y**2).sum()) if loss else None
    solution = ct.solve(
        field(p), y0, t, adjoint=adjoint, params=[p], running_cost=running_cost, loss=observed,
        **options,
    )  # fmt: skip
    total = solution.loss if loss else (solution.ys**2).sum()
    if cost:
        total = total + solution.cost
    grads = torch.autograd.grad(total, [y0, p, t])
    return torch.cat(grads), solution.stats


@cache
def exact_gradient(**options):
    """The gradient by a mesh so fine that only rounding is left."""
    return gradient(ct.DirectAdjoint(), method="dopri8", options={"num_steps": 16}, **options)[0]


@pytest.mark.parametrize("loss", [False, True], ids=["ys", "loss"])
@pytest.mark.parametrize(
    ("method", "order", "coarse"),
    [("euler", 1, 128), ("heun2", 2, 32), ("bosh3", 3, 32), ("rk4", 4, 16), ("dopri5", 5, 16)],
)
@pytest.mark.parametrize("adjoint", ALONG)
def test_the_gradient_has_the_order_of_the_method(adjoint, method, order, coarse, loss):
    exact = exact_gradient(loss=loss)
    errors = [
        torch.linalg.vector_norm(
            gradient(adjoint(), loss=loss, method=method, options={"num_steps": n})[0] - exact
        )
        for n in (coarse, 2 * coarse)
    ]
    # Order 5 is still pre-asymptotic at the steps that round-off leaves.
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.2 if order < 5 else 0.6)


@pytest.mark.parametrize("adjoint", ALONG)
@pytest.mark.parametrize("method", ["dopri5", "tsit5", "bosh3"])
def test_an_adaptive_reverse_solve_meets_its_own_tolerance(adjoint, method):
    exact = exact_gradient(cost=False)
    forward = {"method": "dopri8", "rtol": 1e-12, "atol": 1e-13}
    got, stats = gradient(adjoint(method=method, rtol=1e-7, atol=1e-8), cost=False, **forward)
    # Three intervals, each within its tolerance of rtol |lambda|; the factor 100 is for their sum.
    assert torch.linalg.vector_norm(got - exact) < 1e-5 * torch.linalg.vector_norm(exact)
    assert stats.backward_steps_accepted > 0
    assert stats.reversal_error is None


@pytest.mark.parametrize("adjoint", ALONG)
def test_observations_between_the_steps_keep_the_order(adjoint):
    exact = exact_gradient(times=(0.0, 0.71, 1.93, 2.0))
    errors = [
        torch.linalg.vector_norm(
            gradient(
                adjoint(), times=(0.0, 0.71, 1.93, 2.0), method="rk4", options={"step_size": h}
            )[0]
            - exact
        )
        for h in (1 / 32, 1 / 64)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(4, abs=0.3)


def slow_fast(adjoint, K, dtype=F64):
    problem = builtin_problem("slow_fast", K=K)
    y0 = torch.tensor([2.0, 1.0], dtype=dtype, requires_grad=True)
    p = {name: torch.tensor(float(value), dtype=dtype, requires_grad=True)
         for name, value in problem.params.items()}  # fmt: skip
    t = torch.tensor([0.0, 1.0], dtype=F64)
    solution = ct.solve(
        lambda t, y: problem.f(t, y, p), y0, t, adjoint=adjoint, params=p.values(),
        method="rk4_classic", options={"num_steps": 512},
    )  # fmt: skip
    grads = torch.autograd.grad(problem.terminal_cost(solution.ys[-1], p), [y0, *p.values()])
    return torch.cat([grad.reshape(-1) for grad in grads]), solution


@pytest.mark.parametrize("adjoint", ALONG)
def test_a_contracting_state_that_cannot_be_rebuilt_does_no_harm(adjoint):
    exact, _ = slow_fast(ct.DirectAdjoint(), 50.0)
    got, _ = slow_fast(adjoint(), 50.0)
    # The two differ by the method's own O(h^4); the same solve rebuilt backward is off by 1e7.
    assert torch.linalg.vector_norm(got - exact) < 1e-5 * torch.linalg.vector_norm(exact)
    rebuilt, solution = slow_fast(ct.BacksolveAdjoint(reversal_tolerance=math.inf), 50.0)
    assert torch.linalg.vector_norm(rebuilt - exact) > 1e4 * torch.linalg.vector_norm(exact)
    assert solution.stats.reversal_error > 1e3


@pytest.mark.parametrize("adjoint", [*ALONG, ct.BacksolveAdjoint])
def test_the_gradient_of_a_constant_solution_is_right_where_bptt_is_not(adjoint):
    # x' = x - y, y' = y - x from (1, 1): dx(5)/dx0 = (1 + e^10) / 2.
    exact = (1 + math.exp(10)) / 2

    def derivative(adjoint):
        y0 = torch.ones(2, dtype=F64, requires_grad=True)
        ys = ct.odeint(
            lambda t, y: torch.stack([y[0] - y[1], y[1] - y[0]]), y0,
            torch.tensor([0.0, 5.0], dtype=F64), rtol=1e-6, atol=1e-8, adjoint=adjoint,
        )  # fmt: skip
        return float(torch.autograd.grad(ys[-1, 0], y0)[0][0])

    assert derivative(adjoint(rtol=1e-9, atol=1e-9)) == pytest.approx(exact, rel=1e-6)
    assert abs(derivative(ct.DirectAdjoint()) / exact - 1) > 0.1


@pytest.mark.parametrize("adjoint", ALONG)
def test_gauss_needs_no_parameter_sized_stage(adjoint):
    """The theta-gradient of a linear functional of theta is exact by either quadrature."""
    theta = torch.tensor([0.4, -0.9], dtype=F64, requires_grad=True)
    y0 = torch.zeros(2, dtype=F64)
    t = torch.tensor([0.0, 1.5], dtype=F64)
    ys = ct.odeint(
        lambda t, y: theta * t**3, y0, t, adjoint=adjoint(), params=[theta], method="rk4",
        options={"num_steps": 3},
    )  # fmt: skip
    (got,) = torch.autograd.grad(ys[-1].sum(), theta)
    # Simpson-like weights and two Gauss nodes both integrate a cubic exactly.
    torch.testing.assert_close(got, torch.full_like(theta, 1.5**4 / 4), rtol=1e-14, atol=0)


@pytest.mark.parametrize("adjoint", ALONG)
def test_nested_and_decreasing_and_complex_solves_are_served(adjoint):
    k = torch.tensor(0.7, dtype=F64, requires_grad=True)
    z0 = torch.tensor([1.0 + 0.5j], dtype=torch.complex128, requires_grad=True)
    t = torch.tensor([1.0, 0.0], dtype=F64)

    def f(t, state):
        return {"z": (1j - k) * state["z"]}

    ys = ct.odeint(f, {"z": z0}, t, adjoint=adjoint(), params=[k], rtol=1e-10, atol=1e-12)
    loss = ys["z"][-1].real.sum()
    got_k, got_z = torch.autograd.grad(loss, [k, z0])
    end = z0.detach() * torch.exp(torch.tensor(-1j + 0.7))
    assert got_k.item() == pytest.approx(end.real.item(), rel=1e-8)
    expected = torch.exp(torch.tensor(-1j + 0.7, dtype=torch.complex128)).conj()
    torch.testing.assert_close(got_z[0], expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("adjoint", [*ALONG, ct.ReversibleAdjoint, ct.ForwardSensitivity])
def test_a_second_derivative_is_refused(adjoint):
    y0 = torch.tensor([1.0], dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 1.0], dtype=F64)
    ys = ct.odeint(
        lambda t, y: -(y**2), y0, t, adjoint=adjoint(), method="rk4", options={"num_steps": 4}
    )
    with pytest.raises(NotImplementedError, match="CheckpointAdjoint"):
        torch.autograd.grad(ys[-1].sum(), y0, create_graph=True)
