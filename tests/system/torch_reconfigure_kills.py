"""PyTorch's cases of reconfigure, in each of which one of three ranks is killed.

    python -m tests.system.torch_reconfigure_kills SEED

Forks the ranks, so that PyTorch is imported once. Writes a line of JSON for each case: its name,
the rank that is killed, and how the ranks ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.system.torch_reconfigure import SIZE, Member, check_sum

import rallypoint
from rallypoint.store.server import StoreServer

LONGEST_S = 60.0  # a case that is not over by then hangs
SHORT = timedelta(seconds=1.5)


class Survivor(Member):
    """This process, which may be the one that dies."""

    def __init__(self, victim: int, chance: random.Random) -> None:
        super().__init__()
        self.victim, self.chance = victim, chance  # the same on all ranks
        self.others = [each for each in range(SIZE) if each != victim]

    @property
    def is_victim(self) -> bool:
        return self.number == self.victim

    def all(self, number: int) -> list[str]:
        """As `Member.all`; nobody dies before all have the group."""
        handles = super().all(number)
        self.exchange("formed")
        return handles

    def die(self) -> None:
        """If it is this process."""
        if self.is_victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def go_on(self, number: int, handles: list[str]) -> None:
        """Without the victim."""
        self.reconfigure(number, [handles[each] for each in self.others])
        assert dist.get_rank() == self.others.index(self.number)
        check_sum()

    def in_vain(self, number: int, handles: list[str]) -> None:
        """With the victim, which does not come."""
        with pytest.raises(rallypoint.RallypointError):
            dist._reconfigure(number, handles, timeout=SHORT).wait()


Case = Callable[[Survivor], None]


def basic(member: Survivor) -> None:
    handles = member.handles()
    member.die()
    member.go_on(1, handles)


def all_reduce(member: Survivor) -> None:
    handles, tensor = member.all(1), torch.zeros(100_000)
    last = member.chance.randrange(100)
    with pytest.raises(rallypoint.PeerLostError) as caught:
        for count in range(10**9):
            if member.is_victim and count == last:
                threading.Timer(member.chance.random() / 1000, member.die).start()
            dist.all_reduce(tensor)
    assert caught.value.lost == (member.victim,)
    member.go_on(2, handles)
    left = [handles[each] for each in member.others]
    member.reconfigure(3, left[::-1])
    check_sum()


def send_recv(member: Survivor) -> None:
    handles = member.all(1)
    rank = dist.get_rank()
    member.die()
    received = torch.zeros(4)
    try:
        sent = dist.isend(torch.full((4,), rank + 1.0), (rank + 1) % SIZE)
        dist.recv(received, (rank - 1) % SIZE)
        sent.wait()
    except rallypoint.PeerLostError as error:
        assert error.lost == (member.victim,)
    else:
        assert (rank - 1) % SIZE != member.victim
        assert received.tolist() == [(rank - 1) % SIZE + 1.0] * 4
    member.go_on(2, handles)


def shrink(member: Survivor) -> None:
    """No call is under way."""
    handles = member.all(1)
    member.die()
    member.go_on(2, handles)
    tensor = torch.full((4,), float(dist.get_rank()))
    dist.broadcast(tensor, group_src=1)
    assert tensor.tolist() == [1.0] * 4


def scale_down_up(member: Survivor) -> None:
    handles = member.handles()
    member.alone(10 + member.number)
    member.die()
    member.go_on(2, handles)
    member.alone(20 + member.number)


def single_to_all(member: Survivor) -> None:
    """The victim is still expected."""
    handles = member.handles()
    member.alone(10 + member.number)
    member.die()
    member.in_vain(2, handles)
    member.go_on(3, handles)


def identity(member: Survivor) -> None:
    handles = member.all(1)
    member.die()
    member.in_vain(2, handles)
    member.go_on(3, handles)


def as_a_set(member: Survivor) -> None:
    handles = member.handles()
    member.reconfigure(1, set(handles))
    member.exchange("formed")
    member.die()
    left = [handles[each] for each in member.others]
    member.reconfigure(2, set(left))
    assert dist.get_rank() == sorted(left).index(handles[member.number])
    check_sum()


def late_join(member: Survivor) -> None:
    handles = member.handles()
    if member.number == member.others[0]:
        member.alone(1)
    member.die()
    member.go_on(2, handles)


def merge_split(member: Survivor) -> None:
    """The victim dies in a half; the other half, or its partner, has to be told."""
    handles = member.handles()
    lonely = member.others[0]
    pair = [each for each in range(SIZE) if each != lonely]
    if member.number == lonely:
        member.alone(1)
    else:
        member.reconfigure(2, [handles[each] for each in pair])
        check_sum()
        member.die()
        with pytest.raises(rallypoint.PeerLostError) as caught:
            dist.barrier()
        assert caught.value.lost == (pair.index(member.victim),)
    member.go_on(3, handles)


def after_abort(member: Survivor) -> None:
    handles = member.all(1)
    member.die()
    member.group._get_backend(torch.device("cpu")).abort()
    with pytest.raises(rallypoint.PeerError):
        dist.barrier()
    member.go_on(2, handles)


def after_timeout(member: Survivor) -> None:
    """A rank that is stopped, and killed later."""
    handles = member.all(1)
    check_sum()
    if member.is_victim:
        time.sleep(1.0)
        member.die()
    member.group.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(rallypoint.PeerError):
        dist.all_reduce(torch.ones(4))
    member.group.set_timeout(timedelta(seconds=60))
    member.go_on(2, handles)


def rejects(member: Survivor) -> None:
    handles = member.all(1)
    member.die()
    left = [handles[each] for each in member.others]
    with pytest.raises(RuntimeError, match="already used"):
        member.reconfigure(1, left)
    member.go_on(2, handles)


def while_it_forms(member: Survivor) -> None:
    """Whether the others have formed the round with the victim or not, they go on."""
    handles = member.all(1)
    if member.is_victim:
        threading.Timer(member.chance.random() / 20, member.die).start()
    try:
        dist._reconfigure(2, handles, timeout=SHORT).wait()
        while True:
            dist.barrier()
    except (rallypoint.PeerError, rallypoint.StoreError):  # it may have served the round's store
        member.go_on(3, handles)


CASES: tuple[Case, ...] = (
    *(basic, all_reduce, send_recv, shrink, scale_down_up, single_to_all, identity, as_a_set),
    *(late_join, merge_split, after_abort, after_timeout, rejects, while_it_forms),
)


def be_a_rank(case: Case, victim: int, seed: int) -> None:
    """In a process of its own."""
    member = Survivor(victim, random.Random(seed))
    member.begin(case.__name__)
    case(member)
    assert not member.is_victim
    dist.destroy_process_group()


def forked(case: Case, victim: int, seed: int) -> list[int]:
    """How its ranks ended."""
    with StoreServer() as server:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
        started = []
        for rank in range(SIZE):
            pid = os.fork()
            if pid:
                started.append(pid)
                continue
            os.environ["RANK"] = str(rank)
            status = 1
            try:
                be_a_rank(case, victim, seed)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        deadline, ended = time.monotonic() + LONGEST_S, dict[int, int]()
        while len(ended) < SIZE:
            for pid in started:
                if pid not in ended:
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGABRT)
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        ended[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    return [ended[pid] for pid in started]


def main() -> None:
    chance = random.Random(int(sys.argv[1]))
    for case in CASES:
        victim, seed = chance.randrange(SIZE), chance.randrange(1 << 30)
        statuses = forked(case, victim, seed)
        told = {"case": case.__name__, "victim": victim, "statuses": statuses}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
