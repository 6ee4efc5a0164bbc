"""A device's memory as other processes see it: what it must offer, and what is open of theirs."""

from __future__ import annotations

import struct
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

IDLE_S = 1.0  # an open mapping keeps memory that a peer has freed from the driver
MOST_MAPPINGS, MOST_MAPPED_BYTES = 32, 4 << 30
HANDLE_BYTES = 64


class Location(NamedTuple):
    """Where contiguous bytes of a rank are, for the other ranks.

    Attributes:
        number: of their allocation, which no other one of the process has, not even later; 0 if
            there are no bytes, or others cannot have them.
        offset: where they begin in it, in bytes.
        nbytes: how many they are.
        size: of the allocation, in bytes.
        handle: what `DeviceMemory.open` takes.
    """

    number: int
    offset: int
    nbytes: int
    size: int
    handle: bytes

    @property
    def is_shared(self) -> bool:
        """Whether others can have these bytes."""
        return self.number > 0 or self.nbytes == 0

    def meets(self, other: Location) -> bool:
        """Whether they share memory, of one rank."""
        begin = max(self.offset, other.offset)
        end = min(self.offset + self.nbytes, other.offset + other.nbytes)
        return self.number == other.number and begin < end


FIELDS = f"4Q{HANDLE_BYTES}s"  # of a Location, for structs
LOCATION = struct.Struct(f"<{FIELDS}")


class DeviceMemory(Protocol):
    """The memory of one device. Any thread may call its methods."""

    identity: bytes  # of the device, 16 bytes; all processes have the same

    def export(self, flat: torch.Tensor) -> Location | None:
        """Where some bytes are; None: other processes cannot have this memory."""

    def open(self, handle: bytes, size: int) -> torch.Tensor:
        """Another process's allocation, as bytes.

        Raises:
            OSError: it cannot be had.
        """

    def close(self, whole: torch.Tensor) -> None:
        """Give up what `open` returned, of which no part is used any more."""

    def mark(self, device: torch.device) -> Any:  # noqa: ANN401 - an event
        """Its `synchronize()` waits for what a device's current stream has been given so far."""

    def stream(self) -> AbstractContextManager[object]:
        """Meanwhile, this thread's operations go to a stream on which no one else waits."""

    def synchronize(self) -> None:
        """Wait for that stream."""


class Mappings:
    """The other ranks' allocations that are open here, by rank and number.

    Hold `lock` while a view is used, and do not wait for other ranks meanwhile.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.lock = threading.RLock()
        self.memory = memory
        self._open: dict[tuple[int, int], tuple[torch.Tensor, float]] = {}  # and their last use
        self._is_watched = False  # a thread closes unused ones soon

    def location(self, flat: torch.Tensor) -> Location:
        """Where bytes of this process are."""
        found = self.memory.export(flat) if len(flat) else None
        return found or Location(0, 0, len(flat), 0, b"")

    def view(self, rank: int, where: Location) -> torch.Tensor:
        """A rank's bytes.

        Raises:
            OSError: they cannot be had.
        """
        key = rank, where.number
        found = self._open.pop(key, None)
        whole = self.memory.open(where.handle, where.size) if found is None else found[0]
        self._open[key] = whole, time.monotonic()  # the last one used is the last one here
        self._watch()
        return whole[where.offset : where.offset + where.nbytes]

    def close_unused(self) -> None:
        """Close those that have not been used for a second, and the oldest of too many."""
        with self.lock:
            now, total = time.monotonic(), sum(len(whole) for whole, _ in self._open.values())
            for key, (whole, used) in list(self._open.items()):
                is_bounded = len(self._open) <= MOST_MAPPINGS and total <= MOST_MAPPED_BYTES
                if is_bounded and now - used < IDLE_S:
                    return
                total -= len(whole)
                del self._open[key]
                self.memory.close(whole)

    def close(self) -> None:
        """Close all."""
        with self.lock:
            while self._open:
                self.memory.close(self._open.popitem()[1][0])

    def _watch(self) -> None:
        if self._open and not self._is_watched:
            self._is_watched = True
            timer = threading.Timer(IDLE_S, self._tidy)
            timer.daemon = True
            timer.start()

    def _tidy(self) -> None:
        with self.lock:
            self._is_watched = False
            self.close_unused()
            self._watch()
