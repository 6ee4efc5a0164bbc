"""How ranks wait follows from whose cores are whose."""

from __future__ import annotations

import os
import threading

from rallypoint.process_group.waiting import Room, own_cores, rooms

CROWDED, ENOUGH, OWN = Room


def test_by_hosts_and_cores() -> None:
    assert rooms([0, 0], ["3", "3"]) == [ENOUGH] * 2
    assert rooms([0, 0, 0], ["3"] * 3) == [CROWDED] * 3
    assert rooms([0, 0], ["1", "2"]) == [OWN] * 2
    assert (
        rooms([0, 0], ["1", "1"]) == [CROWDED] * 2
    )  # two tied to one core, whatever else is there
    assert rooms([0, 0, 0], ["c", "3", "3"]) == [OWN, ENOUGH, ENOUGH]
    assert rooms([0, 1, 0, 1], ["1", "1", "2", "1"]) == [OWN, CROWDED, OWN, CROWDED]
    assert rooms([0, 1], ["1", "1"]) == [ENOUGH] * 2  # nobody to wait for here
    wide = [f"{1 << core:x}" for core in range(300)]
    assert rooms([7] * 300, wide) == [OWN] * 300


def test_own_cores_are_those_of_the_thread() -> None:
    def pinned() -> None:
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        found.append((own_cores(), f"{1 << core:x}"))

    found: list[tuple[str, str]] = []
    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert [one for one, _ in found] == [other for _, other in found] != []
    assert int(own_cores(), 16).bit_count() == len(os.sched_getaffinity(0))
