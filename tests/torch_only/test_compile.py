"""Compiled steps give the gradients of the eager ones."""

import pytest
import torch
from torch import nn

import contadj.torch as ct
from contadj.torch._compile import BLOCK, CompiledRungeKutta
from contadj.torch._field import VectorField

# Compiling imports modules of torch that warn of their own deprecations, and looks at `.grad` of
# every input of a compiled vector field.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

RK4 = {"method": "rk4", "options": {"num_steps": 3}}


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.float64))
        self.gain = 1.0

    def forward(self, t, y):
        return self.gain * torch.tanh(y @ self.a) * torch.cos(t)


class Net(nn.Module):
    """A layer, and another one that behaves differently in training."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), layer, nn.Tanh()).double()

    def forward(self, t, y):
        return self.net(y).to(y.dtype)


def gradient(f, adjoint, y0=None, **options):
    if y0 is None:
        y0 = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64)
    y0 = y0.clone().requires_grad_()
    t = torch.tensor([0.0, 0.35, 0.8, 1.0], dtype=torch.float64)
    solution = ct.solve(f, y0, t, adjoint=adjoint, rtol=1e-6, atol=1e-8, **options)
    loss = (solution.ys**2).sum()
    grads = torch.autograd.grad(loss, [y0, *f.parameters()])
    return torch.cat([grad.flatten() for grad in grads]), solution.stats


ADJOINTS = [ct.CheckpointAdjoint(), ct.CheckpointAdjoint(snapshots=2), ct.BacksolveAdjoint()]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
@pytest.mark.parametrize(
    "solver",
    [
        RK4,
        {"method": "rk4", "options": {"step_size": 0.15}},
        {"method": "dopri5"},
        {"method": "bosh3"},  # many steps, several calls
        {"method": "bosh3", "options": {"norm": lambda error: error.abs().max()}},
        {"method": "dopri5", "options": {"first_step": 1.0}},  # rejected
        {"method": "dopri5", "options": {"step_t": (0.5,), "max_step": 0.2}},
    ],
    ids=[
        "rk4-num_steps",
        "rk4-step_size",
        "dopri5",
        "bosh3",
        "bosh3-own norm",
        "rejected",
        "step_t",
    ],
)
def test_compiled_gradients_and_counts_are_the_eager_ones(adjoint, solver):
    f = Field()
    eager, eager_stats = gradient(f, adjoint, **solver)
    compiled, stats = gradient(f, adjoint, compile=True, **solver)
    # Compiled kernels add in another order: a few units in the last place of the sums. The sizes
    # of adaptive steps follow an error estimate whose rounding is larger.
    rtol = 1e-12 if "num_steps" in str(solver) or "step_size" in str(solver) else 1e-9
    torch.testing.assert_close(compiled, eager, rtol=rtol, atol=1e-13)
    assert stats.f_evaluations_forward == eager_stats.f_evaluations_forward
    assert stats.steps_accepted == eager_stats.steps_accepted
    assert stats.steps_rejected == eager_stats.steps_rejected


def test_the_case_of_a_rejected_step_has_one():
    solver = {"method": "dopri5", "options": {"first_step": 1.0}}
    assert gradient(Field(), ct.CheckpointAdjoint(), **solver)[1].steps_rejected > 0


def test_one_call_serves_all_attempts_that_it_foresaw(monkeypatch):
    f = Field()
    calls = []
    attempt = CompiledRungeKutta._try
    monkeypatch.setattr(
        CompiledRungeKutta, "_try", lambda *arguments: calls.append(1) or attempt(*arguments)
    )
    stats = gradient(f, ct.CheckpointAdjoint(), compile=True, method="dopri5")[1]
    assert len(calls) == -(-(stats.steps_accepted + stats.steps_rejected) // BLOCK)


@pytest.mark.parametrize("options", [{}, {"step_t": (0.35, 0.8), "max_step": 0.1}])
def test_a_method_without_a_dense_output_of_its_order_observes_by_shortened_steps(options):
    # With step_t every observation is on a step time, also inside a block.
    f, solver = Field(), {"method": "dopri8", "options": options}
    eager, _ = gradient(f, ct.CheckpointAdjoint(), **solver)
    compiled, _ = gradient(f, ct.CheckpointAdjoint(), compile=True, **solver)
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-13)


def test_a_state_without_axes_is_served():
    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def forward(self, t, y):
            return -self.k * y * y

    y0 = torch.tensor(1.2, dtype=torch.float64)
    eager, _ = gradient(Decay(), ct.CheckpointAdjoint(), y0, method="dopri5")
    compiled, _ = gradient(Decay(), ct.CheckpointAdjoint(), y0, method="dopri5", compile=True)
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_steps": 2}, "`max_num_steps` = 2 steps were tried"),
        ({}, "step size fell|not finite just after"),
    ],
    ids=["too many steps", "singularity"],
)
def test_a_solve_that_cannot_go_on_says_why(options, message):
    class Blows(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, t, y):
            return self.k * y * y

    y0 = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ct.SolveError, match=message):
        gradient(
            Blows(), ct.CheckpointAdjoint(), y0, method="dopri5", compile=True, options=options
        )


def test_a_changed_attribute_is_compiled_again():
    f = Field()
    gradient(f, ct.CheckpointAdjoint(), compile=True, **RK4)
    f.gain = 0.5
    compiled, _ = gradient(f, ct.CheckpointAdjoint(), compile=True, **RK4)
    eager, _ = gradient(f, ct.CheckpointAdjoint(), **RK4)
    torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-13)


def test_other_adjoints_compile_the_vector_field():
    f = Field()
    eager, _ = gradient(f, ct.ReversibleAdjoint(), **RK4)
    compiled, _ = gradient(f, ct.ReversibleAdjoint(), compile=True, **RK4)
    torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-13)


def test_an_implicit_method_is_refused():
    solver = {"method": "trapezoid", "options": {"num_steps": 3}}
    with pytest.raises(ValueError, match="`compile` does not serve the implicit method"):
        gradient(Field(), ct.CheckpointAdjoint(), compile=True, **solver)


def test_a_control_is_served():
    class Driven(Field):
        def forward(self, t, y, u):
            return super().forward(t, y) + u

    def driven(compile):
        values = torch.tensor([0.2, -0.4, 0.7], dtype=torch.float64, requires_grad=True)
        control = ct.Control(torch.linspace(0, 1, 4, dtype=torch.float64), values, kind="hold")
        f, y0 = Driven(), torch.ones(1, 3, dtype=torch.float64)
        t = torch.tensor([0.0, 1.0], dtype=torch.float64)
        ys = ct.odeint(f, y0, t, control=control, compile=compile, **RK4)
        return torch.cat([
            grad.flatten() for grad in torch.autograd.grad((ys**2).sum(), [values, f.a])
        ])  # fmt: skip

    torch.testing.assert_close(driven(True), driven(False), rtol=1e-12, atol=1e-13)


BATCH = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).sin().reshape(4, 3)


def test_dropout_is_refused_in_training_and_right_in_evaluation():
    f = Net(nn.Dropout(0.5))
    with pytest.raises(ValueError, match="draws random numbers"):
        gradient(f, ct.CheckpointAdjoint(), BATCH, compile=True, **RK4)
    f.eval()
    eager, _ = gradient(f, ct.CheckpointAdjoint(), BATCH, **RK4)
    compiled, _ = gradient(f, ct.CheckpointAdjoint(), BATCH, compile=True, **RK4)
    torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_gives_the_eager_gradient_and_running_statistics(training):
    f = Net(nn.BatchNorm1d(3).double()).train(training)

    def run(**compile):
        f.net[1].reset_running_stats()
        grads, _ = gradient(f, ct.CheckpointAdjoint(), BATCH, **RK4, **compile)
        return [grads, *(buffer.clone() for buffer in f.buffers())]

    torch.testing.assert_close(run(compile=True), run(), rtol=1e-11, atol=1e-12)


def test_batch_norm_sees_as_many_evaluations_without_a_gradient():
    f = Net(nn.BatchNorm1d(3).double())
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def run(compile):
        f.net[1].reset_running_stats()
        with torch.no_grad():
            ct.odeint(f, BATCH, t, method="dopri5", rtol=1e-3, atol=1e-6, compile=compile)
        return [buffer.clone() for buffer in f.buffers()]

    torch.testing.assert_close(run(True), run(False), rtol=1e-11, atol=1e-12)


def test_autocast_is_that_of_the_forward_pass():
    f = Net(nn.Identity()).float()

    def run(compile, autocast):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            ys = ct.odeint(
                f, BATCH.float(), torch.tensor([0.0, 1.0]), compile=compile, method="rk4",
                options={"num_steps": 3},
            )  # fmt: skip
        grads = torch.autograd.grad((ys**2).sum(), list(f.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    eager, full = run(False, True), run(False, False)
    compiled = run(True, True)
    # Both round to bfloat16, a fused kernel in fewer places.
    eps = torch.finfo(torch.bfloat16).eps
    assert float((compiled - eager).norm()) < 4 * eps * float(eager.norm())
    assert float((compiled - full).norm()) > 0.01 * eps * float(full.norm())


OUTSIDE = torch.tensor([0.3, 0.8])


class Shifted(nn.Module):
    """A parameter, and a tensor that nobody registered."""

    def __init__(self, where):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.4, 0.9]))
        self.where, self.extra = where, [torch.tensor([0.3, 0.8])]
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, t, y):
        other = OUTSIDE if self.where == "global" else self.extra[0]
        return self.drop(torch.sin(self.a * y) + other)


def shifted_gradient(f, x, compile=True):
    ys = ct.odeint(
        f, torch.ones(2), torch.linspace(0.0, 1.0, 4), rtol=1e-4, atol=1e-6, compile=compile
    )
    return torch.autograd.grad(ys.square().sum(), [f.a, x] if x is not None else [f.a])


def count_watched(monkeypatch):
    """The list that gets an entry for each solve whose f is watched."""
    calls, probe = [], VectorField.probe
    monkeypatch.setattr(
        VectorField, "probe", lambda *a, **options: calls.append(1) or probe(*a, **options)
    )
    return calls


def test_a_field_is_watched_once_for_each_trace(monkeypatch):
    f, calls = Shifted("attribute"), count_watched(monkeypatch)
    first = shifted_gradient(f, None)
    second = shifted_gradient(f, None)
    assert len(calls) == 1
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    with torch.no_grad():
        f.extra[0].add_(1.0)
    torch.testing.assert_close(
        shifted_gradient(f, None), shifted_gradient(f, None, compile=False), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("where", ["attribute", "global"])
def test_a_tensor_that_needs_a_gradient_later_is_seen(where, monkeypatch):
    monkeypatch.setitem(globals(), "OUTSIDE", torch.tensor([0.3, 0.8]))
    f = Shifted(where)
    shifted_gradient(f, None)
    shifted_gradient(f, None)
    x = OUTSIDE if where == "global" else f.extra[0]
    x.requires_grad_()
    for _ in range(2):
        got, want = shifted_gradient(f, x), shifted_gradient(f, x, compile=False)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    f.extra[0] = 2.0 * torch.ones(2, requires_grad=True)
    if where == "attribute":
        for _ in range(2):
            with pytest.raises(ValueError, match="computed outside it and needs a gradient"):
                shifted_gradient(f, None)


@pytest.mark.parametrize("adjoint", [ct.CheckpointAdjoint(), ct.BacksolveAdjoint()], ids=repr)
def test_a_field_that_changes_before_the_backward_pass_is_noticed(adjoint):
    f, t = Field(), torch.linspace(0.0, 1.0, 4, dtype=torch.float64)
    y0 = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64)
    for _ in range(2):  # watched, and not watched again
        ys = ct.odeint(f, y0, t, rtol=1e-4, atol=1e-6, compile=True, adjoint=adjoint)
        f.gain = 0.5
        with pytest.raises(ct.SolveError, match="is not the function it was in the forward pass"):
            ys.sum().backward()
        f.gain = 1.0


def test_noise_that_is_switched_on_later_is_refused():
    f = Shifted("attribute")
    shifted_gradient(f, None)
    f.drop.train()
    for _ in range(2):
        with pytest.raises(ValueError, match="draws random numbers"):
            shifted_gradient(f, None)


def test_a_field_that_was_watched_is_watched_again_with_another_adjoint(monkeypatch):
    f, calls = Shifted("attribute"), count_watched(monkeypatch)
    shifted_gradient(f, None)
    t = torch.linspace(0.0, 1.0, 4)
    for adjoint in (ct.ReversibleAdjoint(), ct.DirectAdjoint()):
        ct.odeint(f, torch.ones(2), t, rtol=1e-4, atol=1e-6, compile=True, adjoint=adjoint)
    assert len(calls) == 3


@pytest.mark.parametrize("points", [2, 30, 33])
@pytest.mark.parametrize("ends", ["increasing", "decreasing"])
def test_observations_of_a_block_are_the_eager_ones(points, ends):
    f = Field()
    t = torch.linspace(0.0, 2.0, points, dtype=torch.float64)
    t = t if ends == "increasing" else t.flip(0)
    weights = torch.linspace(0.5, 1.5, points, dtype=torch.float64)[:, None, None]

    def run(compile):
        y0 = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64, requires_grad=True)
        ys = ct.odeint(f, y0, t, method="dopri5", rtol=1e-7, atol=1e-9, compile=compile)
        loss = (weights * ys**2).sum()
        return [ys, *torch.autograd.grad(loss, [y0, f.a])]

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", [ct.CheckpointAdjoint(), ct.BacksolveAdjoint()], ids=repr)
def test_a_branch_on_the_time_is_refused_so_that_no_tensor_is_used_only_later(adjoint):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.tensor([0.4, 0.9]))
            self.late = [torch.tensor([0.3, 0.8], requires_grad=True)]  # not registered

        def forward(self, t, y):
            return torch.sin((self.late[0] if t > 0.5 else self.first) * y)

    with pytest.raises(RuntimeError, match="Data-dependent branching"):
        ct.odeint(
            Late(), torch.ones(2), torch.tensor([0.0, 1.0]), method="rk4", adjoint=adjoint,
            options={"num_steps": 4}, compile=True,
        )  # fmt: skip
