"""ReversibleAdjoint: equal to backpropagation through the coupled scheme written out here."""

import math
from itertools import pairwise

import pytest
import torch

import contadj.torch as ct
from contadj.tableaus import get_tableau
from contadj.torch._problems import builtin_problem
from contadj.torch._study import _Tensors

F64 = torch.float64


def runge_kutta(name, f, t, h, y):
    """One step of an explicit method, written out."""
    tableau = get_tableau(name)
    slopes = []
    for a, c in zip(tableau.a, tableau.c, strict=True):
        slopes.append(f(t + c * h, y + h * sum(w * k for w, k in zip(a, slopes, strict=False))))
    return y + h * sum(w * k for w, k in zip(tableau.b, slopes, strict=True))


def coupled(name, f, mesh, y, coupling):
    """The scheme of McCallum & Foster 2024, every y_n."""
    z, ys = y, [y]
    for t, t_next in pairwise(mesh):
        h = t_next - t
        y = coupling * y + (1 - coupling) * z + (runge_kutta(name, f, t, h, z) - z)
        z = z - (runge_kutta(name, f, t_next, -h, y) - y)
        ys.append(y)
    return torch.stack(ys)


def setting():
    y0 = torch.tensor([1.0, 0.5], dtype=F64, requires_grad=True)
    p = torch.tensor([0.3, 2.0], dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 0.75, 2.0], dtype=F64, requires_grad=True)

    def f(t, y):
        return torch.stack([y[1], -p[0] * y[1] - p[1] * torch.sin(y[0]) + torch.cos(t)])

    return f, y0, p, t


@pytest.mark.parametrize("coupling", [0.9, 0.99, 1.0])
@pytest.mark.parametrize("method", ["euler", "midpoint", "rk4", "bosh3", "dopri5", "dopri8"])
def test_the_gradient_is_that_of_backpropagation_through_the_coupled_scheme(method, coupling):
    f, y0, p, t = setting()
    n = 6
    mesh = torch.cat([torch.lerp(a, b, torch.arange(n) / n) for a, b in pairwise(t)] + [t[-1:]])
    ys = coupled(method, f, mesh, y0, coupling)[::n]
    expected = torch.autograd.grad((ys**2).sum(), [y0, p, t])

    solution = ct.solve(
        f, y0, t, params=[p], adjoint=ct.ReversibleAdjoint(coupling), method=method,
        options={"num_steps": n},
    )  # fmt: skip
    torch.testing.assert_close(solution.ys, ys, rtol=1e-14, atol=1e-14)
    got = torch.autograd.grad((solution.ys**2).sum(), [y0, p, t])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    assert solution.stats.reversal_error < 1e-14
    stages = get_tableau(method).evaluations
    assert solution.stats.f_evaluations_forward == 2 * n * 2 * stages
    assert solution.stats.steps_accepted == 2 * n


@pytest.mark.parametrize("name", ["nonaut", "pend"])
@pytest.mark.parametrize(("method", "order"), [("midpoint", 2), ("rk4", 4)])
def test_the_coupling_keeps_an_even_order(name, method, order):
    # With 0.99 the parasitic mode of the coupling dies out over hundreds of steps only.
    problem = builtin_problem(name)
    exact = problem.gradient.vector
    errors = []
    for n in (64, 128):
        tensors = _Tensors(problem, F64, torch.device("cpu"))
        solution = ct.solve(
            tensors.field, tensors.y0, torch.tensor([problem.t0, problem.t1], dtype=F64),
            params=tensors.leaves, running_cost=tensors.running_cost, method=method,
            options={"num_steps": n}, adjoint=ct.ReversibleAdjoint(0.9),
        )  # fmt: skip
        cost = tensors.end(solution.ys[-1]) + (0.0 if solution.cost is None else solution.cost)
        grads = torch.autograd.grad(cost, [tensors.y0, *tensors.leaves])
        got = torch.cat([grad.reshape(-1) for grad in grads])
        errors.append(torch.linalg.vector_norm(got - torch.from_numpy(exact)).item())
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize(
    ("coupling", "steps", "low", "high"),
    # Undoing N steps amplifies round-off by about coupling^(-N).
    [
        (0.99, 1000, 1e-14, 1e-9),
        pytest.param(0.99, 3000, 1e-6, 1e0, marks=pytest.mark.slow),
        pytest.param(0.999, 3000, 1e-15, 1e-12, marks=pytest.mark.slow),
    ],
)
def test_the_reversal_error_grows_with_the_steps_and_is_reported(coupling, steps, low, high):
    f, y0, p, _ = setting()
    t = torch.tensor([0.0, 2.0], dtype=F64)
    adjoint = ct.ReversibleAdjoint(coupling, reversal_tolerance=math.inf)
    solution = ct.solve(
        f, y0, t, params=[p], adjoint=adjoint, method="rk4_classic", options={"num_steps": steps}
    )
    solution.ys[-1].sum().backward()
    assert low < solution.stats.reversal_error < high


def test_a_hopeless_coupling_is_warned_about():
    f, y0, p, _ = setting()
    t = torch.tensor([0.0, 2.0], dtype=F64)
    ys = ct.odeint(
        f, y0, t, params=[p], adjoint=ct.ReversibleAdjoint(0.5), method="rk4_classic",
        options={"num_steps": 256},
    )  # fmt: skip
    with pytest.warns(ct.ReversalWarning, match="a `coupling` closer to 1"):
        ys[-1].sum().backward()


def test_a_hopeless_coupling_raises_on_request():
    f, y0, p, _ = setting()
    t = torch.tensor([0.0, 2.0], dtype=F64)
    adjoint = ct.ReversibleAdjoint(0.5, on_reversal="raise")
    ys = ct.odeint(
        f, y0, t, params=[p], adjoint=adjoint, method="rk4_classic", options={"num_steps": 256}
    )
    with pytest.raises(ct.SolveError, match="CheckpointAdjoint"):
        ys[-1].sum().backward()


@pytest.mark.parametrize("method", ["dopri5", "tsit5", "bosh3"])
def test_an_adaptive_coupled_solve_meets_its_tolerance(method):
    f, y0, p, t = setting()
    ys = ct.odeint(f, y0, t, params=[p], method="dopri8", options={"num_steps": 32})
    exact = torch.cat(torch.autograd.grad((ys**2).sum(), [y0, p, t]))
    solution = ct.solve(
        f, y0, t, params=[p], adjoint=ct.ReversibleAdjoint(), method=method, rtol=1e-8, atol=1e-9
    )
    got = torch.cat(torch.autograd.grad((solution.ys**2).sum(), [y0, p, t]))
    assert torch.linalg.vector_norm(got - exact) < 1e-5 * torch.linalg.vector_norm(exact)
    assert solution.stats.steps_accepted > 10


@pytest.mark.parametrize("coupling", [0.0, -0.5, 1.5, float("nan")])
def test_a_coupling_outside_its_range_is_refused(coupling):
    with pytest.raises(ValueError, match=r"`coupling` must be in \(0, 1\]"):
        ct.ReversibleAdjoint(coupling)


def stiff(coupling, steps, **more):
    """The gradient of slow_fast with K = 20, relative to that of dopri8 on a fine mesh."""
    problem = builtin_problem("slow_fast", K=20.0)
    t = torch.tensor([problem.t0, problem.t1], dtype=F64)

    def gradient(adjoint, method, num_steps):
        tensors = _Tensors(problem, F64, torch.device("cpu"))
        solution = ct.solve(
            tensors.field, tensors.y0, t, params=tensors.leaves, method=method, adjoint=adjoint,
            options={"num_steps": num_steps},
        )  # fmt: skip
        grads = torch.autograd.grad(tensors.end(solution.ys[-1]), [tensors.y0, *tensors.leaves])
        return torch.cat([grad.reshape(-1) for grad in grads]), solution.stats

    exact, _ = gradient(ct.DirectAdjoint(), "dopri8", 100)
    got, stats = gradient(ct.ReversibleAdjoint(coupling, **more), "rk4_classic", steps)
    return float((got - exact).norm() / exact.norm()), stats.reversal_error


APART = r"two states of the reversible coupling are apart .*smaller steps, or CheckpointAdjoint"


@pytest.mark.parametrize(("coupling", "steps"), [(0.99, 32), (0.99, 128), (0.999, 128)])
def test_a_coupling_that_is_unstable_on_a_stiff_problem_is_warned_about(coupling, steps):
    # Every step can be undone to rounding: the reversal error does not tell.
    with pytest.warns(ct.ReversalWarning, match=APART):
        error, reversal_error = stiff(coupling, steps)
    assert error > 1.0
    assert reversal_error < 1e-7


@pytest.mark.parametrize(("coupling", "steps"), [(0.9, 128), (0.99, 512)])
def test_a_coupling_on_a_stiff_problem_is_not_warned_about_where_the_gradient_is_right(
    coupling, steps
):
    assert stiff(coupling, steps)[0] < 1e-3  # a warning is an error here


def test_an_unstable_coupling_raises_on_request():
    with pytest.raises(ct.SolveError, match=APART):
        stiff(0.99, 128, on_reversal="raise")


def test_an_unstable_coupling_is_not_reported_where_nothing_is_to_be_reported():
    assert stiff(0.99, 128, reversal_tolerance=math.inf)[0] > 1.0
