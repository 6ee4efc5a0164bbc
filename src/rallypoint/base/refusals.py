"""What the system refuses, as errors: the call, its error number, and a sentence with the cure.

Where there is another way, the caller takes it (docs/support.md lists them), and needs nothing of
this. Otherwise a refusal becomes a `SystemCallError` here, by one table: that of a call in Python,
of one in native code (native/python/refusal.h), and what only shows that there was one ("can't
start new thread"). Imported only after a failure, or by ranks before their groups form.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rallypoint.base.cgroup_limits import full_of_processes
from rallypoint.base.errors import RallypointError, SystemCallError

UNIX_SOCKET = "socket(AF_UNIX)"
NO_THREAD = "can't start new thread"  # says threading, and not why

_SOMEBODY = "this process"
_OLDEST_KERNEL = [4, 18]
_CLONE3 = 435
_STACK_BYTES = 8 << 20
_UNITS = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}
_LAST_NAME = re.compile(r"_*(\w+?)(?:\.__\w+__)?$")
# What Python's library calls by other names.
_ALIASES = {"eventfd": "eventfd2", "fork_exec": "fork", "selector_cls": "epoll_create1"}
# They end with EPERM for other reasons: a firewall, or another user's process.
_OTHERS_CALLS = ("connect", "send", "sendall", "sendmsg", "sendto", "kill")
_MAKES_PROCESSES = ("clone", "clone3", "fork", "posix_spawn", "pthread_create")


@dataclass(frozen=True, slots=True)
class _Refusal:
    who: str  # the program that made the call, in words
    call: str
    number: int
    need: str  # what it needs at least; may be empty

    @property
    def why(self) -> str:
        return os.strerror(self.number)


def refused(call: str, number: int, *, who: str = _SOMEBODY, need: str = "") -> SystemCallError:
    """The error for a system call that the system answered with an error number.

    Args:
        who: the program that made it, in words.
        need: what it needs at least, to be shown with a limit, e.g. ``"4 workers need about 48"``.
    """
    refusal = _Refusal(who, call, number, need)
    text = next(
        sentence.format(who=who, call=call, why=os.strerror(number))
        if isinstance(sentence, str)
        else sentence(refusal)
        for calls, numbers, sentence in _TABLE
        if (not calls or call in calls) and (not numbers or number in numbers)
    )
    return SystemCallError(text, call=call, errno=number)


def refusal_in(
    error: BaseException, *, who: str = _SOMEBODY, need: str = ""
) -> SystemCallError | None:
    """The error to raise in the place of one by which the system refused something; else None."""
    if isinstance(error, SystemCallError):
        return _by(error, who, need)
    if isinstance(error, OSError) and not isinstance(error, RallypointError):
        number = error.errno or 0
        call = _call_of(error)
        if _is_refusal(call, number, is_of_file=error.filename is not None):
            return refused(call, number, who=who, need=need)
    if str(error) == NO_THREAD:
        return refused("clone", errno.EPERM if _is_clone3_forbidden() else errno.EAGAIN, who=who)
    return None


def _by(error: SystemCallError, who: str, need: str) -> SystemCallError:
    """The same error of native code, which knows neither its caller nor the caller's needs."""
    if error.errno == errno.EMFILE:
        return refused(error.call, error.errno, who=who, need=need)
    text = str(error)  # of the state at that time
    if text.startswith(_SOMEBODY):
        text = who + text.removeprefix(_SOMEBODY)
    return SystemCallError(text, call=error.call, errno=error.errno)


def _is_refusal(call: str, number: int, *, is_of_file: bool) -> bool:
    """Whether that error of a call says that the system refuses it to this process at all."""
    if call in _MAKES_PROCESSES:
        return number in (errno.EAGAIN, errno.EPERM, errno.ENOSYS, errno.ENOMEM)
    if number == errno.EPERM:
        return not is_of_file and call not in _OTHERS_CALLS
    return any(number in numbers for calls, numbers, _ in _TABLE if not calls)


# The sentences.


def _processes(refusal: _Refusal) -> str:
    cannot = f"{refusal.who} cannot start more processes"
    full = full_of_processes()
    if full is not None:
        directory, most = full
        return (
            f"{cannot}: its control group is limited to {most} processes and threads "
            f"({directory}/pids.max); raise that (docker run --pids-limit, TasksMax of systemd, "
            "podPidsLimit of Kubernetes), or start fewer."
        )
    if _lacks_room_for_a_stack():  # then threads are refused with the same error
        return _memory(refusal)
    limit = _limit(resource.RLIMIT_NPROC)
    if _has_as_many_threads_as_allowed():
        return (
            f"{cannot}: this user's limit of all processes and threads is reached ({limit}); raise "
            "it with ulimit -u, or end other processes."
        )
    return (
        f"{cannot}, and the system does not show which limit is reached: this user's ({limit}; "
        "ulimit -u), one of a control group (pids.max), kernel.threads-max, or memory."
    )


def _clone3(refusal: _Refusal) -> str:
    if not _is_clone3_forbidden():
        return _forbidden(refusal)
    return (
        f"{refusal.who} cannot start threads or programs: a sandbox forbids clone3 with an error"
        " after which the C library does not retry, as Docker before 20.10.10 does; upgrade"
        " Docker and libseccomp, or start the container with --security-opt seccomp=unconfined."
    )


def _descriptors(refusal: _Refusal) -> str:
    limit = _limit(resource.RLIMIT_NOFILE) + (f"; {refusal.need}" if refusal.need else "")
    return f"{refusal.who} ran out of file descriptors ({limit}): raise the limit with ulimit -n."


def _memory(refusal: _Refusal) -> str:
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        limit = _limit(resource.RLIMIT_AS, " MiB")
        return f"{refusal.who} ran out of address space ({limit}): raise the limit with ulimit -v."
    return f"{refusal.who} ran out of memory ({refusal.call}): free some, or start fewer workers."


def _file_size(refusal: _Refusal) -> str:
    limit = _limit(resource.RLIMIT_FSIZE, " KiB")
    return (
        f"{refusal.who} reached the limit on the size of files ({limit}), which also applies to "
        "memory that ranks share: raise it with ulimit -f unlimited."
    )


def _forbidden(refusal: _Refusal) -> str:
    version = [int(word) for word in re.findall(r"\d+", os.uname().release)[:2]]
    cure = "let the sandbox it runs in permit it (docker run --security-opt seccomp=unconfined)"
    if version < _OLDEST_KERNEL:
        cure = "use Linux {}.{} or newer".format(*_OLDEST_KERNEL)
    return f"{refusal.who} needs {refusal.call}, which this system refuses ({refusal.why}): {cure}."


_NO_UNIX_SOCKETS = (
    "{who} cannot share memory with the other ranks of this host: Unix sockets are refused ({why});"
    " let the sandbox it runs in permit them (AF_UNIX in systemd's RestrictAddressFamilies), or use"
    " backend='tcp'."
)
_NO_DESCRIPTORS = (
    "{who} got no file descriptor: all that this machine has are in use; raise fs.file-max with"
    " sysctl, or end other processes."
)
_NO_SUCH_SOCKETS = (
    "{who} needs a kind of socket that this system refuses ({call}: {why}): let the sandbox it runs"
    " in permit it (RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK of systemd)."
)
# Which sentence describes which errors of which calls; empty: all. The first row that fits applies.
_TABLE: list[tuple[Collection[str], Collection[int], str | Callable[[_Refusal], str]]] = [
    (_MAKES_PROCESSES, [errno.EAGAIN], _processes),
    (_MAKES_PROCESSES, [errno.EPERM], _clone3),
    ([UNIX_SOCKET], [errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT], _NO_UNIX_SOCKETS),
    ([], [errno.EMFILE], _descriptors),
    ([], [errno.ENFILE], _NO_DESCRIPTORS),
    ([], [errno.ENOMEM], _memory),
    ([], [errno.EFBIG], _file_size),
    ([], [errno.EAFNOSUPPORT], _NO_SUCH_SOCKETS),
    ([], [errno.EPERM, errno.ENOSYS], _forbidden),
    ([], [], "{who} failed in {call}: {why}."),
]


# What is found out for them.


def _limit(which: int, unit: str = "") -> str:
    def told(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else f"{value // _UNITS[unit]}{unit}"

    soft, hard = resource.getrlimit(which)
    return f"{told(soft)} here" + (f", and {told(hard)} if you ask for it" if hard != soft else "")


def _has_as_many_threads_as_allowed() -> bool:
    """Whether the limit of this user's threads is reached; others may have ended since it was."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() == 0 or most == resource.RLIM_INFINITY:
        return False
    found = 0
    try:
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and process.stat().st_uid == os.getuid():
                    found += len(list((process / "task").iterdir()))
            except OSError:  # it has just ended
                continue
    except OSError:  # there is no /proc
        return False
    return found >= most * 0.9 - 1


def _lacks_room_for_a_stack() -> bool:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return False
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return False
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return used + (_STACK_BYTES if stack == resource.RLIM_INFINITY else stack) > most


def _is_clone3_forbidden() -> bool:
    """Whether clone3 is refused with EPERM: without a size it is otherwise invalid, or unknown."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.syscall(_CLONE3, None, 0) == -1 and ctypes.get_errno() == errno.EPERM)
    except (ImportError, OSError):
        return False


def _call_of(error: BaseException) -> str:
    """The name of the function of C that raised the error, by the source of the line."""
    import linecache

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "a system call"
    code = trace.tb_frame.f_code
    line, _, column, _ = next(islice(code.co_positions(), trace.tb_lasti // 2, None))
    source = linecache.getline(code.co_filename, line or 0).encode()[column or 0 :]
    name = _LAST_NAME.search(source.partition(b"(")[0].decode(errors="replace"))
    return _ALIASES.get(name[1], name[1]) if name else "a system call"
