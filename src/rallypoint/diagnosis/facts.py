"""The facts observed about a job at one moment, from which an explanation is derived.

Frozen data; a field that could not be determined is None or empty. Each node's times come from its
own clocks, so they are compared only within a node. Two of these records, half a second apart, show
what moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.base.recorded_steps import RecordedSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a program that a thread is executing."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of a Python thread.

    Attributes:
        thread: its identifier, as Python prints it.
        name: its name, or empty.
        frames: the innermost first.
        is_main: whether it is the interpreter's first thread.
        collects_garbage: whether it is in the garbage collector.
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
        state: R is running, S sleeping, D sleeping uninterruptibly, T stopped, t traced, Z ended.
        cpu: its share of one core between the two samples, from 0 to 1.
        wait: the kernel function in which it sleeps, or empty.
        syscall: the system call in progress, or empty, e.g. ``"read"``.
        path: the file or pipe that the call uses, if it uses one.
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
        state: that of its first thread, as in `Thread`.
        cpu: the number of cores used between the two samples.
        starved: the share of the time between the samples in which it was ready but had no core.
        age_s: the time since its start.
    """

    pid: int
    command: str
    state: str
    cpu: float = 0.0
    starved: float = 0.0
    rss_bytes: int = 0
    age_s: float = 0.0
    threads: tuple[Thread, ...] = ()
    children: tuple[Process, ...] = ()

    @property
    def main_thread(self) -> Thread | None:
        """Its first thread; None if that could not be read."""
        return next((each for each in self.threads if each.id == self.pid), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker has ended.

    Attributes:
        code: its exit status; None if a signal killed it.
        signal: the signal's name, e.g. ``"SIGKILL"``; empty if none.
        by_launcher: whether the launcher sent that signal.
        error: its exception in one line, if it reported one.
        ended_ns: the time, by the monotonic clock of its machine.
    """

    code: int | None
    signal: str = ""
    by_launcher: bool = False
    error: str = ""
    ended_ns: int = 0

    @property
    def failed(self) -> bool:
        """Whether it did not succeed."""
        return bool(self.code or self.signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker, and its calls and stacks.

    Attributes:
        process: the kernel's facts about it; None if it has ended, or nothing could be read.
        end: how it ended; None if it is running.
        error: the exception that ends it, in one line, if it has reported one and still runs.
        raised_ns: when it reported that, by the monotonic clock of its machine.
        groups: its calls, by group.
        has_record: whether it keeps a flight record.
        steps: how far its program is, without the log and the values; None if it recorded none.
        stacks: its Python threads; if empty, `no_stacks_because` says why.
        library: the file whose code its main thread runs, if known.
        gil: the thread that holds the GIL, as in `Stack`, or one with number 0; empty if unknown.
    """

    rank: int
    local_rank: int
    process: Process | None
    end: WorkerEnd | None = None
    error: str = ""
    raised_ns: int = 0
    groups: tuple[RecordedGroup, ...] = ()
    has_record: bool = True
    steps: RecordedSteps | None = None
    stacks: tuple[Stack, ...] = ()
    no_stacks_because: str = ""
    library: str = ""
    gil: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledConnection:
    """A connection between workers on two hosts that has data waiting.

    Attributes:
        rank: the worker on this host.
        peer: the other host's address.
        unacknowledged_bytes: bytes sent but not confirmed by the peer's kernel.
        retransmits: how many times in a row the kernel has sent the same data again.
        stalled_s: the time since anything arrived from there.
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
        now_ns: its monotonic clock at that time, with which workers' times are compared.
        ranks: the ranks that run there, even if nothing could be read of them.
        silent_s: the time since its last message; None if it answered.
        oom_kills: the number of kills there by the kernel's out-of-memory killer since the job
            began; None if unknown.
        is_paused: its agent has stopped its workers until it reaches the other nodes again.
        loopback_trouble: why processes there cannot reach each other; empty if they can.
    """

    node_rank: int
    host: str
    now_ns: int = 0
    ranks: tuple[int, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    silent_s: float | None = None
    oom_kills: int | None = None
    is_paused: bool = False
    loopback_trouble: str = ""
    flows: tuple[StalledConnection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything observed about a job at one moment: one sample."""

    run_id: str
    round: int
    world_size: int
    nodes: tuple[Node, ...]
