"""The 1,797 handwritten digits of scikit-learn in batches, the same in both frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 96


def digits(limit: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, at most `limit`, and images and labels held out."""
    images, labels = load_digits(return_X_y=True)
    images, held, labels, held_labels = map(
        np.asarray, train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    )
    images, held = ((x.astype(np.float32) / 8 - 1).reshape(-1, 1, 8, 8) for x in (images, held))
    return images[:limit], labels[:limit], held, held_labels


def batches(
    images: np.ndarray, labels: np.ndarray, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The images in random order, each moved by up to one pixel, in batches of one size.

    What is random in an epoch follows from seed and epoch, so that a resumed run repeats it.
    """
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(images))
    size = min(BATCH, len(images))
    for part in order[: len(order) // size * size].reshape(-1, size):
        yield _shifted(images[part], generator), labels[part]


def _shifted(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Each image moved by up to one pixel in both directions."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1.0)
    rows, columns = generator.integers(3, size=(2, len(images), 1)) + np.arange(8)
    each = np.arange(len(images))[:, None, None]
    return padded[each, 0, rows[:, :, None], columns[:, None, :]][:, None]
