"""Parallel training from a notebook or a plain Python program, without a launcher.

    python examples/notebook.py

Paste the cells into a notebook, or open this file where "# %%" begins a cell (VS Code, Spyder,
Jupytext). `spawn` starts new processes that run a function, and ends them if one fails or if the
notebook ends. Functions that are defined in a notebook need cloudpickle:
pip install cloudpickle. The data need scikit-learn.
"""

# %% What each process needs
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import rallypoint as dist


# %% What each process does: softmax regression on its share of the images
def scores(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
    classes: np.ndarray = images @ weights[:-1] + weights[-1]
    return classes


def train(rank: int, workers: int, folder: str, epochs: int) -> None:
    """Full-batch gradient descent; rank 0 writes the weights to a file in the folder."""
    dist.init_process_group(init_method=f"file://{folder}/meet", rank=rank, world_size=workers)
    digits = load_digits()
    images, labels = digits.data[:1437] / 16.0, digits.target[:1437]
    mine, targets = images[rank::workers], np.eye(10)[labels[rank::workers]]
    weights = np.zeros((65, 10))
    for epoch in range(1, epochs + 1):
        guesses = scores(mine, weights)
        guesses = np.exp(guesses - guesses.max(axis=1, keepdims=True))
        guesses /= guesses.sum(axis=1, keepdims=True)
        error = (guesses - targets) / len(images)
        gradient = np.vstack([mine.T @ error, error.sum(axis=0)])
        loss = np.array([-np.log(guesses[targets == 1]).sum() / len(images)])
        dist.all_reduce(gradient)  # sums over all workers' images
        dist.all_reduce(loss)
        weights -= 2.0 * gradient
        if rank == 0 and epoch % 20 == 0:
            print(f"epoch {epoch}/{epochs}  loss {loss[0]:.6f}", flush=True)
    if rank == 0:
        np.save(f"{folder}/weights.npy", weights)
    dist.destroy_process_group()


# %% Two processes train; a notebook does not need the first of these lines
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.spawn(train, args=(2, folder, 100), nprocs=2)
        weights = np.load(Path(folder) / "weights.npy")

    # %% Back in the notebook: what they learned
    digits = load_digits()
    right = scores(digits.data[1437:] / 16.0, weights).argmax(axis=1) == digits.target[1437:]
    print(f"test accuracy {right.mean():.4f} on {right.size} images")
