"""One rank of three that reconfigures torch's default group; for test_torch_reconfigure.py.

The cases are those of PyTorch's own test of fault tolerance; torch_reconfigure_kills.py has them
with a rank that is killed. "done" is printed at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rallypoint

SIZE = 3
WAIT = timedelta(seconds=60)
Case = Callable[["Member"], None]


class Member:
    """This process: its number, which stays, and what all exchange."""

    def __init__(self) -> None:
        self.number = int(os.environ["RANK"])
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, False, WAIT
        )
        self._exchanges = 0

    def begin(self, name: str) -> None:
        """A default group that is not yet formed."""
        self._name = name
        dist.init_process_group(
            "rallypoint",
            world_size=SIZE,
            rank=self.number,
            store=dist.PrefixStore(name, self.store),
            timeout=WAIT,
            enable_reconfigure=True,
        )
        self.group = dist.group.WORLD
        assert dist._supports_reconfigure()

    def exchange(self, text: str, members: range = range(SIZE)) -> list[str]:
        self._exchanges += 1
        key = f"{self._name}/{self._exchanges}/"
        self.store.set(f"{key}{self.number}", text)
        return [self.store.get(f"{key}{each}").decode() for each in members]

    def handles(self) -> list[str]:
        return self.exchange(dist._get_reconfigure_handle())

    def reconfigure(self, number: int, handles: list[str] | set[str]) -> None:
        dist._reconfigure(number, handles, timeout=WAIT).wait()
        assert dist.group.WORLD is self.group and dist.get_world_size() == len(handles)

    def all(self, number: int) -> list[str]:
        """Form the group of all; returns their handles."""
        handles = self.handles()
        self.reconfigure(number, handles)
        assert dist.get_rank() == self.number
        return handles

    def alone(self, number: int) -> None:
        self.reconfigure(number, [dist._get_reconfigure_handle()])
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)


def check_sum() -> None:
    size = dist.get_world_size()
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 4


def basic(member: Member) -> None:
    with pytest.raises(rallypoint.RevokedError, match="has no members yet"):
        dist.barrier()
    member.all(1)


def all_reduce(member: Member) -> None:
    member.all(1)
    check_sum()
    told: list[int] = [0] * SIZE
    dist.all_gather_object(told, member.number)
    assert told == [0, 1, 2]


def send_recv(member: Member) -> None:
    member.all(1)
    rank = dist.get_rank()
    received = torch.zeros(4)
    sent = dist.isend(torch.full((4,), rank + 1.0), (rank + 1) % SIZE)
    before = (rank - 1) % SIZE
    dist.recv(received, before)
    sent.wait()
    assert received.tolist() == [before + 1.0] * 4


def without(member: Member, excluded: int) -> None:
    handles = member.all(1)
    if member.number != excluded:
        del handles[excluded]
        member.reconfigure(2, handles)
        check_sum()
        tensor = torch.full((4,), float(dist.get_rank()))
        dist.broadcast(tensor, group_src=1)
        assert tensor.tolist() == [1.0] * 4


def shrink_last(member: Member) -> None:
    without(member, SIZE - 1)


def shrink_middle(member: Member) -> None:
    without(member, 1)


def scale_down_up(member: Member) -> None:
    member.alone(10 + member.number)
    member.all(2)
    member.alone(20 + member.number)


def single_to_all(member: Member) -> None:
    member.alone(10 + member.number)
    member.all(2)
    check_sum()


def identity(member: Member) -> None:
    handles = member.all(1)
    assert member.all(2) == handles
    check_sum()


def as_a_set(member: Member) -> None:
    handles = member.handles()
    member.reconfigure(1, set(handles))
    assert dist.get_rank() == sorted(handles).index(handles[member.number])
    check_sum()


def late_join(member: Member) -> None:
    handles = member.handles()
    if member.number == 0:
        member.reconfigure(1, handles[:1])
    member.all(2)
    check_sum()


def merge_split(member: Member) -> None:
    handles = member.handles()
    member.reconfigure(*((1, handles[:1]) if member.number == 0 else (2, handles[1:])))
    check_sum()
    member.all(3)
    check_sum()


def after_abort(member: Member) -> None:
    member.all(1)
    member.group._get_backend(torch.device("cpu")).abort()
    with pytest.raises(rallypoint.RevokedError):
        dist.barrier()
    member.all(2)
    check_sum()


def after_timeout(member: Member) -> None:
    member.all(1)
    check_sum()
    if member.number:
        member.group.set_timeout(timedelta(seconds=0.3))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        for _ in range(2):
            with pytest.raises(rallypoint.CollectiveTimeoutError):
                work.wait()
    member.exchange("has timed out")
    member.group.set_timeout(WAIT)
    member.all(2)
    check_sum()


def rejects(member: Member) -> None:
    member.alone(1)
    with pytest.raises(RuntimeError, match="already used"):
        member.alone(1)
    for handles in ([], ["nonsense"], [dist._get_reconfigure_handle()] * 2):
        with pytest.raises(ValueError, match="own once"):
            member.reconfigure(2, handles)
    with pytest.raises(ValueError, match="is not a handle"):
        member.reconfigure(2, ["nonsense", dist._get_reconfigure_handle()])
    check_sum()


def hooks_and_tools_follow(member: Member) -> None:
    member.all(1)
    seen = list[object]()
    dist.group.WORLD.register_pre_hook(1, seen.append)
    member.all(2)
    before = len(seen)
    check_sum()
    assert len(seen) > before
    with torch.profiler.profile() as profile:
        check_sum()
    assert any(
        "all_reduce" in event.name or "allreduce" in event.name for event in profile.events()
    )


CASES: list[Case] = [
    *(basic, all_reduce, send_recv, shrink_last, shrink_middle, scale_down_up, single_to_all),
    *(identity, as_a_set, late_join, merge_split, after_abort, after_timeout, rejects),
    hooks_and_tools_follow,
]

if __name__ == "__main__":
    me = Member()
    for case in CASES:
        me.begin(case.__name__)
        case(me)
        me.exchange("done")
        dist.destroy_process_group()
        print(case.__name__, flush=True)
    print("done", flush=True)
