"""What goes to and fro between the starter and an actor, which here is in this process."""

from __future__ import annotations

import os
import queue
import select
from collections.abc import Iterator

import pytest
from tests.unit.cli.ray.actors import Actor, ray

from rallypoint.cli.ray.channel import Channel

MODULE = "a.program"


class Program:
    """In place of a Shell: returns its input as its output, and tells its end on stderr."""

    def __init__(self) -> None:
        self._copied: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()

    def start(self, module: str) -> None:
        if module != MODULE:
            raise ModuleNotFoundError(f"No module named {module!r}")

    def write(self, data: bytes) -> None:
        self._copied.put((data, b""))

    def end_input(self) -> None:
        self._copied.put((b"", b"done\n"))
        self.end()

    def end(self) -> None:
        self._copied.put((b"", b""))

    def read(self) -> tuple[bytes, bytes]:
        return self._copied.get()


@pytest.fixture
def actor() -> Iterator[Actor]:
    actor = Actor(Program())
    yield actor
    if not actor.is_killed:
        actor.kill("the test is over")


def read_all(fd: int) -> bytes:
    """Until its end; closes it, as the link does."""
    found = b""
    while data := os.read(fd, 1 << 16):
        found += data
    os.close(fd)
    return found


def has_ended(channel: Channel, within_s: float | None = None) -> bool:
    return bool(select.select([channel.ended], [], [], within_s)[0])


def join(channel: Channel) -> None:
    for thread in channel.threads:
        thread.join()


def test_what_is_written_comes_back_in_order(actor: Actor) -> None:
    channel = Channel(actor, ray(), MODULE)
    for piece in (b"one ", b"two ", b"three\n"):
        os.write(channel.stdin, piece)
    assert os.read(channel.stdout, 4) == b"one "
    assert not has_ended(channel, 0)
    os.write(channel.stdin, many := b"line\n" * 10_000)
    os.close(channel.stdin)
    assert read_all(channel.stdout) == b"two three\n" + many
    assert read_all(channel.stderr) == b"done\n"
    assert has_ended(channel)
    assert not channel.is_lost
    assert channel.why("") == "the program there exited before it answered"
    channel.close()
    join(channel)


def test_the_actor_is_lost(actor: Actor) -> None:
    channel = Channel(actor, ray(), MODULE)
    os.write(channel.stdin, b"up")
    assert os.read(channel.stdout, 2) == b"up"
    actor.kill("\nThe actor died.\n\tclass_name: Shell\n")
    assert has_ended(channel)
    assert channel.is_lost
    assert channel.why("") == "The actor died"
    os.close(channel.stdin)
    assert read_all(channel.stdout) + read_all(channel.stderr) == b""
    channel.close()
    join(channel)


def test_the_program_cannot_be_started(actor: Actor) -> None:
    channel = Channel(actor, ray(), "another.program")
    assert has_ended(channel)
    why = channel.why("python: No module named 'rallypoint'")
    assert why == "install Rallypoint there as well, for the Python that runs Ray"
    assert channel.why("") == "ModuleNotFoundError: No module named 'another.program'"
    os.close(channel.stdin)
    assert read_all(channel.stdout) + read_all(channel.stderr) == b""
    channel.close()
    join(channel)


def test_it_is_ended_from_here(actor: Actor) -> None:
    channel = Channel(actor, ray(), MODULE)
    channel.end()
    assert actor.is_killed
    assert has_ended(channel)
    os.close(channel.stdin)
    assert read_all(channel.stdout) + read_all(channel.stderr) == b""
    channel.close()
    join(channel)


def test_nobody_reads_any_more(actor: Actor) -> None:
    """The link is closed while the program still writes: both threads end, and nothing is told."""
    channel = Channel(actor, ray(), MODULE)
    os.close(channel.stdout)
    os.close(channel.stderr)
    os.write(channel.stdin, b"for nobody")
    assert has_ended(channel)
    assert not channel.is_lost
    os.close(channel.stdin)
    channel.close()
    join(channel)
