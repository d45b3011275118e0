"""Live bytes are counted right, and no O(1) adjoint is backpropagation in disguise."""

import numpy as np
import pytest
import torch

import contadj.torch as ct
from contadj.torch import peak_live_bytes

SIZE = 8 * 1000  # bytes of x


@pytest.fixture
def x():
    return torch.linspace(0.0, 1.0, 1000)


def test_a_view_takes_no_memory(x):
    assert peak_live_bytes(lambda: x.view(10, 100).t()[2:])[1] == 0


def test_an_operation_in_place_takes_no_memory(x):
    result, live = peak_live_bytes(lambda: x.add_(1.0))
    assert live == 0
    assert result is x


def test_a_temporary_counts_beside_what_is_made_from_it(x):
    assert peak_live_bytes(lambda: (x + 1.0) + 1.0)[1] == 2 * SIZE


def test_what_was_freed_counts_no_more(x):
    def one_after_another():
        for _ in range(5):
            last = x + 1.0
            del last
        return x + 2.0

    assert peak_live_bytes(one_after_another)[1] == SIZE


def test_memory_from_before_the_call_does_not_count_when_it_is_freed_in_it():
    held = [torch.zeros(1000), torch.zeros(1000)]

    def replace():
        held.pop().add_(1.0)
        return torch.ones(1000)

    assert peak_live_bytes(replace)[1] == SIZE


def test_a_storage_that_is_resized_counts_at_its_new_size(x):
    assert peak_live_bytes(lambda: torch.empty(0).resize_(500))[1] == 4000


def test_a_tensor_made_from_numbers_counts():
    assert peak_live_bytes(lambda: torch.tensor([1.0, 2.0, 3.0]))[1] == 24


@pytest.mark.parametrize("depth", [2, 5, 40])
def test_saved_activations_and_the_backward_pass_count(x, depth):
    x.requires_grad_()

    def gradient():
        y = x
        for _ in range(depth):
            y = torch.sin(y)
        return torch.autograd.grad(y.sum(), x)[0]

    # All results live when backward begins: each sine saves its argument, `y` is the last one. Then
    # come the sum and its cotangent, a number each, a cosine and its product.
    result, live = peak_live_bytes(gradient)
    assert live == (depth + 2) * SIZE + 16
    y, slope = x.detach(), 1.0
    for _ in range(depth):
        y, slope = torch.sin(y), slope * torch.cos(y)
    torch.testing.assert_close(result, slope)


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="`device` must be a CPU or CUDA device, got 'meta'"):
        peak_live_bytes(lambda: None, "meta")


@pytest.mark.gpu
def test_cuda_counts_what_the_allocator_gives():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.zeros(1 << 20, device="cuda")
    assert peak_live_bytes(lambda: (x + 1.0) + 1.0, "cuda")[1] == 2 * 4 * (1 << 20)


class Growth(torch.nn.Module):
    """y' = r y, one rate per row."""

    def __init__(self):
        super().__init__()
        self.rates = torch.nn.Parameter(torch.tensor([-0.3, 0.2]))

    def forward(self, t, y):
        return self.rates[:, None] * y


def run(adjoint, num_steps, samples, observations=2):
    """Live bytes over those of the state, and the relative error of the gradient.

    The loss is the sum of the final state, reduced on the way. The gradient of the exact solution
    is exp(r T) for y0, T exp(r T) sum(y0) for r; at these step sizes rk4 gives it to 1e-9.
    """
    field = Growth()
    y0 = torch.linspace(-1.0, 2.0, 2 * samples).reshape(2, samples).requires_grad_()
    mesh = torch.linspace(0.0, 1.0, num_steps + 1)
    t = mesh[:: num_steps // (observations - 1)]

    def gradient():
        solution = ct.solve(
            field, y0, t, method="rk4", options={"mesh": mesh}, adjoint=adjoint,
            loss=lambda i, t, y: y.sum() if i == observations - 1 else 0.0 * y[0, 0],
        )  # fmt: skip
        return torch.autograd.grad(solution.loss, (y0, field.rates))

    grads, live = peak_live_bytes(gradient)
    growth = np.exp([-0.3, 0.2])
    expected = (np.repeat(growth[:, None], samples, 1), growth * y0.detach().numpy().sum(1))
    error = max(
        np.linalg.norm(got.numpy() - want) / np.linalg.norm(want)
        for got, want in zip(grads, expected, strict=True)
    )
    return live / (y0.numel() * 8), error


CONSTANT = pytest.mark.parametrize(
    "adjoint",
    [ct.BacksolveAdjoint(), ct.ReversibleAdjoint(0.999), ct.CheckpointAdjoint(snapshots=16)],
    ids=lambda adjoint: type(adjoint).__name__,
)
CEILING = 40.0  # states


@CONSTANT
@pytest.mark.parametrize("observations", [2, 21], ids="{} observations".format)
def test_an_adjoint_of_constant_memory_is_right_under_a_ceiling(adjoint, observations):
    live, error = run(adjoint, 240, 4000, observations)
    assert error < 1e-9
    assert live < CEILING
    few, _ = run(adjoint, 60, 4000, observations)
    assert live < 1.05 * few


@pytest.mark.parametrize(
    ("adjoint", "least"), [(ct.DirectAdjoint(), 4 * 240), (ct.CheckpointAdjoint(), 240)], ids=repr
)
def test_the_ceiling_is_far_below_what_a_growing_adjoint_needs(adjoint, least):
    live, error = run(adjoint, 240, 1000)
    assert error < 1e-9
    assert live > least


def test_checkpointing_grows_by_the_states_alone():
    (few, _), (many, _) = (run(ct.CheckpointAdjoint(), n, 4000) for n in (40, 140))
    assert many - few == pytest.approx(100, rel=0.01)


@pytest.mark.slow
@CONSTANT
@pytest.mark.parametrize("observations", [2, 1001], ids="{} observations".format)
def test_ten_thousand_steps_stay_under_the_ceiling(adjoint, observations):
    live, error = run(adjoint, 10_000, 8192, observations)
    # Undoing 10,000 coupled steps amplifies round-off by 0.999^-10000 = 2e4.
    assert error < 1e-9
    assert live < CEILING
    few, _ = run(adjoint, 1000, 8192, observations)
    # Stage times and step sizes, at most 64 bytes a step, are all that grows. A state has 128 KiB.
    assert (live - few) * 16 * 8192 <= 64 * 9000
