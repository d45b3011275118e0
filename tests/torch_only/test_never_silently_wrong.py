"""What happens to users without any error elsewhere: here it is right, or an error says so."""

import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from contadj.torch import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    Control,
    DirectAdjoint,
    ForwardSensitivity,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversalWarning,
    ReversibleAdjoint,
    SolveError,
    odeint,
    solve,
)

REPLAYING = {
    "Checkpoint": CheckpointAdjoint(),
    "Checkpoint(3)": CheckpointAdjoint(snapshots=3),
    "Reversible": ReversibleAdjoint(),
    "Backsolve": BacksolveAdjoint(),
    "Interpolating": InterpolatingAdjoint(),
    "Gauss": GaussAdjoint(),
}
ALL = {"Direct": DirectAdjoint(), "Forward": ForwardSensitivity()} | REPLAYING
every = pytest.mark.parametrize("adjoint", ALL.values(), ids=ALL)
replaying = pytest.mark.parametrize("adjoint", REPLAYING.values(), ids=REPLAYING)
not_direct = pytest.mark.parametrize(
    "adjoint", [a for n, a in ALL.items() if n != "Direct"], ids=[n for n in ALL if n != "Direct"]
)
STEPS = 32


def end(f, y0, adjoint, **more):
    more = {"method": "rk4_classic", "options": {"num_steps": STEPS}} | more
    return odeint(f, y0, torch.tensor([0.0, 1.0]), adjoint=adjoint, **more)[-1]


def reference(f, y0):
    """rk4 in a plain loop, differentiated by autograd; shares no code with the package."""
    y, h = y0, 1.0 / STEPS
    for n in range(STEPS):
        t = torch.tensor(n * h)
        k1 = f(t, y)
        k2 = f(t + h / 2, y + h / 2 * k1)
        k3 = f(t + h / 2, y + h / 2 * k2)
        k4 = f(t + h, y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return y


def assert_gradients(adjoint, f, y0, inputs, **more):
    # What made y0 or a parameter is differentiated twice.
    y = end(f, y0, adjoint, **more)
    got = torch.autograd.grad((y**2).sum(), inputs, retain_graph=True)
    want = torch.autograd.grad((reference(f, y0) ** 2).sum(), inputs)
    # The continuous gradient, and that of the coupled solution, differ by O(h^4) = 1e-6.
    exact = isinstance(adjoint, DirectAdjoint | CheckpointAdjoint | ForwardSensitivity)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11 if exact else 1e-5, atol=1e-12)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


# A tensor that needs a gradient and is no registered parameter.


@every
def test_a_leaf_in_a_closure_gets_its_gradient(adjoint):
    y0, theta = leaf(0.5, -0.3), leaf(0.7, 1.1)
    assert_gradients(adjoint, lambda t, y: torch.sin(theta * y) + t, y0, (y0, theta))


@every
def test_a_vector_field_that_is_a_bare_leaf_gives_it_a_gradient(adjoint):
    y0, theta = leaf(0.5, -0.3), leaf(0.7, 1.1)
    assert_gradients(adjoint, lambda t, y: theta, y0, (y0, theta))


@every
def test_a_vector_field_that_returns_its_state_is_no_error(adjoint):
    y0 = leaf(0.5, -0.3)
    assert_gradients(adjoint, lambda t, y: y, y0, (y0,))


@every
def test_a_leaf_in_a_list_attribute_gets_its_gradient(adjoint):
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = [leaf(0.4, -0.2), leaf(1.0, 0.3)]  # not registered
            self.bias = nn.Parameter(torch.ones(2))

        def forward(self, t, y):
            return torch.tanh(self.weights[0] * y + self.bias) * self.weights[1]

    f, y0 = Field(), leaf(0.5, -0.3)
    assert_gradients(adjoint, f, y0, (y0, *f.weights, f.bias))


@every
def test_parameters_of_a_functional_call_get_their_gradient(adjoint):
    net = nn.Linear(2, 2)
    params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    y0 = leaf(0.5, -0.3)

    def f(t, y):
        return torch.tanh(torch.func.functional_call(net, params, (y,)))

    assert_gradients(adjoint, f, y0, (y0, *params.values()))


@not_direct
def test_the_output_of_an_encoder_inside_f_is_refused_until_it_is_in_params(adjoint):
    w, y0 = leaf(0.3, 0.9), leaf(0.5, -0.3)
    context = torch.tanh(w)

    def f(t, y):
        return torch.sin(y) * context

    with pytest.raises(ValueError, match=r"`func` uses a tensor that was computed outside.*params"):
        end(f, y0, adjoint)
    assert_gradients(adjoint, f, y0, (y0, w), params=(context,))


def test_the_output_of_an_encoder_inside_f_is_right_with_the_direct_adjoint():
    w, y0 = leaf(0.3, 0.9), leaf(0.5, -0.3)
    context = torch.tanh(w)
    assert_gradients(DirectAdjoint(), lambda t, y: torch.sin(y) * context, y0, (y0, w))


@every
def test_a_state_that_an_encoder_made_passes_its_gradient_on(adjoint):
    x = leaf(0.3, 0.9)
    assert_gradients(adjoint, lambda t, y: torch.sin(y), torch.tanh(x) * 2, (x,))


@not_direct
def test_the_other_output_of_a_node_whose_first_is_a_param_is_seen(adjoint):
    theta, y0 = leaf(0.3, 0.9), leaf(0.5, -0.3)
    first, second = theta.unbind()

    def f(t, y):
        return first * y + torch.sin(second * y)

    with pytest.raises(ValueError, match="`func` uses a tensor that was computed outside it"):
        end(f, y0, adjoint, params=(first,))
    assert_gradients(adjoint, f, y0, (y0, theta), params=(first, second))


@not_direct
def test_an_explicit_list_of_params_that_lacks_one_is_refused_with_its_shape(adjoint):
    a, b, y0 = leaf(0.3), leaf(0.9, 1.0), leaf(0.5, -0.3)
    with pytest.raises(
        ValueError,
        match=r"`func` uses 1 tensor\(s\) that need a gradient and are not in `params` "
        r"\(shapes \(2,\)\): add them, or call .requires_grad_\(False\) on them",
    ):
        end(lambda t, y: a * y + b, y0, adjoint, params=(a,))


@pytest.mark.parametrize("argument", ["running_cost", "loss"])
@every
def test_a_leaf_that_only_a_cost_uses_gets_its_gradient(adjoint, argument):
    w, y0 = leaf(2.0), leaf(0.5, -0.3)

    def cost(*arguments):
        return (w * arguments[-1]).sum()

    solution = solve(
        lambda t, y: -y, y0, torch.tensor([0.0, 1.0]), method="dopri8", adjoint=adjoint,
        options={"num_steps": 16}, **{argument: cost},
    )  # fmt: skip
    value = solution.cost if argument == "running_cost" else solution.loss
    e = np.exp(-1)
    factor = 1 - e if argument == "running_cost" else 1 + e
    got = torch.autograd.grad(value, (y0, w))
    np.testing.assert_allclose(got[0], [2 * factor] * 2, rtol=1e-9)
    np.testing.assert_allclose(got[1], [0.2 * factor], rtol=1e-9)


@pytest.mark.parametrize("argument", ["running_cost", "loss"])
@not_direct
def test_a_cost_that_uses_an_encoder_is_refused_by_its_name(adjoint, argument):
    target = torch.tanh(leaf(2.0))
    with pytest.raises(ValueError, match=f"`{argument}` uses a tensor that was computed outside"):
        solve(
            lambda t, y: -y, leaf(0.5, -0.3), torch.tensor([0.0, 1.0]), method="rk4",
            options={"num_steps": 4}, adjoint=adjoint,
            **{argument: lambda *arguments: (arguments[-1] - target).square().sum()},
        )  # fmt: skip


# A tensor that is used only after the first evaluation.


class Late(nn.Module):
    """-k y, and +k2 y in a window of time."""

    def __init__(self, start=0.5, end=2.0):
        super().__init__()
        self.start, self.end = start, end
        self.k = nn.Parameter(torch.tensor([0.4, 0.9]))
        self.late = [leaf(0.3, 0.8)]  # not registered

    def forward(self, t, y):
        inside = self.start < t <= self.end
        return torch.sin(self.late[0] * y) if inside else torch.sin(self.k * y)


LOST = "uses a tensor of shape .* that needs a gradient and that it did not use when.*`params`"
WINDOWS = {"to the end": (0.5, 2.0), "within one step": (15.2 / STEPS, 15.8 / STEPS)}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@not_direct
def test_a_leaf_that_f_uses_later_is_refused_until_it_is_in_params(adjoint, window):
    f, y0 = Late(*window), leaf(0.5, -0.3)
    with pytest.raises(ValueError, match=f"`func` {LOST}"):
        end(f, y0, adjoint).sum().backward()
    # The jump of f leaves the continuous gradients no order.
    if isinstance(adjoint, CheckpointAdjoint | ForwardSensitivity):
        assert_gradients(adjoint, f, y0, (y0, f.k, *f.late), params=(f.k, *f.late))
    else:
        got = torch.autograd.grad(end(f, y0, adjoint, params=(f.k, *f.late)).sum(), f.late)
        assert got[0].abs().min() > 1e-4


def test_a_leaf_that_f_uses_later_is_right_with_the_direct_adjoint():
    f, y0 = Late(), leaf(0.5, -0.3)
    assert_gradients(DirectAdjoint(), f, y0, (y0, f.k, *f.late))


@pytest.mark.parametrize("method", ["bosh3", "implicit_midpoint"])
@not_direct
def test_a_leaf_that_f_uses_later_is_refused_with_other_methods_too(adjoint, method):
    if isinstance(adjoint, ReversibleAdjoint) and method == "implicit_midpoint":
        pytest.skip("the coupling is for explicit methods")
    options = None if method == "bosh3" else {"num_steps": STEPS}
    with pytest.raises(ValueError, match=f"`func` {LOST}"):
        end(Late(), leaf(0.5, -0.3), adjoint, method=method, options=options).sum().backward()


def test_a_leaf_that_f_uses_later_is_refused_with_the_torchdiffeq_engine_too():
    y = end(Late(), leaf(0.5, -0.3), BacksolveAdjoint(), method="rk4", engine="torchdiffeq")
    with pytest.raises(ValueError, match=f"`func` {LOST}"):
        y.sum().backward()


@not_direct
def test_a_tensor_with_a_graph_of_its_own_that_f_uses_later_is_refused_too(adjoint):
    f, w = Late(), leaf(0.3, 0.8)
    f.late = [torch.tanh(w)]
    with pytest.raises(ValueError, match=f"`func` {LOST}"):
        end(f, leaf(0.5, -0.3), adjoint).sum().backward()


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), CheckpointAdjoint(3)], ids=["None", "3"])
def test_a_leaf_that_f_uses_later_is_refused_in_a_second_derivative_too(adjoint):
    y0 = leaf(0.5, -0.3)
    with pytest.raises(ValueError, match=f"`func` {LOST}"):
        torch.autograd.grad(end(Late(), y0, adjoint).sum(), y0, create_graph=True)


@pytest.mark.parametrize("argument", ["running_cost", "loss"])
@not_direct
def test_a_leaf_that_a_cost_uses_later_is_refused_until_it_is_in_params(adjoint, argument):
    weight, y0, t = leaf(2.0), leaf(0.5, -0.3), torch.tensor([0.0, 0.25, 1.0])

    def cost(*arguments):
        *_, t, y = arguments
        return (weight * y).sum() if t > 0.1 else y.sum()

    def value(**more):
        solution = solve(
            lambda t, y: -y, y0, t, method="rk4_classic", options={"num_steps": 10},
            adjoint=adjoint, **{argument: cost}, **more,
        )  # fmt: skip
        return solution.cost if argument == "running_cost" else solution.loss

    with pytest.raises(ValueError, match=f"`{argument}` {LOST}"):
        value().backward()
    got = torch.autograd.grad(value(params=(weight,)), weight)[0]
    if argument == "loss":
        np.testing.assert_allclose(got, [0.2 * (np.exp(-0.25) + np.exp(-1))], rtol=1e-5)
    assert got > 0.01


@every
def test_a_leaf_that_f_makes_for_itself_is_no_error(adjoint):
    y0, k = leaf(0.5, -0.3), leaf(1.3)

    def f(t, y):
        with torch.enable_grad():
            s = t.detach().clone().requires_grad_()
            rate = torch.autograd.grad(torch.sin(2 * s) + s**3, s, create_graph=True)[0]
        return rate * torch.sin(k * y)

    for more in ({}, {"params": (k,)}):
        assert_gradients(adjoint, f, y0, (y0, k), **more)


# f calls autograd itself.


def energy(y, k):
    return (torch.cos(k * y)).sum() + 0.1 * (y**4).sum()


@every
def test_an_energy_based_field_is_right(adjoint):
    y0, k = leaf(0.5, -0.3), leaf(1.3)

    def f(t, y):
        with torch.enable_grad():
            if not y.requires_grad:
                y = y.detach().requires_grad_()
            return -torch.autograd.grad(energy(y, k), y, create_graph=True)[0]

    assert_gradients(adjoint, f, y0, (y0, k))


@every
def test_an_energy_based_field_that_expects_a_graph_is_given_one(adjoint):
    y0, k = leaf(0.5, -0.3), leaf(1.3)

    def f(t, y):
        return -torch.autograd.grad(energy(y, k), y, create_graph=True)[0]

    assert_gradients(adjoint, f, y0, (y0, k))


@every
def test_an_energy_based_field_by_function_transforms_is_right(adjoint):
    y0, k = leaf(0.5, -0.3), leaf(1.3)
    assert_gradients(adjoint, lambda t, y: -torch.func.grad(lambda y: energy(y, k))(y), y0, (y0, k))


@every
def test_a_divergence_term_is_right(adjoint):
    W = torch.tensor([[0.3, -0.8], [0.6, 0.2]], requires_grad=True)
    y0 = {"z": leaf(0.5, -0.3), "logp": torch.zeros(1, requires_grad=True)}

    def f(t, y):
        with torch.enable_grad():
            z = y["z"] if y["z"].requires_grad else y["z"].detach().requires_grad_()
            slope = torch.tanh(W @ z)
            trace = sum(torch.autograd.grad(slope[i], z, create_graph=True)[0][i] for i in range(2))
        return {"z": slope, "logp": -trace.reshape(1)}

    got = end_of_dict(f, y0, adjoint)
    want = reference_of_dict(f, y0)
    exact = isinstance(adjoint, DirectAdjoint | CheckpointAdjoint | ForwardSensitivity)
    inputs = (y0["z"], W)
    for a, b in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11 if exact else 1e-5, atol=1e-12)


def end_of_dict(f, y0, adjoint):
    ys = odeint(
        f, y0, torch.tensor([0.0, 1.0]), method="rk4_classic", options={"num_steps": STEPS},
        adjoint=adjoint,
    )  # fmt: skip
    return ys["logp"][-1].sum() + (ys["z"][-1] ** 2).sum()


def reference_of_dict(f, y0):
    def flat(t, y):
        slope = f(t, {"z": y[:2], "logp": y[2:]})
        return torch.cat([slope["z"], slope["logp"]])

    y = reference(flat, torch.cat([y0["z"], y0["logp"]]))
    return y[2] + (y[:2] ** 2).sum()


def without_graph(t, y):
    with torch.enable_grad():
        y = y if y.requires_grad else y.detach().requires_grad_()
        return -torch.autograd.grad(energy(y, 1.3), y)[0]


def partly_without_graph(t, y):
    return -0.1 * y + without_graph(t, y)


def cut_off(t, y):
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        return -torch.autograd.grad(energy(z, 1.3), z, create_graph=True)[0]


def through_numpy(t, y):
    return torch.from_numpy(np.sin(y.detach().numpy()))


@pytest.mark.parametrize("f", [without_graph, partly_without_graph])
@every
def test_an_energy_differentiated_without_a_graph_is_refused(adjoint, f):
    with pytest.raises(ValueError, match=r"`func` .* the gradient would be wrong.*create_graph"):
        end(f, leaf(0.5, -0.3), adjoint)


@pytest.mark.parametrize("f", [cut_off, through_numpy])
@every
def test_a_field_whose_graph_does_not_reach_the_state_is_refused(adjoint, f):
    with pytest.raises(
        ValueError, match=r"`func` depends on y but the graph of its result does not reach y"
    ):
        end(f, leaf(0.5, -0.3), adjoint)


@every
def test_a_field_that_differentiates_what_does_not_depend_on_the_state_is_no_error(adjoint):
    y0 = leaf(0.5, -0.3)

    def f(t, y):
        with torch.enable_grad():
            s = t.detach().clone().requires_grad_()
            return torch.autograd.grad(torch.sin(2 * s), s)[0] * torch.sin(y)

    assert_gradients(adjoint, f, y0, (y0,))


@every
def test_a_field_of_time_alone_is_no_error(adjoint):
    y0 = leaf(0.5, -0.3)
    assert_gradients(adjoint, lambda t, y: torch.cos(t) * torch.ones(2), y0, (y0,))


@every
def test_a_field_that_asks_its_state_for_a_graph_does_not_change_the_users_tensor(adjoint):
    y0, k = torch.tensor([0.5, -0.3]), leaf(1.3)

    def f(t, y):
        with torch.enable_grad():
            y = y.requires_grad_(True)
            return -torch.autograd.grad(energy(y, k), y, create_graph=True)[0]

    with torch.no_grad():
        end(f, y0, adjoint)
    assert_gradients(adjoint, f, y0.clone(), (k,))


# f is not the same function in the backward pass.


class Scaled(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.scale = 1.0
        self.w = nn.Parameter(torch.tensor([0.3, 0.9], dtype=dtype))

    def forward(self, t, y):
        return self.scale * torch.sin(self.w * y)


@pytest.mark.parametrize("more", [{}, {"options": None, "method": "dopri5"}], ids=["fixed", "ad"])
@replaying
def test_an_attribute_that_changes_before_the_backward_pass_is_noticed(adjoint, more):
    f, y0 = Scaled(), leaf(0.5, -0.3)
    y = end(f, y0, adjoint, **more)
    f.scale = 1.5
    with pytest.raises((SolveError, ReversalWarning)):
        y.sum().backward()


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), CheckpointAdjoint(3)], ids=["None", "3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_small_change_is_noticed_in_float32_with_many_steps(adjoint, dtype):
    f, y0 = Scaled(dtype), torch.tensor([0.5, -0.3], dtype=dtype, requires_grad=True)
    y = end(f, y0, adjoint, options={"num_steps": 200})
    f.scale = 1.05
    with pytest.raises(SolveError, match="`func` is not the function it was in the forward pass"):
        y.sum().backward()


@replaying
def test_a_counter_in_f_is_noticed(adjoint):
    class Counting(Scaled):
        def forward(self, t, y):
            self.scale = self.scale * 1.02
            return super().forward(t, y)

    y = end(Counting(), leaf(0.5, -0.3), adjoint)
    with pytest.raises((SolveError, ReversalWarning)):
        y.sum().backward()


@replaying
def test_a_parameter_that_an_optimizer_changed_in_place_is_an_error(adjoint):
    f, y0 = Scaled(), leaf(0.5, -0.3)
    y = end(f, y0, adjoint)
    with torch.no_grad():
        f.w.mul_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@not_direct
def test_dropout_is_refused_unless_it_is_off(adjoint):
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, t, y):
            return self.net(y)

    f, y0 = Field(), leaf(0.5, -0.3)
    with pytest.raises(ValueError, match=r"`func` draws random numbers.*call .eval\(\).*Direct"):
        end(f, y0, adjoint)
    f.eval()
    assert_gradients(adjoint, f, y0, (y0, *f.parameters()))


def test_dropout_is_right_with_the_direct_adjoint():
    f, y0 = nn.Dropout(0.5), torch.ones(6, requires_grad=True)
    torch.manual_seed(0)
    y = end(lambda t, y: f(y), y0, DirectAdjoint(), options={"num_steps": 3}, method="euler")
    torch.manual_seed(0)
    want = y0
    for _ in range(3):
        want = want + f(want) / 3
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), y0), torch.autograd.grad(want.sum(), y0)
    )


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.linear = nn.Linear(2, 2)

    def forward(self, t, y):
        return torch.tanh(self.linear(self.norm(y)))


def normalised(adjoint, as_module):
    torch.manual_seed(1)
    f = Normalised()
    y0 = torch.randn(5, 2).requires_grad_()
    y = end(f if as_module else lambda t, y: f(t, y), y0, adjoint)
    after_forward = [b.clone() for b in f.buffers()]
    y.square().sum().backward()
    return f, after_forward, [y0.grad, *(p.grad for p in f.parameters())]


@every
def test_batch_norm_updates_its_buffers_in_the_forward_pass_only(adjoint):
    f, after_forward, grads = normalised(adjoint, as_module=True)
    # A coupled step evaluates the method's own step twice.
    per_step = 8 if isinstance(adjoint, ReversibleAdjoint) else 4
    assert int(f.norm.num_batches_tracked) == per_step * STEPS
    assert all(map(torch.equal, f.buffers(), after_forward))
    _, want, reference_grads = normalised(DirectAdjoint(), as_module=True)
    if not isinstance(adjoint, ReversibleAdjoint):
        torch.testing.assert_close(after_forward, want)
    for a, b in zip(grads, reference_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_batch_norm_inside_a_plain_function_updates_its_buffers_once():
    f, after_forward, _ = normalised(CheckpointAdjoint(), as_module=False)
    assert all(map(torch.equal, f.buffers(), after_forward))


@every
def test_autocast_of_the_forward_pass_holds_in_the_backward_pass(adjoint):
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.linear = nn.Linear(2, 2, dtype=torch.float32)
            self.seen = set()

        def forward(self, t, y):
            z = self.linear(y)
            self.seen.add(z.dtype)
            return torch.tanh(z).to(y.dtype)

    def run(adjoint):
        f, y0 = Field(), torch.tensor([[0.5, -0.3]], dtype=torch.float32, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = end(f, y0, adjoint, options={"num_steps": 8})
        y.sum().backward()
        return f.seen, [y0.grad, *(p.grad for p in f.parameters())]

    seen, grads = run(loose(adjoint))
    assert seen == {torch.bfloat16}
    for a, b in zip(grads, run(DirectAdjoint())[1], strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


class Halved(nn.Module):
    """A linear layer in the lower precision of autocast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(2, 2, dtype=torch.float32)

    def forward(self, t, y):
        return torch.tanh(self.linear(y)).to(y.dtype)


def loose(adjoint):
    # Rounding of bfloat16 is beyond the warning's 1e-3.
    if isinstance(adjoint, BacksolveAdjoint | ReversibleAdjoint):
        return dataclasses.replace(adjoint, reversal_tolerance=1.0)
    return adjoint


@pytest.mark.parametrize("backward", ["inside", "outside"])
@every
def test_solves_that_share_an_autocast_context_give_the_gradients_of_solves_with_their_own(
    adjoint, backward
):
    f = Halved()
    y0 = torch.tensor([[0.5, -0.3]], dtype=torch.float32, requires_grad=True)
    lower = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def value():
        return end(f, y0, loose(adjoint), options={"num_steps": 8}).square().sum()

    def gradient(value):
        return torch.autograd.grad(value, (y0, *f.parameters()))

    with lower():
        alone = value()
    want = gradient(alone)
    with lower():
        encoded = f(0.0, y0.detach()).sum()  # autocast keeps the cast weight until the context ends
        first, second = value(), value()
        if backward == "inside":
            got = [gradient(first), gradient(second)]
    if backward == "outside":
        got = [gradient(first), gradient(second)]
    for grads in got:
        torch.testing.assert_close(grads, want, rtol=0, atol=0)
    assert all(grad.any() for grad in torch.autograd.grad(encoded, list(f.parameters())))


@every
def test_autocast_rounds_no_state_and_no_gradient(adjoint):
    # f has no operation that autocast takes to a lower precision; observations inside a step and a
    # cubic control are sums with weights.
    t, knots = torch.linspace(0.0, 1.0, 12), torch.linspace(0.0, 1.0, 4)
    y0 = torch.tensor([0.5, -0.3], dtype=torch.float32, requires_grad=True)
    values = torch.tensor([0.3, 0.8, -0.2, 0.1], dtype=torch.float32, requires_grad=True)
    control = Control(knots, values, kind="cubic")

    def states_and_gradients(enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            ys = odeint(
                lambda t, y, u: u - torch.sin(y), y0, t, control=control, method="dopri5",
                options={"mesh": knots}, adjoint=loose(adjoint),
            )  # fmt: skip
        return [ys, *torch.autograd.grad((t[:, None] * ys).sum(), [y0, values])]

    got, want = states_and_gradients(True), states_and_gradients(False)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_torchdiffeq_engine_keeps_autocast_and_buffers_in_its_backward_pass():
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.linear = nn.Linear(2, 2, dtype=torch.float32)
            self.norm = nn.BatchNorm1d(2, dtype=torch.float32)
            self.seen = set()

        def forward(self, t, y):
            z = self.linear(y)
            self.seen.add(z.dtype)
            return torch.tanh(self.norm(z)).to(y.dtype)

    f = Field()
    y0 = torch.tensor([[0.5, -0.3], [0.1, 0.7]], dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = end(
            f, y0, BacksolveAdjoint(reversal_tolerance=1.0), engine="torchdiffeq", method="rk4",
            options={"num_steps": 4},
        )  # fmt: skip
    before = [buffer.clone() for buffer in f.buffers()]
    y.sum().backward()
    assert f.seen == {torch.bfloat16}
    assert all(map(torch.equal, f.buffers(), before))


# Leaves that need no gradient.


@every
def test_a_state_that_needs_no_gradient_is_no_obstacle(adjoint):
    f, y0 = Scaled(), torch.tensor([0.5, -0.3])
    assert_gradients(adjoint, f, y0, (f.w,))


@every
def test_a_frozen_parameter_gets_no_gradient_and_the_others_do(adjoint):
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, t, y):
            return self.net(y)

    f, y0 = Field(), leaf(0.5, -0.3)
    net[0].requires_grad_(False)
    assert_gradients(adjoint, f, y0, (y0, *net[2].parameters()))
    end(f, y0, adjoint).sum().backward()
    assert net[0].weight.grad is None and net[2].weight.grad is not None


@every
def test_nothing_that_needs_a_gradient_gives_a_result_without_a_graph(adjoint):
    y = end(lambda t, y: -y, torch.ones(2), adjoint)
    assert not y.requires_grad


@every
def test_no_grad_gives_a_result_without_a_graph(adjoint):
    with torch.no_grad():
        y = end(Scaled(), leaf(0.5, -0.3), adjoint)
    assert not y.requires_grad


# Shapes and values of the state.


@every
def test_an_expanded_state_gives_its_base_the_sum_of_the_gradients(adjoint):
    base, w = leaf(0.5, -0.3), leaf(0.3, 0.9)
    assert_gradients(adjoint, lambda t, y: torch.sin(w * y) + t, base.expand(4, 2), (base, w))


@every
def test_a_state_that_is_not_contiguous_is_no_obstacle(adjoint):
    base = torch.arange(6.0).reshape(2, 3).requires_grad_()
    assert_gradients(adjoint, lambda t, y: torch.sin(y), base.T, (base,))
    assert_gradients(adjoint, lambda t, y: torch.sin(y), base[:, ::2], (base,))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"method": "dopri5", "options": None},
        {"method": "dopri5", "options": {"norm": "sample"}},
    ],
    ids=["fixed", "adaptive", "per sample"],
)
@every
def test_an_empty_batch_has_empty_gradients(adjoint, more):
    f, y0 = Scaled(), torch.zeros(0, 2, requires_grad=True)
    y = end(f, y0, adjoint, **more)
    assert y.shape == (0, 2)
    grads = torch.autograd.grad(y.sum(), (y0, f.w), allow_unused=True)
    assert grads[0].shape == (0, 2)
    assert grads[1] is None or torch.equal(grads[1], torch.zeros(2))


@pytest.mark.parametrize("value", [0.0, 1.0])
@every
def test_a_constant_solution_is_solved_in_a_few_steps(adjoint, value):
    y0 = torch.full((2,), value, requires_grad=True)
    solution = solve(
        lambda t, y: y[[1, 0]] - y, y0, torch.tensor([0.0, 0.5]), adjoint=adjoint,
        rtol=1e-6, atol=1e-9,
    )  # fmt: skip
    torch.testing.assert_close(solution.ys[-1], y0, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(solution.ys[-1, 0], y0)
    e = np.exp(-1)
    np.testing.assert_allclose(grad, [(1 + e) / 2, (1 - e) / 2], rtol=1e-2)
    assert solution.stats.steps_accepted < 10


def test_the_forward_tolerance_does_not_control_the_error_of_the_discrete_gradient():
    # x' = x - y, y' = y - x from (1, 1): the solution is constant, its gradient is not.
    def grad(adjoint):
        y0 = torch.ones(2, requires_grad=True)
        y = odeint(
            lambda t, y: y - y[[1, 0]], y0, torch.tensor([0.0, 5.0]), adjoint=adjoint,
            rtol=1e-6, atol=1e-9,
        )  # fmt: skip
        return float(torch.autograd.grad(y[-1, 0], y0)[0][0])

    exact = (1 + np.exp(10)) / 2
    assert abs(grad(CheckpointAdjoint()) / exact - 1) > 0.1
    assert grad(CheckpointAdjoint()) == pytest.approx(grad(DirectAdjoint()), rel=1e-12)
    for adjoint in (BacksolveAdjoint(), InterpolatingAdjoint(), GaussAdjoint()):
        assert grad(adjoint) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    "more",
    [{"method": name, "options": {"num_steps": 7}} for name in ("rk4", "dopri5", "dopri8")]
    + [{"method": name} for name in ("dopri5", "tsit5", "dopri8", "bosh3")]
    + [{"method": "rk4", "options": {"step_size": 0.17}}],
    ids=lambda more: "-".join(map(str, more.values())),
)
@pytest.mark.parametrize("times", [(0.1, 0.37, 1.3), (1.3, 0.37, 0.1)], ids=["up", "down"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every
def test_f_is_never_evaluated_outside_the_interval(adjoint, dtype, times, more):
    low, high = (float(torch.tensor(x, dtype=dtype)) for x in (0.1, 1.3))

    def f(t, y):
        if not low <= float(t.detach()) <= high:
            raise AssertionError(f"{t!r} is outside [{low!r}, {high!r}]")
        return -y * t

    if dtype == torch.float32:
        more = {"rtol": 1e-4, "atol": 1e-6} | more
    y0 = torch.ones(2, dtype=dtype, requires_grad=True)
    t = torch.tensor(times, requires_grad=True)
    ys = odeint(f, y0, t, adjoint=adjoint, **more)
    torch.autograd.grad(ys.sum(), (y0, t))


# Errors in f.


class MyError(Exception):
    pass


@every
def test_an_error_in_f_reaches_the_user_as_it_is(adjoint):
    def f(t, y):
        if float(t) > 0.5:
            raise MyError("mine")
        return -y

    with pytest.raises(MyError, match="mine"):
        end(f, leaf(0.5, -0.3), adjoint)


@replaying
def test_an_error_in_f_in_the_backward_pass_reaches_the_user_and_leaves_the_buffers(adjoint):
    class Field(Normalised):
        fails = False

        def forward(self, t, y):
            slope = super().forward(t, y)
            if self.fails:
                raise MyError("mine")
            return slope

    f, y0 = Field(), torch.rand(3, 2, generator=torch.manual_seed(0)).requires_grad_()
    y = end(f, y0, adjoint)
    before = [b.clone() for b in f.buffers()]
    f.fails = True
    with pytest.raises(MyError, match="mine"):
        y.sum().backward()
    assert all(map(torch.equal, f.buffers(), before))


@every
def test_nan_from_f_on_a_fixed_mesh_is_reported_with_its_time_and_step(adjoint):
    def f(t, y):
        return torch.where(t > 0.49, torch.nan, -y)

    if isinstance(adjoint, ReversibleAdjoint):
        # The coupled step evaluates f backward too.
        where = "not finite at t = "
    else:
        where = r"`func` is not finite at t = 0.5, in step 1 from t = 0.25 to 0.5"
    with pytest.raises(SolveError, match=where) as caught:
        end(f, leaf(0.5, -0.3), adjoint, options={"num_steps": 4})
    assert caught.value.stats.f_evaluations_forward >= 16


@every
def test_nan_from_f_in_an_adaptive_solve_is_reported_with_its_time(adjoint):
    def f(t, y):
        return torch.where(t > 0.5, torch.nan, -y)

    with pytest.raises(SolveError, match=r"f is not finite .*t = 0.5|fell to .* at t = 0.5") as c:
        end(f, leaf(0.5, -0.3), adjoint, method="dopri5", options=None)
    assert c.value.stats.steps_accepted > 0 and c.value.stats.steps_rejected > 0


def test_nan_in_the_start_is_reported():
    with pytest.raises(SolveError, match="not finite"):
        end(lambda t, y: -y, leaf(torch.nan, 0.0), CheckpointAdjoint())
    with pytest.raises(SolveError, match="not finite at t = 0"):
        end(lambda t, y: -y, leaf(torch.nan, 0.0), CheckpointAdjoint(), method="dopri5",
            options=None)  # fmt: skip


def test_an_overflow_is_reported_with_its_step():
    with pytest.raises(SolveError, match=r"the state overflows in step 0 .* take smaller"):
        end(lambda t, y: 1.7e308 * torch.sign(y), leaf(1.5e308), CheckpointAdjoint(),
            method="euler", options={"num_steps": 4})  # fmt: skip


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), DirectAdjoint()], ids=["C", "D"])
def test_too_many_steps_and_too_small_steps_say_so_with_statistics(adjoint):
    with pytest.raises(
        SolveError, match=r"`max_num_steps` = 5 steps were tried and t = .*accepted.*evaluations"
    ) as caught:
        end(lambda t, y: torch.sin(50 * t) * y, leaf(1.0), adjoint, method="dopri5",
            options={"max_num_steps": 5})  # fmt: skip
    assert caught.value.stats.steps_accepted + caught.value.stats.steps_rejected == 5
    with pytest.raises(SolveError, match=r"the step size fell to .* stiff or f is not smooth"):
        end(lambda t, y: y**2, leaf(2.0), adjoint, method="dopri5", options=None)


# Tolerances per component.


def test_tolerances_per_component_hold_for_their_component():
    # Two oscillators that do not feel each other.
    def f(t, y):
        return {k: torch.stack([v[1], -v[0]]) for k, v in y.items()}

    y0 = {"fine": torch.tensor([1.0, 0.0]), "coarse": torch.tensor([1.0, 0.0])}
    t = torch.tensor([0.0, 5.0])

    def errors(rtol, atol):
        ys = odeint(f, y0, t, rtol=rtol, atol=atol)
        exact = torch.tensor([np.cos(5.0), -np.sin(5.0)])
        return [float((ys[k][-1] - exact).norm()) for k in ("fine", "coarse")]

    loose = errors(1e-3, 1e-3)
    tight = errors(
        {"fine": 1e-9, "coarse": 1.0}, {"fine": torch.tensor([1e-9, 1e-9]), "coarse": 1.0}
    )
    one = errors(1e-9, 1e-9)
    assert tight[0] < 1e-3 * loose[0]
    assert tight[0] == pytest.approx(one[0], rel=5)
    assert errors({"fine": 1.0, "coarse": 1.0}, 1.0)[0] > 10 * loose[0]


@every
def test_tolerances_per_component_leave_the_gradient_right(adjoint):
    y0, t = (leaf(1.0), leaf(0.5, 0.2)), torch.tensor([0.0, 1.0])
    ys = odeint(
        lambda t, y: (-y[0], torch.sin(y[1]) * y[0]), y0, t, adjoint=adjoint,
        rtol=(1e-10, torch.tensor([1e-10, 1e-9])), atol=(1e-10, 1e-11),
    )  # fmt: skip
    got = torch.autograd.grad(ys[0][-1].sum() + ys[1][-1].sum(), y0)
    ys = odeint(
        lambda t, y: (-y[0], torch.sin(y[1]) * y[0]), y0, t, adjoint=DirectAdjoint(),
        method="dopri8", options={"num_steps": 16},
    )  # fmt: skip
    want = torch.autograd.grad(ys[0][-1].sum() + ys[1][-1].sum(), y0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "tolerance", [np.full((2, 3), 1e-6), np.float32(1e-6), torch.tensor(1e-6), 1],
    ids=["numpy array", "numpy scalar", "scalar tensor", "int"],
)  # fmt: skip
def test_a_tolerance_may_be_any_kind_of_number(tolerance):
    y0 = torch.ones(2, 3)
    ys = odeint(lambda t, y: -y, y0, torch.tensor([0.0, 1.0]), rtol=tolerance, atol=tolerance)
    assert ys.shape == (2, 2, 3)


# Misuse.

T = torch.tensor([0.0, 1.0])


def decay(t, y):
    return -y


def misuse(argument, value, error, message, **more):
    # No address in the id: the workers of a parallel run must agree on it.
    shown = message.rpartition("got ")[2] if callable(value) else str(value)
    return pytest.param({argument: value} | more, error, message, id=f"{argument}-{shown}"[:50])


FIXED = {"method": "rk4", "options": {"num_steps": 2}}
MISUSES = [
    misuse("method", "dopri6", ValueError, "`method` must be one of .*got 'dopri6'; did you mean"),
    misuse("method", 5, ValueError, "`method` must be one of .*got 5"),
    misuse("engine", "scipy", ValueError, "`engine` must be one of contadj, torchdiffeq, got 'sci"),
    misuse("engine", "torchdiffeq", ValueError, "torchdiffeq has no method 'tsit5'; it has euler",
           method="tsit5"),
    misuse("engine", "contadj", ValueError, "'explicit_adams' has no .*use engine='torchdiffeq'",
           method="explicit_adams"),
    misuse("engine", "torchdiffeq", ValueError, "serves DirectAdjoint and BacksolveAdjoint, got "
           "CheckpointAdjoint: use engine='contadj'", adjoint=CheckpointAdjoint(), **FIXED),
    misuse("t", [0.0, 1.0], TypeError, "`t` must be a tensor, got list"),
    misuse("t", torch.tensor([0, 1]), TypeError, r"`t` must be floating-point.*t.double\(\)"),
    misuse("t", torch.tensor(1.0), ValueError, r"`t` must have shape \(T,\) with T >= 2, got \(\)"),
    misuse("t", torch.tensor([1.0]), ValueError, r"`t` must have shape .* got \(1,\)"),
    misuse("t", torch.tensor([0.0, 1.0, 1.0]), ValueError, "`t` must be strictly increasing or"),
    misuse("t", torch.tensor([0.0, 1.0, 0.5]), ValueError, "`t` must be strictly increasing or"),
    misuse("t", torch.tensor([0.0, torch.nan]), ValueError, "`t` must be finite, got"),
    misuse("t", torch.tensor([0.0, torch.inf]), ValueError, "`t` must be finite, got"),
    misuse("y0", torch.tensor([1, 2]), TypeError, r"`y0` must be floating-point or complex, got "
           r"torch.int64; convert it with .float\(\)"),
    misuse("y0", [1.0, 2.0], TypeError, "`y0` must be made of tensors, got float"),
    misuse("y0", (), TypeError, "`y0` must hold at least one tensor, got none"),
    misuse("y0", (torch.ones(1).double(), torch.ones(1).float()), TypeError,
           "the leaves of `y0` must share one dtype and device, got torch.float64 on cpu, torch.f"),
    misuse("func", 3, TypeError, r"`func` must be callable as func\(t, y\), got int"),
    misuse("func", lambda t, y: y.float(), TypeError, "`func` must return the dtype of y0, .*cast"),
    misuse("func", lambda t, y: y[:1], TypeError, r"`func` must return .* \[\(2,\)\], got \[\(1,"),
    misuse("func", lambda t, y: y.sum(), TypeError, r"`func` must return .* got \[\(\)\]"),
    misuse("func", lambda t, y: [y], TypeError, "`func` must return a tensor like y0, got list"),
    misuse("func", lambda t, y: 0.0, TypeError, "`func` must return a tensor like y0, got float"),
    misuse("func", lambda t, y: None, TypeError, "`func` must return a tensor like y0, got NoneT"),
    misuse("adjoint", CheckpointAdjoint, TypeError, r"`adjoint` must be an adjoint such as Check"),
    misuse("adjoint", "direct", TypeError, "`adjoint` must be an adjoint such as .*got 'direct'"),
    misuse("params", (1.0,), TypeError, "`params` must be tensors, got float"),
    misuse("rtol", -1e-3, ValueError, "`rtol` must be non-negative, got -0.001"),
    misuse("atol", float("nan"), ValueError, "`atol` must be non-negative, got nan"),
    misuse("rtol", (1e-3, 1e-3), ValueError, "`rtol` must be a number, a tensor, or have"),
    misuse("method", "rk4", ValueError, "`method` = 'rk4' takes fixed steps: give options="),
    misuse("running_cost", lambda t, y: y, TypeError, r"`running_cost` must return a scalar"),
    misuse("running_cost", lambda t, y: 0.0, TypeError, "`running_cost` must return .*got float"),
    misuse("loss", lambda i, t, y: y, TypeError, r"`loss` must return a scalar tensor, got \(2,\)"),
    misuse("control", torch.ones(3), TypeError, "`control` must be a Control"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), MISUSES)
def test_a_wrong_argument_raises_with_what_was_expected_what_came_and_the_fix(
    arguments, error, message
):
    arguments = {"func": decay, "y0": torch.ones(2, requires_grad=True), "t": T} | arguments
    with pytest.raises(error, match=message):
        solve(arguments.pop("func"), arguments.pop("y0"), arguments.pop("t"), **arguments)


OPTIONS = [
    ({"step_sise": 0.1}, r"`options` has no 'step_sise'; did you mean 'step_size'\? \(known: step"),
    ({"steps": 3}, "`options` has no 'steps'"),
    ({"grid_constructor": 1}, "`options` does not take 'grid_constructor': .*'mesh'"),
    ({"perturb": True}, "`options` does not take 'perturb': .*'jump_t'"),
    ({"interp": "linear"}, "`options` does not take 'interp': .*dense output"),
    ({"dtype": torch.float64}, "`options` does not take 'dtype': times are float64 always"),
    ({"max_order": 4}, "`options` does not take 'max_order': .*engine='torchdiffeq'"),
    ({"step_size": 0.1, "num_steps": 3}, "`options` takes one of .*got step_size and num_steps"),
    ({"num_steps": 3, "first_step": 0.1}, "a fixed mesh, and 'first_step', which belongs to error"),
    ({"step_size": 0.0}, "`step_size` must be positive, got 0.0"),
    ({"step_size": -0.1}, "`step_size` must be positive, got -0.1"),
    ({"step_size": "x"}, "`step_size` must be a number, got 'x'"),
    ({"step_size": float("nan")}, "`step_size` must be positive, got nan"),
    ({"step_size": float("inf")}, "`step_size` must be positive and finite, got inf"),
    ({"num_steps": 0}, "`num_steps` must be a positive integer, got 0"),
    ({"num_steps": 2.5}, "`num_steps` must be a positive integer, got 2.5"),
    ({"num_steps": True}, "`num_steps` must be a positive integer, got True"),
    ({"mesh": [0.0, 0.5]}, r"`mesh` must start at t\[0\] = 0.0 and end at t\[-1\] = 1.0, got 0.0"),
    ({"mesh": [0.0, 0.7, 0.5, 1.0]}, "`mesh` must be step times, strictly monotone in the direct"),
    ({"mesh": [1.0, 0.0]}, "`mesh` must be step times, strictly monotone in the direction of `t`"),
    ({"mesh": [0.0]}, "`mesh` must be step times, strictly monotone"),
    ({"max_num_steps": 0}, "`max_num_steps` must be a positive integer, got 0"),
    ({"norm": "max"}, "`norm` must be 'batch', 'sample' or a callable, got 'max'"),
    ({"first_step": -1.0}, "`first_step` must be positive, got -1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(o)[:40] for o, _ in OPTIONS])
def test_a_wrong_option_is_an_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        odeint(decay, torch.ones(2), T, options=options)


TORCHDIFFEQ = [
    ({"step_sise": 0.1}, "`options` has no 'step_sise'; did you mean 'step_size'"),
    ({"first_step": 0.1}, "`options` has no 'first_step'"),
    ({}, "takes fixed steps: give options="),
    ({"step_size": 0.1, "num_steps": 3}, "`options` takes one of"),
]


@pytest.mark.parametrize(("options", "message"), TORCHDIFFEQ, ids=[str(o) for o, _ in TORCHDIFFEQ])
def test_a_wrong_option_of_the_torchdiffeq_engine_is_an_error_too(options, message):
    with pytest.raises(ValueError, match=message):
        odeint(
            decay, torch.ones(2), T, method="rk4", engine="torchdiffeq", options=options,
            adjoint=DirectAdjoint(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"event_fn": decay}, "`event_fn` is not served: use torchdiffeq.odeint_event"),
        (
            {"adjoint": CheckpointAdjoint(), "adjoint_rtol": 1e-3},
            r"give `adjoint` or `adjoint_rtol`, not both: write adjoint=BacksolveAdjoint\(rtol",
        ),
        ({"params": (), "adjoint_params": ()}, "give `params` or `adjoint_params`, not both"),
    ],
    ids=["event_fn", "adjoint_rtol", "adjoint_params"],
)
def test_arguments_of_torchdiffeq_that_contradict_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        odeint(decay, torch.ones(2), T, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CheckpointAdjoint(0), "`snapshots` must be None or a positive integer, got 0"),
        (lambda: CheckpointAdjoint(True), "`snapshots` must be None or a positive integer, got T"),
        (lambda: BacksolveAdjoint(on_reversal="no"), "`on_reversal` must be 'warn' or 'raise'"),
        (lambda: BacksolveAdjoint(restart_every=0), "`restart_every` must be None or a positive"),
        (lambda: ReversibleAdjoint(coupling=2.0), r"`coupling` must be in \(0, 1\], got 2.0"),
        (lambda: ReversibleAdjoint(coupling=0.0), r"`coupling` must be in \(0, 1\], got 0.0"),
    ],
    ids=["no snapshot", "bool", "on_reversal", "restart_every", "coupling 2", "coupling 0"],
)
def test_a_wrong_setting_of_an_adjoint_is_refused_when_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_adjoint_arguments_of_torchdiffeq_select_backsolve():
    f, y0 = Scaled(), leaf(0.5, -0.3)
    y = odeint(f, y0, T, adjoint_rtol=1e-9, adjoint_atol=1e-9, adjoint_options={"norm": "seminorm"},
               adjoint_params=tuple(f.parameters()), adjoint_method="dopri8")  # fmt: skip
    got = torch.autograd.grad((y[-1] ** 2).sum(), (y0, f.w))
    want = torch.autograd.grad((reference(f, y0) ** 2).sum(), (y0, f.w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_no_warning_of_any_kind_is_raised_by_a_correct_solve():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f, y0 = Scaled(), leaf(0.5, -0.3)
        for adjoint in ALL.values():
            end(f, y0, adjoint).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tolerances_below_the_rounding_of_the_state_are_refused(dtype):
    t = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match="below the rounding of torch"):
        odeint(lambda t, y: -y, torch.ones(2, dtype=dtype), t)
    ys = odeint(lambda t, y: -y, torch.ones(2, dtype=dtype), t, rtol=1e-2, atol=1e-2)
    assert abs(float(ys[-1, 0]) - np.exp(-1)) < 0.02


def test_tolerances_of_zero_are_refused():
    with pytest.raises(ValueError, match="`rtol` and `atol` are both 0"):
        odeint(lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 1.0]), rtol=0, atol=0)
