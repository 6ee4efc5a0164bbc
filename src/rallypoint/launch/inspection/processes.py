"""The kernel's data on processes, from two samples of /proc, and on their connections to other
hosts (sock_diag(7)).

The processes themselves are not involved, so it works for those that are stopped, stuck or not
Python; connections need no rights either. Data that cannot be read are omitted. Data that a peer
has not acknowledged for a while, although they were sent again, indicate a network that drops them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.base.files import read_text
from rallypoint.cluster.netlink import DONE, ERROR, attributes, messages, send_request
from rallypoint.diagnosis.facts import Process, StalledConnection, Thread

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
_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_INFO = 2  # INET_DIAG_INFO: a struct tcp_info follows
_ESTABLISHED = 1 << 1
_REQUEST = struct.Struct("=BBBBI48x")
_MESSAGE = struct.Struct("=24x16s12x8xI4xI")  # inet_diag_msg: the peer, bytes that wait, the inode
# tcp_info: the number of retransmissions; milliseconds since data, and since an acknowledgement,
# arrived.
_TCP_INFO = struct.Struct("=2xB49xII")
_CHUNK = 1 << 16
_PATIENCE_S = 0.2
_TRIES = 5  # to see in which call a thread sleeps that wakes again and again


@dataclass(frozen=True, slots=True)
class ProcTask:
    """A process or thread at one moment."""

    name: str
    state: str
    parent: int
    cpu_s: float
    started_s: float
    rss_bytes: int
    ran_ns: int
    waited_ns: int


class ProcessSample:
    """The state in /proc of some processes and all their descendants.

    Args:
        roots: process numbers.
    """

    def __init__(self, roots: Iterable[int]) -> None:
        self.at = time.monotonic()
        self._roots = tuple(roots)
        self._below = _children()
        self._tasks: dict[int, ProcTask] = {}
        self._threads: dict[int, dict[int, ProcTask]] = {}
        for root in self._roots:
            self._add(root)

    def _add(self, pid: int) -> None:
        task = read_task(f"/proc/{pid}", with_times=False)
        if task is None or pid in self._tasks:
            return
        self._tasks[pid] = task
        threads = {}
        for name in _list(f"/proc/{pid}/task")[:_MOST_THREADS]:
            thread = read_task(f"/proc/{pid}/task/{name}", with_times=True)
            if thread is not None:
                threads[int(name)] = thread
        self._threads[pid] = threads
        for child in self._below.get(pid, [])[:_MOST_CHILDREN]:
            self._add(child)

    def running(self) -> set[int]:
        """The roots whose main thread was running."""
        return {root for root, task in self._tasks.items() if task.state == "R"}

    def processes(self, before: ProcessSample) -> dict[int, Process]:
        """The roots that exist, with changes since the sample before."""
        return {root: self._process(root, before) for root in self._roots if root in self._tasks}

    def _process(self, pid: int, before: ProcessSample) -> Process:
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
            age_s=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - task.started_s),
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


def _thread(pid: int, number: int, now: ProcTask, before: ProcTask | None, past_s: float) -> Thread:
    state, call, path = now.state, "", ""
    for _ in range(_TRIES):
        if state not in "SDTt":
            break
        words = read_text(f"/proc/{pid}/task/{number}/syscall").split()
        if words != ["running"]:
            call, path = _syscall(pid, words)
            break
        # It has run since the sample, so what it waited for then is not known: look again.
        task = read_task(f"/proc/{pid}/task/{number}", with_times=False)
        state = "R" if task is None else task.state
    # The scheduler's own times: the kernel's ticks are too coarse for half a second.
    cpu = 0.0 if before is None else max(0.0, (now.ran_ns - before.ran_ns) / 1e9 / past_s)
    return Thread(
        id=number,
        name=now.name,
        state=state,
        cpu=cpu,
        wait=_wait(pid, number) if state in "SD" else "",
        syscall=call,
        path=path,
    )


def read_task(path: str, *, with_times: bool) -> ProcTask | None:
    """Read a process or thread by its directory in /proc; None: it is gone."""
    text = read_text(f"{path}/stat")
    _, _, rest = text.partition("(")
    name, _, rest = rest.rpartition(")")
    fields = rest.split()
    if len(fields) < 22:
        return None
    times = read_text(f"{path}/schedstat").split() if with_times else []
    is_counted = len(times) >= 2 and times[0].isdigit()
    return ProcTask(
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
            task = read_task(f"/proc/{name}", with_times=False)
            if task is not None:
                below.setdefault(task.parent, []).append(int(name))
    return below


def _syscall(pid: int, words: Sequence[str]) -> tuple[str, str]:
    """The system call that a thread is in, and the file that it is for."""
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
    text = read_text(f"/proc/{pid}/task/{number}/wchan").strip()
    return "" if text == "0" else text


def _command(pid: int) -> str:
    return " ".join(read_text(f"/proc/{pid}/cmdline").split("\0"))[:_MOST_COMMAND].strip()


@dataclass(frozen=True, slots=True)
class _Connection:
    inode: int
    peer: str
    unacknowledged_bytes: int
    retransmits: int
    silent_s: float


def waiting_flows(pids: Mapping[int, int]) -> tuple[StalledConnection, ...]:
    """The connections to other hosts in which these workers' data are unacknowledged.

    Args:
        pids: process -> rank.
    """
    waiting = {each.inode: each for each in _connections() if each.unacknowledged_bytes}
    if not waiting:
        return ()
    return tuple(
        StalledConnection(
            rank=rank,
            peer=found.peer,
            unacknowledged_bytes=found.unacknowledged_bytes,
            retransmits=found.retransmits,
            stalled_s=found.silent_s,
        )
        for pid, rank in pids.items()
        for inode in _sockets(pid)
        if (found := waiting.get(inode)) is not None
    )


def _connections() -> Iterator[_Connection]:
    """All TCP connections of this network namespace to other hosts."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
                kernel.settimeout(_PATIENCE_S)
                request = _REQUEST.pack(
                    family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED
                )
                send_request(kernel, _BY_FAMILY, _REQUEST_DUMP, request)
                yield from _answers(kernel, family)
        except (OSError, struct.error):  # a kernel, or a sandbox, without it
            continue


def _answers(kernel: socket.socket, family: int) -> Iterator[_Connection]:
    while True:
        for kind, _, message in messages(kernel.recv(_CHUNK)):
            if kind in (ERROR, DONE):
                return
            found = _connection(message, family)
            if found is not None:
                yield found


def _connection(message: bytes, family: int) -> _Connection | None:
    remote, waiting, inode = _MESSAGE.unpack_from(message)
    peer = ipaddress.ip_address(remote[: 4 if family == socket.AF_INET else 16])
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped:
        peer = peer.ipv4_mapped
    if peer.is_loopback:
        return None
    info = dict(attributes(message[_MESSAGE.size :])).get(_INFO, b"")
    if len(info) < _TCP_INFO.size:
        return None
    retransmits, data_ms, acknowledged_ms = _TCP_INFO.unpack_from(info)
    silent_s = min(data_ms, acknowledged_ms) / 1000
    return _Connection(inode, str(peer), waiting, retransmits, silent_s)


def _sockets(pid: int) -> Iterator[int]:
    for name in _list(f"/proc/{pid}/fd"):
        target = _link(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _link(path: str) -> str:
    try:
        return os.readlink(path)[:_MOST_PATH]
    except OSError:
        return ""


def _list(path: str) -> list[str]:
    """In the kernel's order: the main thread comes first."""
    try:
        return os.listdir(path)
    except OSError:
        return []
