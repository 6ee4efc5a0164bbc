"""A message goes through three ranks, and each adds its part: send and recv.

rallypoint run --nproc-per-node 3 examples/communication/chain.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    message = np.zeros(ranks)
    if rank > 0:
        dist.recv(message, src=rank - 1)
        print(f"rank {rank} received {message}")
    message[rank] = 10.0 * rank + 1
    if rank < ranks - 1:
        dist.send(message, dst=rank + 1)
    else:
        print(f"at the end of the chain: {message}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
