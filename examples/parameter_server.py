"""A parameter server: workers send gradients when they have them, and none waits for another.

    rallypoint run --nproc-per-node 4 examples/parameter_server.py

Rank 0 holds the parameters and takes gradients from any rank (recv without a source);
the others train on handwritten digits, each at its own speed. A gradient may be computed from
parameters that are a few updates old, so the result varies a little from run to run. If all ranks
should take the same steps instead, see train_digits.py. Needs scikit-learn.
"""

from __future__ import annotations

import argparse

import numpy as np
from train_digits import Network, load_digits

import rallypoint as dist

SERVER = 0


def serve(network: Network, options: argparse.Namespace) -> None:
    """Apply each gradient on its arrival, and answer with the parameters as they are then."""
    _, _, test_images, test_labels = load_digits()
    workers = dist.get_world_size() - 1
    updates = options.steps * workers
    taken = np.zeros(workers + 1, np.int64)
    for update in range(1, updates + 1):
        worker = dist.recv(network.gradient)  # from any rank; says from which
        network.parameters -= options.learning_rate * network.gradient
        dist.send(network.parameters, dst=worker)
        taken[worker] += 1
        if update % (updates // 4) == 0:
            accuracy = np.mean(network.predict(test_images) == test_labels)
            print(f"update {update}/{updates}  test accuracy {accuracy:.4f}", flush=True)
    shares = ", ".join(f"{count} from rank {rank}" for rank, count in enumerate(taken) if rank)
    print(f"took {shares}", flush=True)


def work(network: Network, options: argparse.Namespace) -> None:
    """Compute the gradient of some images of this worker's share, again and again."""
    images, labels, _, _ = load_digits()
    workers = dist.get_world_size() - 1
    mine = np.arange(dist.get_rank() - 1, len(labels), workers)
    chance = np.random.default_rng(dist.get_rank())
    for _ in range(options.steps):
        chosen = chance.choice(mine, options.batch, replace=False)
        network.backward(images[chosen], labels[chosen])
        dist.send(network.gradient, dst=SERVER)
        dist.recv(network.parameters, src=SERVER)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each worker")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    options = parser.parse_args()
    dist.init_process_group()
    if dist.get_world_size() < 2:
        raise SystemExit("a server needs workers: --nproc-per-node 2 or more")
    network = Network(np.random.default_rng(1))
    dist.broadcast(network.parameters, src=SERVER)
    (serve if dist.get_rank() == SERVER else work)(network, options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
