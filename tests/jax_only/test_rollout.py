"""Rollouts: against hand-computed numbers, and against JAX's own autodiff of the unrolled loop."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contadj.jax import rollout, rollout_adjoint
from contadj.jax._revolve import Schedule, fewest_steps, reverse

SNAPSHOTS = [None, 1, 2, 3, 8]


def scalar_step(i, z, a, p):
    return p["a"] * z + p["theta"]


def miss(z, p):
    return (z - 2.0) ** 2


SCALAR = {"a": jnp.asarray(0.9), "theta": jnp.asarray(1.0)}


@pytest.mark.parametrize("snapshots", SNAPSHOTS)
def test_the_scalar_rollout_gives_its_hand_computed_adjoints(snapshots):
    got = rollout_adjoint(
        scalar_step, 0.0, jnp.zeros(3), SCALAR, terminal_cost=miss, snapshots=snapshots
    )
    np.testing.assert_allclose(got.adjoints[1:], [1.1502, 1.278, 1.42], rtol=1e-14)
    np.testing.assert_allclose(got.params["theta"], 3.8482, rtol=1e-14)
    np.testing.assert_allclose(got.cost, 0.5041, rtol=1e-14)


@pytest.mark.parametrize("snapshots", SNAPSHOTS)
def test_the_scalar_rollout_returns_its_states(snapshots):
    cost, states = rollout(
        scalar_step, 0.0, jnp.zeros(3), SCALAR, terminal_cost=miss, snapshots=snapshots
    )
    np.testing.assert_allclose(states, [0, 1, 1.9, 2.71], rtol=1e-14)
    np.testing.assert_allclose(cost, 0.5041, rtol=1e-14)


# A pytree state, pytree actions, nested params, an explicit dependence on i and an array that the
# step closes over.
H = 11
GAIN = jnp.array([0.3, -0.2])


def tree_step(i, z, a, p):
    push = jnp.tanh(p["w"][0] @ z["x"] + a["u"]) + 0.01 * i * GAIN
    return {"x": z["x"] + 0.1 * push, "v": z["v"] * p["w"][1] + jnp.sum(a["u"] * z["x"])}


def tree_stage(i, z, a, p):
    return jnp.sum(z["x"] ** 2) + 0.1 * jnp.sum(a["u"] ** 2) + 0.3 * i * z["v"] * p["w"][1]


def tree_end(z, p):
    return jnp.sum(z["x"]) * z["v"] + p["w"][1] ** 2


def tree_arguments():
    rng = np.random.default_rng(0)
    z0 = {"x": jnp.asarray(rng.normal(size=2)), "v": jnp.asarray(0.7)}
    actions = {"u": jnp.asarray(rng.normal(size=(H, 2)))}
    params = {"w": (jnp.asarray(rng.normal(size=(2, 2))), jnp.asarray(0.9))}
    return z0, actions, params


def unrolled(z0, actions, params, extra):
    """The same rollout as a Python loop; the gradient in `extra[t]`, added to z_t, is lambda_t."""
    z, cost = z0, 0.0
    for i in range(H):
        z = jax.tree.map(jnp.add, z, jax.tree.map(lambda x, i=i: x[i], extra))
        a = {"u": actions["u"][i]}
        cost = cost + tree_stage(i, z, a, params)
        z = tree_step(i, z, a, params)
    z = jax.tree.map(jnp.add, z, jax.tree.map(lambda x: x[H], extra))
    return cost + tree_end(z, params)


def assert_trees_close(got, want, rtol=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * max(1.0, np.abs(w).max()))


@pytest.mark.parametrize("snapshots", SNAPSHOTS)
def test_the_adjoint_sweep_equals_autodiff_of_the_unrolled_loop(snapshots):
    z0, actions, params = tree_arguments()
    extra = jax.tree.map(lambda x: jnp.zeros((H + 1, *x.shape)), z0)
    want = jax.jit(jax.grad(unrolled, argnums=(0, 1, 2, 3)))(z0, actions, params, extra)
    got = rollout_adjoint(
        tree_step, z0, actions, params,
        stage_cost=tree_stage, terminal_cost=tree_end, snapshots=snapshots,
    )  # fmt: skip
    assert_trees_close((got.z0, got.actions, got.params, got.adjoints), want)
    np.testing.assert_allclose(got.cost, unrolled(z0, actions, params, extra), rtol=1e-14)


@pytest.mark.parametrize("snapshots", [None, 3])
def test_jax_grad_of_a_rollout_equals_autodiff_of_the_unrolled_loop(snapshots):
    z0, actions, params = tree_arguments()

    def loss(z0, actions, params, gain):
        def step(i, z, a, p):
            out = tree_step(i, z, a, p)
            return out | {"x": out["x"] + 0.001 * i * gain}

        cost, states = rollout(
            step, z0, actions, params,
            stage_cost=tree_stage, terminal_cost=tree_end, snapshots=snapshots,
        )  # fmt: skip
        return cost + jnp.sum(jnp.sin(states["x"]))

    def direct(z0, actions, params, gain):
        z, cost = z0, jnp.sum(jnp.sin(z0["x"]))
        for i in range(H):
            a = {"u": actions["u"][i]}
            cost = cost + tree_stage(i, z, a, params)
            z = tree_step(i, z, a, params)
            z = z | {"x": z["x"] + 0.001 * i * gain}
            cost = cost + jnp.sum(jnp.sin(z["x"]))
        return cost + tree_end(z, params)

    arguments = (z0, actions, params, GAIN)
    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)
    want = jax.jit(jax.value_and_grad(direct, argnums=(0, 1, 2, 3)))(*arguments)
    assert_trees_close(got, want)


def test_hessian_vector_products_of_a_rollout_are_those_of_the_closed_form():
    # z_3 = a^3 + theta (1 + a + a^2) from z_0 = 1, so J = z_3^2 has a known second derivative.
    def cost(a):
        p = {"a": a, "theta": 0.0}
        return rollout(scalar_step, 1.0, jnp.zeros(3), p, terminal_cost=lambda z, p: z**2)[0]

    _, got = jax.jvp(jax.grad(cost), (jnp.asarray(1.3),), (jnp.asarray(1.0),))
    np.testing.assert_allclose(got, 30 * 1.3**4, rtol=1e-13)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 20, 61, 200])
@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 12])
def test_reversing_takes_the_binomial_minimum_of_recomputed_steps(num_steps, snapshots):
    schedule = Schedule(num_steps, snapshots)
    indices = jnp.full(snapshots, -1, jnp.int32).at[0].set(0)
    stored = jnp.zeros(snapshots)
    order, advanced = reverse(
        schedule, jnp.int32(num_steps), indices, jnp.int32(1), stored,
        advance=lambda i, z: z + 1.0,
        pull=lambda i, z, carry: (carry[0] + 1, carry[1] + jnp.abs(z - i) + jnp.abs(
            carry[0] - (num_steps - 1 - i)
        )),
        carry=(jnp.int32(0), jnp.zeros(())),
    )  # fmt: skip
    assert order[0] == num_steps
    assert order[1] == 0  # each step once, last first, from the right state
    assert int(advanced) == fewest_steps(num_steps, snapshots)


def test_the_first_sweep_stores_what_the_reversal_would_have_stored():
    # The first sweep stands for the first descent: together they take the minimum.
    num_steps, snapshots = 50, 4
    schedule = Schedule(num_steps, snapshots)
    indices, count = schedule.first_sweep(jnp.int32(num_steps))
    stored = jnp.where(indices >= 0, indices, 0).astype(float)
    _, advanced = reverse(
        schedule, jnp.int32(num_steps), indices, count, stored,
        lambda i, z: z + 1.0, lambda i, z, carry: carry, jnp.zeros(()),
    )  # fmt: skip
    assert int(advanced) + int(indices[count - 1]) == fewest_steps(num_steps, snapshots)


def test_with_snapshots_the_memory_does_not_grow_with_the_horizon():
    def loss(z0, horizon):
        def step(i, z, a, p):
            return z + 0.01 * jnp.sin(z)

        return rollout(
            step, z0, jnp.arange(horizon), None, terminal_cost=lambda z, p: jnp.sum(z), snapshots=8
        )[0]

    def temporary_bytes(horizon):
        z0 = jax.ShapeDtypeStruct((10_000,), jnp.float64)
        compiled = jax.jit(jax.grad(lambda z: loss(z, horizon))).lower(z0).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(5_000) / temporary_bytes(50) < 1.05


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"z0": 1}, TypeError, "`z0` must hold floating-point arrays"),
        ({"step": lambda i, z, a, p: z.astype("float32")}, TypeError, "`step` must return"),
        ({"step": lambda i, z, a, p: jnp.stack([z, z])}, TypeError, "`step` must return"),
        ({"actions": None}, ValueError, "`actions` must hold arrays"),
        ({"actions": (jnp.zeros(2), jnp.zeros(3))}, ValueError, "`actions` must hold arrays"),
        ({"snapshots": 0}, ValueError, "`snapshots` must be"),
        ({"terminal_cost": lambda z, p: jnp.stack([z, z])}, TypeError, "`terminal_cost` must"),
        ({"stage_cost": 3.0}, TypeError, "`stage_cost` must be callable"),
    ],
)
def test_wrong_input_raises_and_names_the_argument(change, error, message):
    arguments = {
        "step": scalar_step, "z0": 0.5, "actions": jnp.zeros(3), "params": SCALAR,
        "terminal_cost": miss,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        rollout(**(arguments | change))


def test_importing_the_jax_backend_does_not_load_torch():
    code = "import contadj.jax, sys; assert 'torch' not in sys.modules; assert 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_gradient_is_a_pytree_that_jit_returns():
    got = eqx.filter_jit(rollout_adjoint)(
        scalar_step, 0.0, jnp.zeros(3), SCALAR, terminal_cost=miss
    )
    np.testing.assert_allclose(got.params["theta"], 3.8482, rtol=1e-14)
