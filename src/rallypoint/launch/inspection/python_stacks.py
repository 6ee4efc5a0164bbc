"""Asks workers where their Python threads are, with a signal that they answer in C.

base/worker_hook.py has prepared it (native/python/stacks.cc), with memory whose name contains the
signal's number; all that is needed is found in /proc, at any time. A signal that a process does not
handle would kill it, so it is sent only if the memory is still open there and the signal caught. It
is sent to a thread that can take it. Rallypoint's threads are preferred, because a signal
interrupts some system calls of the program. A running main thread is in no such call, and reports
whose code it runs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Iterable

from rallypoint._native import signal_thread
from rallypoint.base.record import Record
from rallypoint.base.worker_hook import STACKS_NAME
from rallypoint.diagnosis.facts import Frame, Stack

_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_GARBAGE = "  Garbage-collecting"
_TEMPLATE = ("<string>", "<module>")  # what `python -c` runs
_MORE_THREADS = "..."  # at the beginning of a line; the mark for more frames is indented


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """The threads in `text`, in its order. The oldest is the main one, if all are there.

    faulthandler lists the newest thread first, at most 100 of them, and each thread's innermost
    frame first. Other lines are skipped.
    """
    threads: list[tuple[str, str, list[Frame]]] = []
    collecting = set()
    has_all = True
    for line in text.split("\n"):
        thread, frame = _THREAD.fullmatch(line), _FRAME.fullmatch(line)
        if thread is not None:
            threads.append((f"0x{thread[1]}", _unescaped(thread[2] or ""), []))
        elif line == _MORE_THREADS:
            has_all = False
        elif not threads:
            continue
        elif line == _GARBAGE:
            collecting.add(len(threads) - 1)
        elif frame is not None:
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][2].append(
                Frame(file=_unescaped(frame[1] or ""), line=number, function=_unescaped(frame[3]))
            )
    return tuple(
        Stack(
            thread=identifier,
            name=name,
            frames=_of_program(frames),
            is_main=has_all and index == len(threads) - 1,
            collects_garbage=index in collecting,
        )
        for index, (identifier, name, frames) in enumerate(threads)
    )


def _of_program(frames: list[Frame]) -> tuple[Frame, ...]:
    """Without the outermost frame of a forked worker, which is base/template.py's PROGRAM."""
    is_template = len(frames) > 1 and (frames[-1].file, frames[-1].function) == _TEMPLATE
    return tuple(frames[:-1] if is_template else frames)


def _unescaped(text: str) -> str:
    """Characters outside ASCII were written as their numbers."""
    return _ESCAPE.sub(lambda found: _character(int(found[1] or found[2] or found[3], 16)), text)


def _character(number: int) -> str:
    return chr(number) if number < 0x110000 else "\N{REPLACEMENT CHARACTER}"


SCRIBE = "rally-scribe"  # a thread of ours, not of the program (native/scribe)
_MEMORY = re.compile(rf"/(?:memfd:|.+/){STACKS_NAME}(\d+)\b.* \(deleted\)")
_MOST_BYTES = 1 << 20
_AT = re.compile(r"^rallypoint: at 0x([0-9a-f]+)$", re.MULTILINE)
_GIL = re.compile(r"^rallypoint: gil (0x[0-9a-f]+)$", re.MULTILINE)
_BEGIN, _END = "rallypoint: begin\n", "rallypoint: end\n"
_LOOK_S = 0.0005
_MOMENT_S = 0.005
_UNABLE = {
    "T": "the process is stopped",
    "t": "a debugger has stopped the process",
    "D": "its thread is in an uninterruptible system call",
    "Z": "the process has ended",
    "X": "the process has ended",
}


class Answer(Record):
    """A process's answer: its stacks, or why there are none.

    Attributes:
        library: the file whose code the main thread was running, if it was running and was asked.
        gil: the thread that held the GIL; as in `Stack`; empty: not known.
    """

    stacks: tuple[Stack, ...]
    because: str = ""
    library: str = ""
    gil: str = ""


class UnansweredError(Exception):
    """There will be no stacks; the message says why."""


def ask_for_stacks(
    pids: Iterable[int], *, wait_s: float = 0.1, running: Container[int] = ()
) -> dict[int, Answer]:
    """The positions of these processes' Python threads; within `wait_s` for all together.

    Each process has one memory for its answer; two callers at a time would disturb each other.

    Args:
        running: processes whose main thread is asked itself, if it is still running.
    """
    answers: dict[int, Answer] = {}
    asked = []
    for pid in pids:
        try:
            asked.append(_Question(pid, asks_main=pid in running))
        except UnansweredError as error:
            answers[pid] = Answer((), str(error))
        except OSError:
            answers[pid] = Answer((), "the process has ended, or cannot be inspected")
    deadline = time.monotonic() + wait_s
    while asked:
        is_late = time.monotonic() >= deadline
        for question in list(asked):
            answer = question.answer(is_late=is_late)
            if answer is not None:
                answers[question.pid] = answer
                asked.remove(question)
        if asked:
            time.sleep(_LOOK_S)
    return answers


class _Question:
    """A signal sent to a process, and the memory in which it answers."""

    def __init__(self, pid: int, *, asks_main: bool) -> None:
        self.pid = pid
        self._descriptor, number = _memory_of(pid)
        self._bit = 1 << (number - 1)
        self._thread = pid
        self._asks_main = asks_main and self._status()["State"].startswith("R")
        if not self._asks_main:
            self._thread = _thread_of(pid)
        self._check()
        self._begin = self._end()
        self._memory = os.open(f"/proc/{pid}/fd/{self._descriptor}", os.O_RDWR)
        trouble = signal_thread(pid, self._thread, number)
        if trouble:
            os.close(self._memory)
            raise OSError(trouble, os.strerror(trouble))

    def _check(self) -> None:
        """Whether the signal is harmless, and will be received."""
        status = self._status()
        if status["State"].startswith("D"):  # many are for a moment
            time.sleep(_MOMENT_S)
            status = self._status()
        if not int(status["SigCgt"], 16) & self._bit:
            raise UnansweredError("the program has replaced the signal's handler")
        if status["State"][:1] in _UNABLE:
            raise UnansweredError(_UNABLE[status["State"][:1]])
        if self._is_busy(status):
            raise UnansweredError(
                "its thread blocks the signal, or has not answered the previous one"
            )

    def answer(self, *, is_late: bool) -> Answer | None:
        """The answer, once it is complete or `is_late`."""
        try:
            # A process that has begun to write and is not busy afterwards has written everything.
            is_done = self._end() > self._begin and not self._is_busy(self._status())
            end = self._end()
        except (OSError, KeyError, ValueError):
            os.close(self._memory)
            return Answer((), "the process has ended")
        if not is_late and not is_done:
            return None
        length = max(0, min(end - self._begin, _MOST_BYTES))
        text = os.pread(self._memory, length, self._begin).decode("ascii", errors="replace")
        os.truncate(self._memory, 0)  # the next answer begins where this one ended
        os.close(self._memory)
        if not is_done:
            return Answer((), "the process did not answer in time")
        stacks, mark, _ = text.rpartition(_BEGIN)[2].rpartition(_END)
        if not mark:
            return Answer((), "its threads were running while they were inspected")
        at, gil = _AT.search(stacks), _GIL.search(stacks)
        return Answer(
            parse_stacks(stacks),
            library=_library(self.pid, int(at[1], 16)) if at and self._asks_main else "",
            gil=gil[1] if gil else "",
        )

    def _is_busy(self, status: dict[str, str]) -> bool:
        """Whether the signal is pending, or its handler runs, which blocks it."""
        return bool((int(status["SigPnd"], 16) | int(status["SigBlk"], 16)) & self._bit)

    def _status(self) -> dict[str, str]:
        lines = _read(f"/proc/{self.pid}/task/{self._thread}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def _end(self) -> int:
        """The number of bytes that it has ever written."""
        first = _read(f"/proc/{self.pid}/fdinfo/{self._descriptor}").splitlines()[0]
        return int(first.partition(":")[2])


def _memory_of(pid: int) -> tuple[int, int]:
    """The descriptor of a process's memory for stacks, and the signal that requests them."""
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        if found := _MEMORY.match(target):
            return int(name), int(found[1])
    raise UnansweredError(
        "the process is not a Python program that Rallypoint started, or it has closed its "
        "descriptors"
    )


def _thread_of(pid: int) -> int:
    """Our own thread there, or else the main one."""
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            if _read(f"/proc/{pid}/task/{name}/comm").rstrip("\n") == SCRIBE:
                return int(name)
        except OSError:
            continue  # it has just ended
    return pid


def _library(pid: int, address: int) -> str:
    """The file that contains the code."""
    try:
        for line in _read(f"/proc/{pid}/maps").splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            first, _, end = addresses.partition("-")
            if int(first, 16) <= address < int(end, 16):
                return path.rpartition("/")[2]
    except (OSError, ValueError):
        pass
    return ""


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
