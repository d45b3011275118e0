"""Train a convolutional neural-ODE classifier on scikit-learn's handwritten digits, in JAX.

    python experiments/train_digits_jax.py [--adjoint checkpoint] [--resume] [--compare]

A stem that halves the 8 x 8 images, y' = f(t, y) of two convolutions over [0, 1], a linear head. A
fifth of the 1,797 images, the same share of each digit, is held out. Writes checkpoint.eqx and
loss.png.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _digits import BATCH, batches, digits
from _training import console
from _training_jax import Trainer, adjoint_of, compare, cost_of, parser, start

import contadj.jax as cj


class ConvolutionalField(eqx.Module):
    """f(t, y) of a batch: two 3 x 3 convolutions, time as one more channel of each."""

    norms: tuple[eqx.nn.GroupNorm, eqx.nn.GroupNorm]
    convolutions: tuple[eqx.nn.Conv2d, eqx.nn.Conv2d]

    def __init__(self, channels: int, key):
        self.norms = (eqx.nn.GroupNorm(4, channels), eqx.nn.GroupNorm(4, channels))
        self.convolutions = tuple(
            eqx.nn.Conv2d(channels + 1, channels, 3, padding=1, key=k)
            for k in jax.random.split(key)
        )

    def one(self, t, y):
        """f of one image."""
        time = jnp.full((1, *y.shape[1:]), t, y.dtype)
        y = self.convolutions[0](jnp.concatenate([jax.nn.silu(self.norms[0](y)), time]))
        return self.convolutions[1](jnp.concatenate([jax.nn.silu(self.norms[1](y)), time]))

    def __call__(self, t, y):
        return jax.vmap(self.one, (None, 0))(t, y)


class Classifier(eqx.Module):
    """Stem, solve, head; from a batch of images to logits."""

    stem: eqx.nn.Conv2d
    solve: cj.NeuralODE
    norm: eqx.nn.GroupNorm
    head: eqx.nn.Linear

    def __init__(self, adjoint, num_steps: int, channels: int, key):
        stem, field, head = jax.random.split(key, 3)
        self.stem = eqx.nn.Conv2d(1, channels, 3, stride=2, padding=1, key=stem)
        self.solve = cj.NeuralODE(
            ConvolutionalField(channels, field), method="rk4", adjoint=adjoint, num_steps=num_steps
        )
        self.norm = eqx.nn.GroupNorm(4, channels)
        self.head = eqx.nn.Linear(16 * channels, 10, key=head)

    def __call__(self, images):
        y = self.solve(jax.vmap(self.stem)(images))
        return jax.vmap(lambda y: self.head(jax.nn.silu(self.norm(y)).ravel()))(y)


def loss(model: Classifier, images, labels):
    """Mean cross entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(images), labels))


def main() -> None:
    options = parser(__doc__.partition("\n")[0], "out/digits_jax", epochs=40, num_steps=2)
    options.add_argument("--channels", type=int, default=24)
    options.add_argument("--limit", type=int, help="train on this many images only")
    arguments = start(options)
    images, labels, held_images, held_labels = digits(arguments.limit)
    size = min(BATCH, len(images))  # whole batches only: one shape, one compilation
    first = jnp.asarray(images[:size]), jnp.asarray(labels[:size])

    def build(adjoint, num_steps: int):
        key = jax.random.key(arguments.seed)
        return Classifier(adjoint, num_steps, arguments.channels, key), loss, first

    def batches_of(epoch: int):
        for batch in batches(images, labels, arguments.seed, epoch):
            yield tuple(map(jnp.asarray, batch))

    @eqx.filter_jit
    def predict(model, images):
        return jnp.argmax(model(images), axis=1)

    def accuracy(model) -> float:
        return float(np.mean(np.asarray(predict(model, jnp.asarray(held_images))) == held_labels))

    model, *_ = build(adjoint_of(arguments.adjoint), arguments.num_steps)
    trainer = Trainer(
        model=model, loss=loss, batches=batches_of, held_out=accuracy, metric="held-out accuracy",
        rate=5e-3, weight_decay=0.02,
        steps_per_epoch=len(images) // size, out=arguments.out, epochs=arguments.epochs,
        settings={
            "seed": arguments.seed, "adjoint": arguments.adjoint, "num_steps": arguments.num_steps,
            "channels": arguments.channels, "limit": arguments.limit,
        },
    )  # fmt: skip
    if arguments.resume:
        trainer.load()
    if arguments.compare:
        compare(build, trainer.model, arguments.num_steps)
        return
    cost = cost_of(model, loss, first)
    trainer.fit(arguments.stop_after)
    console.print(f"loss curve: {trainer.draw()}")
    console.print(
        f"held-out accuracy: {100 * accuracy(trainer.model):.2f} % of {len(held_labels)} images"
    )
    console.print(
        f"{arguments.adjoint}: {cost.bytes / 2**20:.2f} MiB of temporaries, "
        f"{1e3 * cost.seconds:.1f} ms per gradient, {cost.count:.1f} s to compile"
    )


if __name__ == "__main__":
    main()
