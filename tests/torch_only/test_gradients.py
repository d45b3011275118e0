"""Gradients against finite differences of the numerical solution and against closed forms."""

import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from contadj.tableaus import TABLEAUS, get_tableau
from contadj.torch import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversalWarning,
    SolveError,
    _torchdiffeq,
    odeint,
    solve,
    value_grad_and_stats,
)
from contadj.torch._steps import RungeKutta, StepControl, adaptive_steps

DISCRETE = {
    "Direct": DirectAdjoint(),
    "Checkpoint": CheckpointAdjoint(),
    "Checkpoint(3)": CheckpointAdjoint(snapshots=3),
    "Forward": ForwardSensitivity(),
}
CONTINUOUS = {
    "Backsolve": BacksolveAdjoint(),
    "Backsolve(restart_every=5)": BacksolveAdjoint(restart_every=5),
    "Interpolating": InterpolatingAdjoint(),
    "Gauss": GaussAdjoint(),
}
ALL = DISCRETE | CONTINUOUS
discrete = pytest.mark.parametrize("adjoint", DISCRETE.values(), ids=DISCRETE)
continuous = pytest.mark.parametrize("adjoint", CONTINUOUS.values(), ids=CONTINUOUS)
every = pytest.mark.parametrize("adjoint", ALL.values(), ids=ALL)


def start(nested=False, device="cpu"):
    """y0, W, b: the same numbers as one tensor or as a nest."""
    y0 = torch.tensor([0.6, -0.4, 0.9], device=device)
    W = torch.tensor([[-0.4, 0.9, 0.1], [-0.8, -0.3, 0.4], [0.2, -0.5, -0.6]], device=device)
    b = torch.tensor([0.1, -0.2, 0.3], device=device)
    if nested:
        y0 = {"z": (y0[:2].reshape(2, 1),), "a": [y0[2]]}
    return y0, W, b


def field(W, b, nested=False):
    def flat(t, y):
        return torch.tanh(W @ y) + torch.cos(2 * t) * b * y + 0.1 * t

    def f(t, y):
        slope = flat(t, torch.cat([y["z"][0].ravel(), y["a"][0].reshape(1)]))
        return {"z": (slope[:2].reshape(2, 1),), "a": [slope[2]]}

    return f if nested else flat


def join(y, nested):
    """The nested state as one tensor, last axis 3."""
    if not nested:
        return y
    z, a = y["z"][0], y["a"][0]
    return torch.cat([z[..., 0], a[..., None]], -1)


def objective(y0, W, b, t, *, adjoint, kind="states", nested=False, **arguments):
    """A cost that uses every observation, in one of the ways a solve can be asked for it."""
    weights = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1], [2.0, 0.1, 0.4], [-0.6, 1.2, 0.9]])

    def paid(i, t, y):
        return (weights[i].to(y) * y**2).sum() + torch.sin(t) * y[0]

    if kind == "cost":
        arguments["running_cost"] = lambda t, y: (join(y, nested) ** 2).sum() * t + W[0, 0] * b[0]
    if kind == "loss":
        arguments["loss"] = lambda i, t, y: paid(i, t, join(y, nested))
    solution = solve(field(W, b, nested), y0, t, adjoint=adjoint, params=(W, b), **arguments)
    if kind == "loss":
        assert solution.ys is None
        return solution.loss
    total = torch.zeros((), dtype=W.dtype, device=W.device)
    states = join(solution.ys, nested)
    for i in range(len(t)):
        total = total + paid(i, t[i].to(states), states[i])
    return total if solution.cost is None else total + solution.cost


def gradient(adjoint, times, kind="states", nested=False, device="cpu", **arguments):
    """dL/d(y0, W, b, t) as one vector."""
    y0, W, b = start(nested, device)
    leaves = [y0] if not nested else [y0["z"][0], y0["a"][0]]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    y0 = leaves[0] if not nested else {"z": (leaves[0],), "a": [leaves[1]]}
    t = torch.tensor(times, requires_grad=True)
    for x in (W, b):
        x.requires_grad_()
    value = objective(y0, W, b, t, adjoint=adjoint, kind=kind, nested=nested, **arguments)
    grads = torch.autograd.grad(value, [*leaves, W, b, t])
    return torch.cat([g.double().ravel().cpu() for g in grads]).numpy()


@cache
def finite_differences(times, kind, method, options):
    """Central differences of the numerical solution in y0, W, b and t."""
    y0, W, b = start()
    point = np.concatenate([y0, W.ravel(), b, times])
    ends = dict(options).get("mesh")

    def value(point):
        y0, W, b, t = (torch.from_numpy(x) for x in np.split(point, [3, 12, 15]))
        chosen = dict(options)
        if ends is not None:  # a given mesh is held fixed but for its ends
            chosen["mesh"] = np.array([float(t[0]), *ends[1:-1], float(t[-1])])
        with torch.no_grad():
            return float(
                objective(
                    y0, W.reshape(3, 3), b, t, adjoint=DirectAdjoint(), kind=kind, method=method,
                    options=chosen,
                )
            )  # fmt: skip

    eps = 1e-5
    rows = np.eye(len(point)) * eps
    return np.array([(value(point + row) - value(point - row)) / (2 * eps) for row in rows])


UP, DOWN = (0.1, 0.5, 1.0, 1.3), (1.3, 1.0, 0.5, 0.1)
MESHES = {
    "num_steps": {"num_steps": 5},
    "dividing step_size": {"step_size": 0.1},
    "other step_size": {"step_size": 0.17},
    "mesh on observations": {"mesh": (0.1, 0.2, 0.5, 0.6, 0.8, 1.0, 1.15, 1.3)},
    "mesh off observations": {"mesh": (0.1, 0.3, 0.6, 0.75, 0.9, 1.2, 1.3)},
}


def both_ways(options, times):
    if times is DOWN and "mesh" in options:
        return {"mesh": options["mesh"][::-1]}
    return options


@pytest.mark.parametrize("times", [UP, DOWN], ids=["increasing", "decreasing"])
@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("method", ["rk4", "dopri5"])
@discrete
def test_discrete_gradients_are_the_derivatives_of_the_numerical_solution(
    adjoint, method, options, times
):
    options = both_ways(options, times)
    want = finite_differences(times, "cost", method, tuple(options.items()))
    got = gradient(adjoint, times, "cost", method=method, options=options)
    # Central differences with 1e-5: truncation 1e-10, cancellation 1e-10.
    np.testing.assert_allclose(got[:15], want[:15], rtol=1e-7, atol=1e-8)
    # A cubic interpolant's second derivative jumps at a step time, a whole number of steps becomes
    # one more when t moves outward: the derivatives from both sides differ by O(h^p).
    np.testing.assert_allclose(got[15:], want[15:], rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("kind", ["states", "cost", "loss"])
@pytest.mark.parametrize("nested", [False, True], ids=["tensor", "nested"])
@pytest.mark.parametrize("method", ["heun2", "bosh3", "dopri8"])
@discrete
def test_every_way_to_ask_for_a_cost_gives_the_discrete_gradient(adjoint, method, nested, kind):
    options = MESHES["mesh off observations"]
    want = finite_differences(UP, kind, method, tuple(options.items()))
    got = gradient(adjoint, UP, kind, nested, method=method, options=options)
    np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-8)


def accepted_mesh(method, times, rtol, atol):
    """The mesh that error control takes, from the generator of steps itself."""
    y0, W, b = start()
    steps = adaptive_steps(
        RungeKutta(get_tableau(method)), StepControl(rtol, atol), field(W, b), times[0], times[-1],
        y0, None, lambda: None,
    )  # fmt: skip
    with torch.no_grad():
        return (times[0], *[float(step.t_next) for step in steps])


@pytest.mark.parametrize("kind", ["cost", "loss"])
@pytest.mark.parametrize("times", [UP, DOWN], ids=["increasing", "decreasing"])
@pytest.mark.parametrize("method", ["bosh3", "dopri5", "tsit5", "dopri8"])
@discrete
def test_adaptive_gradients_are_those_of_the_frozen_mesh(adjoint, method, times, kind):
    mesh = accepted_mesh(method, times, 1e-5, 1e-7)
    got = gradient(adjoint, times, kind, method=method, rtol=1e-5, atol=1e-7)
    frozen = gradient(DirectAdjoint(), times, kind, method=method, options={"mesh": mesh})
    np.testing.assert_allclose(got, frozen, rtol=1e-12, atol=1e-13)
    want = finite_differences(times, kind, method, (("mesh", mesh),))
    # An observation reached by a shortened step (dopri8) has a derivative in time of that step's
    # own order, and here it falls inside the step.
    np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-8)


@cache
def exact_gradient(times, kind):
    """The gradient of the exact solution: the discrete one of order 8 on a fine mesh."""
    return gradient(DirectAdjoint(), times, kind, method="dopri8", options={"num_steps": 12})


@pytest.mark.parametrize("kind", ["states", "cost", "loss"])
@pytest.mark.parametrize("times", [UP, DOWN], ids=["increasing", "decreasing"])
@pytest.mark.parametrize("method", ["bosh3", "dopri5", "tsit5", "dopri8"])
@continuous
def test_continuous_gradients_are_within_a_small_multiple_of_the_tolerance(
    adjoint, method, times, kind
):
    tolerance = 1e-6 if method == "bosh3" else 1e-9
    got = gradient(adjoint, times, kind, method=method, rtol=tolerance, atol=tolerance)
    want = exact_gradient(times, kind)
    assert np.abs(got - want).max() < 300 * tolerance * np.abs(want).max()


@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("times", [UP, DOWN], ids=["increasing", "decreasing"])
@continuous
def test_continuous_gradients_on_a_fixed_mesh_are_close_to_the_exact_one(adjoint, times, options):
    options = both_ways(options, times)
    got = gradient(adjoint, times, "cost", method="rk4_classic", options=options)
    want = exact_gradient(times, "cost")
    # Steps of up to 0.3 at order 4 (3 for an observation inside a step).
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("nested", [False, True], ids=["tensor", "nested"])
@pytest.mark.parametrize("kind", ["states", "cost", "loss"])
@continuous
def test_continuous_gradients_of_nested_states_are_those_of_the_tensor(adjoint, kind, nested):
    got = gradient(adjoint, UP, kind, nested, method="dopri8", options={"num_steps": 6})
    np.testing.assert_allclose(got, exact_gradient(UP, kind), rtol=1e-9, atol=1e-10)


@every
def test_times_have_the_closed_form_of_a_linear_problem(adjoint):
    # y' = a y: y(t) = y0 exp(a (t - t0)), L = sum_i w_i y(t_i).
    a, y0 = torch.tensor(-0.7, requires_grad=True), torch.tensor([1.3], requires_grad=True)
    t = torch.tensor([0.2, 0.5, 1.1], requires_grad=True)
    w = torch.tensor([[0.4], [1.5], [-2.0]])
    ys = odeint(
        lambda t, y: a * y, y0, t, method="dopri8", options={"num_steps": 10}, adjoint=adjoint
    )
    grads = torch.autograd.grad((w * ys).sum(), (y0, a, t))
    s, y = t.detach() - 0.2, 1.3 * torch.exp(-0.7 * (t.detach() - 0.2))
    rates = w[:, 0] * -0.7 * y
    d_t = torch.cat([-rates[1:].sum()[None], rates[1:]])
    torch.testing.assert_close(grads[0], (w[:, 0] * y / 1.3).sum()[None], rtol=1e-12, atol=0)
    torch.testing.assert_close(grads[1], (w[:, 0] * s * y).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(grads[2], d_t, rtol=1e-11, atol=1e-13)


@discrete
def test_the_discrete_gradient_passes_a_taylor_remainder_test(adjoint):
    generator = torch.Generator().manual_seed(5)
    inputs = [x.clone().requires_grad_() for x in (*start(), torch.tensor(UP))]
    directions = [0.1 * torch.randn(x.shape, generator=generator) for x in inputs]

    def value(*inputs):
        return objective(
            *inputs, adjoint=adjoint, kind="cost", method="bosh3", options={"num_steps": 3}
        )

    at = value(*inputs)
    slope = sum(
        (g * v).sum() for g, v in zip(torch.autograd.grad(at, inputs), directions, strict=True)
    )

    def remainder(e):
        moved = [x + e * v for x, v in zip(inputs, directions, strict=True)]
        with torch.no_grad():
            return float(value(*moved) - at - e * slope)

    orders = np.log2(np.abs([remainder(1e-2) / remainder(5e-3), remainder(1e-3) / remainder(5e-4)]))
    np.testing.assert_allclose(orders, 2, atol=0.05)


SECOND = {"Direct": DirectAdjoint(), "Checkpoint": CheckpointAdjoint(),
          "Checkpoint(3)": CheckpointAdjoint(3)}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"options": {"num_steps": 3}}, {"rtol": 1e-4, "atol": 1e-6},
        {"options": {"mesh": MESHES["mesh off observations"]["mesh"]}},
    ],
    ids=["fixed", "adaptive", "mesh"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["cost", "loss"])
@pytest.mark.parametrize("adjoint", SECOND.values(), ids=SECOND)
def test_hessian_vector_products_are_differences_of_gradients(adjoint, kind, more):
    inputs = [x.clone().requires_grad_() for x in start()]
    generator = torch.Generator().manual_seed(6)
    v = [torch.randn(x.shape, generator=generator) for x in inputs]
    t = torch.tensor(UP)
    if "rtol" in more:
        # The frozen mesh of this very point, so that both sides differentiate one function.
        fixed = {"options": {"mesh": accepted_mesh("dopri5", UP, 1e-4, 1e-6)}}
    else:
        fixed = more

    def gradients(inputs, adjoint, create_graph, more):
        value = objective(*inputs, t, adjoint=adjoint, kind=kind, method="dopri5", **more)
        return torch.autograd.grad(value, inputs, create_graph=create_graph)

    first = gradients(inputs, adjoint, True, more)
    got = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, v, strict=True)), inputs)
    eps = 1e-5
    ahead, behind = (
        gradients(
            [(x + s * eps * d).detach().requires_grad_() for x, d in zip(inputs, v, strict=True)],
            DirectAdjoint(), False, fixed,
        )
        for s in (1, -1)
    )  # fmt: skip
    for h, a, b in zip(got, ahead, behind, strict=True):
        torch.testing.assert_close(h, (a - b) / (2 * eps), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("adjoint", SECOND.values(), ids=SECOND)
def test_a_gradient_penalty_trains_the_parameters(adjoint):
    def penalised(adjoint):
        y0, W, b = (x.clone().requires_grad_() for x in start())
        ys = odeint(
            field(W, b), y0, torch.tensor(UP), method="rk4", options={"num_steps": 3},
            adjoint=adjoint, params=(W, b),
        )  # fmt: skip
        (g,) = torch.autograd.grad(ys[-1].sum(), y0, create_graph=True)
        ((g**2).sum() + ys.sum()).backward()
        return [x.grad for x in (y0, W, b)]

    for got, want in zip(penalised(adjoint), penalised(DirectAdjoint()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@continuous
def test_a_second_derivative_of_a_continuous_adjoint_is_refused_clearly(adjoint):
    y0 = torch.ones(2, requires_grad=True)
    ys = odeint(
        lambda t, y: torch.sin(y), y0, torch.tensor([0.0, 1.0]), method="rk4",
        options={"num_steps": 4}, adjoint=adjoint,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"no second derivative.*CheckpointAdjoint\(\)"):
        torch.autograd.grad(ys[-1].sum(), y0, create_graph=True)


@every
@pytest.mark.parametrize("more", [{"options": {"num_steps": 20}}, {}], ids=["fixed", "adaptive"])
def test_a_complex_state_with_a_real_parameter(adjoint, more):
    # z' = i w z - g z: z(T) = z0 exp((i w - g) T); L = |z - c|^2.
    w, g = torch.tensor(1.7, requires_grad=True), torch.tensor(0.2, requires_grad=True)
    z0 = torch.tensor([1.0 + 0.5j, -0.3 + 0.2j], requires_grad=True)
    target = torch.tensor([0.2 - 0.1j, 0.4 + 0.3j])

    def loss(z):
        return ((z - target).abs() ** 2).sum()

    z = odeint(
        lambda t, z: 1j * w * z - g * z, z0, torch.tensor([0.0, 1.2]), method="dopri8",
        rtol=1e-10, atol=1e-12, adjoint=adjoint, **more,
    )  # fmt: skip
    got = torch.autograd.grad(loss(z[-1]), (z0, w, g))
    want = torch.autograd.grad(loss(z0 * torch.exp((1j * w - g) * 1.2)), (z0, w, g))
    assert got[1].dtype == torch.float64
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-2, torch.bfloat16: 2e-1}


@every
@pytest.mark.parametrize("more", [{"options": {"num_steps": 8}}, {}], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
def test_low_precision_states_keep_their_dtype_with_float64_times(adjoint, dtype, more):
    if not more:
        tolerance = 10 * torch.finfo(dtype).eps
        more = {"rtol": tolerance, "atol": tolerance}
    y0 = torch.tensor([0.5, -0.3], dtype=dtype, requires_grad=True)
    a = torch.tensor(-0.8, dtype=dtype, requires_grad=True)
    seen = []

    def f(t, y):
        seen.append(y.dtype)
        return a * y

    t = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
    if isinstance(adjoint, BacksolveAdjoint):  # rounding alone is beyond the warning's 1e-3
        adjoint = replace(adjoint, reversal_tolerance=1.0)
    ys = odeint(f, y0, t, method="dopri5", adjoint=adjoint, **more)
    got = torch.autograd.grad(ys[-1].sum(), (y0, a))
    assert ys.dtype == dtype and {g.dtype for g in got} == {dtype} and set(seen) == {dtype}
    e = np.exp(-1.6)
    want = torch.tensor([e, e, 2 * 0.2 * e])
    got = torch.cat([x.double().ravel() for x in got])
    assert float((got - want).norm() / want.norm()) < TOLERANCE[dtype]


@every
def test_float32_times_are_taken_for_what_they_are(adjoint):
    y0 = torch.ones(2, requires_grad=True)
    t = torch.tensor([0.0, 0.1, 0.3], dtype=torch.float32, requires_grad=True)
    ys = odeint(lambda t, y: -y, y0, t, method="rk4", options={"num_steps": 4}, adjoint=adjoint)
    (grad,) = torch.autograd.grad(ys[-1].sum(), t)
    assert grad.dtype == torch.float32 and ys.dtype == torch.float64
    rate = -2 * np.exp(-float(t[2].detach()))
    np.testing.assert_allclose(grad, [-rate, 0, rate], rtol=1e-6, atol=1e-6)


SHARED = [name for name in _torchdiffeq.METHODS if name in TABLEAUS]


@pytest.mark.parametrize("options", [{"num_steps": 4}, {"step_size": 0.1}], ids=["num", "size"])
@pytest.mark.parametrize(
    "adjoint", [DirectAdjoint(), BacksolveAdjoint(reversal_tolerance=1.0)], ids=["Direct", "Back"]
)
@pytest.mark.parametrize("method", SHARED)
def test_the_engines_agree_to_rounding_on_one_mesh(method, adjoint, options):
    ours, theirs = (
        gradient(adjoint, UP, "cost", method=method, options=options, engine=engine)
        for engine in ("contadj", "torchdiffeq")
    )
    # Backsolve in torchdiffeq carries the gradient as a state; times of its adaptive methods are
    # not differentiable mesh times, so the last four entries are compared for the others only.
    count = 15 if method in _torchdiffeq.ADAPTIVE else len(ours)
    np.testing.assert_allclose(ours[:count], theirs[:count], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", SHARED)
def test_the_engines_agree_on_every_lambda(method):
    from contadj.torch._study import builtin_problem, gradient_function

    ours, theirs = (
        gradient_function(
            builtin_problem("pend"), method=method, adjoint="DirectAdjoint", engine=engine
        )(8)
        for engine in ("contadj", "torchdiffeq")
    )
    np.testing.assert_allclose(ours.adjoint, theirs.adjoint, rtol=1e-11)
    np.testing.assert_allclose(ours.gradient.vector, theirs.gradient.vector, rtol=1e-11)


def slow_fast(K, adjoint, dtype=torch.float64):
    """The relative error of a gradient of the slow-fast pair, rk4_classic with 512 steps."""
    y0 = torch.tensor([2.0, 1.0], dtype=dtype, requires_grad=True)
    p = torch.tensor([K, 1.0], dtype=dtype, requires_grad=True)

    def f(t, y):
        return torch.stack([-p[0] * (y[0] - torch.cos(y[1])), -y[1] + p[1] * y[0]])

    def run(adjoint):
        solution = solve(
            f, y0, torch.tensor([0.0, 1.0]), method="rk4_classic", options={"num_steps": 512},
            adjoint=adjoint, params=(p,),
        )  # fmt: skip
        grads = torch.autograd.grad((solution.ys[-1, 1] - 1) ** 2, (y0, p))
        return torch.cat(grads), solution.stats

    want, _ = run(CheckpointAdjoint())
    got, stats = run(adjoint)
    return float((got - want).norm() / want.norm()), stats.reversal_error


@pytest.mark.parametrize(
    ("K", "low", "high", "warned"),
    [(20.0, 1e-8, 1e-6, False), (30.0, 5e-4, 5e-2, True), (40.0, 2e1, 2e3, True),
     (50.0, 1e6, 1e8, True)],
)  # fmt: skip
def test_backsolve_says_when_rebuilding_the_state_has_ruined_the_gradient(K, low, high, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrong, reversal_error = slow_fast(K, BacksolveAdjoint())
    assert low < wrong < high
    assert [w.category for w in caught] == [ReversalWarning] * warned
    assert (reversal_error > 1e-3) is warned
    if warned:
        message = str(caught[0].message)
        assert "rebuilt in reverse time is off by" in message
        assert "Use CheckpointAdjoint(), or BacksolveAdjoint(restart_every=...)" in message


def test_in_float32_the_reversal_error_is_seen_much_earlier():
    with pytest.warns(ReversalWarning, match="the gradient may be worthless"):
        wrong, reversal_error = slow_fast(20.0, BacksolveAdjoint(), torch.float32)
    assert wrong > 1e-3 and reversal_error > 1e-2


def test_a_reversal_error_is_raised_on_request():
    with pytest.raises(SolveError, match=r"may be worthless\. Use CheckpointAdjoint") as caught:
        slow_fast(30.0, BacksolveAdjoint(on_reversal="raise"))
    assert caught.value.stats.reversal_error > 1e-3


def test_restarting_from_stored_states_rescues_the_stiffest_case():
    wrong, reversal_error = slow_fast(50.0, BacksolveAdjoint(restart_every=32))
    assert wrong < 5e-8 and reversal_error < 1e-5


@pytest.mark.parametrize("name", ["Interpolating", "Gauss"])
def test_an_adjoint_that_does_not_rebuild_the_state_is_right_there(name):
    wrong, reversal_error = slow_fast(50.0, CONTINUOUS[name])
    assert wrong < 1e-4 and reversal_error is None


def test_a_reversal_error_that_is_not_a_number_is_reported():
    # Backward in time y' = -y^3 blows up when the start is missed; with one crude step it does.
    y0 = torch.tensor([1.0], requires_grad=True)
    ys = odeint(
        lambda t, y: torch.where(t > 0.5, -1e200 * y**3, -y), y0, torch.tensor([0.0, 1.0]),
        method="euler", options={"mesh": [0.0, 1.0]}, adjoint=BacksolveAdjoint(),
    )  # fmt: skip
    with pytest.warns(ReversalWarning, match="off by"):
        torch.autograd.grad(ys[-1].sum(), y0)


def test_value_grad_and_stats_returns_the_statistics_of_both_passes():
    def cost(x, scale):
        ys = odeint(
            lambda t, y: -y * x["k"], x["y"], torch.tensor([0.0, 1.0, 2.0]), method="rk4",
            options={"num_steps": 5}, adjoint=BacksolveAdjoint(),
        )  # fmt: skip
        odeint(
            lambda t, y: -y, torch.ones(1), torch.tensor([0.0, 1.0]), method="euler",
            options={"num_steps": 3},
        )  # fmt: skip
        return scale * ys[-1].sum()

    x = {"y": torch.ones(2), "k": torch.tensor(0.5), "unused": torch.ones(3)}
    value, grads, stats = value_grad_and_stats(cost)(x, 3.0)
    assert float(value) == pytest.approx(6 * np.exp(-1), rel=1e-4) and not value.requires_grad
    np.testing.assert_allclose(grads["k"], -12 * np.exp(-1), rtol=1e-4)
    assert torch.equal(grads["unused"], torch.zeros(3))
    assert [s.f_evaluations_forward for s in stats] == [40, 3]
    # One more looks whether f is still the function it was.
    assert stats[0].steps_accepted == 10 and stats[0].f_evaluations_backward == 41
    assert 0 < stats[0].reversal_error < 1e-5
    assert stats[1].reversal_error is None and not x["y"].requires_grad


def test_value_grad_and_stats_refuses_a_function_that_returns_no_scalar():
    with pytest.raises(TypeError, match="`fn` must return a scalar tensor, got"):
        value_grad_and_stats(lambda x: x)(torch.ones(2))


def counts(adjoint, method, times=(0.0, 1.0), **more):
    """Calls of f as it sees them, forward and backward, and what the statistics say."""
    calls = 0

    def f(t, y):
        nonlocal calls
        calls += 1
        return -y + torch.cos(t)

    y0 = torch.ones(2, requires_grad=True)
    solution = solve(f, y0, torch.tensor(times), method=method, adjoint=adjoint, **more)
    forward = calls
    torch.autograd.grad(solution.ys[-1].sum(), y0)
    stats = solution.stats
    assert (forward, calls - forward) == (
        stats.f_evaluations_forward, stats.f_evaluations_backward
    )  # fmt: skip
    return forward, calls - forward, stats


@pytest.mark.parametrize("method", ["euler", "heun2", "rk4", "bosh3", "dopri5", "dopri8"])
def test_evaluations_on_a_fixed_mesh_are_counted_exactly(method):
    tableau = TABLEAUS[method]
    once = 10 * tableau.evaluations
    # A step taken again for its vector-Jacobian product starts afresh; the stage that a
    # first-same-as-last step would hand on is not needed for it.
    options = {"num_steps": 10}
    assert counts(DirectAdjoint(), method, options=options)[:2] == (once, 0)
    assert counts(CheckpointAdjoint(), method, options=options)[:2] == (once, once)
    backsolve = BacksolveAdjoint(reversal_tolerance=1.0)
    # One more looks whether f is still the function it was.
    assert counts(backsolve, method, options=options)[:2] == (once, once + 1)


def test_repeated_steps_with_snapshots_are_the_binomial_number():
    forward, backward, _ = counts(CheckpointAdjoint(3), "rk4", options={"num_steps": 35})
    # 35 = C(3 + 4, 3): t(35, 3) = 4 * 35 - C(3 + 4, 3) repeats, of which 34 are the forward pass;
    # and each step once for its vector-Jacobian product.
    assert forward == 4 * 35
    assert backward == 4 * (4 * 35 - 35 - 34 + 35)


def test_an_adaptive_solve_counts_attempts_and_the_search_for_the_first_step():
    _, _, stats = counts(CheckpointAdjoint(), "dopri5", (0.0, 4.0), rtol=1e-6, atol=1e-8)
    attempts = stats.steps_accepted + stats.steps_rejected
    # f(t0, y0) and one more for the size of the first step, then six per attempt.
    assert stats.f_evaluations_forward == 2 + 6 * attempts
    assert stats.f_evaluations_backward == 6 * stats.steps_accepted


def test_observations_do_not_restart_an_adaptive_solve():
    few = counts(CheckpointAdjoint(), "dopri5", (0.0, 2.0))
    many = counts(CheckpointAdjoint(), "dopri5", tuple(np.linspace(0, 2, 500)))
    # Dense output of dopri5 needs its own seventh stage only.
    assert many[2].steps_accepted == few[2].steps_accepted
    assert many[0] == few[0]
    assert many[1] <= few[1] * 7 / 6


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(2), BacksolveAdjoint()], ids=["C", "B"])
@pytest.mark.parametrize("more", [{"options": {"num_steps": 20}}, {}], ids=["fixed", "adaptive"])
def test_the_backward_pass_can_run_twice(adjoint, more):
    y0 = torch.tensor([1.0, 2.0], requires_grad=True)
    end = odeint(
        lambda t, y: torch.sin(y), y0, torch.tensor([0.0, 1.0]), adjoint=adjoint,
        method="dopri5", **more,
    )[-1]  # fmt: skip
    (first,) = torch.autograd.grad(end.sum(), y0, retain_graph=True)
    (second,) = torch.autograd.grad(end.sum(), y0, retain_graph=True)
    torch.testing.assert_close(first, second, rtol=1e-14, atol=0)
    jacobian = torch.stack([
        torch.autograd.grad(end[i], y0, retain_graph=True)[0] for i in range(2)
    ])  # fmt: skip
    # A reverse solve under error control takes other steps for another cotangent.
    exact = not (isinstance(adjoint, BacksolveAdjoint) and not more)
    torch.testing.assert_close(jacobian.sum(0), first, rtol=1e-13 if exact else 1e-6, atol=0)


@pytest.mark.parametrize("adjoint", ALL.values(), ids=ALL)
def test_gradients_on_the_device_are_those_of_the_host(adjoint, device):
    got = gradient(adjoint, UP, "cost", device=device, method="dopri5", options={"num_steps": 4})
    want = gradient(adjoint, UP, "cost", method="dopri5", options={"num_steps": 4})
    np.testing.assert_allclose(got, want, rtol=1e-12)


@every
def test_a_rejected_step_leaves_no_trace_in_the_parameter_gradient(adjoint):
    # A first step far too large is rejected several times, forward and in reverse.
    def run(first_step):
        a = torch.tensor(1.0, requires_grad=True)
        y0 = torch.tensor([1.0], requires_grad=True)
        solution = solve(
            lambda t, y: torch.cos(a * t * 3) * y, y0, torch.tensor([0.0, 3.0]), method="dopri5",
            rtol=1e-9, atol=1e-9, options={"first_step": first_step}, adjoint=adjoint,
        )  # fmt: skip
        return torch.stack(torch.autograd.grad(solution.ys[-1].sum(), (a, y0))[:1]), solution.stats

    (got, stats) = run(2.5)
    assert stats.steps_rejected >= 2
    # y(T) = exp(sin(3 a T) / (3 a)) at a = 1.
    y = np.exp(np.sin(9) / 3)
    np.testing.assert_allclose(got, [y * (3 * np.cos(9) - np.sin(9) / 3)], rtol=1e-6)
