"""Why a rank that others wait for does not arrive: root causes only, not the ranks that wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rallypoint.diagnosis.activity import Doing, is_users, main_stack, of_thread
from rallypoint.diagnosis.explanation import Cause, Strength
from rallypoint.diagnosis.facts import Process, Thread
from rallypoint.diagnosis.phrases import numbered, seconds, shortened, times
from rallypoint.diagnosis.sight import Condition, Rank

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What prevents a rank from arriving.

    Attributes:
        words: a predicate: ``"is stopped (SIGSTOP)"``.
        owner: the part of the rank that it is about: ``"data loader"``; empty for the rank itself.
        remedy: what to do, or empty.
    """

    cause: Cause
    words: str
    owner: str = ""
    remedy: str = ""
    strength: Strength = Strength.TOLD


def explain(rank: Rank) -> Obstacle:
    """Why this rank does not arrive."""
    return _TOLD_BY_CONDITION.get(rank.condition, _elsewhere)(rank)


def _killed(rank: Rank) -> Obstacle:
    assert rank.end is not None
    kills = rank.node.oom_kills if rank.node else None
    who = "not by the launcher"
    if rank.end.signal == "SIGKILL" and kills is not None:
        struck = "did not strike" if kills == 0 else f"struck {times(kills)}"
        who += f"; the kernel's out-of-memory killer {struck}"
    return Obstacle(cause=Cause.KILLED, words=f"is dead ({rank.end.signal}, {who})")


def _ended(rank: Rank) -> Obstacle:
    end = rank.end
    if end is None:
        return Obstacle(cause=Cause.ENDED, words="has ended (how is not known yet)")
    loader = _LOADER_KILLED.search(end.error)
    if loader:
        signal = _SIGNALS.get(loader[2].strip(), loader[2].strip())
        words = f"{loader[1]} was killed by {signal}"
        return Obstacle(cause=Cause.ENDED, owner="data loader worker", words=words)
    loader = _LOADER_ENDED.search(end.error)
    if loader:
        words = f"{loader[1]} has ended unexpectedly"
        return Obstacle(cause=Cause.ENDED, owner="data loader worker", words=words)
    full = _DISK_FULL.search(end.error)
    error = _shortened(full[0] if full else end.error)
    return Obstacle(
        cause=Cause.ENDED, words=f"has ended (code {end.code}{f': {error}' if error else ''})"
    )


def _shortened(error: str) -> str:
    """An exception, as far as there is room for it."""
    text = _OF_OURS.sub("", error)
    return shortened(text, _MOST_OF_ERROR if text == error else _MOST_OF_OURS)


def _raised(rank: Rank) -> Obstacle:
    assert rank.worker is not None
    error = _shortened(_OF_LIBRARY.sub("", rank.worker.error))
    return Obstacle(
        cause=Cause.RAISED, words=f"raised {error} and cannot end: {_keeps_from_ending(rank)}"
    )


def _keeps_from_ending(rank: Rank) -> str:
    """What Python waits for at the end: a thread, or something that is to be done at exit."""
    assert rank.worker is not None
    main = main_stack(rank.worker.stacks)
    others = [each for each in rank.worker.stacks if each != main and of_thread(each).frame]
    ends_threads = main is not None and any(each.function == "_shutdown" for each in main.frames)
    if not others or not ends_threads:
        return f"it {rank.activity}"
    stack = next((each for each in others if of_thread(each).doing.communicates), others[0])
    doing = of_thread(stack)
    words = str(doing) if doing.frame and is_users(doing.frame) else doing.words
    running = [
        call
        for group in rank.groups.values()
        for call in (*group.calls, *group.transfers)
        if call.state == "running" and not group.has_left
    ]
    if len(running) == 1 and (doing.doing.communicates or doing.doing is Doing.UNKNOWN):
        words = f"waits in {numbered(running[0])} at {doing.site}"
    return f"thread {stack.name!r} {words}" if stack.name else f"a thread of its own {words}"


def _stopped(rank: Rank) -> Obstacle:
    place = "" if rank.activity.doing is Doing.UNKNOWN else f" at {rank.activity.site}"
    if rank.node is not None and rank.node.is_paused:
        return Obstacle(
            cause=Cause.STOPPED,
            words="is paused by the launcher until the job goes on",
            remedy=f"look for what keeps {rank.node.host} from hearing the other nodes",
        )
    return Obstacle(
        cause=Cause.STOPPED,
        words=f"is stopped (SIGSTOP){place}",
        remedy=f"kill -CONT {rank.pid} lets it go on" if rank.pid else "",
    )


def _traced(rank: Rank) -> Obstacle:
    return Obstacle(cause=Cause.STOPPED, words="is stopped by a debugger")


def _silent(rank: Rank) -> Obstacle:
    assert rank.node is not None
    return Obstacle(
        cause=Cause.SILENT,
        words=f"has not answered for {seconds(rank.node.silent_s or 0.0)}",
        owner=f"node {rank.node.node_rank} ({rank.node.host})",
    )


def _not_seen(rank: Rank) -> Obstacle:
    return Obstacle(
        cause=Cause.NOT_SEEN,
        words="was not seen: cannot tell what it does, because nothing was kept of it",
        strength=Strength.UNKNOWN,
    )


def _in_kernel(rank: Rank) -> Obstacle:
    thread = _first_thread(rank)
    wait = f", in {thread.wait}" if thread and thread.wait else ""
    if thread and thread.path:
        wait += f", {thread.syscall} of {thread.path}"
    site = f" called at {rank.activity.site}" if rank.activity.site else ""
    return Obstacle(
        cause=Cause.IN_KERNEL,
        words=f"has been in the kernel (D) since the first look{wait}{site}",
    )


def _holds_gil(rank: Rank) -> Obstacle:
    assert rank.worker is not None
    # Running code may release it between the looks; sleeping code does not.
    strength = Strength.INFERRED if rank.worker.library else Strength.TOLD
    holder = next((each for each in rank.worker.stacks if each.thread == rank.worker.gil), None)
    site = of_thread(holder).site if holder else ""
    probably = "probably " if strength is Strength.INFERRED else ""
    cpu = f" ({rank.activity.note})" if "CPU" in rank.activity.note else ""
    return Obstacle(
        cause=Cause.HOLDS_GIL,
        words=f"{probably}holds the GIL in C code called at {site or 'a place unknown'}{cpu}",
        strength=strength,
    )


_TOLD_BY_CONDITION = {
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
    doing = rank.activity.doing
    if doing is Doing.LOADER:
        return _loader(rank)
    words, strength = str(rank.activity), rank.activity.strength
    if doing is Doing.LOCK:
        words += _holder(rank)
    elif doing is Doing.SUBPROCESS:
        words += _child(rank)
    elif doing is Doing.C_CODE and strength is Strength.UNKNOWN:
        words += ": cannot tell for what, because C code has no frames"
    if rank.worker and rank.worker.process and rank.worker.process.starved >= 0.3:
        words += f"; it gets no core for {rank.worker.process.starved * 100:.0f} % of the time"
    return Obstacle(cause=Cause.ELSEWHERE, words=words, strength=strength)


def _loader(rank: Rank) -> Obstacle:
    """The explanation if a child process does not deliver."""
    process = rank.worker.process if rank.worker else None
    place = f" ({rank.activity.site})" if rank.activity.site else ""
    for words in process.ended_children if process else ():
        if "killed" in words or "SIG" in words:
            killed = words if words[:1].isdigit() else f"process: {words}"
            return Obstacle(
                cause=Cause.ELSEWHERE, owner="data loader worker", words=f"{killed}{place}"
            )
    for child in _below(process):
        if child.state == "Z":
            return Obstacle(
                cause=Cause.ELSEWHERE,
                owner="data loader worker",
                words=f"{child.pid} has ended, and was not taken note of{place}",
            )
    for child in _below(process):
        thread = next((each for each in child.threads if each.path), None)
        if thread or child.state in ("D", "T"):
            return _loader_is(f"its worker {child.pid} {_does(child, thread)}{place}")
    busy = [child for child in _below(process) if child.cpu >= 0.5]
    if busy:
        cpu = f"{busy[0].cpu * 100:.0f} % CPU"
        return _loader_is(f"its worker {busy[0].pid} computes ({cpu}){place}")
    asleep = [str(child.pid) for child in _below(process)]
    if asleep:
        calls = {thread.syscall for child in _below(process) for thread in child.threads[:1]}
        how = f" in {', '.join(sorted(calls - {''}))}" if calls - {""} else ""
        return _loader_is(f"its workers ({', '.join(asleep[:4])}) sleep{how}{place}")
    return _loader_is(f"no worker of it was found{place}")


def _loader_is(words: str) -> Obstacle:
    return Obstacle(cause=Cause.ELSEWHERE, owner="data loader", words=words)


def _does(child: Process, thread: Thread | None) -> str:
    state = {"D": f" (state D{_in(thread)})", "T": " (stopped)"}.get(child.state, "")
    if thread is None:
        return f"is in state {child.state}"
    return f"is in {thread.syscall.removesuffix('at') or 'a call'} of {thread.path}{state}"


def _in(thread: Thread | None) -> str:
    return f", {thread.wait}" if thread and thread.wait else ""


def _holder(rank: Rank) -> str:
    """The thread that may hold the lock for which the main thread waits."""
    stacks = rank.worker.stacks if rank.worker else ()
    main = main_stack(stacks)
    others = [each for each in stacks if each != main]
    likely = [
        each
        for each in others
        if of_thread(each).frame and of_thread(each).doing is not Doing.QUEUE
    ]
    if not likely:
        return ""
    name = f'"{likely[0].name}"' if likely[0].name else likely[0].thread
    return f" (probably held by thread {name} at {of_thread(likely[0]).site})"


def _child(rank: Rank) -> str:
    children = list(_below(rank.worker.process if rank.worker else None))
    if not children:
        return ""
    state = " in state D" if children[0].state == "D" else ""
    return f": {children[0].pid} ({children[0].command[:40]}){state}"


def _first_thread(rank: Rank) -> Thread | None:
    process = rank.worker.process if rank.worker else None
    threads = process.threads if process else ()
    return next((each for each in threads if process and each.id == process.pid), None)


def _below(process: Process | None) -> Iterator[Process]:
    for child in process.children if process else ():
        yield child
        yield from _below(child)
