"""Transfers of other backends' groups in the flight record, as another process reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rallypoint.base.flight_record import read_groups
from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES

# Keeps a record, and does what it is told; a process keeps one record for its whole life.
KEEPER = """
import json, sys
from rallypoint import _native
from rallypoint.engine.recording import describe
said = json.loads(describe("pairs", "torch pairs", [4, 5, 9]))
said |= {"backend": "gloo", "is_complete": True}
assert _native.open_flight_record(int(sys.argv[1]), 0, '{"operations": [], "dtypes": []}')
group = _native.open_foreign_group(json.dumps(said))
print(group, flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Keeper:
    """Such a process, and its record."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("test")
        os.ftruncate(self.descriptor, FLIGHT_RECORD_BYTES)
        command = [sys.executable, "-c", KEEPER, str(self.descriptor)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, pass_fds=[self.descriptor]
        )
        assert int(self._told()) >= 0

    def do(self, call: str) -> str:
        assert self._process.stdin is not None
        print(f"_native.{call}", file=self._process.stdin, flush=True)
        return self._told()

    def group(self) -> RecordedGroup:
        (group,) = read_groups(self.descriptor, 0)
        return group

    def close(self) -> None:
        self._process.communicate()
        os.close(self.descriptor)

    def _told(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.close()


def transfers(group: RecordedGroup) -> list[tuple[str, str, int | None, int, int, str]]:
    return [
        (each.operation, each.state, each.peer, each.root, each.count, each.dtype)
        for each in group.transfers
    ]


def test_what_is_under_way_is_told_and_nothing_else(keeper: Keeper) -> None:
    assert keeper.group().name == "pairs"
    first = keeper.do("begin_foreign_transfer(group, True, 1, 7, 100, 'float32')")
    second = keeper.do("begin_foreign_transfer(group, False, -1, 8, 3, 'int64')")
    refused = keeper.do("begin_foreign_transfer(group, True, 2, 9, 1, 'int8')")
    sending = ("send", "running", 1, 7, 100, "float32")
    receiving = ("recv", "running", -1, 8, 3, "int64")
    assert transfers(keeper.group()) == [sending, receiving, ("send", "running", 2, 9, 1, "int8")]
    keeper.do(f"withdraw_foreign_transfer(group, {refused})")
    assert transfers(keeper.group()) == [sending, receiving]
    keeper.do(f"end_foreign_transfer(group, {first}, False)")
    keeper.do(f"end_foreign_transfer(group, {second}, True)")
    assert transfers(keeper.group()) == [("recv", "failed", -1, 8, 3, "int64")]
    keeper.do("leave_foreign_group(group)")
    assert keeper.group().has_left


def test_more_than_there_is_room_for_are_not_recorded(keeper: Keeper) -> None:
    numbers = keeper.do(
        "begin_foreign_transfer(group, True, 1, 0, 0, '') or"
        " [_native.begin_foreign_transfer(group, True, 1, 0, 0, '') for _ in range(1000)]"
    )
    assert "-1]" in numbers
    assert keeper.do("begin_foreign_transfer(group, True, 1, 0, 0, '')") == "-1"
    kept = len(keeper.group().transfers)
    assert 0 < kept < 1000
    keeper.do("end_foreign_transfer(group, 0, False)")
    assert keeper.do("begin_foreign_transfer(group, True, 1, 0, 0, '')") == "0"
    for call in ("end_foreign_transfer(99, 0, False)", "withdraw_foreign_transfer(99, 0)"):
        keeper.do(call)  # of a group that there is not
    assert len(keeper.group().transfers) == kept
