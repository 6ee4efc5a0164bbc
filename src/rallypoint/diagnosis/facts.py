"""The facts observed about a job at one moment, from which an explanation is derived.

Frozen data; a field that could not be determined is None or empty. Each node's times are of its own
clocks, so they are compared within a node only. Two of these records, half a second apart, show
what moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.base.recorded_call import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a program in which a thread is."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a Python thread is.

    Attributes:
        thread: its identifier, as Python prints it.
        name: its name, or empty.
        frames: the innermost first.
        is_main: it is the interpreter's first thread.
        collects_garbage: it is in the garbage collector.
    """

    thread: str
    frames: tuple[Frame, ...]
    name: str = ""
    is_main: bool = False
    collects_garbage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread, as the kernel sees it.

    Attributes:
        state: R runs, S sleeps, D sleeps without being interruptible, T is stopped, t is traced,
            Z has ended.
        cpu: how much of one core it used between the two looks, from 0 to 1.
        wait: the function of the kernel in which it sleeps, or empty.
        syscall: the system call that it is in, or empty, e.g. ``"read"``.
        path: what file or pipe that call is about, if it is about one.
    """

    id: int
    name: str
    state: str
    cpu: float = 0.0
    wait: str = ""
    syscall: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, as the kernel sees it.

    Attributes:
        command: its program and arguments, shortened.
        state: of its first thread, as in `Thread`.
        cpu: cores that it used between the two looks.
        starved: for how much of the time between the looks it was ready, but got no core.
        age_s: since its start.
        is_traced: a debugger is attached to it.
        children: below it.
        ended_children: how processes below it that are gone have ended, in words, if that is known,
            each with its pid first: ``"4720 was killed by SIGKILL"``.
    """

    pid: int
    command: str
    state: str
    cpu: float = 0.0
    starved: float = 0.0
    rss_bytes: int = 0
    age_s: float = 0.0
    is_traced: bool = False
    threads: tuple[Thread, ...] = ()
    children: tuple[Process, ...] = ()
    ended_children: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a worker has ended.

    Attributes:
        code: its exit status; None: a signal killed it.
        signal: its name, e.g. ``"SIGKILL"``; empty: none.
        by_launcher: the launcher sent that signal.
        error: its exception, in a line, if it told one.
        ended_ns: when, by the monotonic clock of its machine.
    """

    code: int | None
    signal: str = ""
    by_launcher: bool = False
    error: str = ""
    ended_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker, and what it is in.

    Attributes:
        process: what the kernel says of it; None: it has ended, or nothing could be read.
        end: how it has ended; None: it runs.
        groups: its calls, by group.
        has_record: whether it keeps a flight record at all.
        stacks: its Python threads; empty: `no_stacks_because` says why.
        library: the file in whose code its main thread runs, if it runs and that is known.
        gil: the thread that holds the GIL, as in `Stack`, or one of number 0; empty: not known.
    """

    rank: int
    local_rank: int
    process: Process | None
    end: End | None = None
    groups: tuple[Group, ...] = ()
    has_record: bool = True
    stacks: tuple[Stack, ...] = ()
    no_stacks_because: str = ""
    library: str = ""
    gil: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A connection between workers on two hosts in which data wait.

    Attributes:
        rank: the worker here.
        peer: the other host's address.
        unacknowledged_bytes: sent, and not confirmed by the peer's kernel.
        retransmits: how often in a row the kernel has sent the same again.
        stalled_s: since anything came from there.
    """

    rank: int
    peer: str
    unacknowledged_bytes: int
    retransmits: int
    stalled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine's part of the job.

    Attributes:
        now_ns: its monotonic clock at the look; workers' times are to be compared with that.
        ranks: the ranks that run there, also if nothing could be seen of them.
        silent_s: for how long nothing has been heard of it; None: it has answered.
        oom_kills: how often the kernel's out-of-memory killer has struck there since the job
            began; None: not known.
    """

    node_rank: int
    host: str
    now_ns: int = 0
    ranks: tuple[int, ...] = ()
    workers: tuple[Worker, ...] = ()
    silent_s: float | None = None
    oom_kills: int | None = None
    flows: tuple[Flow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was seen of a job in one look."""

    run_id: str
    round: int
    world_size: int
    nodes: tuple[Node, ...]
