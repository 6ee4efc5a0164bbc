"""A worker that is interrupted at random instants while it forms process groups, and tries again.

    rallypoint run --nproc-per-node 2 forming.py SEED COUNT

Says "formed", how often it was interrupted, how often told of the other's trouble, and the longest
try in seconds, as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

import numpy as np

import rallypoint as dist

RANK = int(os.environ["RANK"])
LONGEST_MS = 12.0


def interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def connections() -> list[str]:
    """Connections of this process to the store."""
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    there = {
        fields[9]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines())
        if fields[2].endswith(port)
    }
    mine = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.append(str(entry.readlink()))
    return [name for name in mine if name.removeprefix("socket:[").rstrip("]") in there]


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    draw = random.Random(f"{seed} {RANK}")
    interrupted = told = 0
    longest_s = 0.0
    signal.signal(signal.SIGALRM, interrupt)
    for number in range(count):
        is_formed = False
        while not is_formed:
            assert connections() == []
            began = time.monotonic()
            after_s = draw.uniform(0.5, LONGEST_MS) / 1000 if draw.random() < 0.5 else 0.0
            try:
                signal.setitimer(signal.ITIMER_REAL, after_s)
                dist.init_process_group(timeout=timedelta(seconds=60))
                signal.setitimer(signal.ITIMER_REAL, 0)
                sent = np.full(100, RANK + number)
                dist.all_reduce(sent)
                assert (sent == 2 * number + 1).all(), sent
                dist.barrier()
                is_formed = True
            except KeyboardInterrupt:
                interrupted += 1
            except (dist.PeerLostError, dist.StoreError):
                told += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if dist.is_initialized():
                    dist.destroy_process_group()
            longest_s = max(longest_s, time.monotonic() - began)
    said = {"formed": count, "interrupted": interrupted, "told": told, "longest_s": longest_s}
    os.write(
        1, f"{json.dumps(said)}\n".encode()
    )  # at once: print writes the line and its end apart


main()
