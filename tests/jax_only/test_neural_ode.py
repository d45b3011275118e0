"""NeuralODE: a module that is solved, trained, filtered and saved."""

import io

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contadj.jax import BacksolveAdjoint, NeuralODE


class Linear(eqx.Module):
    matrix: jax.Array

    def __call__(self, t, y):
        return self.matrix @ y


SPIRAL = jnp.array([[-0.1, 2.0], [-2.0, -0.1]])
Y0 = jnp.array([2.0, 0.0])


def exact(t):
    return np.asarray(jax.scipy.linalg.expm(SPIRAL * t) @ Y0)


@pytest.mark.parametrize("settings", [{"rtol": 1e-9, "atol": 1e-9}, {"num_steps": 64}], ids=str)
def test_it_returns_the_solution_at_the_last_time_or_at_all(settings):
    t = jnp.array([0.0, 0.4, 1.0])
    last = NeuralODE(Linear(SPIRAL), **settings)(Y0, t)
    every = NeuralODE(Linear(SPIRAL), returns="all", **settings)(Y0, t)
    np.testing.assert_allclose(last, exact(1.0), rtol=1e-7)
    np.testing.assert_allclose(every, [exact(0.0), exact(0.4), exact(1.0)], rtol=1e-6, atol=1e-8)


def test_training_recovers_the_matrix_and_survives_being_saved():
    t = jnp.linspace(0.0, 1.0, 9)
    data = jnp.stack([jnp.asarray(exact(float(s))) for s in t])
    model = NeuralODE(Linear(0.5 * SPIRAL), num_steps=4, returns="all", method="rk4")
    optimiser = optax.adam(0.1)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state):
        loss, gradient = eqx.filter_value_and_grad(lambda m: jnp.mean((m(Y0, t) - data) ** 2))(
            model
        )
        step, state = optimiser.update(gradient, state)
        return eqx.apply_updates(model, step), state, loss

    for _ in range(200):
        model, state, loss = update(model, state)
    assert loss < 1e-6
    np.testing.assert_allclose(model.func.matrix, SPIRAL, atol=1e-2)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, model)
    np.testing.assert_array_equal(loaded(Y0, t), model(Y0, t))


def test_the_adjoint_and_the_solver_are_those_asked_for():
    model = NeuralODE(Linear(SPIRAL), method=diffrax.Dopri5(), adjoint=BacksolveAdjoint())
    assert isinstance(model.solver, diffrax.Dopri5)
    got = jax.grad(lambda y0: jnp.sum(model(y0)))(Y0)
    np.testing.assert_allclose(got, jax.scipy.linalg.expm(SPIRAL).T @ jnp.ones(2), rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"func": 3}, TypeError, "`func`"),
        ({"returns": "first"}, ValueError, "`returns`"),
        ({"method": "rk5"}, ValueError, "`method`"),
        ({"num_steps": 0}, ValueError, "`num_steps`"),
        ({"max_steps": 1.5}, ValueError, "`max_steps`"),
    ],
)
def test_a_wrong_argument_raises_and_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        NeuralODE(**({"func": Linear(SPIRAL)} | arguments))


def test_a_single_time_raises():
    with pytest.raises(ValueError, match="`t` must have shape"):
        NeuralODE(Linear(SPIRAL))(Y0, jnp.array([0.0]))
