"""The limit of descriptors: raised if it may be, named if it is too low."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.process_group.formation.host_network import make_room


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The limits of a make-believe process: now, and whatever they are set to."""
    current = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: current[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: current.append(both))
    yield current


def test_it_is_raised_as_far_as_is_wished(limits: list[tuple[int, int]]) -> None:
    make_room(100, 1000, ranks=10)
    soft, hard = limits[-1]
    assert 1200 < soft <= 1200 + len(list(Path("/proc/self/fd").iterdir())) + 1
    assert hard == 4096


def test_the_rest_of_what_is_wished_can_wait(limits: list[tuple[int, int]]) -> None:
    make_room(100, 100_000, ranks=10)
    assert limits[-1] == (4096, 4096)


def test_what_is_there_is_left_alone(limits: list[tuple[int, int]]) -> None:
    limits.append((4096, 4096))
    make_room(100, 1000, ranks=10)
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    make_room(10_000, 10_000, ranks=10)
    assert len(limits) == 3


def test_too_low_a_limit_is_named_with_what_is_needed(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(HostError) as raised:
        make_room(5000, 9000, ranks=1666)
    found = re.fullmatch(
        r"this rank needs (\d+) file descriptors, 5000 of them for connections to 1666 ranks, but"
        r" its limit is 4096; raise the hard limit \(RLIMIT_NOFILE, ulimit -Hn\)",
        str(raised.value),
    )
    assert found
    assert int(found[1]) > 5000
    assert len(limits) == 1
