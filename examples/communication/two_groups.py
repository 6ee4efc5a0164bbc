"""Even and odd ranks sum separately, each within a group of their own.

rallypoint run --nproc-per-node 4 examples/communication/two_groups.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Every rank asks for every group, in the same order; it is in one of them.
    groups = [dist.new_group(range(first, ranks, 2)) for first in range(min(2, ranks))]
    mine = groups[rank % 2]

    value = np.array([rank])
    dist.all_reduce(value, group=mine)
    print(f"rank {rank}: the sum of ranks {dist.get_process_group_ranks(mine)} is {value[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
