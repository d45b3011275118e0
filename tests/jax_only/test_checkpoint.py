"""CheckpointAdjoint is exact: it equals backpropagation through the solve, in every derivative."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

from contadj.jax import BacksolveAdjoint, CheckpointAdjoint, DirectAdjoint, get_solver

NEWTON = optimistix.Newton(rtol=1e-12, atol=1e-12)
PID = diffrax.PIDController(1e-5, 1e-7)
PI = diffrax.PIDController(1e-4, 1e-6, pcoeff=0.3, icoeff=0.4, dtmax=0.21)
CONSTANT = diffrax.ConstantStepSize()
EVERYTHING = {"t0": True, "ts": True, "t1": True}

CASES = {
    "explicit, constant steps": (diffrax.Tsit5(), CONSTANT, 0.17, EVERYTHING),
    "explicit, no first-same-as-last": (diffrax.Ralston(), CONSTANT, 0.11, {"ts": True}),
    "euler": (diffrax.Euler(), CONSTANT, 0.1, {"t1": True}),
    "eighth order": (diffrax.Dopri8(), PID, None, {"t1": True}),
    "from a tableau": (get_solver("bosh3"), PID, None, EVERYTHING),
    "adaptive": (diffrax.Tsit5(), PID, None, EVERYTHING),
    "adaptive, first step given and rejected": (diffrax.Tsit5(), PID, 0.9, {"ts": True}),
    "adaptive, PI control, longest step": (diffrax.Tsit5(), PI, 0.01, EVERYTHING),
    "steps and jumps to meet": (diffrax.Tsit5(), "clip", None, EVERYTHING),
    "mesh given": (diffrax.Dopri5(), "mesh", None, {"ts": True, "t1": True}),
    "every step saved": (diffrax.Bosh3(), PID, None, {"t0": True, "steps": 1}),
    "every third step saved": (diffrax.Bosh3(), PID, None, {"ts": True, "steps": 3, "t1": True}),
    "implicit, diagonally": (diffrax.Kvaerno3(root_finder=NEWTON), PID, None, EVERYTHING),
    "implicit euler": (diffrax.ImplicitEuler(root_finder=NEWTON), CONSTANT, 0.1, {"t1": True}),
    "two-step": (diffrax.LeapfrogMidpoint(), CONSTANT, 0.1, {"ts": True}),
    "reversible heun": (diffrax.ReversibleHeun(), CONSTANT, 0.1, {"ts": True}),
}


# What these cover beyond the others is a second example; they run with `-m slow`.
SLOW = {
    "explicit, no first-same-as-last", "euler", "eighth order", "from a tableau", "adaptive",
    "adaptive, PI control, longest step", "every step saved", "implicit euler", "reversible heun",
}  # fmt: skip
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, case in CASES.items()
    ],
)


def loss(x, adjoint, solver, controller, dt0, what):
    y0, a, t0, t1, ts, jump, mesh = x
    bias = 0.3 * a  # closed over, beside the args

    def f(t, y, b):
        # Without a step at the jump, error control there would amplify rounding errors.
        kick = jnp.where(t < jump, 1.0, 0.4) if controller == "clip" else 1.0
        return jnp.stack([jnp.cos(t) * y[1] * b + kick * bias, -jnp.sin(y[0]) * t * a])

    steps = controller
    if controller == "clip":
        steps = diffrax.ClipStepSizeController(
            PID, step_ts=jnp.stack([0.7 * jump]), jump_ts=jnp.stack([jump])
        )
    elif controller == "mesh":
        steps = diffrax.StepTo(jnp.concatenate([t0[None], mesh, t1[None]]))
    what = what | ({"ts": ts} if what.get("ts") else {})
    saveat = diffrax.SaveAt(**what, fn=lambda t, y, b: {"y": y * b, "t": jnp.sin(t) * y[0]})
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(f), solver, t0, t1, dt0, y0, 2 * a, adjoint=adjoint, saveat=saveat,
        stepsize_controller=steps, max_steps=128,
    )  # fmt: skip
    saved = jnp.isfinite(sol.ts)
    out = jnp.where(saved[:, None], sol.ys["y"], 0.0)
    weight = jnp.arange(1, 1 + out.size).reshape(out.shape)
    return (
        jnp.sum(jnp.sin(out) * weight) + jnp.sum(jnp.where(saved, sol.ys["t"] * sol.ts, 0.0)),
        sol.stats,
    )


POINT = (
    jnp.array([1.0, 0.5]), jnp.asarray(0.9), jnp.asarray(0.1), jnp.asarray(1.9),
    jnp.array([0.3, 0.55, 0.6, 1.9]), jnp.asarray(0.83), jnp.array([0.31, 0.55, 1.0, 1.4]),
)  # fmt: skip


@every_case
def test_the_gradient_equals_backpropagation_through_the_solve(case):
    got, want = (
        jax.value_and_grad(loss, has_aux=True)(POINT, adjoint, *case)
        for adjoint in (CheckpointAdjoint(), DirectAdjoint())
    )
    (value, stats), (wanted, others) = got[0], want[0]
    for name in ("num_steps", "num_accepted_steps", "num_rejected_steps"):
        assert stats[name] == others[name]
    np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-11)  # a sum of terms of 100
    # The mesh differs by the rounding of the step-size control, about 1e-13 of a step.
    for g, w in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-11, atol=2e-11 * max(1, np.abs(w).max()))


def many_steps(x, adjoint):
    """Van der Pol's oscillator at a stiffness of its own: many steps, many of them rejected."""
    mu, y0, dt0, t1, ts = x
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, mu: jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])),
        diffrax.Tsit5(), 0.0, t1, dt0, y0, mu, adjoint=adjoint, max_steps=256,
        saveat=diffrax.SaveAt(ts=ts, t1=True),
        stepsize_controller=diffrax.PIDController(1e-6, 1e-8),
    )  # fmt: skip
    return jnp.sum(sol.ys * jnp.arange(1.0, 1 + sol.ys.size).reshape(sol.ys.shape)), sol.stats


def test_small_states_are_recorded_and_read_a_stretch_of_steps_at_a_time():
    # A stretch is 31 steps: one lane needs one, the others three, and lanes reject different steps,
    # so that under vmap no two are at the same one.
    mu = jnp.array([0.2, 3.0, 6.0])
    times = jnp.asarray(0.3), jnp.asarray(6.0), jnp.array([0.0, 0.01, 2.9, 5.5])
    x = (mu, jnp.array([2.0, 0.0]), *times)

    def gradient(adjoint):
        return jax.value_and_grad(lambda x: many_steps(x, adjoint), has_aux=True)

    axes = ((0, None, None, None, None),)
    got = jax.jit(jax.vmap(gradient(CheckpointAdjoint()), axes))(x)
    (_, stats), _ = got
    assert min(stats["num_accepted_steps"]) < 31 and max(stats["num_accepted_steps"]) > 62
    assert min(stats["num_rejected_steps"]) < max(stats["num_rejected_steps"])
    want = jax.vmap(gradient(DirectAdjoint()), axes)(x)
    for name in ("num_steps", "num_accepted_steps", "num_rejected_steps"):
        assert jnp.all(stats[name] == want[0][1][name])
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-9)
    one = jax.jit(gradient(CheckpointAdjoint()))
    for i in range(len(mu)):
        alone = one((mu[i], *x[1:]))[1]
        for g, w, a in zip(got[1], want[1], alone, strict=True):
            # The step sizes of Diffrax's own loop differ by rounding, which stiffness amplifies.
            np.testing.assert_allclose(g[i], w[i], rtol=1e-8, atol=1e-8 * np.abs(w[i]).max())
            np.testing.assert_allclose(g[i], a, rtol=1e-8, atol=1e-8 * np.abs(a).max())


@pytest.mark.parametrize(
    ("case", "snapshots"),
    [
        ("adaptive", 3),
        ("explicit, constant steps", 2),
        pytest.param("adaptive", 1, marks=pytest.mark.slow),
        pytest.param("adaptive", 200, marks=pytest.mark.slow),
        pytest.param("every third step saved", 3, marks=pytest.mark.slow),
        pytest.param("explicit, constant steps", 1, marks=pytest.mark.slow),
    ],
)
def test_with_snapshots_the_gradient_is_the_same_to_the_last_bit(case, snapshots):
    got, want = (
        jax.grad(loss, has_aux=True)(POINT, adjoint, *CASES[case])[0]
        for adjoint in (CheckpointAdjoint(snapshots=snapshots), CheckpointAdjoint())
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_snapshots_serve_a_solver_with_a_state_of_its_own():
    got, want = (
        jax.grad(loss, has_aux=True)(POINT, adjoint, *CASES["two-step"])[0]
        for adjoint in (CheckpointAdjoint(snapshots=3), CheckpointAdjoint())
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-14)


def test_with_snapshots_memory_does_not_grow_with_the_number_of_steps():
    # 1 MB of state, Heun on y' = -sin(y) / 10; the gradient is that of all states kept.
    def value(y0, steps, adjoint):
        return jnp.sum(diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -0.1 * jnp.sin(y)), diffrax.Heun(), 0.0, 1.0,
            1.0 / steps, y0, adjoint=adjoint, max_steps=steps,
        ).ys)  # fmt: skip

    def temporary_bytes(steps):
        gradient = jax.jit(jax.grad(lambda y0: value(y0, steps, CheckpointAdjoint(snapshots=16))))
        y0 = jax.ShapeDtypeStruct((131_072,), jnp.float64)
        return gradient.lower(y0).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(10_000) / temporary_bytes(100) < 1.05
    y0 = jnp.linspace(0, 3, 5)
    got, want = (
        jax.grad(value)(y0, 50, a) for a in (CheckpointAdjoint(snapshots=16), DirectAdjoint())
    )
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_the_gradient_of_the_mesh_passes_a_finite_difference_test():
    # The discrete solution's own derivative, dense output and mesh included.
    case = CASES["explicit, constant steps"]
    value = jax.jit(lambda x: loss(x, CheckpointAdjoint(), *case)[0])
    gradient = jax.grad(value)(POINT)
    rng = np.random.default_rng(3)
    v = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), POINT)
    slope = sum(jnp.sum(g * d) for g, d in zip(gradient, v, strict=True))
    # t0, t1 and ts move together, so that ts stays inside.
    shifted = lambda e: jax.tree.map(lambda x, d: x + e * d, POINT, v)  # noqa: E731
    v = (v[0], v[1], v[2], v[2], jnp.full(4, v[2]), v[5], v[6])
    slope = sum(jnp.sum(g * d) for g, d in zip(gradient, v, strict=True))
    remainders = [abs(value(shifted(e)) - value(POINT) - e * slope) for e in (1e-4, 5e-5)]
    assert np.log2(remainders[0] / remainders[1]) == pytest.approx(2, abs=0.05)


def test_euler_s_gradient_is_its_closed_form_to_rounding():
    # y_N = (1 - a h)^N y0, h = (t1 - t0) / N
    def value(y0, a, t0, t1):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * y), diffrax.Euler(), t0, t1, (t1 - t0) / 20, y0, a,
            adjoint=CheckpointAdjoint(), max_steps=20,
        ).ys[0]  # fmt: skip

    def exact(y0, a, t0, t1):
        return (1 - a * (t1 - t0) / 20) ** 20 * y0

    at = tuple(map(jnp.asarray, (1.3, 0.7, 0.2, 1.7)))
    got, want = jax.grad(value, (0, 1, 2, 3))(*at), jax.grad(exact, (0, 1, 2, 3))(*at)
    np.testing.assert_allclose(got, want, rtol=1e-14)


def test_half_steps_for_error_control_are_served():
    case = (diffrax.HalfSolver(diffrax.Heun()), PID, None, {"t1": True})
    got, want = (
        jax.grad(loss, has_aux=True)(POINT, adjoint, *case)[0]
        for adjoint in (CheckpointAdjoint(), diffrax.RecursiveCheckpointAdjoint())
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-12)


def test_splitting_and_implicit_explicit_solvers_are_served():
    def splitting(a, adjoint):
        terms = (
            diffrax.ODETerm(lambda t, y, args: -a * y),
            diffrax.ODETerm(lambda t, y, args: y * t),
        )
        y0 = (jnp.asarray(1.0), jnp.asarray(0.5))
        return diffrax.diffeqsolve(
            terms, diffrax.SemiImplicitEuler(), 0.0, 1.0, 0.1, y0, adjoint=adjoint, max_steps=16
        ).ys[0][0]

    def imex(a, adjoint):
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, args: -a * jnp.sin(y)),
            diffrax.ODETerm(lambda t, y, args: -2 * a * y),
        )
        return diffrax.diffeqsolve(
            terms, diffrax.KenCarp3(root_finder=NEWTON), 0.0, 1.0, 0.1, jnp.asarray(1.0),
            adjoint=adjoint, max_steps=16,
        ).ys[0]  # fmt: skip

    for value in (splitting, imex):
        got, want = (jax.grad(value)(0.7, a) for a in (CheckpointAdjoint(), DirectAdjoint()))
        np.testing.assert_allclose(got, want, rtol=1e-13)


def decay(adjoint, max_steps=64, **more):
    def value(a):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * y), diffrax.Heun(), 0.0, 1.0, 0.05,
            jnp.asarray(1.0), a, adjoint=adjoint, max_steps=max_steps, **more,
        )  # fmt: skip
        return sol.ys[0], sol.result

    return jax.value_and_grad(value, has_aux=True)(0.7)


def test_a_capacity_of_just_the_steps_taken_suffices():
    (_, result), slope = decay(CheckpointAdjoint(capacity=20), max_steps=4096)
    assert result == diffrax.RESULTS.successful
    np.testing.assert_allclose(slope, decay(DirectAdjoint())[1], rtol=1e-13)


def test_a_capacity_that_is_exceeded_is_reported():
    with pytest.raises(Exception, match="capacity"):
        decay(CheckpointAdjoint(capacity=19), max_steps=4096)


def test_a_capacity_that_is_exceeded_is_in_the_result_without_throw():
    (_, result), _ = decay(CheckpointAdjoint(capacity=19), max_steps=4096, throw=False)
    assert result == diffrax.RESULTS.max_steps_reached


def test_without_a_bound_on_the_steps_a_capacity_is_asked_for():
    with pytest.raises(ValueError, match=r"`max_steps`.*capacity"):
        decay(CheckpointAdjoint(), max_steps=None)
    np.testing.assert_allclose(
        decay(CheckpointAdjoint(capacity=32), max_steps=None)[1], decay(DirectAdjoint())[1], 1e-13
    )


@pytest.mark.parametrize("argument", ["capacity", "snapshots"])
@pytest.mark.parametrize("value", [0, 2.5, "all", True])
def test_an_argument_that_is_no_count_raises(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        CheckpointAdjoint(**{argument: value})


def test_a_controller_whose_mesh_moves_in_an_unknown_way_is_refused_for_time_gradients():
    class Mine(diffrax.ConstantStepSize):
        pass

    def value(t1, a):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * y), diffrax.Heun(), 0.0, t1, 0.1, 1.0, a,
            adjoint=CheckpointAdjoint(), stepsize_controller=Mine(), max_steps=16,
        ).ys[0]  # fmt: skip

    with pytest.raises(NotImplementedError, match=r"Mine.*DirectAdjoint"):
        jax.grad(value)(1.0, 0.7)
    assert np.isfinite(jax.grad(value, 1)(1.0, 0.7))


def test_a_failed_forward_solve_raises_and_without_throw_says_so():
    def value(a, throw):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: a * y**2), diffrax.Tsit5(), 0.0, 2.0, None, 1.0, a,
            adjoint=CheckpointAdjoint(), stepsize_controller=PID, max_steps=32, throw=throw,
        )  # fmt: skip
        return sol.ys[0], sol.result

    with pytest.raises(Exception, match="maximum number of solver steps"):
        value(1.0, True)
    assert value(1.0, False)[1] == diffrax.RESULTS.max_steps_reached


@pytest.mark.parametrize("adjoint", [CheckpointAdjoint(), BacksolveAdjoint()], ids=["ck", "bs"])
def test_a_solve_goes_on_from_the_state_of_the_one_before(adjoint):
    def part(t0, t1, y0, adjoint, **state):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -y * jnp.cos(t)), diffrax.Tsit5(), t0, t1, 0.1, y0,
            adjoint=adjoint, max_steps=16, **state,
            saveat=diffrax.SaveAt(t1=True, solver_state=True, controller_state=True),
        )  # fmt: skip

    first = part(0.0, 0.5, jnp.array([1.0]), adjoint)
    state = {"solver_state": first.solver_state}
    for then in (adjoint, diffrax.RecursiveCheckpointAdjoint()):
        got = part(0.5, 1.0, first.ys[-1], then, **state).ys
        np.testing.assert_allclose(got[0], np.exp(-np.sin(1.0)), rtol=1e-7)


def test_a_gradient_through_the_final_solver_state_is_refused():
    def value(y0):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -y), diffrax.Tsit5(), 0.0, 0.5, 0.1, y0,
            adjoint=CheckpointAdjoint(), max_steps=16,
            saveat=diffrax.SaveAt(t1=True, solver_state=True),
        )  # fmt: skip
        return jnp.sum(sol.solver_state[1])

    with pytest.raises(RuntimeError, match="`solver_state`"):
        jax.grad(value)(jnp.array([1.0]))
