"""Controls: their values, their knots as step ends, their gradients, and refusals."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.interpolate import CubicSpline, interp1d

from contadj.torch import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    Control,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
    odeint,
    solve,
)

KINDS = ("hold", "linear", "cubic")
KNOTS = np.array([0.0, 0.5, 1.1, 1.3, 2.2, 3.0])
ADJOINTS = (
    DirectAdjoint(), CheckpointAdjoint(), CheckpointAdjoint(2), ForwardSensitivity(),
    ReversibleAdjoint(), BacksolveAdjoint(reversal_tolerance=1.0), InterpolatingAdjoint(),
    GaussAdjoint(),
)  # fmt: skip
B, K = 0.3, 2.0


def control(kind, seed=0, scale=1.0):
    count = len(KNOTS) - (kind == "hold")
    values = scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return Control(KNOTS, values.requires_grad_(), kind)


def driven(t, y, u):
    """The pendulum with a torque."""
    return torch.stack([y[1], -B * y[1] - K * torch.sin(y[0]) + u])


def paid(t, y, u):
    return y[0] ** 2 + 0.1 * y[1] ** 2 + 0.05 * u**2


def end_cost(y):
    return (y[0] - 0.2) ** 2 + y[1] ** 2 / 2


def loss(u, adjoint, method, options, y0, t=(0.0, 1.3, 3.0), **more):
    solution = solve(
        driven, y0, torch.tensor(t), method=method, options=options, adjoint=adjoint, control=u,
        running_cost=paid, **more,
    )  # fmt: skip
    return solution.cost + end_cost(solution.ys[-1]) + solution.ys[1][0] ** 3


def start():
    return torch.tensor([1.0, 0.5], requires_grad=True)


# Values.


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_is_the_interpolant_of_its_values(kind):
    u = control(kind)
    values = u.values.detach().numpy()
    if kind == "hold":
        want = interp1d(KNOTS, np.append(values, values[-1]), "previous")
    else:
        want = interp1d(KNOTS, values) if kind == "linear" else CubicSpline(KNOTS, values)
    for t in np.linspace(0.01, 2.99, 61):
        assert float(u(t).detach()) == pytest.approx(float(want(t)), abs=1e-13)
        assert float(u(torch.tensor(t)).detach()) == pytest.approx(float(want(t)), abs=1e-13)


@pytest.mark.parametrize("kind", ["linear", "cubic"])
def test_a_control_is_differentiable_in_its_values_and_in_time(kind):
    u = control(kind)
    t = torch.tensor(1.7, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda t, values: Control(KNOTS, values, kind)(t), (t, u.values)
    )


def test_a_control_may_have_any_shape():
    values = torch.arange(24.0).reshape(6, 2, 2).requires_grad_()
    for kind in ("linear", "cubic"):
        u = Control(torch.tensor(KNOTS), values, kind)
        torch.testing.assert_close(u(0.5).detach(), values[1].detach())
        assert u(0.2).shape == (2, 2)


# Knots.


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("bosh3", {"step_size": 0.25}), ("dopri5", None), ("rk4", {"num_steps": 3}),
        ("gl4", {"step_size": 0.25}), ("trbdf2", None),
    ],
)  # fmt: skip
def test_every_evaluation_sees_the_held_value_of_its_own_piece(method, options, adjoint):
    if isinstance(adjoint, ReversibleAdjoint) and method in ("gl4", "trbdf2"):
        pytest.skip("the coupling is for explicit methods")
    u, y0 = control("hold"), start()
    seen = {}

    def f(t, y, value):
        i = int(torch.argmin((u.values - value).abs()))
        assert KNOTS[i] - 1e-12 <= float(t) <= KNOTS[i + 1] + 1e-12
        for end in (KNOTS[i], KNOTS[i + 1]):
            if abs(float(t) - end) < 1e-12:
                seen.setdefault(round(end, 6), set()).add(i)
        return driven(t, y, value)

    ys = odeint(
        f, y0, torch.tensor([0.0, 0.7, 3.0]), method=method, options=options, control=u,
        rtol=1e-4, atol=1e-6, adjoint=adjoint,
    )  # fmt: skip
    torch.autograd.grad(end_cost(ys[-1]) + ys[1].sum(), [y0, u.values])
    if method in ("bosh3", "dopri5", "rk4", "trbdf2"):
        # Both limits were taken at a knot: the end of one step, the start of the next.
        assert seen[0.5] == {0, 1} and seen[2.2] == {3, 4}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["rk4", "bosh3", "dopri5", "gl4", "radauIIA3"])
def test_a_driven_solve_is_the_chain_of_the_solves_between_its_knots(method, kind):
    u, y0 = control(kind), start()
    options = {"num_steps": 2}
    got = odeint(driven, y0, torch.tensor(KNOTS), method=method, options=options, control=u)
    got_grads = torch.autograd.grad(end_cost(got[-1]), [y0, u.values])
    y = y0
    for i in range(len(KNOTS) - 1):
        y = odeint(
            lambda t, y, i=i: driven(t, y, u.on_piece(t, i)), y,
            torch.tensor(KNOTS[i : i + 2]), method=method, options=options,
            adjoint=DirectAdjoint(),
        )[-1]  # fmt: skip
    want_grads = torch.autograd.grad(end_cost(y), [y0, u.values])
    torch.testing.assert_close(got[-1], y, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"step_size": 0.5}, 9), ({"num_steps": 3}, 7), ({"step_size": 0.1}, 30)],
)
def test_knots_are_added_to_a_mesh_unless_they_are_in_it(options, steps):
    times = (0.0, 3.0)
    solution = solve(
        driven, start(), torch.tensor(times), method="rk4", options=options,
        control=control("linear"),
    )  # fmt: skip
    assert solution.stats.steps_accepted == steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "order"), [("heun3", 3), ("gl4", 4)])
def test_a_method_keeps_its_order_across_knots(method, order, kind):
    def gradient(method, n):
        u, y0 = control(kind), start()
        value = loss(u, CheckpointAdjoint(), method, {"num_steps": n}, y0, tuple(KNOTS))
        return torch.cat([value.detach()[None], *torch.autograd.grad(value, [y0, u.values])])

    exact = gradient("dopri8", 8)
    coarse, fine = (float((gradient(method, n) - exact).norm()) for n in (4, 8))
    assert np.log2(coarse / fine) == pytest.approx(order, abs=0.35)


# Gradients.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "options"),
    [("rk4", {"step_size": 0.25}), ("tsit5", None), ("gl4", {"step_size": 0.25})],
)
def test_every_discrete_adjoint_gives_the_gradient_in_the_values(method, options, kind):
    u, y0 = control(kind), start()
    want = torch.autograd.grad(loss(u, DirectAdjoint(), method, options, y0), [y0, u.values])
    for adjoint in (CheckpointAdjoint(), CheckpointAdjoint(2), ForwardSensitivity()):
        got = torch.autograd.grad(loss(u, adjoint, method, options, y0), [y0, u.values])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    if options is None:
        return  # the mesh of error control moves with the values
    for i in range(len(u.values)):
        ends = []
        for shift in (1e-5, -1e-5):
            moved = u.values.detach().clone()
            moved[i] += shift
            with torch.no_grad():
                ends.append(loss(Control(KNOTS, moved, kind), DirectAdjoint(), method, options, y0))
        assert float(want[1][i]) == pytest.approx(float(ends[0] - ends[1]) / 2e-5, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "adjoint",
    [ReversibleAdjoint(), BacksolveAdjoint(), InterpolatingAdjoint(), GaussAdjoint(),
     BacksolveAdjoint(method="rk4", options={"step_size": 0.01})],
    ids=["Reversible", "Backsolve", "Interpolating", "Gauss", "own mesh"],
)  # fmt: skip
def test_every_other_adjoint_approaches_scipys_gradient(adjoint, kind):
    u, y0 = control(kind), start()
    tolerances = {"rtol": 1e-8, "atol": 1e-10}
    got = torch.autograd.grad(loss(u, adjoint, "tsit5", None, y0, **tolerances), [u.values])[0]

    def scipy_loss(values):
        pieces = Control(KNOTS, torch.tensor(values), kind)
        z, parts = np.array([1.0, 0.5, 0.0]), 0.0
        for i in range(len(KNOTS) - 1):

            def f(t, z, i=i):
                v = float(pieces.on_piece(t, i))
                x, w = z[:2]
                cost = x**2 + 0.1 * w**2 + 0.05 * v**2
                return [w, -B * w - K * np.sin(x) + v, cost]

            z = solve_ivp(f, KNOTS[i : i + 2], z, rtol=1e-11, atol=1e-12, method="DOP853").y[:, -1]
            if KNOTS[i + 1] == 1.3:
                parts = z[0] ** 3
        return z[2] + parts + (z[0] - 0.2) ** 2 + z[1] ** 2 / 2

    values = u.values.detach().numpy()
    for i in (0, 2, 4):
        shift = np.zeros_like(values)
        shift[i] = 1e-4
        want = (scipy_loss(values + shift) - scipy_loss(values - shift)) / 2e-4
        assert float(got[i]) == pytest.approx(want, abs=3e-6)


def functional_gradient(u):
    """H_u(t) = f_u^T lambda + c_u on a fine grid, for a smooth u(t), by a tight solve."""
    fine = np.linspace(0, 3, 129)
    y = torch.tensor([1.0, 0.5])

    def f(t, y):
        return driven(t, y, u(t))

    with torch.no_grad():
        ys = odeint(f, y, torch.tensor(fine), method="dopri8", options={"num_steps": 1})
    adjoint = torch.stack([2 * (ys[-1, 0] - 0.2), ys[-1, 1]])

    # lambda' = -f_y^T lambda - c_y beside y, in reverse time
    def reverse(t, z):
        x, v, a, b = z
        return torch.stack([
            v, -B * v - K * torch.sin(x) + u(t),
            K * torch.cos(x) * b - 2 * x, -a + B * b - 0.2 * v,
        ])  # fmt: skip

    with torch.no_grad():
        z = odeint(
            reverse, torch.cat([ys[-1], adjoint]), torch.tensor(fine[::-1].copy()),
            method="dopri8", options={"num_steps": 1},
        )  # fmt: skip
    slope = z.flip(0)[:, 3] + 0.1 * u(torch.tensor(fine))
    return fine, slope.numpy()


@pytest.mark.parametrize("method", ["heun2", "rk4_classic", "gl4"])
def test_the_gradient_of_a_held_control_over_h_converges_to_the_functional_gradient(method):
    # Order 1 against H_u at the start of a step, 2 against its middle, whatever the method.
    def smooth(t):
        return torch.sin(2 * torch.as_tensor(t)) - 0.3

    fine, slope = functional_gradient(smooth)
    errors = []
    for n in (16, 32):
        knots = np.linspace(0, 3, n + 1)
        middles = (knots[1:] + knots[:-1]) / 2
        values = smooth(torch.tensor(middles)).requires_grad_()
        solution = solve(
            driven, start(), torch.tensor([0.0, 3.0]), method=method,
            options={"num_steps": n}, control=Control(knots, values, "hold"), running_cost=paid,
        )  # fmt: skip
        assert solution.stats.steps_accepted == n
        total = solution.cost + end_cost(solution.ys[-1])
        density = torch.autograd.grad(total, values)[0].numpy() * n / 3
        stride = 128 // n
        at_starts, at_middles = slope[:-1:stride], slope[stride // 2 :: stride]
        assert np.allclose(fine[stride // 2 :: stride], middles)
        errors.append([np.abs(density - want).max() for want in (at_starts, at_middles)])
    orders = np.log2(np.array(errors[0]) / np.array(errors[1]))
    assert orders[0] == pytest.approx(1.0, abs=0.1)
    assert orders[1] == pytest.approx(2.0, abs=0.15)


def test_values_may_come_from_a_network():
    policy = torch.nn.Linear(1, 1)
    y0 = start()
    for kind in KINDS:
        times = torch.tensor(KNOTS if kind != "hold" else KNOTS[:-1])
        grads = []
        for adjoint in (DirectAdjoint(), CheckpointAdjoint(), ForwardSensitivity()):
            values = torch.tanh(policy(times[:, None])[:, 0])
            value = loss(
                Control(KNOTS, values, kind), adjoint, "rk4", {"step_size": 0.25}, y0
            )  # fmt: skip
            grads.append(torch.autograd.grad(value, [y0, *policy.parameters()]))
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads[0], grads[2], rtol=1e-12, atol=1e-12)


def test_values_beside_other_parameters_are_found_without_being_named():
    gain = torch.tensor(0.7, requires_grad=True)
    u, y0 = control("linear"), start()
    for more in ({}, {"params": [gain]}):
        ys = odeint(
            lambda t, y, u: gain * driven(t, y, u), y0, torch.tensor([0.0, 3.0]), method="rk4",
            options={"step_size": 0.25}, control=u, **more,
        )  # fmt: skip
        grads = torch.autograd.grad(end_cost(ys[-1]), [gain, u.values])
        assert all(float(grad.abs().max()) > 0 for grad in grads)


def test_a_hessian_vector_product_in_the_values_is_right():
    u, y0 = control("cubic"), start()
    direction = torch.linspace(-1, 1, 6)

    def slope(values, create_graph=False):
        value = loss(
            Control(KNOTS, values, "cubic"), CheckpointAdjoint(), "rk4", {"step_size": 0.25}, y0
        )
        return torch.autograd.grad(value, values, create_graph=create_graph)[0]

    got = torch.autograd.grad(slope(u.values, True) @ direction, u.values)[0]
    ahead, behind = (
        slope((u.values + s * direction).detach().requires_grad_()) for s in (1e-5, -1e-5)
    )
    torch.testing.assert_close(got, (ahead - behind) / 2e-5, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "adjoint",
    [DirectAdjoint(), CheckpointAdjoint(), ForwardSensitivity(), BacksolveAdjoint(),
     InterpolatingAdjoint()],
    ids=lambda a: type(a).__name__,
)  # fmt: skip
def test_the_ends_of_the_solve_move_along_the_limits_of_f(kind, adjoint):
    # dL/dt1 = L_y f(t1-) + c(t1-), dL/dt0 = -(lambda f + c)(t0+), of the exact solution.
    u, y0 = control(kind), start()
    t = torch.tensor([0.0, 2.2], requires_grad=True)
    solution = solve(
        driven, y0, t, method="dopri8", rtol=1e-10, atol=1e-12, control=u, running_cost=paid,
        adjoint=adjoint,
    )  # fmt: skip
    end = solution.ys[-1]
    value = solution.cost + end_cost(end)
    got, adjoint_0 = torch.autograd.grad(value, [t, y0])
    with torch.no_grad():
        slope = torch.stack([2 * (end[0] - 0.2), end[1]])
        last, first = u.on_piece(2.2, 3), u.on_piece(0.0, 0)
        at_end = slope @ driven(None, end, last) + paid(None, end, last)
        at_start = adjoint_0 @ driven(None, y0, first) + paid(None, y0, first)
    torch.testing.assert_close(got, torch.stack([-at_start, at_end]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), BacksolveAdjoint()])
@pytest.mark.parametrize("kind", KINDS)
def test_decreasing_time_undoes_increasing_time(kind, adjoint):
    u, y0 = control(kind), start()
    t = torch.tensor([0.0, 3.0])
    options = {"num_steps": 20}
    there = odeint(driven, y0, t, method="gl4", options=options, control=u, adjoint=adjoint)[-1]
    back = odeint(
        driven, there, t.flip(0), method="gl4", options=options, control=u, adjoint=adjoint
    )[-1]
    torch.testing.assert_close(back, y0, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(back.sum(), u.values)
    assert float(grad.abs().max()) < 1e-12


def test_single_precision_and_nested_states_are_driven_too():
    u = Control(KNOTS, torch.ones(5, dtype=torch.float32, requires_grad=True), "hold")
    y0 = {"x": torch.ones(1, dtype=torch.float32), "v": torch.zeros(1, dtype=torch.float32)}
    ys = odeint(
        lambda t, y, u: {"x": y["v"], "v": u - y["x"]}, y0, torch.tensor([0.0, 3.0]),
        method="rk4", options={"step_size": 0.05}, control=u,
    )  # fmt: skip
    assert ys["x"].dtype == torch.float32
    # x = 1 stays; dx(T)/du_i = cos(T - t_{i+1}) - cos(T - t_i)
    got = torch.autograd.grad(ys["x"][-1].sum(), u.values)[0]
    want = np.cos(3 - KNOTS[1:]) - np.cos(3 - KNOTS[:-1])
    np.testing.assert_allclose(got, want, atol=1e-5)


# Refusals.


@pytest.mark.parametrize(
    ("times", "values", "kind", "error", "message"),
    [
        ([0, 1], torch.ones(2), "zoh", ValueError, "`kind` must be one of hold, linear, cubic"),
        ([0, 1, 1], torch.ones(3), "linear", ValueError, "two knots or more, strictly increasing"),
        ([0], torch.ones(1), "linear", ValueError, "two knots or more"),
        ([0, 1, 2], torch.ones(3), "hold", ValueError, "one entry per piece between knots, 2 for"),
        ([0, 1, 2], torch.ones(2), "linear", ValueError, "one entry per knot, 3 for"),
        ([0, 1], torch.ones(2).long(), "linear", TypeError, "floating-point tensor, got torch.int"),
        ([0, 1], [1.0, 2.0], "linear", TypeError, "floating-point tensor, got list"),
    ],
)
def test_a_wrong_control_raises(times, values, kind, error, message):
    with pytest.raises(error, match=message):
        Control(times, values, kind)


def test_gradients_in_the_knots_are_refused():
    with pytest.raises(TypeError, match="the knots are step times, held fixed"):
        Control(torch.tensor([0.0, 1.0], requires_grad=True), torch.ones(2))


def test_a_control_is_not_extrapolated():
    with pytest.raises(ValueError, match=r"given on \[0.0, 3.0\], not at t = 3.5"):
        control("linear")(3.5)
    with pytest.raises(ValueError, match=r"runs over \[0.0, 3.5\]: add knots"):
        loss(control("linear"), DirectAdjoint(), "rk4", {"num_steps": 2}, start(), (0, 1.3, 3.5))


def test_a_given_mesh_must_have_the_knots():
    u = control("linear")
    with pytest.raises(ValueError, match=r"`mesh` must have the knots of `control`.*0.5 is not"):
        loss(u, DirectAdjoint(), "rk4", {"mesh": np.linspace(0, 3, 5)}, start())
    assert loss(u, DirectAdjoint(), "rk4", {"mesh": KNOTS}, start()).isfinite()


def test_what_is_no_control_is_refused():
    with pytest.raises(TypeError, match=r"must be a Control\(times, values, kind\), got function"):
        loss(lambda t: 0.0, DirectAdjoint(), "rk4", {"num_steps": 2}, start())
    with pytest.raises(ValueError, match="`control` needs engine='contadj'"):
        loss(control("hold"), DirectAdjoint(), "rk4", {"num_steps": 2}, start(),
             engine="torchdiffeq")  # fmt: skip


def test_values_computed_from_another_parameter_are_refused():
    w = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ValueError, match="would count twice"):
        loss(Control(KNOTS, w + torch.ones(6)), CheckpointAdjoint(), "rk4", {"num_steps": 2},
             start(), params=[w])  # fmt: skip
