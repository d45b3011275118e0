"""Rollouts: the scalar example by hand, equality with autograd, snapshots, refusals."""

import gc
import weakref

import numpy as np
import pytest
import torch

from contadj.torch import rollout, rollout_adjoint


def scalar_example(**more):
    a, target = 0.9, 2.0
    return dict(
        step=lambda i, x, u, theta: a * x + theta,
        z0=torch.tensor(0.0),
        actions=torch.arange(3),
        params=torch.tensor(1.0),
        terminal_cost=lambda x, theta: (x - target) ** 2,
        **more,
    )


@pytest.mark.parametrize("snapshots", [None, 1, 2, 5])
def test_the_scalar_rollout_has_the_numbers_worked_out_by_hand(snapshots):
    got = rollout_adjoint(**scalar_example(snapshots=snapshots))
    assert float(got.cost) == pytest.approx(0.5041, rel=1e-15)
    np.testing.assert_allclose(got.adjoints, [1.03518, 1.1502, 1.278, 1.42], rtol=1e-15, atol=0)
    assert float(got.params) == pytest.approx(3.8482, rel=1e-15)
    assert float(got.z0) == float(got.adjoints[0])


def test_the_scalar_rollout_returns_its_states():
    cost, states = rollout(**scalar_example())
    np.testing.assert_allclose(states, [0, 1, 1.9, 2.71], rtol=1e-15)
    assert float(cost) == pytest.approx(0.5041, rel=1e-15)


HORIZON = 9


def nested_example(device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).to(device)

    z0 = {"x": random(2, 3), "pair": (random(4), [random()])}
    actions = {"u": random(HORIZON, 3), "v": (random(HORIZON, 4, 1),)}
    params = {"W": random(3, 3), "deep": [random(4), (random(),)]}

    def step(i, z, a, p):
        x, (v, (s,)) = z["x"], z["pair"]
        return {
            "x": x + 0.1 * torch.tanh(x @ p["W"] + a["u"] * s),
            "pair": (
                v * torch.cos(p["deep"][0]) + 0.1 * a["v"][0][:, 0] * x.sum() + 0.01 * i,
                [s + p["deep"][1][0] * v.mean()],
            ),
        }

    def stage_cost(i, z, a, p):
        return (z["x"] ** 2).sum() * p["deep"][1][0] + (i + 1) * (a["u"] ** 2).sum()

    def terminal_cost(z, p):
        return (z["pair"][0] ** 2).sum() + z["pair"][1][0] * p["W"].sum()

    return step, z0, actions, params, stage_cost, terminal_cost


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


def unrolled(step, z0, actions, params, stage_cost, terminal_cost):
    """Autograd through a plain loop, sharing no code with the package."""
    inputs = leaves(z0) + leaves(actions) + leaves(params)
    for leaf in inputs:
        leaf.requires_grad_()
    z, cost, states = z0, 0.0, [z0]
    for i in range(HORIZON):
        a = {"u": actions["u"][i], "v": (actions["v"][0][i],)}
        cost = cost + stage_cost(i, z, a, params)
        z = step(i, z, a, params)
        states.append(z)
    cost = cost + terminal_cost(z, params)
    kept = [leaf for z in states for leaf in leaves(z)]
    grads = torch.autograd.grad(cost, inputs + kept, allow_unused=True)
    count = len(leaves(z0))
    rows = [grads[len(inputs) + k :: count] for k in range(count)]
    zero = [torch.zeros_like(x) for x in leaves(z0)]
    adjoints = [
        torch.stack([zero[k] if g is None else g for g in row]) for k, row in enumerate(rows)
    ]
    for leaf in inputs:
        leaf.requires_grad_(False)
    return cost.detach(), list(grads[: len(inputs)]), adjoints


def close(got, want, dtype=torch.float64):
    tolerance = 1e3 * torch.finfo(dtype).eps
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("snapshots", [None, 1, 2, 3, 8, 9, 40])
def test_the_sweep_equals_autograd_through_the_unrolled_loop(device, snapshots):
    example = nested_example(device)
    cost, grads, adjoints = unrolled(*example)
    step, z0, actions, params, stage_cost, terminal_cost = example
    got = rollout_adjoint(
        step, z0, actions, params, stage_cost=stage_cost, terminal_cost=terminal_cost,
        snapshots=snapshots,
    )  # fmt: skip
    close([got.cost], [cost])
    close(leaves(got.z0) + leaves(got.actions) + leaves(got.params), grads)
    close(leaves(got.adjoints), adjoints)
    assert set(got.params) == {"W", "deep"} and isinstance(got.params["deep"][1], tuple)


@pytest.mark.parametrize("snapshots", [None, 1, 3, 40])
def test_rollout_is_differentiable_and_equals_the_unrolled_loop(device, snapshots):
    example = nested_example(device)
    cost, grads, _ = unrolled(*example)
    step, z0, actions, params, stage_cost, terminal_cost = example
    inputs = leaves(z0) + leaves(actions) + leaves(params)
    for leaf in inputs:
        leaf.requires_grad_()
    got, _ = rollout(
        step, z0, actions, params, stage_cost=stage_cost, terminal_cost=terminal_cost,
        snapshots=snapshots,
    )  # fmt: skip
    close([got.detach()], [cost])
    close(torch.autograd.grad(got, inputs), grads)


def test_float32_is_kept_throughout():
    example = nested_example(dtype=torch.float32)
    _, grads, _ = unrolled(*example)
    got = rollout_adjoint(
        *example[:4], stage_cost=example[4], terminal_cost=example[5], snapshots=2
    )
    found = leaves(got.z0) + leaves(got.actions) + leaves(got.params)
    assert {x.dtype for x in found} == {torch.float32}
    # 9 steps of float32 rounding, in sums of about ten terms of mixed sign.
    close(found, grads, torch.float32)


@pytest.mark.parametrize("snapshots", [None, 3])
def test_the_final_state_carries_a_gradient_too(snapshots):
    z0 = torch.tensor([1.0, 2.0], requires_grad=True)
    theta = torch.tensor(0.7, requires_grad=True)
    _, states = rollout(
        lambda i, z, a, p: p * z + a, z0, torch.zeros(5, 2), theta, snapshots=snapshots
    )
    end = states[-1] if snapshots is None else states
    grads = torch.autograd.grad(end.sum(), (z0, theta))
    close(grads, [torch.full((2,), 0.7**5), torch.tensor(5 * 0.7**4 * 3)])


@pytest.mark.parametrize("snapshots", [None, 2])
def test_a_complex_state_with_a_real_parameter_has_a_real_parameter_gradient(snapshots):
    theta = torch.tensor(0.3)

    def cost(theta):
        return ((1 + 1j * theta) ** 4 * (1 + 2j)).real

    got = rollout_adjoint(
        lambda i, z, a, p: (1 + 1j * p) * z, torch.tensor(1 + 2j), torch.arange(4), theta,
        terminal_cost=lambda z, p: z.real, snapshots=snapshots,
    )  # fmt: skip
    assert got.params.dtype == torch.float64
    theta.requires_grad_()
    close([got.params], torch.autograd.grad(cost(theta), theta))


def test_no_action_at_all_returns_the_terminal_cost_alone():
    got = rollout_adjoint(
        lambda i, z, a, p: z, torch.tensor([1.0, 2.0]), torch.zeros(0, 1), torch.tensor(3.0),
        terminal_cost=lambda z, p: p * z.sum(), snapshots=2,
    )  # fmt: skip
    close([got.adjoints, got.params, got.cost], [
        torch.full((1, 2), 3.0), torch.tensor(3.0), torch.tensor(9.0)
    ])  # fmt: skip


def test_a_parameter_that_nothing_depends_on_has_a_zero_gradient():
    got = rollout_adjoint(
        lambda i, z, a, p: z + a, torch.zeros(2), torch.ones(3, 2), {"unused": torch.ones(4)},
        terminal_cost=lambda z, p: z.sum(),
    )  # fmt: skip
    assert torch.equal(got.params["unused"], torch.zeros(4))


class LiveStates:
    """How many tensors of the state's size are alive at most, seen from inside the step."""

    size = 4096

    def __init__(self):
        self.most = 0
        self.alive = 0

    def step(self, i, z, a, p):
        new = torch.tanh(p * z) + a
        self.alive += 1
        weakref.finalize(new.untyped_storage(), self.gone)
        self.most = max(self.most, self.alive)
        return new

    def gone(self):
        self.alive -= 1


@pytest.mark.parametrize("horizon", [50, 400])
@pytest.mark.parametrize("snapshots", [1, 4])
def test_snapshots_keep_a_number_of_states_that_does_not_grow_with_the_horizon(horizon, snapshots):
    if snapshots == 1 and horizon == 400:
        horizon = 150  # one snapshot repeats H^2 / 2 steps
    live = LiveStates()
    gc.collect()
    rollout_adjoint(
        live.step, torch.full((live.size,), 0.5), torch.zeros(horizon, 1), torch.tensor(0.9),
        terminal_cost=lambda z, p: z.sum(), snapshots=snapshots,
    )  # fmt: skip
    # lambda_t is kept on request and is no state; beside the snapshots there are z0, the final
    # state, the state in work, its detached leaf and the step's result.
    assert live.most <= snapshots + 6


def test_without_snapshots_every_state_is_kept():
    live = LiveStates()
    rollout_adjoint(
        live.step, torch.full((live.size,), 0.5), torch.zeros(50, 1), torch.tensor(0.9),
        terminal_cost=lambda z, p: z.sum(),
    )  # fmt: skip
    assert live.most >= 50


def test_the_backward_pass_of_a_rollout_with_snapshots_can_run_twice():
    z0 = torch.tensor([1.0, 2.0], requires_grad=True)
    cost, _ = rollout(
        lambda i, z, a, p: torch.sin(z) + a, z0, torch.zeros(7, 2), [],
        terminal_cost=lambda z, p: z.sum(), snapshots=2,
    )  # fmt: skip
    (first,) = torch.autograd.grad(cost, z0, retain_graph=True)
    (second,) = torch.autograd.grad(cost, z0)
    close([first], [second])


def test_the_cost_of_a_sweep_does_not_depend_on_the_number_of_parameters():
    def calls(size):
        count = 0

        def step(i, z, a, p):
            nonlocal count
            count += 1
            return z + p.sum() * a

        rollout_adjoint(
            step, torch.ones(2), torch.ones(20, 2), torch.ones(size),
            terminal_cost=lambda z, p: z.sum(),
        )  # fmt: skip
        return count

    # Forward, and once more in the sweep.
    assert calls(1) == calls(1000) == 40


def keep(i, z, a, p):
    return z


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"z0": torch.tensor([1, 2])}, TypeError, "`z0` must hold floating-point tensors, got"),
        ({"z0": [1.0]}, TypeError, "`z0` must hold tensors, got float"),
        ({"params": 3.0}, TypeError, "`params` must hold tensors, got float"),
        ({"step": lambda i, z, a, p: z[:1]}, TypeError, "`step` must return the structure, shapes"),
        ({"step": lambda i, z, a, p: z.float()}, TypeError, "`step` must return the structure"),
        ({"step": lambda i, z, a, p: (z, z)}, TypeError, "`step` must return the structure"),
        ({"step": None}, TypeError, "`step` must be callable, got None"),
        ({"actions": torch.tensor(1.0)}, ValueError, "`actions` must hold tensors that share a"),
        ({"actions": []}, ValueError, r"`actions` .* \(pass torch.arange\(H\)"),
        (
            {"actions": (torch.ones(3), torch.ones(4))},
            ValueError,
            r"share a leading axis, one entry per step; got leading axes \['3', '4'\]",
        ),
        ({"terminal_cost": lambda z, p: z}, TypeError, "`terminal_cost` must return one real"),
        ({"stage_cost": lambda i, z, a, p: z}, TypeError, "`stage_cost` must return one real"),
        ({"stage_cost": lambda i, z, a, p: 0.0}, TypeError, "`stage_cost` must return one real"),
        ({"stage_cost": 1.0}, TypeError, "`stage_cost` must be callable or None, got 1.0"),
        ({"snapshots": 0}, ValueError, "`snapshots` must be None or a positive integer, got 0"),
        ({"snapshots": 2.5}, ValueError, "`snapshots` must be None or a positive integer, got 2.5"),
    ],
    ids=[
        "integer state", "float state", "float params", "shape", "dtype", "structure", "no step",
        "scalar action", "no action", "two horizons", "terminal vector", "stage vector",
        "stage float", "stage not callable", "no snapshots", "half a snapshot",
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [rollout, rollout_adjoint])
def test_a_wrong_argument_raises_with_its_name_what_came_and_the_fix(
    function, change, error, message
):
    arguments = {
        "step": keep, "z0": torch.ones(2), "actions": torch.ones(3), "params": torch.ones(1)
    } | change  # fmt: skip
    with pytest.raises(error, match=message):
        function(**arguments)


def test_a_tensor_that_snapshots_cannot_see_is_refused_before_a_wrong_gradient_is_returned():
    theta = torch.tensor(0.5, requires_grad=True)
    z0 = torch.ones(2, requires_grad=True)
    cost, _ = rollout(
        lambda i, z, a, p: theta * z, z0, torch.ones(5), [],
        terminal_cost=lambda z, p: z.sum(), snapshots=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs a gradient and is not in `params`: put it there"):
        cost.backward()


def test_a_rollout_with_snapshots_refuses_a_second_derivative():
    z0 = torch.ones(2, requires_grad=True)
    cost, _ = rollout(
        lambda i, z, a, p: torch.sin(z), z0, torch.ones(5), [],
        terminal_cost=lambda z, p: z.sum(), snapshots=2,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="no second derivative; leave `snapshots` out"):
        torch.autograd.grad(cost, z0, create_graph=True)


def test_a_rollout_without_snapshots_has_a_second_derivative():
    z0 = torch.tensor([0.3, 0.4], requires_grad=True)

    def cost(z0):
        return rollout(
            lambda i, z, a, p: torch.sin(z), z0, torch.ones(5), [],
            terminal_cost=lambda z, p: z.sum(),
        )[0]  # fmt: skip

    assert torch.autograd.gradgradcheck(cost, (z0,))
