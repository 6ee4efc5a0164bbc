"""Two broadcasts from different ranks: every rank names the same source in the same order.

rallypoint run --nproc-per-node 3 examples/communication/two_sources.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group()
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    settings = np.array([0.1, 0.9]) if rank == 0 else np.empty(2)
    weights = np.arange(4.0) if rank == last else np.empty(4)
    dist.broadcast(settings, src=0)
    dist.broadcast(weights, src=last)

    print(f"rank {rank}: settings {settings} from rank 0, weights {weights} from rank {last}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
