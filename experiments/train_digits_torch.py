"""Train a convolutional neural-ODE classifier on the 1,797 handwritten digits of scikit-learn.

    python experiments/train_digits_torch.py [--adjoint checkpoint] [--resume] [--compare]

A stem that halves the 8 x 8 images, y' = f(t, y) of two convolutions over [0, 1], a linear head. A
fifth of the images, the same share of each digit, is held out. Writes checkpoint.pt and loss.png.
"""

from __future__ import annotations

import torch
from _digits import BATCH, batches, digits
from _training import console
from _training_torch import Trainer, adjoint_of, compare, cost_of, parser, start
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import contadj.torch as ct


class ConvolutionalField(nn.Module):
    """f(t, y): two 3 x 3 convolutions, time as one more channel of each."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels + 1, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels + 1, channels, 3, padding=1)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        time = t.expand(y.shape[0], 1, *y.shape[2:])
        y = self.conv1(torch.cat([silu(self.norm1(y)), time], 1))
        return self.conv2(torch.cat([silu(self.norm2(y)), time], 1))


def classifier(adjoint: ct.Adjoint, num_steps: int, channels: int) -> nn.Sequential:
    """Stem, solve, head."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        ct.NeuralODE(
            ConvolutionalField(channels), method="rk4", adjoint=adjoint,
            options={"num_steps": num_steps},
        ),
        nn.GroupNorm(4, channels),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16 * channels, 10),
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__.partition("\n")[0], "out/digits", epochs=40, num_steps=2)
    options.add_argument("--channels", type=int, default=24)
    options.add_argument("--limit", type=int, help="train on this many images only")
    arguments = start(options)
    parts = digits(arguments.limit)
    images, labels, held_images, held_labels = (
        torch.from_numpy(part).to(arguments.device) for part in parts
    )

    def build(adjoint: ct.Adjoint, num_steps: int):
        torch.manual_seed(arguments.seed)
        model = classifier(adjoint, num_steps, arguments.channels).to(arguments.device)
        return model, model[1], lambda: cross_entropy(model(images[:BATCH]), labels[:BATCH])

    model, block, first_loss = build(adjoint_of(arguments.adjoint), arguments.num_steps)

    def losses(epoch: int):
        for batch in batches(*parts[:2], arguments.seed, epoch):
            x, y = (torch.from_numpy(part).to(arguments.device) for part in batch)
            yield lambda x=x, y=y: cross_entropy(model(x), y)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(held_images).argmax(1) == held_labels).float().mean())

    trainer = Trainer(
        model=model, losses=losses, held_out=accuracy, metric="held-out accuracy", rate=5e-3,
        weight_decay=0.02, out=arguments.out, epochs=arguments.epochs,
        settings={
            "seed": arguments.seed, "adjoint": arguments.adjoint, "num_steps": arguments.num_steps,
            "channels": arguments.channels, "limit": arguments.limit,
        },
    )  # fmt: skip
    if arguments.resume:
        trainer.load()
    if arguments.compare:
        compare(build, model, arguments.num_steps)
        return
    cost = cost_of(model, block, first_loss)
    trainer.fit(arguments.stop_after)
    console.print(f"loss curve: {trainer.draw()}")
    console.print(f"held-out accuracy: {100 * accuracy():.2f} % of {len(held_labels)} images")
    console.print(
        f"{arguments.adjoint}: peak {cost.bytes / 2**20:.2f} MiB live, "
        f"{1e3 * cost.seconds:.1f} ms and {cost.count} f evaluations per gradient"
    )


if __name__ == "__main__":
    main()
