"""How ranks wait follows from which cores they may use."""

from __future__ import annotations

import os
import threading

from rallypoint.process_group.formation.connecting import have_cores, own_cores


def test_by_machines_and_cores() -> None:
    assert have_cores(["0", "0"], ["3", "3"]) == [True] * 2
    assert have_cores(["0", "0", "0"], ["3"] * 3) == [False] * 3
    assert have_cores(["0", "0"], ["1", "2"]) == [True] * 2  # tied to one each
    assert have_cores(["0", "0"], ["1", "1"]) == [False] * 2  # tied to the same
    assert have_cores(["0", "1", "0", "1"], ["1", "1", "2", "1"]) == [True, False, True, False]
    assert have_cores(["7"] * 300, [f"{1 << core:x}" for core in range(300)]) == [True] * 300


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
