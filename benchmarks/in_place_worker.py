"""The training that in_place.py disturbs; each process writes down what it notices, and when.

A line of DIRECTORY/HOST.PID.told is `WHAT SECONDS ROUND RANK SIZE IDENTITY`; the time is by
CLOCK_MONOTONIC, which is also the killer's. WHAT is, in this order:

    noticed   a call has failed, or there is news of another round
    told      the launcher has given this rank a place in it
    formed    the group is connected
    agreed    all ranks know who has the state
    synced    this rank has it
    good      the first all_reduce after that has returned, with the right sum

The last committed step is in DIRECTORY/HOST.PID.step, 8 bytes.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy

import rallypoint as dist
from rallypoint import elastic
from rallypoint.elastic.membership import Membership, membership


class Diary:
    """What this process tells."""

    def __init__(self, directory: str) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}"
        flags = os.O_CREAT | os.O_WRONLY
        self._told = os.open(Path(directory, f"{name}.told"), flags | os.O_APPEND)
        self._step = os.open(Path(directory, f"{name}.step"), flags)
        self.identity = 0

    def tell(self, what: str) -> None:
        """It happens now."""
        place = f"{membership().round} {dist.get_rank()} {dist.get_world_size()} {self.identity}"
        os.write(self._told, f"{what} {time.monotonic():.6f} {place}\n".encode())

    def commit(self, step: int) -> None:
        """This step is done."""
        os.pwrite(self._step, step.to_bytes(8, sys.byteorder), 0)


def tell_parts(diary: Diary) -> None:
    """Have the parts of a recovery told, most of which are private to rallypoint.elastic."""

    def around(owner: type, name: str, before: str, after: str) -> None:
        whole = getattr(owner, name)

        @functools.wraps(whole)
        def told(*args: object) -> object:
            if before:
                diary.tell(before)
            result = whole(*args)
            diary.tell(after)
            return result

        setattr(owner, name, told)

    around(Membership, "go_on", "noticed", "agreed")
    around(Membership, "_form", "told", "formed")
    around(elastic.State, "sync", "", "synced")


def check_sum() -> None:
    """One all_reduce, whose result is known.

    Raises:
        SystemExit: it is wrong.
    """
    size = dist.get_world_size()
    numbers = numpy.full(1000, dist.get_rank() + 1.0)
    dist.all_reduce(numbers)
    if not (numbers == size * (size + 1) / 2).all():
        raise SystemExit(f"WRONG: all_reduce of {size} ranks gave {numbers}")


def communicate(step: int) -> None:
    """A collective that is drawn by the step."""
    chance = random.Random(step)
    data = numpy.ones(chance.choice((1, 1000, 100_000)))
    kind = chance.randrange(4)
    if kind == 0:
        dist.broadcast(data, step % dist.get_world_size())
    elif kind == 1:
        dist.all_gather_into_tensor(numpy.empty(data.size * dist.get_world_size()), data)
    elif kind == 2:
        dist.barrier()
    else:
        dist.all_reduce(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--step-s", type=float, default=0.002, help="how long a rank computes")
    parser.add_argument("--bytes", type=int, default=80, help="of the state")
    parser.add_argument("--arrays", type=int, default=1, help="of the state")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of the group")
    parser.add_argument("--torch", action="store_true", help="import PyTorch first")
    options = parser.parse_args()
    if options.torch:
        import torch  # noqa: F401 - it takes time
    diary = Diary(options.directory)
    arrays = [numpy.ones(options.bytes // options.arrays // 8) for _ in range(options.arrays)]
    state = elastic.State(step=0, arrays=arrays)
    diary.identity = id(arrays[0])
    tell_parts(diary)
    dist.init_process_group(timeout=timedelta(seconds=options.timeout_s))

    @elastic.run
    def train(state: elastic.State) -> None:
        check_sum()
        diary.tell("good")
        while True:
            time.sleep(options.step_s)
            communicate(state.step)
            with state.update():
                state.arrays[0][:10] += 1.0
                state.step += 1
            diary.commit(state.step)

    train(state)


if __name__ == "__main__":
    main()
