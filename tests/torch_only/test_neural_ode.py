"""NeuralODE behaves like any other module."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import contadj.torch as ct

MESH = {"method": "rk4", "options": {"num_steps": 3}}


class Field(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(0.5 * torch.randn(size, size, generator=generator))

    def forward(self, t, y):
        return torch.tanh(y @ self.a) * torch.cos(t)


class NestedField(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.7))

    def forward(self, t, y):
        return {"x": -self.rate * y["x"] + y["v"].sum(), "v": self.rate * y["v"]}


@pytest.fixture
def y0():
    return torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


def test_the_last_state_or_all_of_them(y0):
    t = torch.tensor([0.0, 0.4, 1.0])
    field = Field()
    expected = ct.odeint(field, y0, t, **MESH)
    torch.testing.assert_close(ct.NeuralODE(field, **MESH)(y0, t), expected[-1], rtol=0, atol=0)
    every = ct.NeuralODE(field, returns="all", **MESH)(y0, t)
    torch.testing.assert_close(every, expected, rtol=0, atol=0)


def test_without_times_it_solves_over_its_own(y0):
    field = Field()
    t = torch.tensor([0.5, 0.0])
    got = ct.NeuralODE(field, times=(0.5, 0.0), **MESH)(y0)
    torch.testing.assert_close(got, ct.odeint(field, y0, t, **MESH)[-1], rtol=0, atol=0)


def test_nested_states_keep_their_structure():
    state = {"x": torch.ones(2), "v": torch.ones(3)}
    last = ct.NeuralODE(NestedField(), **MESH)(state)
    assert {name: tuple(leaf.shape) for name, leaf in last.items()} == {"x": (2,), "v": (3,)}
    every = ct.NeuralODE(NestedField(), returns="all", **MESH)(state)
    assert tuple(every["v"].shape) == (2, 3)
    torch.testing.assert_close(every["v"][-1], last["v"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "adjoint",
    [
        ct.DirectAdjoint(), ct.CheckpointAdjoint(), ct.CheckpointAdjoint(snapshots=2),
        ct.InterpolatingAdjoint(), ct.GaussAdjoint(), ct.BacksolveAdjoint(),
    ],
    ids=repr,
)  # fmt: skip
def test_gradients_inside_a_sequence_of_layers(adjoint, y0):
    torch.manual_seed(0)
    options = {"method": "rk4", "options": {"num_steps": 12}}
    ode = ct.NeuralODE(Field(), adjoint=adjoint, **options)
    model = nn.Sequential(nn.Linear(3, 3), ode, nn.Linear(3, 2))
    params = list(model.parameters())
    got = torch.autograd.grad(model(y0).square().sum(), params)
    hidden = model[0](y0)
    # The same steps written out.
    h = 1.0 / 12
    for n in range(12):
        t = torch.tensor(n * h)
        k1 = ode.func(t, hidden)
        k2 = ode.func(t + h / 3, hidden + h / 3 * k1)
        k3 = ode.func(t + 2 * h / 3, hidden + h * (k2 - k1 / 3))
        k4 = ode.func(t + h, hidden + h * (k1 - k2 + k3))
        hidden = hidden + h / 8 * (k1 + 3 * k2 + 3 * k3 + k4)
    want = torch.autograd.grad(model[2](hidden).square().sum(), params)
    exact = isinstance(adjoint, ct.DirectAdjoint | ct.CheckpointAdjoint)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12 if exact else 1e-5, atol=1e-12)
    assert ode.stats.steps_accepted == 12
    if not isinstance(adjoint, ct.DirectAdjoint):
        assert ode.stats.f_evaluations_backward > 0


def test_it_trains(y0):
    torch.manual_seed(0)
    model = ct.NeuralODE(Field(), **MESH)
    goal = ct.NeuralODE(Field(), **MESH)
    with torch.no_grad():
        goal.func.a.mul_(-1.0).add_(0.1)
        target = goal(y0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(y0) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1e-2 * losses[0]


def test_its_state_is_that_of_its_field(y0):
    model, other = ct.NeuralODE(Field(), **MESH), ct.NeuralODE(Field(), **MESH)
    assert list(model.state_dict()) == ["func.a"]
    with torch.no_grad():
        model.func.a.add_(0.3)
    assert not torch.equal(model(y0), other(y0))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(y0), other(y0))


def test_it_moves_to_another_dtype(y0):
    model = ct.NeuralODE(Field(), adjoint=ct.BacksolveAdjoint(), **MESH).to(torch.float32)
    result = model(y0.float())
    assert result.dtype == torch.float32
    result.sum().backward()
    assert model.func.a.grad.dtype == torch.float32
    # Float32 has 24 bits: 1e-6 of a few sums.
    exact = ct.NeuralODE(Field(), **MESH)(y0)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_parameters_of_its_own(again, y0):
    model = ct.NeuralODE(Field(), adjoint=ct.CheckpointAdjoint(snapshots=2), **MESH)
    model(y0)
    other = again(model)
    assert torch.equal(model(y0), other(y0))
    with torch.no_grad():
        other.func.a.zero_()
    assert not torch.equal(model(y0), other(y0))


def test_its_description_names_the_settings():
    model = ct.NeuralODE(Field(), adjoint=ct.CheckpointAdjoint(snapshots=2), **MESH)
    shown = str(model)
    assert "method='rk4', adjoint=CheckpointAdjoint(snapshots=2)" in shown
    assert "(func): Field()" in shown


def test_a_wrong_argument_raises():
    with pytest.raises(TypeError, match=r"`func` must be callable as func\(t, y\), got int"):
        ct.NeuralODE(3)
    with pytest.raises(ValueError, match="`returns` must be 'last' or 'all', got 'first'"):
        ct.NeuralODE(Field(), returns="first")


WORKER = """
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import contadj.torch as ct


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t, y):
        return self.net(y) * torch.cos(t)


def gradients(adjoint, method, rank, world):
    torch.manual_seed(0)
    solve = ct.NeuralODE(Field(), adjoint=adjoint, **method)
    model = nn.Sequential(nn.Linear(3, 3), solve, nn.Linear(3, 2))
    data = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)
    if world > 1:
        model = DistributedDataParallel(model)
        data = data.chunk(world)[rank]
    model(data).square().mean().backward()
    return [param.grad for param in model.parameters()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    # On an adaptive mesh the processes step apart; tolerances make that gap small.
    adaptive = {"method": "dopri5", "rtol": 1e-10, "atol": 1e-12}
    fixed = {"method": "rk4", "options": {"num_steps": 8}}
    for adjoint in (ct.CheckpointAdjoint(), ct.BacksolveAdjoint()):
        for method, rtol in ((fixed, 1e-12), (adaptive, 1e-7)):
            shared = gradients(adjoint, method, rank, 2)
            alone = gradients(adjoint, method, rank, 1)
            for got, want in zip(shared, alone, strict=True):
                torch.testing.assert_close(got, want, rtol=rtol, atol=1e-10)
            print(type(adjoint).__name__, method["method"], "agrees", flush=True)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    workers = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=300)
            assert worker.returncode == 0, err
            assert out.count("agrees") == 4
    finally:
        for worker in workers:
            worker.kill()
