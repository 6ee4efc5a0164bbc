"""Resolves host names in separate threads, because a name service may be slow.

    address_of(host) --known--> an address          failed(host): try the next one, and when all
                     --else---> None, and later:                  have failed, look it up again
    take() --> hosts that can be asked for again

A host that comes back with another address is found; the pauses between lookups grow.
"""

from __future__ import annotations

import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable

from rallypoint.base.address import numeric_family
from rallypoint.base.errors import HostError
from rallypoint.base.inbox import Inbox
from rallypoint.cluster.network import addresses_of

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0


def in_thread(work: Callable[[], None]) -> None:
    """Do `work` in a thread, so that a signal can interrupt the wait; raises what it raises."""
    raised: list[BaseException] = []
    is_done = allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            is_done.release()

    start_new_thread(run, ())
    is_done.acquire()
    if raised:
        raise raised[0]


class _Name:
    """The lookup state of one host."""

    def __init__(self) -> None:
        self.addresses: list[str] = []  # the next one to try comes first
        self.failures = 0  # connection failures since the lookup
        self.error = ""
        self.is_asked = False
        self.not_before = 0.0
        self.pause_s = _FIRST_PAUSE_S


class Names:
    """The addresses of hosts. Wait until `fileno()` is readable; then call `take()`."""

    def __init__(self, look_up: Callable[[str], list[str]] = addresses_of) -> None:
        self._look_up = look_up
        self._names: dict[str, _Name] = {}
        self._answers: Inbox[tuple[str, list[str] | HostError]] = Inbox()

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has results."""
        return self._answers.fileno()

    def address_of(self, host: str) -> str | None:
        """The address to connect to now; None while it is being looked up."""
        if numeric_family(host) is not None:
            return host
        name = self._names.setdefault(host, _Name())
        is_worn = name.failures >= len(name.addresses)
        if is_worn and not name.is_asked and time.monotonic() >= name.not_before:
            name.is_asked = True
            start_new_thread(self._ask, (host,))
        if name.is_asked:
            return None
        if not name.addresses:
            raise HostError(name.error)
        return name.addresses[0]

    def failed(self, host: str) -> None:
        """Note that no reply came from that address."""
        name = self._names.get(host)
        if name is not None and name.addresses:
            name.failures += 1
            name.addresses.append(name.addresses.pop(0))

    def worked(self, host: str) -> None:
        """Note that the host answered at that address."""
        name = self._names.get(host)
        if name is not None:
            name.failures, name.pause_s = 0, _FIRST_PAUSE_S

    def take(self) -> list[str]:
        """The hosts whose names have been looked up since the last call."""
        hosts = []
        for host, answer in self._answers.take():
            hosts.append(host)
            name = self._names[host]
            name.is_asked, name.failures = False, 0
            name.not_before = time.monotonic() + name.pause_s
            name.pause_s = min(2 * name.pause_s, _LONGEST_PAUSE_S)
            if isinstance(answer, HostError):
                name.error = str(answer)  # the last known address may still be right
            else:
                name.addresses = answer
        return hosts

    def close(self) -> None:
        """Stop; a thread that still waits is left alone."""
        self._answers.close()

    def _ask(self, host: str) -> None:
        answer: list[str] | HostError
        try:
            answer = self._look_up(host)
        except HostError as error:
            answer = error
        self._answers.put((host, answer))
