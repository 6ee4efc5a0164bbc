"""Rank 0 cuts a table into pieces, each rank works on its own, and rank 0 gathers the results.

rallypoint run --nproc-per-node 4 examples/communication/scatter.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    table = np.arange(2 * ranks * 3).reshape(2 * ranks, 3) if rank == 0 else None
    rows = np.empty((2, 3), int)
    dist.scatter(rows, list(np.split(table, ranks)) if table is not None else None, src=0)

    results = [np.empty((2, 3), int) for _ in range(ranks)] if rank == 0 else None
    dist.gather(rows**2, results, dst=0)
    if results is not None and table is not None:
        assert (np.concatenate(results) == table**2).all()
        print(np.concatenate(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
