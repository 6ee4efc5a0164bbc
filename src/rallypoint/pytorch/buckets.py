"""DDP's gradient buckets, placed where the other ranks of the host can read them without a copy.

DDP allocates them in private memory. When `ddp_comm_hook` first sees a bucket, its storage moves to
an unnamed file in /dev/shm, as PyTorch does for tensors that processes share: all views follow, and
the engine learns the location. A storage stays there, kept alive here, until nothing else uses it
or the last group has ended. See docs/decisions/061.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from rallypoint._native import abandon, adopt
from rallypoint.engine.communicator import Communicator, PeerMemoryAccess

_DIRECTORY = "/dev/shm"
_LEAST_BYTES = 1 << 20  # below this, a copy costs little


class SharedBuckets:
    """The storages of this process that were moved to shared memory."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may destroy the group meanwhile
        self._storages: dict[int, Any] = {}  # by address
        self._groups = 0

    def enter(self) -> None:
        """Note that a group has been formed."""
        with self._lock:
            self._groups += 1

    def leave(self) -> None:
        """Note that a group has ended."""
        with self._lock:
            self._groups -= 1
            self._forget(all_of_them=self._groups == 0)

    def share(self, tensor: Any, communicator: Communicator) -> None:  # noqa: ANN401 - of torch
        """Let others read the storage of a bucket in place, if possible."""
        if not _is_whole_storage(tensor) or PeerMemoryAccess.ARENAS not in communicator.reach:
            return
        with self._lock:
            self._forget(all_of_them=False)
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._storages:
                return
            # A storage that cannot be resized has users that know its address, such as NumPy
            # arrays.
            if storage.is_shared() or not storage.resizable():
                return
            if not _has_room(storage.nbytes(), len(communicator.here)):
                return
            try:
                descriptor, _ = storage._share_fd_cpu_()
            except RuntimeError:
                return  # the directory does not exist, or no descriptor is left
            if adopt(storage.data_ptr(), storage.nbytes(), descriptor):
                self._storages[storage.data_ptr()] = storage

    def _forget(self, *, all_of_them: bool) -> None:
        """Release the storages that nobody else uses, or all."""
        for address, storage in list(self._storages.items()):
            is_used = torch._C._storage_Use_Count(storage._cdata) > 1
            if all_of_them or not is_used:
                abandon(address, is_used)
                self._storages.pop(address, None)


shared_buckets = SharedBuckets()


def _is_whole_storage(tensor: Any) -> bool:  # noqa: ANN401 - of torch
    nbytes = tensor.nbytes
    return (
        nbytes >= _LEAST_BYTES
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == nbytes
    )


def _has_room(nbytes: int, ranks: int) -> bool:
    """Whether half of the directory stays free if all ranks of the host do this now.

    A process that writes to a page for which there is no room is killed; and others need the room,
    above all DataLoader.
    """
    try:
        space = os.statvfs(_DIRECTORY)
    except OSError:
        return False
    free = space.f_bavail * space.f_frsize
    return free - nbytes * ranks >= space.f_blocks * space.f_frsize // 2
