"""Memory to share, where there are memfds and where there are none."""

from __future__ import annotations

import errno
import mmap
import os
import re
from pathlib import Path

import pytest

from rallypoint.base import memory_file as module
from rallypoint.base.errors import SystemCallError
from rallypoint.base.memory_file import memory_file

NAME = "rallypoint-test"


def refuse(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    def memfd_create(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", memfd_create)


def check(descriptor: int, size: int) -> str:
    """It is zeroed memory of that size, of this process alone; returns what /proc shows."""
    try:
        status = os.fstat(descriptor)
        assert (status.st_size, status.st_nlink) == (size, 0)
        assert not os.get_inheritable(descriptor)
        with mmap.mmap(descriptor, size) as memory:
            assert memory[:] == bytes(size)
            memory[-1] = 7
            assert os.pread(descriptor, 1, size - 1) == b"\7"
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    finally:
        os.close(descriptor)


def test_a_memfd() -> None:
    assert check(memory_file(NAME, 10_000), 10_000) == f"/memfd:{NAME} (deleted)"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, 0])
def test_a_file_takes_its_place(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if number:
        refuse(monkeypatch, number)
    else:
        monkeypatch.delattr(os, "memfd_create")  # as in a Python that was built without it
    descriptor = memory_file(NAME, 1 << 20)
    assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20  # a full file system kills nobody
    shown = check(descriptor, 1 << 20)
    assert re.fullmatch(rf"/dev/shm/{NAME}\.[0-9a-f]{{16}} \(deleted\)", shown)
    assert not list(Path("/dev/shm").glob(f"{NAME}*"))


def test_a_file_elsewhere_if_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse(monkeypatch)
    monkeypatch.setattr(module, "_MEMORY_DIRECTORY", "/missing")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert check(memory_file(NAME, 4096), 4096).startswith(f"{tmp_path}/{NAME}")


def test_a_limit_of_descriptors_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another directory would not help."""

    def refuse_open(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    refuse(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_open)
        with pytest.raises(SystemCallError, match="ran out of file descriptors") as raised:
            memory_file(NAME, 4096)
    assert (raised.value.call, raised.value.errno) == ("open", errno.EMFILE)


def test_no_file_can_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EPERM)
    monkeypatch.setattr(module, "_MEMORY_DIRECTORY", "/missing")
    monkeypatch.setenv("TMPDIR", "/proc")
    with pytest.raises(SystemCallError) as info:
        memory_file(NAME, 1 << 20)
    assert (info.value.call, info.value.errno) == ("memfd_create", errno.EPERM)
    assert str(info.value) == (
        "cannot allocate 1024 KiB of shared memory: memfd_create is refused (Operation not "
        "permitted), and no file can replace it (/missing: No such file or directory; /proc: "
        "No such file or directory); allow memfd_create, or make room in /missing (docker run "
        "--shm-size)"
    )


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EFBIG])
def test_a_limit_holds_for_files_too(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, number)
    with pytest.raises(SystemCallError) as info:
        memory_file(NAME, 4096)
    assert info.value.errno == number
