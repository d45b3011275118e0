"""What a torchdiffeq user writes is accepted, translated, or refused by name."""

from functools import cache

import pytest
import torch
import torchdiffeq

import contadj.torch as ct

Y0 = torch.tensor([1.0, -0.5], dtype=torch.float64)
T = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [-2.0, -0.3]], dtype=torch.float64))

    def forward(self, t, y):
        return torch.tanh(y) @ self.a.T


def gradient(odeint, **options):
    f = Field()
    ys = odeint(f, Y0, T, **options)
    return torch.autograd.grad((ys**2).sum(), f.a)[0]


@cache
def exact():
    """The gradient by a fixed mesh so fine that only rounding is left."""
    return gradient(torchdiffeq.odeint, method="rk4", options={"step_size": 1 / 512})


@pytest.mark.parametrize("method", ["dopri5", "bosh3", "dopri8", "tsit5"])
def test_odeint_is_a_drop_in_for_torchdiffeq(method):
    got = gradient(ct.odeint, rtol=1e-10, atol=1e-12, method=method)
    # The gradient is not under error control; a hundred times the tolerance has room.
    torch.testing.assert_close(got, exact(), rtol=1e-8, atol=1e-8)


def test_the_gradient_at_the_same_tolerance_is_torchdiffeqs():
    options = {"rtol": 1e-10, "atol": 1e-12}
    got, expected = gradient(ct.odeint, **options), gradient(torchdiffeq.odeint, **options)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_adjoint_arguments_select_backsolve():
    options = {
        "rtol": 1e-9, "atol": 1e-11, "adjoint_rtol": 1e-8, "adjoint_atol": 1e-10,
        "adjoint_method": "dopri8", "adjoint_options": {"norm": "seminorm"},
    }  # fmt: skip
    with ct.collect_stats() as stats:
        got = gradient(ct.odeint, **options)
    torch.testing.assert_close(got, exact(), rtol=1e-7, atol=1e-7)
    assert stats[0].reversal_error is not None


@pytest.mark.parametrize("name", ["callback_step", "callback_accept_step_adjoint"])
def test_a_callback_is_refused_by_name(name):
    f = Field()
    setattr(f, name, lambda t, y, dt: None)
    with pytest.raises(ValueError, match=name):
        ct.odeint(f, Y0, T)


@pytest.mark.parametrize("name", ["grid_constructor", "perturb", "interp", "dtype"])
def test_an_option_that_is_not_served_is_refused_with_its_replacement(name):
    with pytest.raises(ValueError, match=f"`options` does not take '{name}': "):
        ct.odeint(Field(), Y0, T, method="rk4", options={name: None, "num_steps": 2})


def test_an_event_is_refused():
    with pytest.raises(ValueError, match="odeint_event"):
        ct.odeint(Field(), Y0, T, event_fn=lambda t, y: y[0])


def test_both_spellings_of_an_adjoint_are_refused():
    with pytest.raises(ValueError, match=r"adjoint=BacksolveAdjoint\(rtol=\.\.\.\)"):
        ct.odeint(Field(), Y0, T, adjoint=ct.CheckpointAdjoint(), adjoint_rtol=1e-3)


def test_a_misspelt_option_is_an_error_with_the_right_spelling():
    with pytest.raises(ValueError, match="did you mean 'step_size'"):
        ct.odeint(Field(), Y0, T, method="rk4", options={"step_sise": 0.1})


def test_torchdiffeq_giving_up_is_a_solve_error():
    with pytest.raises(ct.SolveError, match="torchdiffeq cannot go on: underflow in dt"):
        ct.odeint(lambda t, y: y**2, Y0, T * 2, engine="torchdiffeq")


def test_an_assertion_inside_the_field_is_not_mistaken_for_it():
    def f(t, y):
        assert t < 0.5, "mine"
        return -y

    with pytest.raises(AssertionError, match="mine"):
        ct.odeint(f, Y0, T, engine="torchdiffeq")
