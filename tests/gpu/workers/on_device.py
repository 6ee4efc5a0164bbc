"""What the workers here do with a device, so that the CPU can stand in for it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch

from rallypoint.process_group import arrays
from rallypoint.process_group.arrays import DeviceArray

KIND = os.environ["GPU_TEST_DEVICE"]
IS_GPU = KIND == "cuda"
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))


def own_device() -> Any:
    """This rank's; ranks share devices where there are too few."""
    if not IS_GPU:
        if os.environ.get("RALLYPOINT_DEVICE_MEMORY") == "1":
            from tests import stand_in

            stand_in.install()
        return torch.device("cpu")
    device = torch.device("cuda", LOCAL_RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def seen_as_device_arrays() -> None:
    """Have our own calls see all tensors as those of a device, which NumPy cannot look into."""

    def seen(tensor: Any, operation: str) -> Any:
        return DeviceArray(tensor, arrays._dtype_of(tensor, operation))

    if not IS_GPU:
        arrays._view = seen


def keep_busy(seconds: float) -> None:
    """Give the current stream work for about so long, and return at once; the CPU is busy now."""
    if not IS_GPU:
        time.sleep(seconds)
        return
    torch.cuda._sleep(int(seconds * 1e9))  # cycles, of 1 to 2 GHz


def side_stream() -> Any:
    """A context in which the current stream is another one than before."""
    return torch.cuda.stream(torch.cuda.Stream()) if IS_GPU else contextlib.nullcontext()


def is_idle() -> bool:
    """Whether all that the current stream was given is done."""
    return not IS_GPU or bool(torch.cuda.current_stream().query())


def allocated() -> int:
    """Bytes of the device that tensors have."""
    return int(torch.cuda.memory_allocated()) if IS_GPU else 0


def free_bytes() -> int:
    """Of the device's memory, which no process has."""
    return int(torch.cuda.mem_get_info()[0]) if IS_GPU else 0


def say(*words: object) -> None:
    """A line, at once and whole, as ranks share their output."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
