"""The directory in which agents leave their addresses: what each sees, and who begins the job."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.launch.rounds.shared_directory import AddressFiles, Listing, may_found
from rallypoint.rendezvous.job.round import Endpoint

A, B = Endpoint(host="10.0.0.1", port=4001), Endpoint(host="fd00::2", port=4002)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_each_sees_the_others(shared: Path) -> None:
    a, b = (AddressFiles(str(shared), key) for key in ("aa", "bb"))
    a.leave_address(A)
    assert a.contents() == Listing(others={})
    b.leave_address(B)
    assert (a.contents().others, b.contents().others) == ({"bb": B}, {"aa": A})
    b.clear(is_over=False)
    assert a.contents() == Listing(others={})


def test_what_else_lies_there_does_no_harm(shared: Path) -> None:
    a = AddressFiles(str(shared), "aa")
    a.leave_address(A)
    for name, text in {
        "agent.b": "10.0.0.2", "agent.c": "10.0.0.3:99999", "agent.d": "", "agent.l": "name:7",
        "agent.e": "10.0.0.5:7 and more", "agent.f-g": "10.0.0.6:7", "part.h": "10.0.0.7:7",
        "agent.i": "10.0.0.8:8\n", "founder.x": "i", "founder.": "i", "README": "a" * 10_000,
    }.items():  # fmt: skip
        (shared / name).write_text(text)
    (shared / "agent.j").write_bytes(bytes(range(256)) * 100)
    (shared / "agent.k").mkdir()
    os.mkfifo(shared / "agent.m")  # whose reader would wait for ever
    (shared / "agent.n").symlink_to(shared / "agent.i")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shared / "agent.o"))
    found = a.contents()
    assert dict(found.others) == {"i": Endpoint(host="10.0.0.8", port=8)}
    assert found.generation == -1


def test_a_founder_that_is_seen_has_not_left(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing may lack what came while it was made, and have what came after that."""
    a, b = (AddressFiles(str(shared), key) for key in ("aa", "bb"))
    b.leave_address(B)
    a.leave_address(A)
    assert a.found(0)
    whole = [path.name for path in shared.iterdir()]
    lists = iter([[name for name in whole if name != "agent.aa"], whole])
    monkeypatch.setattr(os, "listdir", lambda _: next(lists))
    seen = b.contents()
    assert (seen.founder, seen.others) == ("aa", {"aa": A})
    assert not may_found(seen, unanswered_s=0.0, patience_s=1.0)


def test_the_second_does_not_begin_another_job(shared: Path) -> None:
    """It looked before the founder came, and knows only that there is one."""
    a, b = (AddressFiles(str(shared), key) for key in ("aa", "bb"))
    b.leave_address(B)
    seen = b.contents()
    assert may_found(seen, unanswered_s=0.0, patience_s=1.0)
    a.leave_address(A)
    assert a.found(0)
    assert not b.found(0)
    seen = seen.overtaken()
    assert not may_found(seen, unanswered_s=59.0, patience_s=1.0)  # as late NFS may show it
    assert may_found(seen, unanswered_s=60.0, patience_s=1.0)
    assert b.contents() == Listing(others={"aa": A}, founder="aa", generation=0)


def test_one_of_many_founds(shared: Path) -> None:
    everyone = [AddressFiles(str(shared), f"key{i}") for i in range(16)]
    for each in everyone:
        each.leave_address(A)
    start = threading.Barrier(len(everyone))
    founders: list[int] = []

    def found(number: int) -> None:
        start.wait()
        if everyone[number].found(0):
            founders.append(number)

    threads = [threading.Thread(target=found, args=(number,)) for number in range(len(everyone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (founder,) = founders
    seen = everyone[0].contents()
    assert (seen.founder, seen.generation) == (f"key{founder}", 0)
    other = everyone[founder - 1]
    assert other.found(1)
    assert everyone[0].contents().generation == 1
    other.clear(is_over=False)
    assert everyone[0].contents().generation == 1
    other.clear(is_over=True)
    assert everyone[0].contents().generation == 0  # its founder is still here
    everyone[founder].clear(is_over=False)
    assert everyone[0].contents().generation == 0
    everyone[founder - 2].clear(is_over=True)
    assert everyone[0].contents().generation == -1


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """Nor one below what is missing: a file system that is not there, or a wrong letter."""
    (tmp_path / "file").touch()
    for name in ("file", "not_mounted"):
        told = rf"cannot use the directory .*/{name}/run of --rdzv-endpoint"
        with pytest.raises(HostError, match=told):
            AddressFiles(str(tmp_path / name / "run"), "aa").leave_address(A)


@pytest.mark.parametrize(
    ("seen", "vain_s", "expected"),
    [
        (Listing(others={}), 0, True),
        (Listing(others={"b": B}), 0, True),  # both may try, and one file is made
        (Listing(others={}, founder="b", generation=0), 0, True),
        (Listing(others={"b": B}, founder="b", generation=0), 9.9, False),
        (Listing(others={"b": B}, founder="gone", generation=0), 9.9, False),
        (Listing(others={"b": B}, founder="b", generation=3), 10.0, True),
    ],
)
def test_who_may_found(seen: Listing, vain_s: float, expected: bool) -> None:
    assert may_found(seen, unanswered_s=vain_s, patience_s=10.0) is expected


def test_a_directory_that_is_not_there(shared: Path) -> None:
    """Nobody has founded anything there: it is an error, and not another's success."""
    with pytest.raises(FileNotFoundError):
        AddressFiles(str(shared), "aa").found(0)
