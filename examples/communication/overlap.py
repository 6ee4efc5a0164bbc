"""Each rank passes a large array round a ring and computes while it travels: isend and irecv.

rallypoint run --nproc-per-node 4 examples/communication/overlap.py
"""

from __future__ import annotations

import numpy as np

import rallypoint as dist

ITEMS = 1_000_000


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    held = np.full(ITEMS, float(rank))
    total = np.zeros(ITEMS)
    for _ in range(ranks - 1):
        coming = np.empty(ITEMS)
        sent = dist.isend(held, dst=(rank + 1) % ranks)
        received = dist.irecv(coming, src=(rank - 1) % ranks)
        total += held  # reading what is being sent is fine; changing it is not, before wait()
        assert sent is not None and received is not None
        received.wait()
        sent.wait()
        held = coming
    total += held

    assert (total == sum(range(ranks))).all()
    print(f"rank {rank}: every item is {total[0]:g}, the sum of all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
