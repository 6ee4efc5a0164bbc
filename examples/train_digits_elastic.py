"""Training that continues when nodes join, leave and die: digits in NumPy, with checkpoints.

    rallypoint run --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29400 --rdzv-id x \\
        examples/train_digits_elastic.py --checkpoint /shared/digits.npz

Run it in several terminals; start and kill launchers at will. After each change, all workers
restart from the last checkpoint, which all nodes must be able to read. The workers share the global
batch as evenly as possible, and each step's images depend only on the step. The result is therefore
the same as without any interruption, except for rounding. Workers that are asked to end (by
SIGTERM, a node that joins or leaves) save first: no step is lost.
"""

from __future__ import annotations

import argparse
import os
import time
import zipfile
from pathlib import Path

import numpy as np
from train_digits import Network, load_digits

import rallypoint as dist


class Checkpoint:
    """A file that is always whole: a new one replaces it in one step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, network: Network, velocity: np.ndarray) -> int:
        """Fill in parameters and velocity; how many steps they have seen, 0 if there is no file."""
        try:
            with np.load(self.path) as saved:
                network.parameters[...] = saved["parameters"]
                velocity[...] = saved["velocity"]
                return int(saved["steps"])
        except FileNotFoundError:
            return 0
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise SystemExit(f"{self.path} is no checkpoint of this script: {error}") from None

    def save(self, network: Network, velocity: np.ndarray, steps: int) -> None:
        """Write it beside the old one, make sure that it is on the disk, and only then rename it.

        Two that write at once, as when a node that was given up for lost is not quite dead yet, do
        not write into the same file.
        """
        part = self.path.with_name(f".{self.path.name}.{os.uname().nodename}.{os.getpid()}")
        with part.open("wb") as file:
            np.savez(file, parameters=network.parameters, velocity=velocity, steps=steps)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)


def are_asked_to_end() -> bool:
    """Whether any worker is. All leave after the same step; else some would wait for the others."""
    asked = np.array([dist.preempted()], np.uint8)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked[0])


def train(options: argparse.Namespace) -> None:
    images, labels, test_images, test_labels = load_digits()
    rank, workers = dist.get_rank(), dist.get_world_size()
    network = Network(np.random.default_rng(options.seed))
    velocity = np.zeros_like(network.parameters)
    checkpoint = Checkpoint(options.checkpoint)

    # One worker reads and broadcasts: whatever the file contains, all continue from the same step.
    state = np.concatenate([network.parameters, velocity, [0.0]])
    if rank == 0:
        begin = checkpoint.load(network, velocity)
        state = np.concatenate([network.parameters, velocity, [begin]])
        print(f"{workers} workers continue after step {begin}", flush=True)
    dist.broadcast(state, src=0)
    network.parameters[...], velocity[...] = np.split(state[:-1], 2)

    steps_per_epoch = len(labels) // options.global_batch
    for step in range(int(state[-1]), options.epochs * steps_per_epoch):
        epoch, place = divmod(step, steps_per_epoch)
        order = np.random.default_rng((options.seed, epoch)).permutation(len(labels))
        batch = order[place * options.global_batch :][: options.global_batch]
        mine = batch[rank::workers]
        network.gradient[...] = 0
        if len(mine):
            network.backward(images[mine], labels[mine])
        network.gradient *= len(mine) / len(batch)  # the sum of all is the mean over the batch
        dist.all_reduce(network.gradient)
        velocity = options.momentum * velocity - options.learning_rate * network.gradient
        network.parameters += velocity
        is_end = are_asked_to_end()
        if rank == 0 and (is_end or (step + 1) % options.checkpoint_every == 0):
            checkpoint.save(network, velocity, step + 1)
        if is_end:
            if rank == 0:
                print(f"asked to end: saved after step {step + 1}", flush=True)
            return
        time.sleep(options.pause)
    if rank == 0:
        checkpoint.save(network, velocity, options.epochs * steps_per_epoch)
        accuracy = float(np.mean(network.predict(test_images) == test_labels))
        print(f"test accuracy {accuracy:.4f} on {len(test_labels)} images", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="an .npz that all nodes see")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step, all workers")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="in each step")
    options = parser.parse_args()
    dist.init_process_group()
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
