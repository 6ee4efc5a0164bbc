"""Tensors as arrays for the engine: views where possible, copies where necessary.

CPU tensors of the engine's dtypes become views of the same memory; process_group.calls.call then
handles strided ones. Tensors of other devices are copied to the host and back. If items are only
moved, their dtype does not matter and bytes are sent.
"""

from __future__ import annotations

from typing import Any

import torch

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import DTYPES
from rallypoint.process_group.memory.arrays import Array, as_array, describe
from rallypoint.pytorch.staging import host_memory

_ENGINES = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


class Memory:
    """The arrays of one call, whose tensors are of one dtype.

    Args:
        operation: for messages.
        moves: items are only moved, not computed with.
    """

    def __init__(self, operation: str, *, moves: bool = False) -> None:
        self._operation = operation
        self._moves = moves
        self._first: Any = None  # the first of the call's tensors
        self._back: list[tuple[Any, Any]] = []

    @property
    def has_copies(self) -> bool:
        """Whether `finish` has something to do."""
        return bool(self._back)

    def reads(self, tensor: Any) -> Array:  # noqa: ANN401 - of torch
        """An array of the tensor's present contents.

        Raises:
            InvalidTypeError: it is not dense, or has a dtype that the operation does not take.
            InvalidArgumentError: its dtype differs from that of the call's first tensor.
        """
        return self._array(self._on_host(_arrived(tensor), is_read=True))

    def writes(self, tensor: Any, *, in_place: bool = False) -> Array:  # noqa: ANN401 - of torch
        """An array whose items the tensor has after `finish`.

        Args:
            in_place: it has the present ones before. Each item's new value depends on its old one,
                so items that share memory stay equal.

        Raises what `reads` raises; InvalidArgumentError also if several items share memory.
        """
        # Equal items may share memory, but nothing can be copied there.
        if _is_expanded(tensor) and not (in_place and tensor.is_cpu):
            raise InvalidArgumentError(
                f"{self._operation} cannot write into {describe(tensor)}, which is expanded: many "
                "items share a place in memory; pass a clone"
            )
        tensor = _arrived(tensor)
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

    def _on_host(self, tensor: Any, *, is_read: bool) -> Any:  # noqa: ANN401 - of torch
        self._first = tensor if self._first is None else self._first
        if tensor.dtype is not self._first.dtype:
            raise InvalidArgumentError(
                f"{self._operation}: {describe(tensor)} and {describe(self._first)} are passed to "
                "one call; their dtypes must be equal"
            )
        if tensor.layout is not torch.strided:
            raise InvalidTypeError(
                f"{self._operation} takes dense tensors, not {tensor.layout}; convert it with "
                "to_dense()"
            )
        here = tensor.detach()
        if here.is_cpu:
            return here
        if not here.is_cuda:
            return here.to("cpu")
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgumentError(
                f"{self._operation} copies {describe(tensor)} to the host and back, which a CUDA "
                "graph cannot capture; call it outside of the capture, or give each rank a GPU of "
                "its own"
            )
        staged = host_memory(here)
        # It waits for the stream; so does copy_ in `finish`.
        return staged.copy_(here) if is_read else staged

    def _is_bytes(self, tensor: Any) -> bool:  # noqa: ANN401 - of torch
        return self._moves and tensor.dtype not in _ENGINES

    def _array(self, tensor: Any, *, writes: bool = False) -> Array:  # noqa: ANN401 - of torch
        if self._is_bytes(tensor):
            tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
        return as_array(tensor, self._operation, writes=writes)


def _arrived(tensor: Any) -> Any:  # noqa: ANN401 - of torch
    """The tensor; if it is a functional collective's result, the tensor that it stands for, once
    complete.
    """
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def _is_dense(tensor: Any) -> bool:  # noqa: ANN401 - of torch
    return bool(tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj())


def _is_expanded(tensor: Any) -> bool:  # noqa: ANN401 - of torch
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in layout)
