"""Ring, tree and double tree: the same sums, at different speeds.

rallypoint run --nproc-per-node 4 examples/algorithms/compared.py

A ring sends least, and takes most steps; trees are for many ranks and small arrays. To compare them
on machines that you do not have: `rallypoint simulate all_reduce --ranks 64`.
"""

from __future__ import annotations

import time

import numpy as np

import rallypoint as dist

CALLS = 200


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for algorithm in ("ring", "binary_tree", "double_tree"):
        for count in (1, 1 << 18):
            begin = time.perf_counter()
            for _ in range(CALLS):
                values = np.full(count, rank + 1, np.float32)
                dist.all_reduce(values, algorithm=algorithm)
            us = (time.perf_counter() - begin) / CALLS * 1e6
            assert (values == size * (size + 1) / 2).all()
            if rank == 0:
                print(f"{algorithm}, {values.nbytes} bytes: {us:.0f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
