"""Train a convolutional neural-ODE classifier on the 1,797 handwritten digits of scikit-learn.

    python experiments/train_digits_torch.py [--adjoint checkpoint] [--resume] [--compare]

A stem that halves the 8 x 8 images, y' = f(t, y) of two convolutions over [0, 1], a linear head. A
fifth of the images, the same share of each digit, is held out. Writes checkpoint.pt and loss.png.
"""

from __future__ import annotations

import numpy as np
import torch
from _training import Cost, Trainer, adjoint_of, compare, console, parser, start
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu

import contadj.torch as ct

BATCH = 96


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


def digits(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, images and labels held out."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train, held, train_labels, held_labels = (torch.from_numpy(np.asarray(x)) for x in parts)

    def scaled(pixels: Tensor) -> Tensor:
        return (pixels.float() / 8.0 - 1.0).reshape(-1, 1, 8, 8).to(device)

    return scaled(train), train_labels.to(device), scaled(held), held_labels.to(device)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel in both directions."""
    padded = pad(images, (1, 1, 1, 1), value=-1.0)
    offsets = torch.randint(3, (2, len(images)), generator=generator).to(images.device)
    window = torch.arange(8, device=images.device)
    rows, columns = (offset[:, None] + window for offset in offsets)
    each = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[each, 0, rows[:, :, None], columns[:, None, :]][:, None]


def main() -> None:
    options = parser(__doc__.partition("\n")[0], "out/digits", epochs=40, num_steps=2)
    options.add_argument("--channels", type=int, default=24)
    options.add_argument("--limit", type=int, help="train on this many images only")
    arguments = start(options)
    images, labels, held_images, held_labels = digits(arguments.device)
    if arguments.limit is not None:
        images, labels = images[: arguments.limit], labels[: arguments.limit]

    def build(adjoint: ct.Adjoint, num_steps: int):
        torch.manual_seed(arguments.seed)
        model = classifier(adjoint, num_steps, arguments.channels).to(arguments.device)
        return model, model[1], lambda: cross_entropy(model(images[:BATCH]), labels[:BATCH])

    model, block, first_loss = build(adjoint_of(arguments.adjoint), arguments.num_steps)

    def losses(epoch: int):
        # What is random in an epoch follows from seed and epoch, so a resumed run repeats it.
        generator = torch.Generator().manual_seed(1000 * arguments.seed + epoch)
        for batch in torch.randperm(len(images), generator=generator).split(BATCH):
            pixels = shifted(images[batch], generator)
            yield lambda x=pixels, y=labels[batch]: cross_entropy(model(x), y)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(held_images).argmax(1) == held_labels).float().mean())

    trainer = Trainer(
        model, losses, accuracy, "held-out accuracy", rate=5e-3, weight_decay=0.02,
        out=arguments.out, epochs=arguments.epochs,
        settings={
            "seed": arguments.seed, "adjoint": arguments.adjoint, "num_steps": arguments.num_steps,
            "channels": arguments.channels, "limit": arguments.limit,
        },
    )  # fmt: skip
    if arguments.resume:
        trainer.load()
    if arguments.compare:
        state = model.state_dict()

        def trained(adjoint: ct.Adjoint, num_steps: int):
            built = build(adjoint, num_steps)
            built[0].load_state_dict(state)
            return built

        compare(trained, arguments.num_steps)
        return
    cost = Cost.of(model, block, first_loss)
    trainer.fit(arguments.stop_after)
    console.print(f"loss curve: {trainer.draw()}")
    console.print(f"held-out accuracy: {100 * accuracy():.2f} % of {len(held_labels)} images")
    console.print(
        f"{arguments.adjoint}: peak {cost.live / 2**20:.2f} MiB live, "
        f"{1e3 * cost.seconds:.1f} ms and {cost.evaluations} f evaluations per gradient"
    )


if __name__ == "__main__":
    main()
