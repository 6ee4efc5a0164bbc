"""A hook for DDP that averages gradient buckets where other ranks of the host read them in place.

DDP allocates them in private memory. When `ddp_comm_hook` first sees a bucket, its storage moves to
an unnamed file in /dev/shm, as PyTorch does for tensors that processes share: all views follow, and
the engine learns the location. A storage stays there, kept alive here, until nothing else uses it
or the last group has ended. See docs/decisions/061.
"""

# DDP cannot evaluate a hook's annotations if they are strings: no annotations from __future__.
import os
import threading
from typing import Any

import torch
import torch.distributed as dist

from rallypoint._native import abandon, adopt
from rallypoint.engine.communicator import Communicator, PeerMemoryAccess
from rallypoint.pytorch.memory import LEAST_BYTES

_DIRECTORY = "/dev/shm"


class SharedBuckets:
    """The storages of this process that were moved to shared memory."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may destroy the group meanwhile
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address
        self._groups = 0

    def add_group(self) -> None:
        """Note that a group has been formed."""
        with self._lock:
            self._groups += 1

    def remove_group(self) -> None:
        """Note that a group has ended."""
        with self._lock:
            self._groups -= 1
            self._forget(all_of_them=self._groups == 0)

    def share(self, tensor: torch.Tensor, communicator: Communicator) -> None:
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
        """Release the storages that no one else uses, or all."""
        for address, storage in list(self._storages.items()):
            is_used = torch._C._storage_Use_Count(storage._cdata) > 1
            if all_of_them or not is_used:
                abandon(address, is_used)
                self._storages.pop(address, None)


shared_buckets = SharedBuckets()


def ddp_comm_hook(
    state: Any,  # noqa: ANN401
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients, in fewer bits if `state` says so, without DDP's own pass over them.

    In full precision, the ranks of a host read them in place (docs/decisions/061-buckets.md).

        model.register_comm_hook(torch.bfloat16, rallypoint.pytorch.ddp_comm_hook)

    Args:
        state: None, or the dtype in which gradients travel: torch.bfloat16 or torch.float16. They
            are rounded, averaged as float32, and rounded again, so that float16 overflows only if
            the average does. If the model's group is not the default one: a pair of the group and
            one of these.
        bucket: gradients, side by side.
    """
    group, dtype = state if isinstance(state, tuple) else (None, state)
    gradients = bucket.buffer()
    sent = gradients if dtype in (None, gradients.dtype) else gradients.to(dtype)
    ours = getattr(dist.group.WORLD if group is None else group, "engine_group", None)
    if sent is gradients and ours is not None:
        shared_buckets.share(gradients, ours.communicator)
    work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=group, async_op=True)

    def received(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        result = future.value()[0]  # raises the error, if any
        return result if result is gradients else gradients.copy_(result)

    return work.get_future().then(received)


def _is_whole_storage(tensor: torch.Tensor) -> bool:
    nbytes = tensor.nbytes
    return (
        nbytes >= LEAST_BYTES
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
