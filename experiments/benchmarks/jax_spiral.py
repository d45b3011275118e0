"""Gradient of a small spiral in JAX: time against Diffrax's default adjoint, and against dispatch.

y' = A y^3, the spiral of the neural-ODE papers: 4 parameters, adaptive steps. A problem this small
is all overhead, which is what is measured. Prints ratios of times taken in one run.

    python experiments/benchmarks/jax_spiral.py [--repeat 200] [--x64]

In float32 the error estimate of the first step is rounding, which moves the mesh and with it every
gradient by less than the tolerance; in float64 the discrete gradients agree to rounding.
"""

import argparse
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from contadj.jax import BacksolveAdjoint, CheckpointAdjoint

A = np.array([[-0.1, 2.0], [-2.0, -0.1]])
Y0 = np.array([2.0, 0.0])
TS = np.linspace(0.0, 1.5, 10)


def gradient(adjoint, max_steps=4096):
    def loss(a):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: y**3 @ a), diffrax.Tsit5(), 0.0, 1.5, None,
            jnp.asarray(Y0), a, saveat=diffrax.SaveAt(ts=jnp.asarray(TS)), adjoint=adjoint,
            max_steps=max_steps,
            stepsize_controller=diffrax.PIDController(1e-3, 1e-6),
        )  # fmt: skip
        return jnp.mean(jnp.abs(sol.ys))

    return jax.jit(jax.value_and_grad(loss))


CASES = {
    "bare dispatch": lambda: jax.jit(lambda a: (jnp.sum(a), a)),
    "diffrax recursive": lambda: gradient(diffrax.RecursiveCheckpointAdjoint()),
    "diffrax recursive, max_steps=64": lambda: gradient(diffrax.RecursiveCheckpointAdjoint(), 64),
    "checkpoint, max_steps=64": lambda: gradient(CheckpointAdjoint(), 64),
    "diffrax backsolve": lambda: gradient(diffrax.BacksolveAdjoint()),
    "checkpoint": lambda: gradient(CheckpointAdjoint()),
    "checkpoint, capacity=64": lambda: gradient(CheckpointAdjoint(capacity=64)),
    "backsolve": lambda: gradient(BacksolveAdjoint()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--x64", action="store_true")
    arguments = parser.parse_args()
    repeat = arguments.repeat
    jax.config.update("jax_enable_x64", arguments.x64)
    a = jnp.asarray(A)
    functions, compiles = {}, {}
    for name, make in CASES.items():
        start = time.perf_counter()
        functions[name] = make()
        jax.block_until_ready(functions[name](a))
        compiles[name] = time.perf_counter() - start
    best = dict.fromkeys(CASES, np.inf)
    for _ in range(repeat):  # interleaved, so that a busy machine slows all alike
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(a))
            best[name] = min(best[name], time.perf_counter() - start)
    peer = "diffrax recursive"
    print(f"{'':34}{'ms':>8}{'speed-up':>10}{'first call, s':>15}")
    for name in CASES:
        speed = best[peer] / best[name]
        print(f"{name:34}{1e3 * best[name]:8.3f}{speed:10.2f}{compiles[name]:15.2f}")
    reference = functions["diffrax recursive"](a)[1]
    worst = max(
        float(jnp.max(jnp.abs(functions[name](a)[1] - reference)))
        for name in CASES
        if name.startswith("checkpoint")
    )
    print(f"largest difference of a checkpoint gradient from Diffrax's: {worst:.1e}")


if __name__ == "__main__":
    main()
