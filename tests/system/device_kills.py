"""Kills ranks amid calls in device memory, on the stand-in for a GPU; the others must be well.

python tests/system/device_kills.py ROUNDS SEED

Each round has two to four ranks, forked from this process, one of which is killed at a random
point of a random call. Each of the others says what it found: its error names the one that was
killed; from then on nobody writes into its memory; it has nothing of the others open any more.
"""

import contextlib
import gc
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import stand_in

import rallypoint
from rallypoint.pytorch.device_memory import device_calls
from rallypoint.pytorch.device_memory.call_page import CallPage

CALLS = ("all_reduce", "in the background", "broadcast", "all_gather", "all_to_all", "around")
AS_WORKER = ("opening", "before it is done")
ON_PAGE = ("amid arriving", "arrived")
POINTS = ("before arriving", *ON_PAGE, *AS_WORKER, "some time")
COUNT = 1 << 19  # float32, 2 MiB
LIMIT_S = 120
LAST_S = 0.02  # after so long, it is the last to arrive


class Plan:
    """What happens in one round."""

    def __init__(self, seed: int, number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        self.ranks = chance.choice([2, 3, 4])
        self.call = chance.choice(CALLS)
        self.point = chance.choice(POINTS)
        self.victim = chance.randrange(self.ranks)
        if self.call == "around" and self.point in ON_PAGE:
            self.point = "some time"  # messages do without
        self.delay_s = chance.random() * 0.02
        self.turn = chance.randrange(1, 4)

    def __str__(self) -> str:
        return f"rank {self.victim} of {self.ranks}, {self.call}, {self.point}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fragile(stand_in.StandIn):
    """Kills its process where the plan says so, once it is armed."""

    instance: Any = None

    def __init__(self, device: object = None) -> None:
        super().__init__(device)
        self.armed = ""
        self.delay_s = 0.0
        Fragile.instance = self

    def mark(self, device: object) -> Any:
        del device
        memory = self

        class Mark:
            def synchronize(self) -> None:
                if memory.armed == "before arriving":
                    die()
                if memory.armed in AS_WORKER:
                    time.sleep(LAST_S)
                if memory.armed == "some time":
                    threading.Timer(memory.delay_s, die).start()

        return Mark()

    def open(self, handle: bytes, size: int) -> torch.Tensor:
        if self.armed == "opening":
            die()
        return super().open(handle, size)

    def synchronize(self) -> None:
        if self.armed == "before it is done":
            die()


class FragilePage(CallPage):
    """The same for the page."""

    def arrive(self, request: bytes) -> list[bytes] | None:
        requests = super().arrive(request)
        if Fragile.instance.armed == "arrived":
            die()
        return requests

    def _read(self) -> list[int]:
        if Fragile.instance.armed == "amid arriving":
            die()  # it has the lock
        return super()._read()


held: list[torch.Tensor] = []  # the tensors of the last call


def make(call: str, rank: int, ranks: int) -> None:
    """Make a call."""
    tensor = torch.full((COUNT,), float(rank))
    whole = torch.full((COUNT // ranks * ranks,), float(rank))
    held[:] = tensor, whole
    if call == "all_reduce":
        dist.all_reduce(tensor)
    elif call == "in the background":
        for work in [dist.all_reduce(each, async_op=True) for each in (tensor, whole)]:
            work.wait()
    elif call == "broadcast":
        dist.broadcast(tensor, 0)
    elif call == "all_gather":
        dist.all_gather(list(whole.chunk(ranks)), tensor[: COUNT // ranks])
    elif call == "all_to_all":
        dist.all_to_all_single(whole, whole.clone())
    else:
        there = dist.P2POp(dist.isend, tensor[: len(whole)], (rank + 1) % ranks)
        back = dist.P2POp(dist.irecv, whole, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()


def run_rank(plan: Plan, rank: int, directory: str) -> str:
    """What is wrong; empty if nothing is."""
    stand_in.install(Fragile)
    vars(device_calls).update(CallPage=FragilePage)
    dist.init_process_group(
        "rallypoint",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=plan.ranks,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )
    group: Any = dist.group.WORLD
    make("all_reduce", rank, plan.ranks)
    memory = Fragile.instance
    memory.delay_s = plan.delay_s
    troubles = []
    try:
        for turn in range(100):
            if rank == plan.victim and turn == plan.turn:
                memory.armed = plan.point
            make(plan.call, rank, plan.ranks)
        troubles.append("nobody was killed")
    except rallypoint.PeerLostError as error:
        if error.rank != plan.victim:
            troubles.append(f"the error names rank {error.rank}: {error}")
    before = [each.clone() for each in held]
    time.sleep(0.1)
    if not all(map(torch.equal, before, held)):
        troubles.append("memory was written after the error")
    calls = group.devices._calls["cpu"]
    if plan.call == "around":  # its messages do not open what collectives do
        calls._mapped.close()
    if memory.opened:
        troubles.append(f"{len(memory.opened)} mappings are open")
    dist.destroy_process_group()
    gc.collect()  # errors that works hold refer to frames
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the directory itself
            links.append(str(descriptor.readlink()))
    if any("rallypoint-device" in link for link in links):
        troubles.append("the calls' page is open")
    return "; ".join(troubles)


def play(plan: Plan) -> list[str]:
    """Play a round; what is wrong with it."""
    children = {}
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(plan.ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    said = run_rank(plan, rank, directory)
                except BaseException as error:
                    said = repr(error)
                os.write(write, json.dumps(said).encode())
                os._exit(0)
            os.close(write)
            children[rank] = pid, read
        troubles = []
        deadline = time.monotonic() + LIMIT_S
        for rank, (pid, read) in children.items():
            ready = select.select([read], [], [], max(0, deadline - time.monotonic()))[0]
            text = os.read(read, 1 << 16) if ready else b'"it hangs"'
            os.close(read)
            if not ready:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            said = json.loads(text) if text else "killed"
            if said != ("killed" if rank == plan.victim else ""):
                troubles.append(f"rank {rank}: {said or 'lives'}")
    return troubles


def main() -> None:
    rounds, seed = map(int, sys.argv[1:])
    wrong = 0
    for number in range(rounds):
        plan = Plan(seed, number)
        troubles = play(plan)
        if troubles:
            wrong += 1
            print(f"round {number}: {plan}: {'; '.join(troubles)}", flush=True)
    print(f"{rounds} kills, {wrong} wrong, seed {seed}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
