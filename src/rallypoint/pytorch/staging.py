"""Host memory through which a GPU's tensors are communicated.

It is page-locked, which the GPU copies to and from several times as fast, and from 1 MiB on it is
an arena: the other ranks of the host read it in place. Locking pages takes long, so memory that
nothing refers to any more is kept for the next call, up to what was in use at one time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
import torch

from rallypoint._native import allocate

_LEAST_BYTES = 1 << 20  # below this, a copy costs little
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts
_CLASSES_PER_DOUBLING = 8


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor on the host for the items of one on a GPU, whose own are not specified.

    Whoever has a device copy to or from it in the background keeps it until that is done.
    """
    nbytes = tensor.nbytes
    memory = _pool.take(nbytes) if nbytes >= _LEAST_BYTES else None
    if memory is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.from_numpy(memory)[:nbytes].view(tensor.dtype).view(tensor.shape)


class Pool:
    """Page-locked arenas, in use and kept.

    Args:
        lock, unlock: pages, by address and length in bytes; whether they could.
    """

    def __init__(
        self, lock: Callable[[int, int], bool], unlock: Callable[[int, int], bool]
    ) -> None:
        self._lock_pages, self._unlock_pages = lock, unlock
        self._mutex = threading.Lock()
        self._kept: list[Any] = []  # the arena that came back last is the last one
        self._coming_back: deque[Any] = deque()  # from any thread, at any moment
        self._used = self._most_used = 0
        self._has_failed = False

    def take(self, nbytes: int) -> Any | None:  # noqa: ANN401 - a NumPy array of bytes
        """An array of at least so many bytes; None: no memory is left, or none can be locked.

        Its memory comes back when nothing refers to it any more.
        """
        size = _class_of(nbytes)
        with self._mutex:
            if self._has_failed:
                return None
            while self._coming_back:
                arena = self._coming_back.popleft()
                self._used -= arena.nbytes
                self._kept.append(arena)
            arena = self._kept_of(size)
            if arena is None:
                arena = allocate(size)
                if arena is None:
                    return None
                if not self._lock_pages(_address(arena), size):
                    self._has_failed = True
                    return None
            self._used += size
            self._most_used = max(self._most_used, self._used)
            self._let_go()
        return numpy.asarray(_Lease(arena, self._coming_back))

    def _kept_of(self, size: int) -> Any | None:  # noqa: ANN401
        for place in reversed(range(len(self._kept))):
            if self._kept[place].nbytes == size:
                return self._kept.pop(place)
        return None

    def _let_go(self) -> None:
        """Free what came back first, as long as more is kept than was used at one time."""
        kept = sum(arena.nbytes for arena in self._kept)
        while kept > self._most_used:
            arena = self._kept.pop(0)
            kept -= arena.nbytes
            self._unlock_pages(_address(arena), arena.nbytes)


class _Lease:
    """An arena in use, as NumPy sees it."""

    def __init__(self, arena: Any, coming_back: deque[Any]) -> None:  # noqa: ANN401
        self._arena, self._coming_back = arena, coming_back
        self.__array_interface__ = arena.__array_interface__

    def __del__(self) -> None:
        self._coming_back.append(self._arena)


def _class_of(nbytes: int) -> int:
    """The next of eight sizes from one power of two to the next."""
    step = max(1, (1 << (nbytes - 1).bit_length()) // 2 // _CLASSES_PER_DOUBLING)
    return -(-nbytes // step) * step


def _address(arena: Any) -> int:  # noqa: ANN401
    address: int = arena.__array_interface__["data"][0]
    return address


def _lock(address: int, nbytes: int) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA remembers the error, and the next kernel would raise it
        torch.ones(1, device="cuda")
    return False


def _unlock(address: int, _: int) -> bool:
    return int(torch.cuda.cudart().cudaHostUnregister(address)) == 0


_pool = Pool(_lock, _unlock)
