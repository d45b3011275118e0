"""Compiled steps give the gradients of the eager ones."""

import pytest
import torch

import contadj.torch as ct

# Compiling imports modules of torch that warn of their own deprecations.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = torch.nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.float64))
        self.gain = 1.0

    def forward(self, t, y):
        return self.gain * torch.tanh(y @ self.a) * torch.cos(t)


def gradient(f, adjoint, **options):
    y0 = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.35, 0.8, 1.0], dtype=torch.float64)
    solution = ct.solve(f, y0, t, adjoint=adjoint, rtol=1e-6, atol=1e-8, **options)
    loss = (solution.ys**2).sum()
    grads = torch.autograd.grad(loss, [y0, f.a])
    return torch.cat([grad.flatten() for grad in grads]), solution.stats


ADJOINTS = [ct.CheckpointAdjoint(), ct.CheckpointAdjoint(snapshots=2), ct.BacksolveAdjoint()]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
@pytest.mark.parametrize(
    "solver",
    [
        {"method": "rk4", "options": {"num_steps": 3}},
        {"method": "rk4", "options": {"step_size": 0.15}},
        {"method": "dopri5"},
    ],
    ids=["rk4-num_steps", "rk4-step_size", "dopri5"],
)
def test_compiled_gradients_and_counts_are_the_eager_ones(adjoint, solver):
    f = Field()
    eager, eager_stats = gradient(f, adjoint, **solver)
    compiled, stats = gradient(f, adjoint, compile=True, **solver)
    # Compiled kernels add in another order: a few units in the last place of the sums.
    torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-13)
    assert stats.f_evaluations_forward == eager_stats.f_evaluations_forward
    assert stats.steps_accepted == eager_stats.steps_accepted


def test_a_changed_attribute_is_compiled_again():
    f = Field()
    solver = {"method": "rk4", "options": {"num_steps": 3}, "compile": True}
    gradient(f, ct.CheckpointAdjoint(), **solver)
    f.gain = 0.5
    compiled, _ = gradient(f, ct.CheckpointAdjoint(), **solver)
    del solver["compile"]
    eager, _ = gradient(f, ct.CheckpointAdjoint(), **solver)
    torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-13)


def test_other_adjoints_compile_the_vector_field():
    f = Field()
    solver = {"method": "rk4", "options": {"num_steps": 3}}
    eager, _ = gradient(f, ct.ReversibleAdjoint(), **solver)
    compiled, _ = gradient(f, ct.ReversibleAdjoint(), compile=True, **solver)
    torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-13)
