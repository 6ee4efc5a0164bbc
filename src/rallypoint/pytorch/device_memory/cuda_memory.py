"""The memory of a GPU, by PyTorch and four functions of libcuda.

libcuda is loaded by its name when ranks first share a GPU, so nothing of CUDA is in the package.
tests/stand_in.py has the same for memory files, for machines without a GPU.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from rallypoint.pytorch.device_memory.mappings import HANDLE_BYTES, Location

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaMemory:
    """A DeviceMemory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._stream = torch.cuda.Stream(device)
        properties: Any = torch.cuda.get_device_properties(device)
        self.identity = uuid.UUID(str(properties.uuid).removeprefix("GPU-")).bytes

    def export(self, flat: torch.Tensor) -> Location | None:
        """See DeviceMemory. Expandable segments, and cudaMallocAsync, have no such handle."""
        if flat.device != self._device:
            return None
        at, base = ctypes.c_uint64(flat.data_ptr()), ctypes.c_uint64()
        size, number = ctypes.c_size_t(), ctypes.c_uint64()
        handle = (ctypes.c_char * HANDLE_BYTES)()
        with self._context():
            failed = (
                self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at)
                or self._cuda.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, base)
                or self._cuda.cuIpcGetMemHandle(handle, base)
            )
        if failed:
            return None
        return Location(number.value, at.value - base.value, flat.numel(), size.value, handle.raw)

    def open(self, handle: bytes, size: int) -> torch.Tensor:
        """See DeviceMemory."""
        address = ctypes.c_uint64()
        with self._context():
            error = self._cuda.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
        if error:
            raise OSError(f"cuIpcOpenMemHandle failed with CUDA's error {error}")
        data = {"data": (address.value, False), "shape": (size,), "typestr": "|u1", "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=data), device=self._device)

    def close(self, whole: torch.Tensor) -> None:
        """See DeviceMemory."""
        with self._context():
            self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(whole.data_ptr()))

    def mark(self, device: torch.device) -> torch.cuda.Event:
        """See DeviceMemory."""
        return torch.cuda.current_stream(device).record_event()

    def stream(self) -> AbstractContextManager[object]:
        """See DeviceMemory."""
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """See DeviceMemory."""
        self._stream.synchronize()

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Have PyTorch's context of the device be this thread's, for calls of libcuda."""
        with torch.cuda.device(self._device):
            self._stream.query()  # before CUDA 12, only a call of the runtime sets it
            yield


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)
