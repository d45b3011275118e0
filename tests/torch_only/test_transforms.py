"""Solves inside torch.func transforms."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

import contadj.torch as ct

T = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
MESH = {"method": "rk4", "options": {"num_steps": 4}}
NET = torch.nn.Linear(2, 2, dtype=torch.float64)
with torch.no_grad():
    NET.weight.copy_(torch.tensor([[-0.4, 0.9], [-1.1, 0.2]]))
    NET.bias.copy_(torch.tensor([0.1, -0.3]))
PARAMS = {name: param.detach() for name, param in NET.named_parameters()}
Y0 = torch.tensor([[0.5, -1.0], [1.5, 0.2], [0.0, 0.7]], dtype=torch.float64)


def loss(params, y0, adjoint):
    def f(t, y):
        return torch.tanh(functional_call(NET, params, (y,)))

    ys = ct.odeint(f, y0, T, adjoint=adjoint, params=params.values(), **MESH)
    return (ys**2).sum()


def by_autograd(y0):
    y0 = y0.clone().requires_grad_()
    params = {name: param.clone().requires_grad_() for name, param in PARAMS.items()}
    value = loss(params, y0, ct.CheckpointAdjoint())
    grads = torch.autograd.grad(value, [y0, *params.values()])
    return grads[0], dict(zip(params, grads[1:], strict=True))


ADJOINTS = [ct.CheckpointAdjoint(), ct.DirectAdjoint()]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_func_grad_with_respect_to_params_is_the_autograd_gradient(adjoint):
    got = grad(loss)(PARAMS, Y0[0], adjoint)
    _, expected = by_autograd(Y0[0])
    for name in PARAMS:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_vmap_over_y0_gives_one_gradient_per_sample(adjoint):
    got = vmap(grad(loss, argnums=1), in_dims=(None, 0, None))(PARAMS, Y0, adjoint)
    expected = torch.stack([by_autograd(y0)[0] for y0 in Y0])
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)


def test_vmap_over_params_gives_one_gradient_per_ensemble_member():
    stacked = {name: torch.stack([param, 2 * param]) for name, param in PARAMS.items()}
    got = vmap(grad(loss), in_dims=(0, None, None))(stacked, Y0[0], ct.CheckpointAdjoint())
    _, expected = by_autograd(Y0[0])
    for name in PARAMS:
        torch.testing.assert_close(got[name][0], expected[name], rtol=1e-14, atol=1e-15)


def test_jacrev_of_the_flow_of_a_linear_field_is_the_stability_polynomial():
    a = torch.tensor([[0.0, 1.0], [-2.0, -0.3]], dtype=torch.float64)
    t = torch.tensor([0.0, 0.1], dtype=torch.float64)
    options = {"method": "rk4_classic", "options": {"num_steps": 1}}
    got = jacrev(lambda y: ct.odeint(lambda t, y: a @ y, y, t, **options)[-1])(Y0[0])
    z = 0.1 * a
    expected = (
        torch.eye(2, dtype=torch.float64) + z + z @ z / 2 + z @ z @ z / 6 + z @ z @ z @ z / 24
    )
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, dtype=torch.float64)
        self.linear.load_state_dict(PARAMS)

    def forward(self, t, y):
        return torch.tanh(self.linear(y)) * torch.cos(t)


FIELD = Field()
NAMED = {name: param.detach() for name, param in FIELD.named_parameters()}


def backsolve_loss(params, y0):
    ys = ct.odeint(FIELD, y0, T, params=params, adjoint=ct.BacksolveAdjoint(), **MESH)
    return (ys**2).sum()


def backsolve_by_autograd(params, y0):
    """The gradient of the adjoint that autograd calls, which shares no backward pass with it."""
    y0 = y0.clone().requires_grad_()
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    value = backsolve_loss(leaves, y0)
    grads = torch.autograd.grad(value, [y0, *leaves.values()])
    return grads[0], dict(zip(leaves, grads[1:], strict=True))


def test_backsolve_inside_grad_is_the_continuous_gradient():
    got_params, got_y0 = grad(backsolve_loss, argnums=(0, 1))(NAMED, Y0[0])
    y0, params = backsolve_by_autograd(NAMED, Y0[0])
    torch.testing.assert_close(got_y0, y0, rtol=1e-13, atol=1e-14)
    for name in NAMED:
        torch.testing.assert_close(got_params[name], params[name], rtol=1e-13, atol=1e-14)
    discrete = torch.autograd.functional.jacobian(
        lambda y: (ct.odeint(FIELD, y, T, **MESH) ** 2).sum(), Y0[0]
    )
    assert 1e-7 < (got_y0 - discrete).abs().max() < 1e-3  # not backpropagation in disguise


def test_backsolve_inside_vmap_over_y0_and_over_params():
    per_sample = vmap(grad(backsolve_loss, argnums=1), in_dims=(None, 0))(NAMED, Y0)
    expected = torch.stack([backsolve_by_autograd(NAMED, y0)[0] for y0 in Y0])
    torch.testing.assert_close(per_sample, expected, rtol=1e-13, atol=1e-14)
    stacked = {name: torch.stack([param, 1.5 * param]) for name, param in NAMED.items()}
    members = vmap(grad(backsolve_loss), in_dims=(0, None))(stacked, Y0[1])
    for k in range(2):
        member = {name: param[k] for name, param in stacked.items()}
        _, expected = backsolve_by_autograd(member, Y0[1])
        for name in NAMED:
            torch.testing.assert_close(members[name][k], expected[name], rtol=1e-13, atol=1e-14)


def test_backsolve_must_be_handed_what_it_differentiates():
    with pytest.raises(ValueError, match="must be handed what f depends on"):
        grad(loss)(PARAMS, Y0[0], ct.BacksolveAdjoint())


def test_backsolve_inside_a_transform_observes_step_times_only():
    options = {"method": "rk4", "options": {"step_size": 0.3}, "adjoint": ct.BacksolveAdjoint()}
    with pytest.raises(ValueError, match="must be step times"):
        grad(lambda y: ct.odeint(FIELD, y, T, params=NAMED, **options)[-1].sum())(Y0[0])


@pytest.mark.parametrize(
    "adjoint", [ct.ReversibleAdjoint(), ct.GaussAdjoint(), ct.ForwardSensitivity()], ids=repr
)
def test_another_adjoint_is_refused_inside_a_transform(adjoint):
    with pytest.raises(ValueError, match=r"does not serve inside torch\.func"):
        grad(loss)(PARAMS, Y0[0], adjoint)


def test_parameters_by_name_take_the_place_of_the_modules():
    doubled = {name: (2 * param).requires_grad_() for name, param in NAMED.items()}
    ys = ct.odeint(FIELD, Y0[0], T, params=doubled, **MESH)
    other = Field()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    torch.testing.assert_close(ys, ct.odeint(other, Y0[0], T, **MESH), rtol=1e-15, atol=1e-15)
    got = torch.autograd.grad(ys.sum(), list(doubled.values()))
    expected = torch.autograd.grad(
        ct.odeint(other, Y0[0], T, **MESH).sum(), list(other.parameters())
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-15)


def test_an_unknown_parameter_name_is_refused():
    with pytest.raises(ValueError, match=r"'linear\.wieght', which is no parameter"):
        ct.odeint(FIELD, Y0[0], T, params={"linear.wieght": Y0}, **MESH)


def test_an_adaptive_mesh_is_refused_inside_a_transform():
    with pytest.raises(ValueError, match="the mesh must be fixed"):
        grad(lambda y: ct.odeint(lambda t, y: -y, y, T)[-1].sum())(Y0[0])
