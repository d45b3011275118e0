"""The continuous adjoints: orders, error control, failure, memory, what each keeps."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contadj import GradientProblem
from contadj.jax import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    GaussAdjoint,
    InterpolatingAdjoint,
    ReversalWarning,
    builtin_problem,
    get_solver,
    value_grad_and_stats,
)
from contadj.jax._study import gradient_function

CONTINUOUS = [BacksolveAdjoint, InterpolatingAdjoint, GaussAdjoint]
every_continuous = pytest.mark.parametrize("adjoint", CONTINUOUS, ids=lambda a: a.__name__)
PEND = builtin_problem("pend")
Y0 = jnp.asarray(PEND.y0)
PARAMS = jax.tree.map(jnp.asarray, PEND.params)


def cost(params, y0, adjoint, *, solver, steps=None, **more):
    """The pendulum's cost; the running cost is a third component of the state."""

    def f(t, state, p):
        y = state[:2]
        return jnp.append(PEND.f(t, y, p), PEND.running_cost(t, y, p))

    fixed = {} if steps is None else {"dt0": 3.0 / steps, "max_steps": 128}
    arguments = {"dt0": None, "max_steps": 4096} | fixed | more
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(f), solver, 0.0, 3.0, y0=jnp.append(y0, 0.0), args=params, adjoint=adjoint,
        **arguments,
    )  # fmt: skip
    end = sol.ys[0]
    return PEND.terminal_cost(end[:2], params) + end[2]


def flat(gradient):
    d_params, d_y0 = gradient
    return np.array([*d_y0, d_params["b"], d_params["k"]])


@every_continuous
def test_on_a_fixed_mesh_the_gradient_converges_at_the_order_of_the_method(adjoint):
    solver = get_solver("rk4")
    run = lambda dt0: jax.grad(cost, (0, 1))(  # noqa: E731
        PARAMS, Y0, adjoint(), solver=solver, dt0=dt0, max_steps=256
    )
    run = jax.jit(run)
    exact = PEND.gradient.vector
    errors = [np.linalg.norm(flat(run(3.0 / n)) - exact) for n in (64, 128)]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(4, abs=0.35)
    assert errors[1] < 1e-6


@every_continuous
def test_none_of_them_is_backpropagation_in_disguise(adjoint):
    # On a coarse mesh the continuous gradient differs from the discrete one by its gap.
    run = lambda a: flat(  # noqa: E731
        jax.grad(cost, (0, 1))(PARAMS, Y0, a, solver=get_solver("rk4"), steps=16)
    )
    gap = np.linalg.norm(run(adjoint()) - run(CheckpointAdjoint()))
    assert 1e-6 < gap < 1e-1


def test_backsolve_on_a_fixed_mesh_is_the_study_s_reverse_sweep():
    got = flat(jax.grad(cost, (0, 1))(
        PARAMS, Y0, BacksolveAdjoint(), solver=get_solver("rk4_classic"), steps=32
    ))  # fmt: skip
    want = gradient_function(
        PEND, method="rk4_classic", adjoint="BacksolveAdjoint", max_steps=32
    )(32)  # fmt: skip
    np.testing.assert_allclose(got, want.gradient.vector, rtol=1e-12)


@every_continuous
def test_tolerances_of_its_own_make_the_gradient_as_good_as_they_are(adjoint):
    # The solution is constant, so that the forward solve takes a handful of steps whatever its
    # tolerance, and backpropagation through them is off by 66 %.
    def value(y0, adjoint):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jnp.stack([y[0] - y[1], y[1] - y[0]])),
            diffrax.Tsit5(), 0.0, 5.0, None, y0, adjoint=adjoint, max_steps=512,
            stepsize_controller=diffrax.PIDController(1e-8, 1e-8),
        ).ys[0, 0]  # fmt: skip

    want = (1 + np.exp(10)) / 2
    y0 = jnp.ones(2)
    got = jax.grad(value)(y0, adjoint(rtol=1e-9, atol=1e-9))[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert abs(jax.grad(value)(y0, CheckpointAdjoint())[0] / want - 1) > 0.5


@every_continuous
def test_another_method_serves_the_backward_solve(adjoint):
    # Euler forward, a fine method backward: the error left is that of the rebuilt y and of L alone.
    def value(a, adjoint):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: a * jnp.ones_like(y)), diffrax.Euler(), 0.0, 1.0, 0.1,
            1.0, a, adjoint=adjoint, max_steps=512,
        ).ys[0] ** 2  # fmt: skip

    got = jax.grad(value)(0.7, adjoint("dopri5", rtol=1e-8, atol=1e-8))
    np.testing.assert_allclose(got, 2 * 1.7, rtol=1e-7)


def test_the_seminorm_takes_no_more_steps_than_the_full_norm():
    stats = []
    for seminorm in (False, True):
        adjoint = BacksolveAdjoint(rtol=1e-7, atol=1e-10, seminorm=seminorm)
        fn = lambda p, adjoint: 1e4 * cost(  # noqa: E731
            p, Y0, adjoint, solver=diffrax.Dopri5(),
            stepsize_controller=diffrax.PIDController(1e-7, 1e-10),
        )  # fmt: skip
        _, gradient, stat = value_grad_and_stats(fn, adjoint)(PARAMS)
        stats.append(stat.accepted + stat.rejected)
        np.testing.assert_allclose(gradient["b"], 1e4 * PEND.gradient.params[0], rtol=1e-5)
    assert stats[1] < stats[0]


def test_an_observation_does_not_restart_the_step_size():
    def solve(observations):
        ts = jnp.linspace(0.1, 3.0, observations)
        fn = lambda a, adjoint: jnp.sum(diffrax.diffeqsolve(  # noqa: E731
            diffrax.ODETerm(lambda t, y, a: a * jnp.cos(t) * y), diffrax.Tsit5(), 0.0, 3.0, None,
            1.0, a, adjoint=adjoint, saveat=diffrax.SaveAt(ts=ts), max_steps=512,
            stepsize_controller=diffrax.PIDController(1e-8, 1e-8),
        ).ys) / observations  # fmt: skip
        return value_grad_and_stats(fn, BacksolveAdjoint())(0.5)[2]

    few, many = solve(2), solve(30)
    # A restart costs about five steps to get back to size; here each observation costs one.
    assert many.accepted + many.rejected <= few.accepted + few.rejected + 30 + 10


@every_continuous
def test_a_backward_solve_that_fails_gives_nan_and_with_throw_an_error(adjoint):
    # With two attempted steps beyond the forward ones, this tolerance puts t0 out of reach.
    def value(a, throw):
        controller = diffrax.PIDController(1e-4, 1e-4)
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * y), diffrax.Tsit5(), 0.0, 1.0, None, 1.0, a,
            adjoint=adjoint(rtol=1e-14, atol=1e-14, max_steps=2), max_steps=512, throw=throw,
            stepsize_controller=controller,
        ).ys[0]  # fmt: skip

    assert np.isfinite(value(3.0, False))
    assert np.isnan(jax.grad(value)(3.0, False))
    with pytest.raises(Exception, match="did not reach t0"):
        jax.grad(value)(3.0, True)


def slow_fast(theta, adjoint, *, ts=None, adaptive=False, **more):
    """A contracting pair: rebuilding y backward amplifies round-off by exp(K)."""

    def f(t, y, theta):
        k, c = theta
        return jnp.stack([-k * (y[0] - jnp.cos(y[1])), -y[1] + c * y[0]])

    steps = {"dt0": 1 / 512, "max_steps": 512, "stepsize_controller": diffrax.ConstantStepSize()}
    if adaptive:
        steps = {"dt0": None, "max_steps": 1024,
                 "stepsize_controller": diffrax.PIDController(1e-9, 1e-9)}  # fmt: skip
    saveat = diffrax.SaveAt(t1=True) if ts is None else diffrax.SaveAt(ts=jnp.asarray(ts))
    ys = diffrax.diffeqsolve(
        diffrax.ODETerm(f), diffrax.Tsit5() if adaptive else get_solver("rk4_classic"), 0.0, 1.0,
        y0=jnp.array([2.0, 1.0]), args=theta, adjoint=adjoint, saveat=saveat, **steps, **more,
    ).ys  # fmt: skip
    return jnp.sum((ys[:, 1] - 2) ** 2)


STIFF = jnp.array([50.0, 1.0])


@pytest.mark.parametrize(
    ("every", "settings"),
    [
        (32, {}),
        # Between mesh points, and the last stored states after the last observation.
        (32, {"ts": (0.3, 0.501, 0.8)}),
        (4, {"adaptive": True}),
    ],
    ids=["fixed mesh", "observations between mesh points", "adaptive"],
)
def test_restarting_from_stored_states_saves_a_gradient_that_cannot_be_rebuilt(every, settings):
    want = jax.grad(slow_fast)(STIFF, CheckpointAdjoint(), **settings)
    fn = lambda theta, adjoint: slow_fast(theta, adjoint, **settings)  # noqa: E731
    _, got, stats = value_grad_and_stats(fn, BacksolveAdjoint(restart_every=every))(STIFF)
    # 1e-16 exp(50 * 32 / 512) is 2e-15; what is left is the error of the methods themselves.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    assert stats.reversal_error < 1e-6


def test_restarting_after_every_step_is_the_continuous_gradient_along_the_stored_states():
    # lambda and theta-bar of every step start from the stored y: what the study's sweep makes of
    # a problem observed, at no cost, at every mesh point.
    steps = 16
    got = flat(jax.grad(cost, (0, 1))(
        PARAMS, Y0, BacksolveAdjoint(restart_every=1), solver=get_solver("rk4"), steps=steps
    ))  # fmt: skip
    times = tuple(3.0 * n / steps for n in range(1, steps))
    observed = GradientProblem(
        "observed", "jax", PEND.f, PEND.y0, PEND.params, PEND.t0, PEND.t1,
        terminal_cost=PEND.terminal_cost, running_cost=PEND.running_cost,
        observation_times=times, observation_cost=lambda i, t, y, p: 0.0 * y[0],
    )  # fmt: skip
    want = gradient_function(observed, method="rk4", adjoint="BacksolveAdjoint", max_steps=1)(1)
    np.testing.assert_allclose(got, want.gradient.vector, rtol=1e-12)


def finished(run, *arguments):
    jax.block_until_ready(run(*arguments))
    jax.effects_barrier()  # what the device has to say to the host


def transformed(name):
    gradient = jax.grad(lambda theta: slow_fast(theta, BacksolveAdjoint()))
    if name == "jit":
        return jax.jit(gradient), STIFF
    if name == "vmap":  # one of the two is good: one warning
        return jax.jit(jax.vmap(gradient)), jnp.array([[50.0, 1.0], [1.0, 1.0]])

    def summed(theta):
        add = lambda total, _: (total + slow_fast(theta, BacksolveAdjoint()), None)  # noqa: E731
        return jax.lax.scan(add, 0.0, None, length=1)[0]

    return jax.grad(summed), STIFF


@pytest.mark.parametrize("name", ["jit", "vmap", "scan"])
def test_a_state_that_cannot_be_rebuilt_is_warned_of_once_with_the_remedy(name):
    run, theta = transformed(name)
    with pytest.warns(ReversalWarning, match=r"off by 3.*e\+08 .*restart_every=...") as caught:
        finished(run, theta)
    assert len(caught) == 1


def test_a_state_that_can_be_rebuilt_is_not_warned_of():
    # Warnings are errors here.
    finished(jax.grad(slow_fast), jnp.array([1.0, 1.0]), BacksolveAdjoint())


def test_on_request_a_state_that_cannot_be_rebuilt_is_an_error_and_without_throw_nan():
    adjoint = BacksolveAdjoint(on_reversal="raise")
    run = lambda throw: jax.grad(slow_fast)(STIFF, adjoint, throw=throw)  # noqa: E731
    with pytest.raises(Exception, match=r"`reversal_tolerance` = 1.0e-03 .*restart_every"):
        run(True)
    assert np.all(np.isnan(run(False)))


@pytest.mark.parametrize("every", [None, 8], ids=["from the end", "restarted half-way"])
def test_the_reversal_error_is_relative_to_the_largest_state_saved_or_not(every):
    # y' = 4 (1 - t) y by Euler: y(0) = y(2) = 1, and e^2 between.
    n, h = 16, 2 / 16
    rate = 4 * (1 - h * np.arange(n + 1))
    ys = np.cumprod([1.0, *(1 + h * rate[:-1])])
    errors = []
    for begin, end in [(n, 0)] if every is None else [(n, every), (every, 0)]:
        rebuilt = ys[begin] * np.prod(1 - h * rate[end + 1 : begin + 1])
        errors.append(abs(rebuilt - ys[end]))

    def fn(y0, adjoint):
        term = diffrax.ODETerm(lambda t, y, args: 4 * (1 - t) * y)
        solver = get_solver("euler")
        sol = diffrax.diffeqsolve(term, solver, 0, 2, h, y0, adjoint=adjoint, max_steps=n)
        return sol.ys[0]

    adjoint = BacksolveAdjoint(restart_every=every, reversal_tolerance=np.inf)
    stats = value_grad_and_stats(fn, adjoint)(jnp.array(1.0))[2]
    assert stats.reversal_error == pytest.approx(max(errors) / ys.max(), rel=1e-12)


def test_an_infinite_tolerance_asks_for_no_report():
    adjoint = BacksolveAdjoint(reversal_tolerance=np.inf, on_reversal="raise")
    _, gradient, stats = value_grad_and_stats(slow_fast, adjoint)(STIFF)
    assert stats.reversal_error > 1e6
    assert np.all(np.isfinite(gradient))


def test_stored_states_need_a_bound_on_the_number_of_steps():
    with pytest.raises(ValueError, match=r"restart_every.*`max_steps`"):
        cost(PARAMS, Y0, BacksolveAdjoint(restart_every=4), solver=diffrax.Heun(), steps=16,
             max_steps=None)  # fmt: skip


def test_memory_of_backsolve_does_not_grow_with_the_number_of_steps():
    def temporary_bytes(steps):
        def value(y0):
            return jnp.sum(diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: -0.1 * jnp.sin(y)), diffrax.Heun(), 0.0, 1.0,
                1.0 / steps, y0, adjoint=BacksolveAdjoint(), max_steps=steps,
            ).ys)  # fmt: skip

        y0 = jax.ShapeDtypeStruct((131_072,), jnp.float64)
        return jax.jit(jax.grad(value)).lower(y0).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(10_000) / temporary_bytes(100) < 1.05


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "rk5"}, ValueError, "`method`"),
        ({"method": 5}, TypeError, "`method`"),
        ({"seminorm": 1}, TypeError, "`seminorm`"),
        ({"max_steps": 0}, ValueError, "`max_steps`"),
        ({"restart_every": 0}, ValueError, "`restart_every`"),
        ({"on_reversal": "ignore"}, ValueError, "`on_reversal`"),
        ({"reversal_tolerance": -1.0}, ValueError, "`reversal_tolerance`"),
    ],
)
def test_a_wrong_argument_raises_and_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        BacksolveAdjoint(**arguments)


def test_one_tolerance_alone_is_refused_on_a_fixed_mesh():
    with pytest.raises(ValueError, match="`rtol` and `atol`"):
        cost(PARAMS, Y0, BacksolveAdjoint(rtol=1e-6), solver=diffrax.Heun(), steps=16)


@every_continuous
def test_saving_every_step_is_refused_with_what_to_use(adjoint):
    with pytest.raises(NotImplementedError, match=rf"{adjoint.__name__}.*CheckpointAdjoint"):
        cost(PARAMS, Y0, adjoint(), solver=diffrax.Heun(), steps=16,
             saveat=diffrax.SaveAt(steps=True))  # fmt: skip


@every_continuous
def test_a_saved_function_of_the_state_passes_its_cotangent_on(adjoint):
    # y' = -a y; what is saved is t y b, at two times
    ts = jnp.array([0.4, 1.0])

    def value(a, b):
        return jnp.sum(diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -args[0] * y), diffrax.Tsit5(), 0.0, 1.0, None, 1.0,
            (a, b), adjoint=adjoint(), max_steps=512,
            saveat=diffrax.SaveAt(ts=ts, fn=lambda t, y, args: {"out": t * y * args[1]}),
            stepsize_controller=diffrax.PIDController(1e-9, 1e-9),
        ).ys["out"])  # fmt: skip

    got = jax.grad(value, (0, 1))(0.7, 1.3)
    want = jax.grad(lambda a, b: jnp.sum(ts * jnp.exp(-a * ts) * b), (0, 1))(0.7, 1.3)
    np.testing.assert_allclose(got, want, rtol=1e-6)
