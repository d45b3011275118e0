"""Gradient through a network in JAX: time, compile time and memory against the alternatives.

y' = W3 tanh(W2 tanh(W1 y)), 64-256-256-64, batch 128, Heun, 128 steps, float32. Peers: Diffrax's
recursive checkpointing and backsolve, and the floor, a hand-written `lax.scan` of checkpointed
steps. Prints ratios of one run; bytes are XLA's own count for the compiled gradient.

    python experiments/benchmarks/jax_mlp.py [--repeat 5]
"""

import argparse
import itertools
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from contadj.jax import BacksolveAdjoint, CheckpointAdjoint, ReversibleAdjoint

STEPS, BATCH, WIDTHS = 128, 128, (64, 256, 256, 64)


def field(t, y, weights):
    for w in weights[:-1]:
        y = jnp.tanh(y @ w)
    return y @ weights[-1]


def solved(adjoint, max_steps=4096):
    def loss(weights, y0):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Heun(), 0.0, 1.0, 1.0 / STEPS, y0, weights,
            adjoint=adjoint, max_steps=max_steps,
        )  # fmt: skip
        return jnp.mean(sol.ys**2)

    return loss


def scanned(weights, y0):
    h = 1.0 / STEPS

    @jax.checkpoint
    def step(y, _):
        k0 = field(0.0, y, weights)
        return y + h / 2 * (k0 + field(0.0, y + h * k0, weights)), None

    return jnp.mean(jax.lax.scan(step, y0, None, length=STEPS)[0] ** 2)


CASES = {
    "scan of checkpointed steps": scanned,
    "diffrax recursive": solved(diffrax.RecursiveCheckpointAdjoint()),
    "diffrax recursive, max_steps=128": solved(diffrax.RecursiveCheckpointAdjoint(), STEPS),
    "diffrax backsolve, max_steps=128": solved(diffrax.BacksolveAdjoint(), STEPS),
    "checkpoint, capacity=130": solved(CheckpointAdjoint(capacity=130)),
    "checkpoint, max_steps=128": solved(CheckpointAdjoint(), STEPS),
    "checkpoint, snapshots=16": solved(CheckpointAdjoint(snapshots=16), STEPS),
    "reversible": solved(ReversibleAdjoint(), STEPS),
    "backsolve": solved(BacksolveAdjoint(), STEPS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), jnp.float32)
        for s in itertools.pairwise(WIDTHS)
    ]
    y0 = jnp.asarray(rng.normal(size=(BATCH, WIDTHS[0])), jnp.float32)
    compiled, first, size = {}, {}, {}
    for name, loss in CASES.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(jax.value_and_grad(loss)).lower(weights, y0).compile()
        jax.block_until_ready(compiled[name](weights, y0))
        first[name] = time.perf_counter() - start
        size[name] = compiled[name].memory_analysis().temp_size_in_bytes
    best = dict.fromkeys(CASES, np.inf)
    for _ in range(repeat):  # interleaved, so that a busy machine slows all alike
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(weights, y0))
            best[name] = min(best[name], time.perf_counter() - start)
    floor = best["scan of checkpointed steps"]
    states = STEPS * y0.nbytes
    print(f"stored states: {states / 1e6:.2f} MB")
    print(f"{'':34}{'ms':>8}{'of floor':>10}{'temp MB':>9}{'first call, s':>15}{'difference':>12}")
    reference = compiled["scan of checkpointed steps"](weights, y0)[1]
    scale = max(float(jnp.max(jnp.abs(w))) for w in reference)
    for name in CASES:
        gradient = compiled[name](weights, y0)[1]
        difference = max(
            float(jnp.max(jnp.abs(g - w))) for g, w in zip(gradient, reference, strict=True)
        )
        print(
            f"{name:34}{1e3 * best[name]:8.1f}{best[name] / floor:10.2f}{size[name] / 1e6:9.2f}"
            f"{first[name]:15.2f}{difference / scale:12.1e}"
        )


if __name__ == "__main__":
    main()
