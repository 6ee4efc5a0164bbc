"""What the system refuses is told by its call, its error and the cure, whoever made the call."""

from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable, Mapping

import pytest

from rallypoint import _native
from rallypoint.base import refusals
from rallypoint.base.errors import HostError, StoreTimeoutError, SystemCallError
from rallypoint.base.refusals import UNIX_SOCKET, refusal_in, refused


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine without any limit, which no test's own can be."""
    limits = {
        resource.RLIMIT_NOFILE: (1024, 4096),
        resource.RLIMIT_FSIZE: (1 << 20, 1 << 20),
    }
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    monkeypatch.setattr(refusals, "full_of_processes", lambda: None)
    monkeypatch.setattr(refusals, "_is_clone3_forbidden", lambda: False)


@pytest.mark.parametrize(
    ("call", "number", "sentence"),
    [
        (
            "accept",
            errno.EMFILE,
            "this process ran out of file descriptors (1024 here, and 4096 if you ask for it): "
            "raise the limit with ulimit -n.",
        ),
        (
            "open",
            errno.ENFILE,
            "this process got no file descriptor: all that this machine has are in use; raise "
            "fs.file-max with sysctl, or end other processes.",
        ),
        (
            "mmap",
            errno.ENOMEM,
            "this process ran out of memory (mmap): free some, or start fewer workers.",
        ),
        (
            "ftruncate",
            errno.EFBIG,
            "this process reached the limit on the size of files (1024 KiB here), which also "
            "applies to memory that ranks share: raise it with ulimit -f unlimited.",
        ),
        (
            "socket",
            errno.EAFNOSUPPORT,
            "this process needs a kind of socket that this system refuses (socket: Address family "
            "not supported by protocol): let the sandbox it runs in permit it "
            "(RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK of systemd).",
        ),
        (
            UNIX_SOCKET,
            errno.EAFNOSUPPORT,
            "this process cannot share memory with the other ranks of this host: Unix sockets are "
            "refused (Address family not supported by protocol); let the sandbox it runs in "
            "permit them (AF_UNIX in systemd's RestrictAddressFamilies), or use backend='tcp'.",
        ),
        (
            "clone",
            errno.EAGAIN,
            "this process cannot start more processes, and the system does not show which limit "
            "is reached: this user's (unlimited here; ulimit -u), one of a control group "
            "(pids.max), kernel.threads-max, or memory.",
        ),
        ("epoll_ctl", errno.EBADF, "this process failed in epoll_ctl: Bad file descriptor."),
    ],
)
def test_a_sentence_for_each(call: str, number: int, sentence: str) -> None:
    error = refused(call, number)
    assert (str(error), error.call, error.errno) == (sentence, call, number)
    assert isinstance(error, HostError)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@pytest.mark.parametrize(
    ("release", "cure"),
    [
        (
            "6.18.44-1-amd64",
            "let the sandbox it runs in permit it (docker run --security-opt seccomp=unconfined).",
        ),
        ("3.10.0-1160.el7.x86_64", "use Linux 4.18 or newer."),
        (
            "4.18.0-553.el8_10.x86_64",
            "let the sandbox it runs in permit it (docker run --security-opt seccomp=unconfined).",
        ),
    ],
)
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_call_that_is_forbidden(
    number: int, release: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uname = os.uname_result(("Linux", "here", release, "", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: uname)
    error = refused("eventfd2", number, who="the launcher")
    why = os.strerror(number)
    assert str(error) == f"the launcher needs eventfd2, which this system refuses ({why}): {cure}"


def test_a_control_group_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "full_of_processes", lambda: ("/sys/fs/cgroup/job", 40))
    assert str(refused("fork", errno.EAGAIN, who="the launcher")) == (
        "the launcher cannot start more processes: its control group is limited to 40 processes "
        "and threads (/sys/fs/cgroup/job/pids.max); raise that (docker run --pids-limit, TasksMax "
        "of systemd, podPidsLimit of Kubernetes), or start fewer."
    )


@pytest.mark.parametrize("call", ["posix_spawn", "pthread_create", "clone"])
def test_clone3_that_an_old_sandbox_forbids(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_is_clone3_forbidden", lambda: True)
    assert "a sandbox forbids clone3" in str(refused(call, errno.EPERM))


def test_an_address_space_without_room_for_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then threads are refused as if there were too many."""
    limits = {resource.RLIMIT_AS: (1 << 20, 1 << 20), resource.RLIMIT_STACK: (1 << 20, 1 << 20)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert str(refused("clone", errno.EAGAIN)) == (
        "this process ran out of address space (1 MiB here): raise the limit with ulimit -v."
    )


@pytest.mark.parametrize(
    ("most", "told"),
    [
        (1, "this user's limit of all processes and threads is reached (1 here); raise it"),
        (1 << 30, "and the system does not show which limit is reached: this user's (1073741824"),
    ],
)
def test_a_limit_of_a_users_threads(most: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {resource.RLIMIT_NPROC: (most, most)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)  # whose process has just ended
    assert told in str(refused("fork", errno.EAGAIN))


def test_a_program_that_may_not_be_started_for_another_reason() -> None:
    assert "needs posix_spawn, which this system refuses (Operation not permitted)" in str(
        refused("posix_spawn", errno.EPERM)
    )


def test_clone3_is_permitted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or cannot be asked for, where there is no ctypes."""
    monkeypatch.undo()
    assert not refusals._is_clone3_forbidden()
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert not refusals._is_clone3_forbidden()


def test_an_error_that_was_never_raised_has_no_call() -> None:
    told = refusal_in(OSError(errno.EMFILE, "Too many open files"))
    assert told is not None
    assert told.call == "a system call"


def no_thread() -> None:
    raise RuntimeError("can't start new thread")


CALLS: Mapping[str, tuple[Callable[[], None], str | None]] = {
    "no thread": (no_thread, "clone"),
    "memory": (lambda: os.truncate(os.devnull, -1), None),
    "a file that is missing": (lambda: os.close(os.open("/missing", os.O_RDONLY)), None),
    "a file that is not ours": (lambda: os.unlink("/proc/1/stat"), None),  # noqa: PTH108
    "no data": (lambda: os.set_blocking(-1, False), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_a_refusal(name: str) -> None:
    call, expected = CALLS[name]
    with pytest.raises((OSError, RuntimeError)) as info:
        call()
    found = refusal_in(info.value)
    assert (None if found is None else found.call) == expected


@pytest.mark.parametrize("call", ["connect", "sendto", "kill"])
def test_a_firewall_and_other_users_are_no_sandbox(call: str) -> None:
    assert not refusals._is_refusal(call, errno.EPERM, is_of_file=False)
    assert refusals._is_refusal("eventfd2", errno.EPERM, is_of_file=False)


def test_the_call_is_read_from_the_source() -> None:
    limits = resource.prlimit(0, resource.RLIMIT_NOFILE)
    resource.prlimit(0, resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as info:
            os.memfd_create("none")
        with pytest.raises(OSError, match="Too many open files") as other:
            os.close(os.open("/dev/null", os.O_RDONLY))
    finally:
        resource.prlimit(0, resource.RLIMIT_NOFILE, limits)
    calls = [found.call for each in (info, other) if (found := refusal_in(each.value))]
    assert calls == ["memfd_create", "open"]


def test_errors_that_have_their_sentence_are_kept() -> None:
    assert refusal_in(StoreTimeoutError("no key")) is None
    assert refusal_in(ValueError("no number")) is None
    error = refused("eventfd2", errno.ENOSYS)
    told = refusal_in(error, who="the launcher")
    assert str(told) == str(error).replace("this process", "the launcher")


def test_a_need_is_told_with_its_limit() -> None:
    told = refusal_in(
        refused("epoll_create1", errno.EMFILE), who="the launcher", need="4 workers need 48"
    )
    assert "(1024 here, and 4096 if you ask for it; 4 workers need 48)" in str(told)


def test_native_code_raises_the_same_error() -> None:
    """Its word is the call's name."""
    with pytest.raises(SystemCallError) as info:
        _native.StoreServer(-1, -1, b"", 5)
    assert (info.value.call, info.value.errno) == ("fcntl", errno.EBADF)
    assert str(info.value) == "this process failed in fcntl: Bad file descriptor."


def test_no_exception_of_native_code_lacks_a_call() -> None:
    """The word of each std::system_error is the name of a system call, or of one of pthreads."""
    from pathlib import Path

    native = Path(__file__).parents[3] / "native"
    words = []
    for path in native.rglob("*.cc"):
        if "tests" not in path.parts:
            text = path.read_text()
            words += re.findall(r"system_error\([^;]*?,\s*\"([^\"]*)\"\)", text, re.DOTALL)
    assert len(words) > 8
    assert all(re.fullmatch(r"[a-z0-9_]+", word) for word in words), words
