"""Arrays that peers can map: their memory is theirs alone, and comes and goes with them."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint import _native

MIB = 1 << 20


def arena_kib() -> int:
    """What this process's arenas take, by the kernel's account."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = "/memfd:rallypoint-arena" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128", "bool", "datetime64[s]"])
@pytest.mark.parametrize("shape", [(), 5, (0,), (3, 4), [2, 0, 3], np.int64(7)])
def test_is_an_ordinary_array(shape: Any, dtype: str) -> None:
    array, like = dist.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (like.shape, like.dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = 1
    assert (array == np.ones_like(like)).all()


def test_arrays_keep_apart(seed: int) -> None:
    """Random arrays come and go, each full of its own number."""
    rng = random.Random(seed)
    living: dict[int, Any] = {}
    for number in range(400):
        if living and rng.random() < 0.45:
            del living[rng.choice(list(living))]
        items = rng.choice([1, 100, 5_000, 300_000, 3 * MIB])
        living[number] = dist.empty(rng.randint(1, items), np.int64)
        living[number][...] = number
        if rng.random() < 0.1:
            for key, array in living.items():
                assert array[0] == array[-1] == key
                assert (array == key).all()
        if sum(array.nbytes for array in living.values()) > 200 * MIB:
            living.clear()


def test_memory_is_given_back() -> None:
    gc.collect()
    before, fds = arena_kib(), len(list(Path("/proc/self/fd").iterdir()))
    arrays = [dist.empty(20 * MIB, np.uint8) for _ in range(8)]
    for array in arrays:
        array[...] = 1
    view = arrays[0][5:10]
    assert arena_kib() - before >= 8 * 20 * 1024
    del arrays, array
    gc.collect()
    assert arena_kib() - before < 21 * 1024  # of the view
    assert (view == 1).all()
    del view
    gc.collect()
    assert arena_kib() <= before
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds + 1
    assert not list(Path("/dev/shm").glob("*rallypoint-arena*"))


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        (-1, "f4", dist.InvalidArgumentError),
        ((2, -3), "f4", dist.InvalidArgumentError),
        ("ab", "f4", dist.InvalidTypeError),
        (2.5, "f4", dist.InvalidTypeError),
        (3, "object", dist.InvalidTypeError),
        (3, "no such type", dist.InvalidTypeError),
        (1 << 60, "f4", dist.OutOfMemoryError),
        (1 << 80, "f4", dist.OutOfMemoryError),
    ],
)
def test_errors(shape: Any, dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        dist.empty(shape, dtype)


def test_a_child_does_not_give_back_what_is_its_parents() -> None:
    array = dist.empty(1_000_000, np.int64)
    array[...] = 7
    child = os.fork()
    if child == 0:
        is_good = (array == 7).all()
        del array
        own = dist.empty(500_000, np.int64)
        own[...] = 8
        os._exit(0 if is_good and (own == 8).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (array == 7).all()


def test_the_functions_for_other_allocators() -> None:
    library = ctypes.PyDLL(_native.__file__)
    library.rallypoint_allocate.restype = ctypes.c_void_p
    library.rallypoint_allocate.argtypes = [ctypes.c_size_t]
    library.rallypoint_release.argtypes = [ctypes.c_void_p]
    at = library.rallypoint_allocate(100_000)
    assert at
    assert at % 4096 == 0
    ctypes.memset(at, 1, 100_000)
    assert arena_kib() > 0
    library.rallypoint_release(at)
    library.rallypoint_release(None)
