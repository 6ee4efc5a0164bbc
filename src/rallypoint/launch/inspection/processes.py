"""The kernel's data on processes, from two looks at /proc a moment apart.

The processes themselves are not involved, so it works for those that are stopped, stuck or not
Python. Data that cannot be read are omitted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rallypoint.diagnosis.facts import Process, Thread

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")
_MOST_COMMAND = 200  # characters
_MOST_THREADS = 256  # of a process
_MOST_CHILDREN = 64
_MOST_PATH = 256
# By machine: numbers of system calls in which a thread may wait for something outside.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 7: "poll", 16: "ioctl", 17: "pread64",
        18: "pwrite64", 19: "readv", 20: "writev", 23: "select", 35: "nanosleep", 42: "connect",
        43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 58: "vfork",
        61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex",
        208: "io_getevents", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid",
        257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 57: "close",
        63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64",
        72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 220: "clone", 242: "accept4",
        260: "wait4",
    },
}  # fmt: skip
_OF_A_FILE = frozenset(
    {"read", "write", "close", "ioctl", "pread64", "pwrite64", "readv", "writev", "connect"}
    | {"accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock"}
    | {"fsync", "fdatasync"}
)


@dataclass(frozen=True, slots=True)
class _Task:
    """A process or thread at one moment."""

    name: str
    state: str
    parent: int
    cpu_s: float
    started_s: float
    rss_bytes: int
    ran_ns: int
    waited_ns: int


class Look:
    """The state in /proc of some processes and all their descendants.

    Args:
        roots: process numbers.
    """

    def __init__(self, roots: Iterable[int]) -> None:
        self.at = time.monotonic()
        self._roots = tuple(roots)
        self._below = _children()
        self._tasks: dict[int, _Task] = {}
        self._threads: dict[int, dict[int, _Task]] = {}
        for root in self._roots:
            self._add(root)

    def _add(self, pid: int) -> None:
        task = _read_task(f"/proc/{pid}", with_times=False)
        if task is None or pid in self._tasks:
            return
        self._tasks[pid] = task
        threads = {}
        for name in _list(f"/proc/{pid}/task")[:_MOST_THREADS]:
            thread = _read_task(f"/proc/{pid}/task/{name}", with_times=True)
            if thread is not None:
                threads[int(name)] = thread
        self._threads[pid] = threads
        for child in self._below.get(pid, [])[:_MOST_CHILDREN]:
            self._add(child)

    def running(self) -> set[int]:
        """The roots whose main thread was running."""
        return {root for root, task in self._tasks.items() if task.state == "R"}

    def processes(self, before: Look) -> dict[int, Process]:
        """The roots that exist, with changes since the look before."""
        return {root: self._process(root, before) for root in self._roots if root in self._tasks}

    def _process(self, pid: int, before: Look) -> Process:
        task, earlier = self._tasks[pid], before._tasks.get(pid)
        past_s = max(1e-3, self.at - before.at)
        threads = self._threads[pid]
        known = before._threads.get(pid, {})
        waited_ns = sum(
            thread.waited_ns - known[number].waited_ns
            for number, thread in threads.items()
            if number in known
        )
        return Process(
            pid=pid,
            command=_command(pid) or task.name,
            state=task.state,
            cpu=0.0 if earlier is None else max(0.0, task.cpu_s - earlier.cpu_s) / past_s,
            starved=max(0.0, waited_ns / 1e9 / past_s),
            rss_bytes=task.rss_bytes,
            age_s=max(0.0, _uptime_s() - task.started_s),
            is_traced=_is_traced(pid),
            threads=tuple(
                _thread(pid, number, thread, known.get(number), past_s)
                for number, thread in sorted(threads.items())
            ),
            children=tuple(
                self._process(child, before)
                for child in self._below.get(pid, [])
                if child in self._tasks
            ),
        )


def _thread(pid: int, number: int, now: _Task, before: _Task | None, past_s: float) -> Thread:
    call, path = _syscall(pid, number) if now.state in "SDTt" else ("", "")
    # The scheduler's own times: the kernel's ticks are too coarse for half a second.
    cpu = 0.0 if before is None else max(0.0, (now.ran_ns - before.ran_ns) / 1e9 / past_s)
    return Thread(
        id=number,
        name=now.name,
        state=now.state,
        cpu=cpu,
        wait=_wait(pid, number) if now.state in "SD" else "",
        syscall=call,
        path=path,
    )


def _read_task(path: str, *, with_times: bool) -> _Task | None:
    text = _read(f"{path}/stat")
    _, _, rest = text.partition("(")
    name, _, rest = rest.rpartition(")")
    fields = rest.split()
    if len(fields) < 22:
        return None
    times = _read(f"{path}/schedstat").split() if with_times else []
    is_counted = len(times) >= 2 and times[0].isdigit()
    return _Task(
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        started_s=int(fields[19]) / _TICKS,
        rss_bytes=int(fields[21]) * _PAGE,
        ran_ns=int(times[0]) if is_counted else 0,
        waited_ns=int(times[1]) if is_counted else 0,
    )


def _children() -> Mapping[int, list[int]]:
    """All processes of the machine, by parent."""
    below: dict[int, list[int]] = {}
    for name in _list("/proc"):
        if name.isdigit():
            task = _read_task(f"/proc/{name}", with_times=False)
            if task is not None:
                below.setdefault(task.parent, []).append(int(name))
    return below


def _syscall(pid: int, number: int) -> tuple[str, str]:
    """The system call that a thread is in, and the file that it is for."""
    words = _read(f"/proc/{pid}/task/{number}/syscall").split()
    if len(words) < 3 or not words[0].isdigit():
        return "", ""
    name = _CALLS.get(os.uname().machine, {}).get(int(words[0]), "")
    if name in _OF_A_FILE:
        return name, _link(f"/proc/{pid}/fd/{int(words[1], 16)}")
    if name in ("open", "openat"):
        return name, _string_in(pid, int(words[1 if name == "open" else 2], 16))
    return name, ""


def _string_in(pid: int, address: int) -> str:
    """Text in that process's memory, which on some machines only its parents can read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(_MOST_PATH).partition(b"\0")[0].decode(errors="replace")
    except (OSError, OverflowError, ValueError):
        return ""


def _wait(pid: int, number: int) -> str:
    text = _read(f"/proc/{pid}/task/{number}/wchan").strip()
    return "" if text == "0" else text


def _is_traced(pid: int) -> bool:
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "TracerPid":
            return value.strip() != "0"
    return False


def _command(pid: int) -> str:
    return " ".join(_read(f"/proc/{pid}/cmdline").split("\0"))[:_MOST_COMMAND].strip()


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _link(path: str) -> str:
    try:
        return os.readlink(path)[:_MOST_PATH]
    except OSError:
        return ""


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
