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


def test_a_continuous_adjoint_is_refused_inside_a_transform():
    with pytest.raises(ValueError, match=r"BacksolveAdjoint does not serve inside torch\.func"):
        grad(loss)(PARAMS, Y0[0], ct.BacksolveAdjoint())


def test_an_adaptive_mesh_is_refused_inside_a_transform():
    with pytest.raises(ValueError, match="the mesh must be fixed"):
        grad(lambda y: ct.odeint(lambda t, y: -y, y, T)[-1].sum())(Y0[0])
