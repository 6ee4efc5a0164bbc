"""all_reduce and all_gather side by side: the sum on every rank, or all the parts on every rank.

rallypoint run --nproc-per-node 4 examples/communication/side_by_side.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = np.arange(3.0) + 10 * rank

    total = mine.copy()
    dist.all_reduce(total)  # in place: as large as what each rank put in

    parts = np.empty((ranks, 3))
    dist.all_gather_into_tensor(parts, mine)  # as many times as large as there are ranks

    assert np.allclose(parts.sum(axis=0), total)
    if rank == 0:
        print(f"all_reduce: {total}")
        print("all_gather:")
        print(parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
