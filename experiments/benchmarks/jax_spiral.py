"""Gradient of the spiral in JAX: time against Diffrax's adjoints, and against dispatch.

The neural ODE of the original paper, as in torch_speed.py: y' = net(y^3), 2-50-2 tanh, y0 = (2, 0),
30 observations on [0, 1.5], Tsit5, rtol 1e-3, atol 1e-6; one gradient of the squared error to a
damped spiral. A problem this small is all overhead, which is what is measured. Candidates take
turns in one run; the ratio is that of their medians. A turn is 200 gradients in a row, as in
training: one alone would mostly measure how the others emptied the processor's caches. XLA wakes
a second thread for some operations of this size, which costs Diffrax's adjoints, not these: see
both `--cores 1` and all cores, the default.

    python experiments/benchmarks/jax_spiral.py [--turns 40] [--x64] [--cores N]

In float32, Diffrax's default, the error estimate of the first step is rounding, which moves the
mesh and with it every gradient by less than the tolerance; in float64 the discrete gradients agree
to rounding.
"""

import argparse
import os
import statistics
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from contadj.jax import BacksolveAdjoint, CheckpointAdjoint

A = np.array([[-0.1, 2.0], [-2.0, -0.1]])
Y0 = np.array([2.0, 0.0])
TS = np.linspace(0.0, 1.5, 30)


def solved(field, args, rtol, atol, **more):
    """The states at the observation times."""
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.5, None, jnp.asarray(Y0), args,
        saveat=diffrax.SaveAt(ts=jnp.asarray(TS)),
        stepsize_controller=diffrax.PIDController(rtol, atol), **more,
    ).ys  # fmt: skip


def network(t, y, params):
    w1, b1, w2, b2 = params
    return jnp.tanh(y**3 @ w1 + b1) @ w2 + b2


def gradient(adjoint, max_steps=4096):
    """The compiled loss and gradient as a function of the parameters and the target."""

    def loss(params, target):
        ys = solved(network, params, 1e-3, 1e-6, adjoint=adjoint, max_steps=max_steps)
        return jnp.mean((ys - target) ** 2)

    return jax.jit(jax.value_and_grad(loss))


DISPATCH = "bare dispatch"
CASES = {
    DISPATCH: lambda: jax.jit(lambda params, target: (jnp.sum(target), params)),
    "diffrax recursive": lambda: gradient(diffrax.RecursiveCheckpointAdjoint()),
    "diffrax recursive, max_steps=64": lambda: gradient(diffrax.RecursiveCheckpointAdjoint(), 64),
    "diffrax backsolve": lambda: gradient(diffrax.BacksolveAdjoint()),
    "checkpoint": lambda: gradient(CheckpointAdjoint()),
    "checkpoint, max_steps=64": lambda: gradient(CheckpointAdjoint(), 64),
    "checkpoint, capacity=64": lambda: gradient(CheckpointAdjoint(capacity=64)),
    "backsolve": lambda: gradient(BacksolveAdjoint()),
}
# (ours, theirs, how many times faster ours must be)
TURN = 200
TARGETS = (
    ("checkpoint", "diffrax recursive", 2.0),
    ("checkpoint, capacity=64", "diffrax recursive", 3.0),
    ("checkpoint, capacity=64", "diffrax recursive, max_steps=64", 1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--cores", type=int, help="cores to use, all by default")
    arguments = parser.parse_args()
    # XLA counts the cores when it starts, at the first operation.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    jax.config.update("jax_enable_x64", arguments.x64)
    rng = np.random.default_rng(0)
    weights = [0.1 * rng.normal(size=(2, 50)), np.zeros(50), 0.1 * rng.normal(size=(50, 2)), [0, 0]]
    params = [jnp.asarray(w, float) for w in weights]
    target = solved(lambda t, y, a: y**3 @ a, jnp.asarray(A), 1e-6, 1e-6)
    functions, compiles = {}, {}
    for name, make in CASES.items():
        start = time.perf_counter()
        functions[name] = make()
        jax.block_until_ready(functions[name](params, target))
        compiles[name] = time.perf_counter() - start
    times = {name: [] for name in CASES}
    for _ in range(arguments.turns):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(TURN):
                jax.block_until_ready(function(params, target))
            times[name].append((time.perf_counter() - start) / TURN)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'':34}{'ms':>8}{'speed-up':>10}{'of dispatch':>13}{'first call, s':>15}")
    for name, seconds in median.items():
        speed, of_dispatch = median["diffrax recursive"] / seconds, seconds / median[DISPATCH]
        print(
            f"{name:34}{1e3 * seconds:8.3f}{speed:10.2f}{of_dispatch:13.1f}{compiles[name]:15.2f}"
        )
    for ours, theirs, factor in TARGETS:
        ratio = median[theirs] / median[ours]
        met = "met" if ratio >= factor else "missed"
        print(f"{ours} against {theirs}: {ratio:.2f} times faster, target {factor:g}, {met}")
    want = functions["diffrax recursive"](params, target)[1]
    size = max(float(jnp.max(jnp.abs(w))) for w in want)
    worst = max(
        float(jnp.max(jnp.abs(g - w)))
        for name in CASES
        if name.startswith("checkpoint")
        for g, w in zip(functions[name](params, target)[1], want, strict=True)
    )
    print(f"largest difference of a checkpoint gradient from Diffrax's: {worst / size:.1e}")


if __name__ == "__main__":
    main()
