"""Tensors as arrays for the engine: views where possible, copies where necessary.

CPU tensors of the engine's dtypes become views of the same memory; process_group.calls.call then
handles strided ones. Tensors of other devices are copied to the host and back. If items are only
moved, their dtype does not matter and bytes are sent.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy
import torch

from rallypoint._native import allocate
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import DTYPES
from rallypoint.process_group.arrays import Array, address, as_array, describe

LEAST_BYTES = 1 << 20  # below this, a copy costs little
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts
_CLASSES_PER_DOUBLING = 8


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor on the host, of the shape of one on a GPU; its items are undefined.

    Keep it until copies in the background to and from it are done.
    """
    nbytes = tensor.nbytes
    memory = _pool.take(nbytes) if nbytes >= LEAST_BYTES else None
    if memory is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.from_numpy(memory)[:nbytes].view(tensor.dtype).view(tensor.shape)


class Pool:
    """Page-locked arenas, in use and free.

    The GPU copies to and from page-locked memory several times as fast, and the other ranks of the
    host read an arena in place. Locking pages takes long, so memory that nothing refers to any more
    stays locked for the next call, up to what was in use at one time.

    Args:
        lock, unlock: pages, by address and length in bytes; whether they could.
    """

    def __init__(
        self, lock: Callable[[int, int], bool], unlock: Callable[[int, int], bool]
    ) -> None:
        self._lock_pages, self._unlock_pages = lock, unlock
        self._mutex = threading.Lock()
        self._free: list[Array] = []  # in the order in which they were returned
        self._returned = deque[Array]()  # by any thread, at any moment
        self._used = self._most_used = 0
        self._has_failed = False

    def take(self, nbytes: int) -> Array | None:
        """An array of at least this many bytes; None: no memory is left, or none can be locked.

        Its memory comes back when nothing refers to it any more.
        """
        size = _class_of(nbytes)
        with self._mutex:
            if self._has_failed:
                return None
            while self._returned:
                returned = self._returned.popleft()
                self._used -= returned.nbytes
                self._free.append(returned)
            arena = self._free_of(size)
            if arena is None:
                arena = allocate(size)
                if arena is None:
                    return None
                if not self._lock_pages(address(arena), size):
                    self._has_failed = True
                    return None
            self._used += size
            self._most_used = max(self._most_used, self._used)
            self._trim()
        return numpy.asarray(_Lease(arena, self._returned))

    def _free_of(self, size: int) -> Array | None:
        for index in reversed(range(len(self._free))):
            if self._free[index].nbytes == size:
                return self._free.pop(index)
        return None

    def _trim(self) -> None:
        """Unlock what was returned first, while more is free than was in use at one time."""
        free = sum(arena.nbytes for arena in self._free)
        while free > self._most_used:
            arena = self._free.pop(0)
            free -= arena.nbytes
            self._unlock_pages(address(arena), arena.nbytes)


class _Lease:
    """An arena in use, as NumPy sees it."""

    def __init__(self, arena: Array, returned: deque[Array]) -> None:
        self._arena, self._returned = arena, returned
        self.__array_interface__ = arena.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._arena)


def _class_of(nbytes: int) -> int:
    """The next of eight sizes from one power of two to the next."""
    step = max(1, (1 << (nbytes - 1).bit_length()) // 2 // _CLASSES_PER_DOUBLING)
    return -(-nbytes // step) * step


def _lock(address: int, nbytes: int) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA remembers the error, and the next kernel would raise it
        torch.ones(1, device="cuda")
    return False


def _unlock(address: int, _: int) -> bool:
    return int(torch.cuda.cudart().cudaHostUnregister(address)) == 0


_pool = Pool(_lock, _unlock)


_ENGINES = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


class Memory:
    """The arrays of one call, whose tensors are of one dtype.

    Args:
        moves: items are only moved, not computed with.
    """

    def __init__(self, operation: str, *, moves: bool = False) -> None:
        self._operation = operation
        self._moves = moves
        self._first: torch.Tensor | None = None  # the first of the call's tensors
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def completion(self, *, in_background: bool) -> Callable[[], None] | None:
        """What copies results back to their tensors, if any have to be copied.

        Args:
            in_background: the thread that calls it need not be that of the caller, nor its stream.
                Otherwise results are there for what the caller's stream is given from then on.
        """
        if not self._back:
            return None
        return self.finish if in_background else self._give_to_stream

    def reads(self, tensor: torch.Tensor) -> Array:
        """An array of the tensor's present contents."""
        return self._array(self._on_host(arrived(tensor), is_read=True))

    def writes(self, tensor: torch.Tensor, *, in_place: bool = False) -> Array:
        """An array whose items the tensor has after `finish`.

        Args:
            in_place: it begins with the present ones. Each item's new value depends on its old one,
                so items that share memory stay equal.
        """
        # Equal items may share memory, but no copy can be put there.
        if not (in_place and tensor.is_cpu):
            _check_not_expanded(self._operation, tensor)
        tensor = arrived(tensor)
        here = self._on_host(tensor, is_read=in_place)
        if self._is_bytes(here) and not here.is_contiguous():
            here = here.contiguous()
        elif here.is_neg() or here.is_conj():
            here = here.resolve_neg().resolve_conj()
        if here.data_ptr() != tensor.data_ptr() or here.device != tensor.device:
            self._back.append((tensor.detach(), here))
        return self._array(here, writes=True)

    def finish(self) -> None:
        """Copy results back to their tensors; they are there when this returns."""
        for tensor, copy in self._back:
            tensor.copy_(copy)
        # A strided tensor is written by way of device memory, which is not waited for. The stream
        # is this thread's, which need not be that of the thread that waits for the call.
        strided = {each.device for each, _ in self._back if each.is_cuda and not _is_dense(each)}
        for device in strided:
            torch.cuda.current_stream(device).synchronize()

    def _give_to_stream(self) -> None:
        for tensor, copy in self._back:
            # PyTorch keeps its own pinned memory until the stream has read it; arenas are taken
            # again as soon as nothing refers to them.
            waits = not tensor.is_cuda or copy.nbytes >= LEAST_BYTES
            tensor.copy_(copy, non_blocking=not waits)

    def _on_host(self, tensor: torch.Tensor, *, is_read: bool) -> torch.Tensor:
        first = self._first = tensor if self._first is None else self._first
        check_tensor(self._operation, tensor, first)
        here = tensor.detach()
        if here.is_cpu:
            return here
        if not here.is_cuda:
            return here.to("cpu")
        staged = host_memory(here)
        # It waits for the stream; so does copy_ in `finish`.
        return staged.copy_(here) if is_read else staged

    def _is_bytes(self, tensor: torch.Tensor) -> bool:
        return self._moves and tensor.dtype not in _ENGINES

    def _array(self, tensor: torch.Tensor, *, writes: bool = False) -> Array:
        if self._is_bytes(tensor):
            tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
        return as_array(tensor, self._operation, writes=writes)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; for a functional collective's result, what it stands for, once complete."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's items, flat and as bytes; a copy unless they are side by side."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((len(flat),), (1,)).view(torch.uint8)  # a single item has any stride


def check_tensor(
    operation: str, tensor: torch.Tensor, first: torch.Tensor, *, is_written: bool = False
) -> None:
    """Refuse a tensor that no call can take, or not beside the first of its call.

    Args:
        is_written: by way of a copy, so that it may not be expanded.
    """
    if tensor.dtype is not first.dtype:
        raise InvalidArgumentError(
            f"{operation}: {describe(tensor)} and {describe(first)} are passed to one call; their "
            "dtypes must be equal"
        )
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(
            f"{operation} takes dense tensors, not {tensor.layout}; convert it with to_dense()"
        )
    if is_written:
        _check_not_expanded(operation, tensor)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidArgumentError(
            f"{operation} of {describe(tensor)} needs the host, which a CUDA graph cannot capture; "
            "call it outside of the capture, or give each rank a GPU of its own"
        )


def _check_not_expanded(operation: str, tensor: torch.Tensor) -> None:
    if _is_expanded(tensor):
        raise InvalidArgumentError(
            f"{operation} cannot write into {describe(tensor)}, which is expanded: many items "
            "share a place in memory; pass a clone"
        )


def warn_staged(kind: str, group_name: str, reason: str) -> None:
    """Say why a group's tensors take the slow way by the host."""
    warnings.warn(
        f"rallypoint: {kind} tensors are copied to the host and back in the group "
        f"{group_name!r}, because {reason}",
        stacklevel=4,
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj())


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in layout)
