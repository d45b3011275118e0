"""The two backends give one gradient: same tableau, same mesh, double precision."""

from functools import cache

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import contadj.jax
import contadj.torch
from contadj.jax import _study as jax_study
from contadj.problems import BUILT_IN
from contadj.tableaus import TABLEAUS
from contadj.torch import _study as torch_study
from contadj.torch import _torchdiffeq

STUDIES = {"torch": torch_study, "jax": jax_study}
METHODS = [name for name in jax_study.methods() if name in torch_study.methods("contadj")]
METHODS = [name for name in METHODS if name in TABLEAUS and TABLEAUS[name].explicit]
FEW = ("heun2", "rk4", "dopri5")
# Every method on the problems that tell methods apart, every problem with three of them; each case
# costs JAX a compilation, so that the rest is slow.
NOW = [("pend", m) for m in METHODS] + [(p, m) for p in BUILT_IN if p != "pend" for m in FEW]
LATER = [(p, m) for p in ("nonaut", "mlp") for m in METHODS if m not in FEW]


def cases(*now):
    later = [c for c in (*NOW, *LATER) if c not in now]
    return pytest.mark.parametrize(
        ("problem", "method"), [*now, *(pytest.param(*c, marks=pytest.mark.slow) for c in later)]
    )


STEPS = {"hare_lynx": 4}


@cache
def measured(backend, problem, method, adjoint, engine=None):
    study = STUDIES[backend]
    n = STEPS.get(problem, 16)
    more = {} if engine is None else {"engine": engine}
    return study.gradient_function(
        study.builtin_problem(problem), method=method, adjoint=adjoint, max_steps=n, **more
    )(n)


def assert_same_gradient(a, b, tolerance=1e-13):
    assert a.gradient.cost == pytest.approx(b.gradient.cost, rel=tolerance)
    difference = np.linalg.norm(a.gradient.vector - b.gradient.vector)
    assert difference <= tolerance * np.linalg.norm(b.gradient.vector)


@cases(*NOW, *[("nonaut", m) for m in METHODS if m not in FEW])
def test_discrete_gradients_costs_and_every_lambda_agree(problem, method):
    ours, theirs = (measured(b, problem, method, "DirectAdjoint") for b in ("torch", "jax"))
    np.testing.assert_array_equal(ours.mesh, theirs.mesh)
    assert_same_gradient(ours, theirs)
    worst = np.max(np.linalg.norm(ours.adjoint - theirs.adjoint, axis=1))
    assert worst <= 1e-13 * np.max(np.linalg.norm(theirs.adjoint, axis=1))


@cases(*[("pend", m) for m in METHODS], *[(p, "rk4") for p in BUILT_IN if p != "pend"])
def test_continuous_gradients_and_reversal_errors_agree(problem, method):
    ours, theirs = (measured(b, problem, method, "BacksolveAdjoint") for b in ("torch", "jax"))
    # Where rebuilding y amplifies round-off by r, the two rounding histories differ by r too.
    amplified = 1e-13 * (1e4 if problem in ("slow_fast", "van_der_pol") else 1)
    assert_same_gradient(ours, theirs, amplified)
    # A difference of two states of size 1: to rounding, absolutely.
    assert ours.reversal_error == pytest.approx(theirs.reversal_error, rel=1e-9, abs=amplified)
    assert ours.f_evaluations_forward == theirs.f_evaluations_forward
    # PyTorch looks once more whether f is still the function it was; JAX's are pure.
    assert ours.f_evaluations_backward == theirs.f_evaluations_backward + 1


@pytest.mark.parametrize("adjoint", ["DirectAdjoint", "BacksolveAdjoint"])
@pytest.mark.parametrize("method", [m for m in METHODS if m in _torchdiffeq.METHODS])
def test_the_torchdiffeq_engine_agrees_with_jax_too(method, adjoint):
    ours = measured("torch", "pend", method, adjoint, "torchdiffeq")
    assert_same_gradient(ours, measured("jax", "pend", method, adjoint))


def test_checkpointing_in_torch_is_the_direct_gradient_in_jax():
    ours = measured("torch", "mlp", "dopri5", "CheckpointAdjoint")
    assert_same_gradient(ours, measured("jax", "mlp", "dopri5", "DirectAdjoint"))


W = np.array([[-0.4, 0.9, 0.1], [-0.8, -0.3, 0.4], [0.2, -0.5, -0.6]])
Y0, MESH = np.array([0.6, -0.4, 0.9]), np.array([0.0, 0.1, 0.25, 0.5, 0.6, 0.8, 1.0])


def torch_solve(method, adjoint):
    y0 = torch.from_numpy(Y0.copy()).requires_grad_()
    w = torch.from_numpy(W.copy()).requires_grad_()
    ys = contadj.torch.odeint(
        lambda t, y: torch.tanh(w @ y) + torch.cos(2 * t) * y, y0,
        torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), method=method,
        options={"mesh": MESH}, adjoint=adjoint,
    )  # fmt: skip
    weights = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    grads = torch.autograd.grad((weights * ys**2).sum(), (y0, w))
    return ys.detach().numpy(), np.concatenate([g.numpy().ravel() for g in grads])


def jax_solve(method, adjoint):
    def loss(y0, w):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y) + jnp.cos(2 * t) * y),
            contadj.jax.get_solver(method), 0.0, 1.0, None, y0, w,
            stepsize_controller=diffrax.StepTo(jnp.asarray(MESH)), adjoint=adjoint,
            saveat=diffrax.SaveAt(ts=jnp.array([0.0, 0.5, 1.0])), max_steps=len(MESH) - 1,
        )  # fmt: skip
        weights = jnp.array([[1.0], [-2.0], [0.5]])
        return jnp.sum(weights * solution.ys**2), solution.ys

    (_, ys), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(Y0, W)
    return np.asarray(ys), np.concatenate([np.ravel(g) for g in grads])


@pytest.mark.parametrize("name", ["DirectAdjoint", "CheckpointAdjoint", "BacksolveAdjoint"])
@pytest.mark.parametrize("method", ["heun2", "tsit5", "dopri8"])
def test_a_solve_for_users_agrees_on_a_given_mesh(method, name):
    more = {"reversal_tolerance": 1.0} if name == "BacksolveAdjoint" else {}
    ours, our_gradient = torch_solve(method, getattr(contadj.torch, name)(**more))
    theirs, their_gradient = jax_solve(method, getattr(contadj.jax, name)(**more))
    np.testing.assert_allclose(ours, theirs, rtol=1e-13)
    difference = np.linalg.norm(our_gradient - their_gradient)
    assert difference <= 1e-13 * np.linalg.norm(their_gradient)


HORIZON = 12


def rollout_example(backend):
    """One rollout in both frameworks: operators and two functions of theirs."""
    xp, array = (torch, torch.from_numpy) if backend == "torch" else (jnp, jnp.asarray)
    rng = np.random.default_rng(4)
    z0 = {"x": array(rng.normal(size=3)), "s": (array(rng.normal(size=(2, 2))),)}
    actions = {"u": array(rng.normal(size=(HORIZON, 3)))}
    params = {"A": array(0.4 * rng.normal(size=(3, 3))), "k": [array(rng.normal(size=2))]}

    def step(i, z, a, p):
        x = xp.tanh(p["A"] @ z["x"] + a["u"])
        return {"x": x, "s": (z["s"][0] * xp.cos(p["k"][0]) + 0.1 * i * x.sum(),)}

    return dict(
        step=step, z0=z0, actions=actions, params=params,
        stage_cost=lambda i, z, a, p: (z["x"] ** 2).sum() + (i + 1) * (a["u"] ** 2).sum(),
        terminal_cost=lambda z, p: (z["s"][0] ** 2).sum() * p["k"][0].sum(),
    )  # fmt: skip


@pytest.mark.parametrize("snapshots", [None, 1, 3])
def test_rollouts_agree_in_every_derivative(snapshots):
    ours, theirs = (
        module.rollout_adjoint(**rollout_example(backend), snapshots=snapshots)
        for backend, module in (("torch", contadj.torch), ("jax", contadj.jax))
    )
    np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-14)
    for name in ("adjoints", "actions", "params", "z0"):
        a, b = (
            jax.tree.leaves(jax.tree.map(np.asarray, (getattr(ours, name),))),
            jax.tree.leaves(getattr(theirs, name)),
        )
        assert len(a) == len(b) > 0
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13 * np.abs(y).max())


SHARED = sorted(set(torch_study.adjoints()) & set(jax_study.adjoints()))


SOME = ("heun2", "bosh3", "rk4", "dopri5")
# Between mesh points their dense output is of lower order than they are: there PyTorch takes a
# shortened step, JAX Diffrax's polynomial.
COARSE = ("dopri8", "radauIIA5", "gl6")
ALONG = ("InterpolatingAdjoint", "GaussAdjoint")


def shared_cases():
    """Every shared adjoint with every method with which both backends compute one thing."""
    for adjoint in SHARED:
        for method, tableau in TABLEAUS.items():
            if adjoint == "ReversibleAdjoint" and not tableau.explicit:
                continue
            if adjoint in ALONG and method in COARSE:
                continue
            now = method in SOME or (method, adjoint) == ("gl4", "BacksolveAdjoint")
            marks = [] if now else [pytest.mark.slow]
            yield pytest.param(adjoint, "driven", method, marks=marks)
            # JAX couples the running cost with the state, PyTorch integrates it beside the state.
            if method in SOME and adjoint != "ReversibleAdjoint":
                yield pytest.param(adjoint, "pend", method)


@pytest.mark.parametrize(("adjoint", "problem", "method"), list(shared_cases()))
def test_every_shared_adjoint_gives_the_same_gradient(adjoint, problem, method):
    ours, theirs = (measured(b, problem, method, adjoint) for b in ("torch", "jax"))
    assert_same_gradient(ours, theirs, 1e-13)
