"""Data-parallel training of a small neural network on handwritten digits, in NumPy.

    rallypoint run --standalone --nproc-per-node 4 examples/train_digits.py

Every worker holds the whole model, computes the gradient of its share of each global batch, and
averages it with the others' in one all_reduce. The global batch is the same for any number of
workers, so the training is too. Needs scikit-learn, which brings 1,797 real 8 x 8 images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rallypoint as dist

Array = NDArray[np.float64]


def load_digits() -> tuple[Array, NDArray[Any], Array, NDArray[Any]]:
    """Training images and labels, test images and labels; the same split in every process."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit("train_digits.py needs scikit-learn: pip install scikit-learn")
    digits = load()
    images, labels = digits.data / 16.0, digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


class Network:
    """64 pixels -> 64 hidden units (ReLU) -> 10 classes; all parameters in one flat array."""

    def __init__(self, rng: np.random.Generator, hidden: int = 64) -> None:
        shapes = [(64, hidden), (hidden,), (hidden, 10), (10,)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.parameters = np.zeros(sum(sizes))
        self.gradient = np.zeros(sum(sizes))
        ends = np.cumsum(sizes)[:-1]
        self.w1, self.b1, self.w2, self.b2 = (
            part.reshape(shape)
            for part, shape in zip(np.split(self.parameters, ends), shapes, strict=True)
        )
        self.dw1, self.db1, self.dw2, self.db2 = (
            part.reshape(shape)
            for part, shape in zip(np.split(self.gradient, ends), shapes, strict=True)
        )
        self.w1[...] = rng.standard_normal(shapes[0]) * np.sqrt(2 / 64)
        self.w2[...] = rng.standard_normal(shapes[2]) * np.sqrt(2 / hidden)

    def predict(self, images: Array) -> NDArray[np.int64]:
        """The most likely class of each image, shape (n,)."""
        hidden = np.maximum(images @ self.w1 + self.b1, 0)
        classes: NDArray[np.int64] = np.argmax(hidden @ self.w2 + self.b2, axis=1)
        return classes

    def backward(self, images: Array, labels: NDArray[Any]) -> float:
        """Fill `gradient` with that of the mean cross-entropy, and return the latter."""
        rows = np.arange(len(labels))
        hidden = np.maximum(images @ self.w1 + self.b1, 0)
        logits = hidden @ self.w2 + self.b2
        logits -= logits.max(axis=1, keepdims=True)
        probabilities = np.exp(logits)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        loss = -np.log(probabilities[rows, labels]).mean()

        error = probabilities
        error[rows, labels] -= 1
        error /= len(labels)
        self.dw2[...], self.db2[...] = hidden.T @ error, error.sum(axis=0)
        error = (error @ self.w2.T) * (hidden > 0)
        self.dw1[...], self.db1[...] = images.T @ error, error.sum(axis=0)
        return float(loss)


def train(options: argparse.Namespace) -> None:
    images, labels, test_images, test_labels = load_digits()
    rank, workers = dist.get_rank(), dist.get_world_size()
    if options.global_batch % workers:
        sys.exit(f"--global-batch {options.global_batch} is not a multiple of {workers} workers")
    batch = options.global_batch // workers
    steps = len(labels) // options.global_batch

    network = Network(np.random.default_rng(options.seed))
    dist.broadcast(network.parameters, src=0)
    velocity = np.zeros_like(network.parameters)
    sampler = dist.DistributedSampler(labels, seed=options.seed, drop_last=True)
    history = []
    for epoch in range(options.epochs):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        mine = sampler.indices()
        loss = np.zeros(1)
        for step in range(steps):
            chosen = mine[step * batch : (step + 1) * batch]
            loss += network.backward(images[chosen], labels[chosen])
            dist.all_reduce(network.gradient, op=dist.ReduceOp.AVG)
            velocity = options.momentum * velocity - options.learning_rate * network.gradient
            network.parameters += velocity
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        speed = steps * options.global_batch / (time.perf_counter() - started)
        history.append(float(loss[0] / steps))
        if rank == 0:
            print(
                f"epoch {epoch + 1:2}/{options.epochs}  loss {history[-1]:.6f}  "
                f"{speed:9,.0f} samples/s",
                flush=True,
            )

    # Each worker tests its share of the images.
    right = network.predict(test_images[rank::workers]) == test_labels[rank::workers]
    counts = np.array([right.sum(), right.size])
    dist.all_reduce(counts)
    if rank == 0:
        accuracy = counts[0] / counts[1]
        print(f"test accuracy {accuracy:.4f} on {counts[1]} images, {workers} workers")
        if options.history:
            result = {"loss": history, "test_accuracy": accuracy, "workers": workers}
            Path(options.history).write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step, all workers")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--history", metavar="FILE", help="write losses and accuracy as JSON")
    options = parser.parse_args()
    dist.init_process_group()
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
