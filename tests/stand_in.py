"""A device for machines without a GPU: CPU tensors, in memory files that other processes map.

It has what cuda_memory.py has for a GPU. A tensor's storage moves to a file in shared memory when
it is exported, as PyTorch does it for tensors that processes share. OnStandIn replaces the two
functions of Operations that all calls pass, and hands all tensors to DeviceCalls, as ours hand it
CUDA tensors; `install` does so for all groups of a process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.base.collective import Collective
from rallypoint.pytorch.device_memory.device_calls import DeviceCalls
from rallypoint.pytorch.device_memory.mappings import Location
from rallypoint.pytorch.operations import Operations

_HANDLE = struct.Struct("<qq")  # process and descriptor


class Passed:
    """A mark in a stream whose work is done at once."""

    def synchronize(self) -> None:
        pass


class StandIn:
    """The memory of the stand-in, as DeviceMemory has it."""

    identity = b"stand-in".ljust(16)

    def __init__(self, device: object = None) -> None:
        del device
        self._lock = threading.Lock()
        self.opened: dict[int, mmap.mmap] = {}  # by address

    def export(self, flat: torch.Tensor) -> Location | None:
        storage = flat.untyped_storage()
        with self._lock:
            if not storage.is_shared() and not storage.resizable():
                return None  # others know its address
            descriptor, size = storage._share_fd_cpu_()  # open as long as the storage lives
        number = os.fstat(descriptor).st_ino
        offset = flat.data_ptr() - storage.data_ptr()
        handle = _HANDLE.pack(os.getpid(), descriptor)
        return Location(number, offset, flat.numel(), size, handle)

    def open(self, handle: bytes, size: int) -> torch.Tensor:
        pid, descriptor = _HANDLE.unpack_from(handle)
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(file, size)
        finally:
            os.close(file)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self.opened[whole.data_ptr()] = mapped
        return whole

    def close(self, whole: torch.Tensor) -> None:
        """Unmapped as soon as no view is left."""
        del self.opened[whole.data_ptr()]

    def mark(self, device: object) -> Any:
        return Passed()

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass


_call, _post = Operations._call, Operations._post


class OnStandIn(Operations):
    """The calls of a group of ours, made in the stand-in's memory.

    Args:
        group: LoneGroup or RallypointGroup.
    """

    is_watched = False
    memory_of: Any = StandIn

    def __init__(self, group: Any) -> None:
        self.engine_group, self.devices = group.engine_group, group.devices

    def calls(self) -> DeviceCalls:
        devices = self.devices
        if "cpu" not in devices._calls:
            store = dist.PrefixStore(f"{devices._prefix}/cpu", devices._store)
            calls = DeviceCalls(self.engine_group, store, OnStandIn.memory_of)
            devices._calls["cpu"] = calls
        return devices._calls["cpu"]

    def _call(
        self,
        collective: int,
        operation: str,
        source: Any,
        target: Any,
        opts: Any,
        results: Any,
        *,
        op: int = 0,
        root: int = 0,
        in_place: bool = False,
    ) -> Any:
        given = [each for each in (source, target) if each is not None]
        if not given or getattr(given[0], "is_sparse", False):  # a barrier, or sparse
            return _call(
                self,
                collective,
                operation,
                source,
                target,
                opts,
                results,
                op=op,
                root=root,
                in_place=in_place,
            )
        return OnStandIn.calls(self).collective(
            Collective(collective),
            operation,
            source,
            target,
            opts,
            results,
            root=root,
            in_place=in_place,
        )

    def _post(self, operation: str, tensor: Any, peer: int, tag: int) -> Any:
        return OnStandIn.calls(self).message(operation, tensor, peer, tag)


def install(memory_of: Any = StandIn) -> None:
    """Have all groups of this process from now on use the stand-in for CPU tensors."""
    OnStandIn.memory_of = memory_of
    for name in ("_call", "_post"):
        setattr(Operations, name, vars(OnStandIn)[name])
