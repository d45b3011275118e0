"""Every adjoint against closed forms, where users of ODE gradients are hurt."""

import os
import subprocess
import sys

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

from contadj.jax import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversibleAdjoint,
)

TIGHT = diffrax.PIDController(1e-10, 1e-10)
ADJOINTS = [CheckpointAdjoint(), BacksolveAdjoint(), InterpolatingAdjoint(), GaussAdjoint()]
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda a: type(a).__name__)
REVERSE_ONLY = [*ADJOINTS, ReversibleAdjoint()]
# InterpolatingAdjoint and GaussAdjoint refuse these, or share all that matters.
two_adjoints = pytest.mark.parametrize("adjoint", ADJOINTS[:2], ids=lambda a: type(a).__name__)
# Global errors at a tolerance of 1e-10 per step, and their amplification by the problems here.
RTOL = 1e-7


def solve(f, y0, args=None, *, t0=0.0, t1=1.0, dt0=None, saveat=None, solver=None, **more):
    arguments = {"stepsize_controller": TIGHT, "max_steps": 512} | more
    return diffrax.diffeqsolve(
        diffrax.ODETerm(f), solver or diffrax.Tsit5(), t0, t1, dt0, y0, args,
        saveat=saveat or diffrax.SaveAt(t1=True), **arguments,
    )  # fmt: skip


def assert_trees_close(got, want, rtol=RTOL):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * max(1.0, np.abs(w).max()))


@every_adjoint
@pytest.mark.parametrize("forward", [True, False], ids=["forward in time", "backward in time"])
def test_gradients_in_y0_args_t0_t1_and_ts_are_those_of_the_solution(adjoint, forward):
    # y' = -a t y: y(t) = y0 exp(-a (t^2 - t0^2) / 2)
    a, y0, t0, t1, ts = 0.9, 0.8, 0.1, 1.2, jnp.array([0.3, 0.7, 1.2])
    if not forward:
        t0, t1, ts = t1, t0, ts[::-1] - 0.1

    def loss(y0, a, t0, t1, ts):
        saveat = diffrax.SaveAt(t0=True, ts=ts, t1=True)
        ys = solve(
            lambda t, y, args: -args * t * y, y0, a, t0=t0, t1=t1, saveat=saveat, adjoint=adjoint
        ).ys
        return jnp.sum(jnp.sin(ys) * jnp.array([1.0, 2, 3, 4, 5]))

    def exact(y0, a, t0, t1, ts):
        t = jnp.concatenate([jnp.stack([t0]), ts, jnp.stack([t1])])
        ys = y0 * jnp.exp(-a * (t**2 - t0**2) / 2)
        return jnp.sum(jnp.sin(ys) * jnp.array([1.0, 2, 3, 4, 5]))

    arguments = tuple(map(jnp.asarray, (y0, a, t0, t1, ts)))
    # Dense output is of order 4 at steps of 1e-2: 1e-8 in y, 1e-6 in its derivative.
    rtol = 1e-5 if isinstance(adjoint, CheckpointAdjoint) else RTOL
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*arguments)
    assert_trees_close(got, jax.grad(exact, argnums=(0, 1, 2, 3, 4))(*arguments), rtol)


@every_adjoint
def test_arrays_that_the_vector_field_closes_over_get_their_gradient(adjoint):
    # y' = -a y + 3 b
    def loss(a, b):
        f = lambda t, y, args: -a * y + args * b  # noqa: E731
        return solve(f, jnp.asarray(1.0), 3.0, adjoint=adjoint).ys[0]

    def exact(a, b):
        return jnp.exp(-a) + 3 * b * (1 - jnp.exp(-a)) / a

    a, b = jnp.asarray(0.7), jnp.asarray(0.2)
    assert_trees_close(jax.grad(loss, (0, 1))(a, b), jax.grad(exact, (0, 1))(a, b))


@every_adjoint
@pytest.mark.filterwarnings("ignore:Complex dtype support")
def test_complex_states_with_real_and_complex_parameters_get_jax_s_gradient(adjoint):
    def loss(y0, w, k):
        y = solve(lambda t, y, args: 1j * w * k * y, y0, adjoint=adjoint).ys[0]
        return jnp.abs(y - 1.0) ** 2

    def exact(y0, w, k):
        return jnp.abs(y0 * jnp.exp(1j * w * k) - 1.0) ** 2

    at = jnp.asarray(0.5 + 0.3j), jnp.asarray(1.3), jnp.asarray(0.8 + 0.1j)
    assert_trees_close(jax.grad(loss, (0, 1, 2))(*at), jax.grad(exact, (0, 1, 2))(*at))


@two_adjoints
def test_the_time_of_a_discontinuity_gets_its_gradient(adjoint):
    # y' = 1[t < T] exp(-y): y(1) = log(1 + T)
    def loss(T):
        controller = diffrax.ClipStepSizeController(TIGHT, jump_ts=T[None])
        return solve(
            lambda t, y, args: jnp.where(t < T, jnp.exp(-y), 0.0), jnp.asarray(0.0),
            stepsize_controller=controller, adjoint=adjoint,
        ).ys[0]  # fmt: skip

    value, slope = jax.value_and_grad(loss)(jnp.asarray(0.37))
    np.testing.assert_allclose(value, np.log(1.37), rtol=1e-9)
    np.testing.assert_allclose(slope, 1 / 1.37, rtol=RTOL)


@every_adjoint
def test_a_masked_loss_is_right_when_the_solve_stops_early(adjoint):
    # Five steps of 0.1: 0.2 and 0.45 are saved, 0.9 is not.
    def loss(a):
        ys = solve(
            lambda t, y, a: -a * y, jnp.asarray(1.0), a, dt0=0.1, max_steps=5, throw=False,
            stepsize_controller=diffrax.ConstantStepSize(), adjoint=adjoint,
            saveat=diffrax.SaveAt(ts=jnp.array([0.2, 0.45, 0.9])), solver=diffrax.Dopri8(),
        ).ys  # fmt: skip
        return jnp.sum(jnp.where(jnp.isfinite(ys), ys, 0.0))

    want = -0.2 * np.exp(-0.14) - 0.45 * np.exp(-0.315)
    np.testing.assert_allclose(jax.grad(loss)(0.7), want, rtol=1e-8)


@every_adjoint
def test_none_leaves_and_integer_args_are_left_alone(adjoint):
    def loss(y0, rates):
        args = {"rates": rates, "index": 1, "nothing": None, "counts": jnp.arange(3)}

        def f(t, y, args):
            return {"y": -args["rates"][args["index"]] * y["y"] * args["counts"][1], "none": None}

        return solve(f, {"y": y0, "none": None}, args, adjoint=adjoint).ys["y"][0]

    d_y0, d_rates = jax.grad(loss, (0, 1))(jnp.asarray(1.0), jnp.array([1.0, 2.0]))
    assert_trees_close((d_y0, d_rates), (np.exp(-2.0), np.array([0, -np.exp(-2.0)])))


@two_adjoints
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["y0", "args", "both"])
def test_vmap_gives_each_element_its_gradient(adjoint, axes):
    def value(y0, a):
        return solve(lambda t, y, a: -a * y, y0, a, adjoint=adjoint).ys[0]

    y0, a = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 2.0, 8.0])
    y0, a = y0 if axes[0] == 0 else y0[1], a if axes[1] == 0 else a[1]
    d_y0, d_a = jax.jit(jax.vmap(jax.grad(value, (0, 1)), axes))(y0, a)
    ones = jnp.ones(3)
    assert_trees_close((d_y0, d_a), (jnp.exp(-a) * ones, -y0 * jnp.exp(-a) * ones))


@two_adjoints
def test_hessian_vector_products_by_forward_over_reverse_are_exact(adjoint):
    # y' = -a y^2 from 1: y(1) = 1 / (1 + a), d2y/da2 = 2 / (1 + a)^3
    def value(a):
        return solve(lambda t, y, a: -a * y**2, jnp.asarray(1.0), a, adjoint=adjoint).ys[0]

    a = jnp.asarray(0.7)
    slope, curvature = jax.jvp(jax.grad(value), (a,), (jnp.asarray(1.0),))
    np.testing.assert_allclose([slope, curvature], [-1 / 1.7**2, 2 / 1.7**3], rtol=RTOL)


@every_adjoint
def test_reverse_over_reverse_is_refused_with_what_to_use(adjoint):
    def value(a):
        return solve(lambda t, y, a: -a * y**2, jnp.asarray(1.0), a, adjoint=adjoint).ys[0]

    with pytest.raises(RuntimeError, match=rf"{type(adjoint).__name__}.*forward over reverse"):
        jax.grad(jax.grad(value))(0.7)


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (0.7,), (1.0,)),
    "jvp of jit": lambda f: jax.jvp(jax.jit(f), (0.7,), (1.0,)),
    "jacfwd": lambda f: jax.jacfwd(f)(0.7),
    "jacfwd of a batch": lambda f: jax.vmap(jax.jacfwd(f))(jnp.array([0.7, 0.8])),
    "linearize": lambda f: jax.linearize(f, 0.7)[1](1.0),
}


@pytest.mark.parametrize("forward", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize("adjoint", REVERSE_ONLY, ids=lambda a: type(a).__name__)
def test_forward_mode_is_refused_with_what_to_use(adjoint, forward):
    def value(a):
        return solve(
            lambda t, y, a: -a * y**2, jnp.asarray(1.0), a, adjoint=adjoint, dt0=0.1, max_steps=16,
            stepsize_controller=diffrax.ConstantStepSize(),
        ).ys[0]  # fmt: skip

    name = type(adjoint).__name__
    with pytest.raises(TypeError, match=rf"{name}.*DirectAdjoint.*ForwardSensitivity"):
        forward(value)


@two_adjoints
def test_what_is_batched_before_or_after_it_is_differentiated_has_one_gradient(adjoint):
    # The refusal of forward mode looks at how tangents are batched.
    def value(a):
        return solve(
            lambda t, y, a: -a * y**2, jnp.asarray(1.0), a, adjoint=adjoint, dt0=0.1, max_steps=16,
            stepsize_controller=diffrax.ConstantStepSize(),
        ).ys[0]  # fmt: skip

    a = jnp.array([0.3, 0.7])
    want = jnp.stack([jax.grad(value)(x) for x in a])
    for got in (
        jax.vmap(jax.grad(value))(a), jax.grad(lambda a: jnp.sum(jax.vmap(value)(a)))(a),
        jax.grad(lambda a: jnp.sum(jax.vmap(jax.jit(value))(a)))(a),
        jnp.diag(jax.jacrev(jax.vmap(value))(a)),
        jax.vmap(jax.grad(jax.checkpoint(value)))(a),
    ):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-13)


@two_adjoints
def test_float32_reaches_the_gradient_to_its_precision(adjoint):
    def value(y0, a):
        controller = diffrax.PIDController(jnp.float32(1e-5), jnp.float32(1e-6))
        return solve(
            lambda t, y, a: -a * y, y0, a, adjoint=adjoint, stepsize_controller=controller,
            t0=jnp.float32(0), t1=jnp.float32(1),
        ).ys[0]  # fmt: skip

    got = jax.grad(value, (0, 1))(jnp.float32(2.0), jnp.float32(0.7))
    assert all(g.dtype == jnp.float32 for g in got)
    # The tolerance of 1e-5 per step sets the floor, not float32.
    assert_trees_close(got, (np.exp(-0.7), -2 * np.exp(-0.7)), 5e-5)


@every_adjoint
def test_a_solve_over_an_empty_interval_returns_the_cotangents_of_y0(adjoint):
    def loss(y0):
        saveat = diffrax.SaveAt(ts=jnp.array([1.0, 1.0]), t1=True)
        return jnp.sum(solve(
            lambda t, y, args: -y, y0, t0=1.0, t1=1.0, dt0=0.1, saveat=saveat, adjoint=adjoint
        ).ys)  # fmt: skip

    assert jax.grad(loss)(2.0) == 3.0


@two_adjoints
def test_the_solution_is_the_one_that_diffrax_returns(adjoint):
    def run(adjoint):
        saveat = diffrax.SaveAt(t0=True, ts=jnp.array([0.2, 0.21, 0.9]), t1=True)
        f = lambda t, y, args: jnp.stack([y[1], -jnp.sin(y[0]) * jnp.cos(9 * t)])  # noqa: E731
        return solve(f, jnp.array([1.0, 0.5]), saveat=saveat, adjoint=adjoint)

    got, want = run(adjoint), run(diffrax.RecursiveCheckpointAdjoint())
    for name in ("num_steps", "num_accepted_steps", "num_rejected_steps"):
        assert got.stats[name] == want.stats[name]
    np.testing.assert_allclose(got.ys, want.ys, rtol=1e-12)
    np.testing.assert_array_equal(got.ts, want.ts)
    assert got.result == want.result


@two_adjoints
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"saveat": diffrax.SaveAt(dense=True)}, "dense=True"),
        ({"saveat": diffrax.SaveAt(subs=[diffrax.SubSaveAt(t1=True)])}, "subs=..."),
        ({"event": diffrax.Event(lambda t, y, args, **kwargs: y[0] < 0.5)}, "event"),
    ],
    ids=["dense", "subs", "event"],
)
def test_what_an_adjoint_cannot_serve_is_refused_with_what_to_use(adjoint, change, what):
    with pytest.raises(NotImplementedError, match=f"{what}.*use .*Adjoint"):
        solve(lambda t, y, args: -y, jnp.array([1.0]), adjoint=adjoint, **change)


@two_adjoints
def test_noise_is_refused_with_what_to_use(adjoint):
    path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (), jax.random.key(0))
    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: -y), diffrax.ControlTerm(lambda t, y, args: 0.1, path)
    )
    with pytest.raises(NotImplementedError, match=r"RecursiveCheckpointAdjoint|one `diffrax.ODET"):
        diffrax.diffeqsolve(terms, diffrax.EulerHeun(), 0.0, 1.0, 0.1, 1.0, adjoint=adjoint)


def test_direct_refuses_a_solve_without_a_bound_on_its_steps():
    with pytest.raises(ValueError, match="`max_steps`"):
        solve(lambda t, y, args: -y, 1.0, adjoint=DirectAdjoint(), max_steps=None)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, diffrax
from jax.sharding import NamedSharding, PartitionSpec
from contadj.jax import BacksolveAdjoint, CheckpointAdjoint

assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

def loss(w, y0, adjoint, **more):
    def f(t, y, w):
        return jnp.tanh(y @ w)
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(f), diffrax.Heun(), 0.0, 1.0, 0.1, y0, w,
        adjoint=adjoint, max_steps=16, **more,
    )
    return jnp.sum(sol.ys**2)

w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)))
y0 = jnp.asarray(np.random.default_rng(1).normal(size=(16, 3)))
spread = jax.device_put(y0, NamedSharding(mesh, PartitionSpec("batch")))
for adjoint in (CheckpointAdjoint(), BacksolveAdjoint()):
    gradient = jax.jit(jax.grad(lambda w, y0: loss(w, y0, adjoint), argnums=(0, 1)))
    one, eight = gradient(w, y0), gradient(w, spread)
    assert len(eight[1].sharding.device_set) == 8

    def share(w, y0):
        d_w, d_y0 = jax.grad(lambda w, y0: loss(w, y0, adjoint, throw=False), argnums=(0, 1))(w, y0)
        return jax.lax.psum(d_w, "batch"), d_y0

    whole, part = PartitionSpec(), PartitionSpec("batch")
    mapped = jax.jit(jax.shard_map(
        share, mesh=mesh, in_specs=(whole, part), out_specs=(whole, part), check_vma=False
    ))(w, spread)
    for got in (eight, mapped):
        for a, b in zip(one, got):
            np.testing.assert_allclose(a, b, rtol=1e-12)
"""


def test_a_batch_spread_over_eight_devices_gives_the_gradient_of_one():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("tolerance", [1e-6, 1e-9, 1e-12])
def test_the_gradient_through_an_implicit_solver_does_not_depend_on_its_root_tolerance(tolerance):
    # y' = -a y^3: y(1) = y0 / sqrt(1 + 2 a y0^2)
    root_finder = optimistix.Newton(rtol=tolerance, atol=tolerance)

    def value(y0, a):
        return solve(
            lambda t, y, a: -a * y**3, y0, a, solver=diffrax.Kvaerno5(root_finder=root_finder),
            stepsize_controller=diffrax.ConstantStepSize(), dt0=0.02, adjoint=CheckpointAdjoint(),
            max_steps=64,
        ).ys[0]  # fmt: skip

    def exact(y0, a):
        return y0 / jnp.sqrt(1 + 2 * a * y0**2)

    got = jax.grad(value, (0, 1))(1.3, 0.8)
    # 50 steps, each with roots good to the tolerance; then the error of the method.
    assert_trees_close(got, jax.grad(exact, (0, 1))(1.3, 0.8), 50 * tolerance + 1e-8)
