"""Step sizes of their own for the samples of a batch: each sample as if it were solved alone."""

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
    ReversibleAdjoint,
    SolveError,
    solve,
)

EXACT = {
    "direct": DirectAdjoint(),
    "checkpoint": CheckpointAdjoint(),
    "snapshots": CheckpointAdjoint(snapshots=3),
    "forward": ForwardSensitivity(),
}
# Their backward solves go on steps found for the state; their errors follow its tolerance.
CLOSE = {
    "backsolve": BacksolveAdjoint(reversal_tolerance=float("inf")),
    "interpolating": InterpolatingAdjoint(),
    "gauss": GaussAdjoint(),
}
T = torch.tensor([0.0, 0.5, 1.3, 2.0], dtype=torch.float64)
TOLERANCES = {"rtol": 1e-6, "atol": 1e-8}


class Field(nn.Module):
    """Nonlinear, time-dependent, the faster the larger y."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(2, 2, generator=generator, dtype=torch.float64))

    def forward(self, t, y):
        return torch.tanh(y @ self.w) * torch.cos(3 * t) - y**3


def batch():
    y0 = torch.tensor([[0.1, -0.2], [1.0, 0.5], [-3.0, 2.0], [8.0, -5.0]], dtype=torch.float64)
    return y0.requires_grad_()


def gradients(f, y0, t=T, **more):
    solution = solve(f, y0, t, **{**TOLERANCES, **more})
    return solution, torch.autograd.grad((solution.ys**2).sum(), [y0, *f.parameters()])


def alone(f, y0, t=T, **more):
    """Every sample solved on its own, ending a step on each observation time."""
    options = {"step_t": t[1:-1].tolist()}
    results = [gradients(f, y0[b : b + 1], t, options=options, **more) for b in range(len(y0))]
    ys = torch.cat([solution.ys for solution, _ in results], dim=1)
    steps = [solution.stats.steps_accepted for solution, _ in results]
    return ys, torch.cat([g[0] for _, g in results]), sum(g[1] for _, g in results), steps


@pytest.mark.parametrize("adjoint", EXACT.values(), ids=EXACT)
def test_a_sample_of_a_batch_is_solved_as_if_it_were_alone(adjoint):
    f, y0 = Field(), batch()
    solution, (d_y0, d_w) = gradients(f, y0, adjoint=adjoint, options={"norm": "sample"})
    ys, y0_alone, w_alone, steps = alone(f, y0, adjoint=adjoint)
    torch.testing.assert_close(solution.ys, ys, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(d_y0, y0_alone, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(d_w, w_alone, rtol=1e-11, atol=1e-13)
    assert min(steps) < 15 < 30 < max(steps) <= solution.stats.steps_accepted < 1.1 * max(steps)


@pytest.mark.parametrize("adjoint", CLOSE.values(), ids=CLOSE)
def test_a_continuous_gradient_follows_the_tolerance(adjoint):
    f, y0 = Field(), batch()
    exact = gradients(f, y0, rtol=1e-11, atol=1e-12, adjoint=DirectAdjoint())[1]
    for rtol, bound in ((1e-5, 1e-3), (1e-8, 1e-6)):
        more = {"adjoint": adjoint, "options": {"norm": "sample"}, "rtol": rtol, "atol": rtol / 100}
        found = gradients(f, y0, **more)[1]
        error = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)]).norm()
        assert error < bound * torch.cat([b.flatten() for b in exact]).norm()


def test_the_reversible_gradient_is_that_of_its_own_solution():
    # Resting steps of a coupled pair move it; its gradient is exact for what it computed.
    f, y0 = Field(), batch()
    direction = torch.tensor([[1.0, -0.3], [0.2, 0.7], [-0.5, 0.1], [0.05, 0.02]]).double()
    adjoint, options = ReversibleAdjoint(0.9), {"first_step": 0.01, "norm": "sample"}
    _, (d_y0, _) = gradients(f, y0, adjoint=adjoint, options=options, rtol=1e-7, atol=1e-4)
    want = (d_y0 * direction).sum()
    _, (exact, _) = gradients(f, y0, rtol=1e-11, atol=1e-12)
    assert abs(want - (exact * direction).sum()) < 1e-2 * abs(want)


@pytest.mark.parametrize("method", ["bosh3", "tsit5", "dopri8"])
def test_methods_with_and_without_a_last_stage_to_carry_agree_with_single_solves(method):
    f, y0 = Field(), batch()
    solution, (d_y0, d_w) = gradients(f, y0, method=method, options={"norm": "sample"})
    ys, y0_alone, w_alone, _ = alone(f, y0, method=method)
    # dopri8's error estimate is a small difference: its rounding moves the steps a little.
    torch.testing.assert_close(solution.ys, ys, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(d_y0, y0_alone, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(d_w, w_alone, rtol=1e-9, atol=1e-11)


def test_time_can_run_backward():
    f, y0 = Field(), batch().detach().mul(0.05).requires_grad_()
    t = torch.tensor([1.0, 0.7, 0.0], dtype=torch.float64)
    solution, (d_y0, _) = gradients(f, y0, t, options={"norm": "sample"})
    ys, y0_alone, _, _ = alone(f, y0, t)
    torch.testing.assert_close(solution.ys, ys, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(d_y0, y0_alone, rtol=1e-11, atol=1e-13)


def test_nested_states_tolerances_of_their_own_and_a_loss_on_the_fly_work():
    def f(t, y):
        return {"x": y["v"], "v": -y["x"] * (1 + y["k"][:, None]), "k": 0 * y["k"]}

    y0 = {
        "x": torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64),
        "v": torch.zeros(3, 1, dtype=torch.float64),
        "k": torch.tensor([0.0, 10.0, 300.0], dtype=torch.float64, requires_grad=True),
    }
    seen = []

    def loss(i, t, y):
        seen.append((i, float(t)))
        return (y["x"] ** 2).sum()

    t = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    atol = {"x": 1e-9, "v": 1e-9, "k": 1.0}
    solution = solve(f, y0, t, rtol=1e-8, atol=atol, options={"norm": "sample"}, loss=loss)
    # x = x0 cos(w t), w^2 = 1 + k
    k = y0["k"].detach().clone().requires_grad_()
    w = torch.sqrt(1 + k)
    want = sum(((y0["x"][:, 0] * torch.cos(w * time)) ** 2).sum() for time in (0.0, 1.0, 2.0))
    torch.testing.assert_close(solution.loss, want, rtol=1e-6, atol=0)
    (got,) = torch.autograd.grad(solution.loss, y0["k"])
    torch.testing.assert_close(got, *torch.autograd.grad(want, k), rtol=1e-5, atol=1e-7)
    assert set(seen) == {(0, 0.0), (1, 1.0), (2, 2.0)}


def test_evaluations_count_those_that_found_the_steps():
    count = 0

    def f(t, y):
        nonlocal count
        count += 1
        return -y

    solution = solve(f, torch.ones(2, 1), torch.tensor([0.0, 1.0]), options={"norm": "sample"},
                     rtol=1e-3, atol=1e-6)  # fmt: skip
    # One more is spent on f in the whole batch, to see that it treats samples alone.
    assert solution.stats.f_evaluations_forward == count - 1


def test_a_field_that_mixes_samples_is_refused():
    with pytest.raises(ValueError, match="treats each sample alone"):
        solve(lambda t, y: y - y.mean(0), batch(), T, options={"norm": "sample"})


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("implicit `method`", {"method": "trbdf2"}),
        ("`running_cost`", {"running_cost": lambda t, y: y.sum()}),
        ("`control`", {"control": Control([0.0, 2.0], torch.zeros(2))}),
        ("`compile`", {"compile": True}),
        ("respect to `t`", {"t": T.clone().requires_grad_()}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_serve_is_refused(what, more):
    arguments = {"t": T, "options": {"norm": "sample"}, **more}
    with pytest.raises(ValueError, match=f"`norm` = 'sample' does not serve .*{what}"):
        solve(lambda t, y, *u: -y, batch(), arguments.pop("t"), **arguments)


def test_states_without_a_common_first_axis_are_refused():
    y0 = (torch.ones(3, 2), torch.ones(2))
    with pytest.raises(ValueError, match="samples along the first axis of every leaf"):
        solve(lambda t, y: y, y0, T, options={"norm": "sample"})


def test_an_adjoint_has_no_sample_norm_of_its_own():
    adjoint = BacksolveAdjoint(options={"norm": "sample"})
    ys = solve(lambda t, y: -y, batch(), T, adjoint=adjoint).ys
    with pytest.raises(ValueError, match="the reverse one takes each sample's own steps"):
        ys.sum().backward()


@pytest.mark.parametrize(
    ("f", "options", "match"),
    [
        (lambda t, y: torch.where(y > 2, torch.nan, y), {}, "sample 2: f is not finite at t = 0"),
        (lambda t, y: y**2, {}, "sample 2: .* at t = 0.3"),
        (lambda t, y: -y, {"max_num_steps": 3}, "sample 0: `max_num_steps` = 3 steps were tried"),
    ],
    ids=["nan", "blow-up", "too many steps"],
)
def test_a_sample_that_cannot_go_on_is_named(f, options, match):
    y0 = torch.tensor([[0.1], [0.4], [3.0]], dtype=torch.float64)
    with pytest.raises(SolveError, match=match):
        solve(f, y0, T, options={"norm": "sample", **options})
