"""The classic deadlock: two ranks that both receive before they send, and what then happens.

    rallypoint run --nproc-per-node 2 examples/communication/deadlock.py

Neither can send before it has received. Instead of hanging, both get an error that names the ranks
in the circle. The same exchange without the mistake follows.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np

import rallypoint as dist


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    other = 1 - rank
    mine, theirs = np.full(3, rank), np.empty(3, int)
    try:
        dist.recv(theirs, src=other)  # both wait here
        dist.send(mine, dst=other)
    except dist.PeerError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}")
    dist.destroy_process_group()

    dist.init_process_group()  # after an error, the process is well
    sent = dist.isend(mine, dst=other)  # the send does not keep the receive waiting
    dist.recv(theirs, src=other)
    assert sent is not None
    sent.wait()
    print(f"rank {rank}: received {theirs} from rank {other}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
