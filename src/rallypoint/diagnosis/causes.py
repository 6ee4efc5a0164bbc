"""Why a rank that others wait for does not arrive: root causes only, not the ranks that wait."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from rallypoint.diagnosis.activity import ActivityKind, is_users, main_stack, of_thread
from rallypoint.diagnosis.explanation import Cause, Strength
from rallypoint.diagnosis.facts import Process, Thread
from rallypoint.diagnosis.job_state import Condition, Rank
from rallypoint.diagnosis.phrases import numbered, seconds, shortened, times

_LOADER_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([\w ]+)")
_LOADER_ENDED = re.compile(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly")
_DISK_FULL = re.compile(r"No space left on device: .* is full")  # base/fatal_error.py
_OF_OURS = re.compile(r"raised rallypoint\.base\.errors\.(?=\w+Error: )")
_OF_LIBRARY = re.compile(r"^rallypoint\.base\.errors\.")
_SIGNALS = {
    "Killed": "SIGKILL",
    "Terminated": "SIGTERM",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
}
_MOST_OF_ERROR = 80  # characters
_MOST_OF_OURS = 170  # our own errors say why


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What prevents a rank from arriving.

    Attributes:
        words: a predicate: ``"is stopped (SIGSTOP)"``.
        owner: the part of the rank that it is about: ``"data loader"``; empty for the rank itself.
        remedy: what to do, or empty.
    """

    cause: Cause
    words: str
    _: KW_ONLY
    owner: str = ""
    remedy: str = ""
    strength: Strength = Strength.CERTAIN


def explain(rank: Rank) -> Obstacle:
    """Why this rank does not arrive."""
    return _BY_CONDITION.get(rank.condition, _elsewhere)(rank)


def _killed(rank: Rank) -> Obstacle:
    assert rank.end is not None
    kills = rank.node.oom_kills if rank.node else None
    who = "not by the launcher"
    if rank.end.signal == "SIGKILL" and kills is not None:
        struck = "did not strike" if kills == 0 else f"struck {times(kills)}"
        who += f"; the kernel's out-of-memory killer {struck}"
    return Obstacle(Cause.KILLED, f"is dead ({rank.end.signal}, {who})")


def _ended(rank: Rank) -> Obstacle:
    end = rank.end
    if end is None:
        return Obstacle(Cause.ENDED, "has ended (exit status not yet known)")
    loader = _LOADER_KILLED.search(end.error)
    if loader:
        signal = _SIGNALS.get(loader[2].strip(), loader[2].strip())
        words = f"{loader[1]} was killed by {signal}"
        return Obstacle(Cause.ENDED, words, owner="data loader worker")
    loader = _LOADER_ENDED.search(end.error)
    if loader:
        words = f"{loader[1]} has ended unexpectedly"
        return Obstacle(Cause.ENDED, words, owner="data loader worker")
    full = _DISK_FULL.search(end.error)
    error = _shortened(full[0] if full else end.error)
    if end.signal:
        raised = f"raised {error.removeprefix('raised ')}"
        return Obstacle(Cause.ENDED, f"{raised}, and was then ended by {end.signal}")
    return Obstacle(Cause.ENDED, f"has ended (code {end.code}{f': {error}' if error else ''})")


def _shortened(error: str) -> str:
    """An exception, as far as there is room for it."""
    text = _OF_OURS.sub("", error)
    return shortened(text, _MOST_OF_ERROR if text == error else _MOST_OF_OURS)


def _raised(rank: Rank) -> Obstacle:
    assert rank.worker is not None
    error = _shortened(_OF_LIBRARY.sub("", rank.worker.error))
    return Obstacle(Cause.RAISED, f"raised {error} and cannot end: {_keeps_from_ending(rank)}")


def _keeps_from_ending(rank: Rank) -> str:
    """What Python waits for at the end: a thread, or something that is to be done at exit."""
    main = main_stack(rank.stacks)
    others = [each for each in rank.stacks if each != main and of_thread(each).frame]
    ends_threads = main is not None and any(each.function == "_shutdown" for each in main.frames)
    if not others or not ends_threads:
        return f"it {rank.activity}"
    stack = next((each for each in others if of_thread(each).kind.communicates), others[0])
    activity = of_thread(stack)
    words = str(activity) if activity.frame and is_users(activity.frame) else activity.words
    running = [
        call for group, call in rank.calls() if call.state == "running" and not group.has_left
    ]
    if len(running) == 1 and (activity.kind.communicates or activity.kind is ActivityKind.UNKNOWN):
        words = f"waits in {numbered(running[0])} at {activity.site}"
    return f"thread {stack.name!r} {words}" if stack.name else f"a thread of its own {words}"


def _stopped(rank: Rank) -> Obstacle:
    if rank.node is not None and rank.node.is_paused:
        return Obstacle(
            Cause.STOPPED,
            "is paused by the launcher until the job continues",
            remedy=f"check the connections of {rank.node.host} to the other nodes",
        )
    site = "" if rank.activity.kind is ActivityKind.UNKNOWN else f" at {rank.activity.site}"
    return Obstacle(
        Cause.STOPPED,
        f"is stopped (SIGSTOP){site}",
        remedy=f"kill -CONT {rank.pid} resumes it" if rank.pid else "",
    )


def _traced(rank: Rank) -> Obstacle:
    return Obstacle(Cause.STOPPED, "is stopped by a debugger")


def _silent(rank: Rank) -> Obstacle:
    assert rank.node is not None
    return Obstacle(
        Cause.SILENT,
        f"has not answered for {seconds(rank.node.silent_s or 0.0)}",
        owner=f"node {rank.node.node_rank} ({rank.node.host})",
    )


def _not_seen(rank: Rank) -> Obstacle:
    return Obstacle(
        Cause.NOT_SEEN,
        "was not seen: cannot determine what it does, because no data of it was kept",
        strength=Strength.UNKNOWN,
    )


def _in_kernel(rank: Rank) -> Obstacle:
    thread = rank.process.main_thread if rank.process else None
    wait = f", in {thread.wait}" if thread and thread.wait else ""
    if thread and thread.path:
        wait += f", {thread.syscall} of {thread.path}"
    site = f" called at {rank.activity.site}" if rank.activity.site else ""
    return Obstacle(Cause.IN_KERNEL, f"has been in the kernel (D) since the first look{wait}{site}")


def _holds_gil(rank: Rank) -> Obstacle:
    assert rank.worker is not None
    # Running code may release it between the samples; sleeping code does not.
    strength = Strength.INFERRED if rank.worker.library else Strength.CERTAIN
    holder = next((each for each in rank.worker.stacks if each.thread == rank.worker.gil), None)
    site = of_thread(holder).site if holder else ""
    cpu = f" ({rank.activity.note})" if "CPU" in rank.activity.note else ""
    return Obstacle(
        Cause.HOLDS_GIL,
        f"{strength.adverb}holds the GIL in C code called at {site or 'a place unknown'}{cpu}",
        strength=strength,
    )


_BY_CONDITION = {
    Condition.KILLED: _killed,
    Condition.ENDED: _ended,
    Condition.RAISED: _raised,
    Condition.STOPPED: _stopped,
    Condition.TRACED: _traced,
    Condition.SILENT: _silent,
    Condition.NOT_SEEN: _not_seen,
    Condition.IN_KERNEL: _in_kernel,
    Condition.HOLDS_GIL: _holds_gil,
}


def _elsewhere(rank: Rank) -> Obstacle:
    """The explanation for a rank that is alive, and does something else."""
    kind = rank.activity.kind
    if kind is ActivityKind.LOADER:
        return _loader(rank)
    words, strength = str(rank.activity), rank.activity.strength
    if kind is ActivityKind.LOCK:
        words += _holder(rank)
    elif kind is ActivityKind.SUBPROCESS:
        words += _child(rank)
    elif kind is ActivityKind.C_CODE and strength is Strength.UNKNOWN:
        words += ": cannot determine for what, because C code has no frames"
    if rank.starved >= 0.3:
        words += f"; it gets no core for {rank.starved * 100:.0f} % of the time"
    return Obstacle(Cause.ELSEWHERE, words, strength=strength)


def _loader(rank: Rank) -> Obstacle:
    """The explanation if a child process does not deliver."""
    site = f" ({rank.activity.site})" if rank.activity.site else ""
    below = list(_below(rank.process))
    for child in below:
        if child.state == "Z":
            words = f"{child.pid} has ended, and was not waited for{site}"
            return Obstacle(Cause.ELSEWHERE, words, owner="data loader worker")
    return Obstacle(Cause.ELSEWHERE, f"{_of_loader(below)}{site}", owner="data loader")


def _of_loader(below: Sequence[Process]) -> str:
    """What a data loader does: its first worker that is blocked, or computes, or else all."""
    for child in below:
        thread = next((each for each in child.threads if each.path), None)
        if thread or child.state in ("D", "T"):
            return f"its worker {child.pid} {_does(child, thread)}"
    for child in below:
        if child.cpu >= 0.5:
            return f"its worker {child.pid} computes ({child.cpu * 100:.0f} % CPU)"
    if not below:
        return "no worker of it was found"
    calls = sorted({thread.syscall for child in below for thread in child.threads[:1]} - {""})
    how = f" in {', '.join(calls)}" if calls else ""
    return f"its workers ({', '.join(str(child.pid) for child in below[:4])}) sleep{how}"


def _does(child: Process, thread: Thread | None) -> str:
    if thread is None:
        return f"is in state {child.state}"
    wait = f", {thread.wait}" if thread.wait else ""
    state = {"D": f" (state D{wait})", "T": " (stopped)"}.get(child.state, "")
    return f"is in {thread.syscall.removesuffix('at') or 'a call'} of {thread.path}{state}"


def _holder(rank: Rank) -> str:
    """The thread that may hold the lock for which the main thread waits."""
    main = main_stack(rank.stacks)
    for stack in rank.stacks:
        activity = of_thread(stack)
        if stack != main and activity.frame and activity.kind is not ActivityKind.QUEUE:
            name = f'"{stack.name}"' if stack.name else stack.thread
            return f" (probably held by thread {name} at {activity.site})"
    return ""


def _child(rank: Rank) -> str:
    child = next(_below(rank.process), None)
    if child is None:
        return ""
    state = " in state D" if child.state == "D" else ""
    return f": {child.pid} ({child.command[:40]}){state}"


def _below(process: Process | None) -> Iterator[Process]:
    for child in process.children if process else ():
        yield child
        yield from _below(child)
