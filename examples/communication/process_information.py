"""Every rank learns where every other one runs: all_gather of numbers, all_gather_object of words.

rallypoint run --nproc-per-node 4 examples/communication/process_information.py
"""

from __future__ import annotations

import os
import socket

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    mine = np.array([os.getpid(), os.getppid(), int(os.environ.get("LOCAL_RANK", rank))])
    everyone = [np.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine)

    hosts: list[str] = [""] * ranks
    dist.all_gather_object(hosts, socket.gethostname())

    if rank == 0:
        for other, (pid, parent, local_rank) in enumerate(everyone):
            print(
                f"rank {other}: host {hosts[other]}, pid {pid}, parent {parent}, "
                f"local rank {local_rank}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
