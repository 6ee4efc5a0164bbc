"""Training that continues in the same processes when workers die: digits in NumPy, no checkpoint.

    rallypoint run --nproc-per-node 4 --spares 1 --max-restarts 10 examples/train_digits_in_place.py

Kill any worker, as often as you like: the others continue within a fraction of a second. A spare
takes over and receives the state from their memory. The accuracy is the same to the last bit.
Without spares and restarts, fewer workers share each step's batch.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from train_digits import Network, load_digits

import rallypoint as dist
from rallypoint import elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step, all workers")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="in each step")
    options = parser.parse_args()

    # What takes long comes before init_process_group: a spare has done it when it is needed.
    images, labels, test_images, test_labels = load_digits()
    network = Network(np.random.default_rng(options.seed))
    sampler = elastic.Sampler(len(labels), options.global_batch, seed=options.seed)
    steps = options.epochs * len(labels) // options.global_batch
    state = elastic.State(
        step=0, parameters=network.parameters, velocity=np.zeros_like(network.parameters)
    )

    @elastic.run
    def train(state: elastic.State) -> None:
        print(
            f"rank {dist.get_rank()} of {dist.get_world_size()}, process {os.getpid()}, "
            f"begins after step {state.step}",
            flush=True,
        )
        while state.step < steps:
            mine = sampler.indices(state.step)
            network.gradient[...] = 0
            if len(mine):
                network.backward(images[mine], labels[mine])  # the mean over its images
            network.gradient *= len(mine) / options.global_batch
            dist.all_reduce(network.gradient)
            time.sleep(options.pause)
            with state.update():  # on all workers, or on none
                state.velocity *= options.momentum
                state.velocity -= options.learning_rate * network.gradient
                state.parameters += state.velocity
                state.step += 1

    dist.init_process_group()
    train(state)
    if dist.get_rank() == 0:
        accuracy = float(np.mean(network.predict(test_images) == test_labels))
        print(f"test accuracy {accuracy:.4f} on {len(test_labels)} images", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
