"""Storages that move to memory that others can map: all views follow, and it is given back."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from rallypoint._native import abandon, adopt  # noqa: E402
from rallypoint.engine.communicator import PeerMemoryAccess  # noqa: E402
from rallypoint.pytorch.buckets import SharedBuckets  # noqa: E402

pytestmark = pytest.mark.needs_torch

ITEMS = 1 << 20


class Neighbours:
    """As much of a communicator as matters: who is on this host, and can read what."""

    here = (0, 1)
    reach = PeerMemoryAccess.ARENAS


@pytest.fixture
def buckets() -> Iterator[SharedBuckets]:
    shared = SharedBuckets()
    shared.add_group()
    yield shared
    shared.remove_group()


def share(buckets: SharedBuckets, tensor: Any, neighbours: Any = Neighbours) -> bool:
    buckets.share(tensor, neighbours)
    return bool(tensor.is_shared())


def test_all_views_follow(buckets: SharedBuckets) -> None:
    tensor = torch.arange(ITEMS, dtype=torch.float32)
    view = tensor[4:].view(-1, 3)
    assert share(buckets, tensor)
    assert view.data_ptr() == tensor.data_ptr() + 16
    assert tensor.equal(torch.arange(ITEMS, dtype=torch.float32))
    tensor.zero_()
    assert not view.any()
    where = tensor.data_ptr()
    assert share(buckets, tensor)  # once more does nothing
    assert tensor.data_ptr() == where


def test_what_must_not_move_stays(buckets: SharedBuckets) -> None:
    seen = torch.ones(ITEMS)
    array = seen.numpy()
    assert not share(buckets, seen)
    seen.fill_(2)
    assert (array == 2).all()
    assert not share(buckets, torch.ones(1000))
    assert not share(buckets, torch.ones(2 * ITEMS)[ITEMS:])
    assert not share(buckets, torch.ones(1024, 1024).t())

    class Strangers(Neighbours):
        reach = PeerMemoryAccess.NOTHING

    assert not share(buckets, torch.ones(ITEMS), Strangers)


def test_takes_no_more_than_half_of_the_room(
    buckets: SharedBuckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all ranks of the host move theirs at about the same time."""

    def room(free_mib: int) -> Any:
        return lambda _: os.statvfs_result([4096, 4096, 16384, 0, free_mib * 256, 0, 0, 0, 0, 255])

    monkeypatch.setattr(os, "statvfs", room(39))  # of 64; 4 MiB for each of two
    assert not share(buckets, torch.ones(ITEMS))
    monkeypatch.setattr(os, "statvfs", room(40))
    assert share(buckets, torch.ones(ITEMS))


def test_memory_goes_with_the_last_user(buckets: SharedBuckets) -> None:
    """Also where a peer has mapped it, for which a descriptor stands here."""
    tensor = torch.ones(ITEMS)
    view = tensor[3:]
    assert share(buckets, tensor)
    file = os.dup(tensor.untyped_storage()._share_fd_cpu_()[0])
    try:
        del tensor
        assert share(buckets, torch.ones(ITEMS))  # whichever comes by
        assert os.fstat(file).st_blocks * 512 >= 4 * ITEMS
        assert float(view[-1]) == 1
        del view
        assert share(buckets, torch.ones(ITEMS))
        assert os.fstat(file).st_blocks == 0
    finally:
        os.close(file)


def test_what_is_still_used_outlives_the_last_group() -> None:
    buckets = SharedBuckets()
    buckets.add_group()
    buckets.add_group()
    tensor = torch.ones(ITEMS)
    assert share(buckets, tensor)
    where = tensor.data_ptr()
    descriptor = tensor.untyped_storage()._share_fd_cpu_()[0]
    buckets.remove_group()
    assert not adopt(where, 4 * ITEMS, descriptor)  # as it is known
    buckets.remove_group()
    assert adopt(where, 4 * ITEMS, descriptor)
    abandon(where, True)
    assert bool((tensor == 1).all())


def test_a_child_does_not_take_its_parents_memory(buckets: SharedBuckets) -> None:
    tensor = torch.ones(ITEMS)
    assert share(buckets, tensor)
    child = os.fork()
    if child == 0:
        abandon(tensor.data_ptr(), False)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((tensor == 1).all())


def test_only_whole_files_without_a_name_are_adopted(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as memory:
            where = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert not adopt(where, 8192, file.fileno())
            (tmp_path / "file").unlink()
            assert not adopt(where, 8193, file.fileno())
            assert adopt(where, 8192, file.fileno())
            abandon(where, True)
