"""Stacks of workers that sleep, hold the GIL, wait for locks, or are no such workers any more."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.everyday import wait_until

from rallypoint.diagnosis.facts import Stack
from rallypoint.launch.inspection.python_stacks import Answer, ask_for_stacks

pytestmark = pytest.mark.system

READY = "import os, signal, sys, time, threading\nprint('ready', flush=True)\n"


@contextmanager
def worker(code: str, directory: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a control socket, as the launcher starts it, once it has said "ready"."""
    script = directory / "worker.py"
    script.write_text(READY + code)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        ours,
        theirs,
        subprocess.Popen(
            [sys.executable, *words, str(script)],
            env={**os.environ, "RALLYPOINT_CONTROL_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def ask(pid: int) -> Answer:
    return ask_for_stacks([pid], wait_s=5)[pid]


def ask_until(pid: int, function: str) -> tuple[Stack, ...]:
    """The stacks, once a thread is in that function."""
    found: list[tuple[Stack, ...]] = []

    def is_there() -> bool:
        found.append(ask(pid).stacks)
        frames = (frame for stack in found[-1] for frame in stack.frames)
        return any(frame.function == function for frame in frames)

    wait_until(is_there)
    return found[-1]


@pytest.mark.parametrize(
    "blocked",
    [
        pytest.param("time.sleep(1000)", id="sleep", marks=pytest.mark.everyday),
        pytest.param(
            "ctypes.PyDLL(None).read(pipe[0], buffer, 1)",  # does not release the GIL
            id="gil",
            marks=pytest.mark.everyday,
        ),
        pytest.param("while True: pass", id="loop"),
    ],
)
def test_where_the_main_thread_is(blocked: str, tmp_path: Path) -> None:
    code = (
        "import ctypes\n"
        "pipe, buffer = os.pipe(), ctypes.create_string_buffer(1)\n"
        f"def stuck():\n    {blocked}\ndef outer():\n    stuck()\nouter()\n"
    )
    lines = (READY + code).splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.strip() == blocked)
    with worker(code, tmp_path) as process:
        for _ in range(3):  # as often as one likes
            (stack,) = ask_until(process.pid, "stuck")
            assert stack.is_main
            assert [frame.function for frame in stack.frames] == ["stuck", "outer", "<module>"]
            assert {frame.file for frame in stack.frames} == {str(tmp_path / "worker.py")}
        wait_until(lambda: ask_until(process.pid, "stuck")[0].frames[0].line == line)
        assert process.poll() is None


def test_many_threads_and_many_processes(tmp_path: Path) -> None:
    code = (
        "def child(n):\n    time.sleep(1000)\n"
        "for n in range({}):\n    threading.Thread(target=child, args=(n,), daemon=True).start()\n"
        "def stuck():\n    time.sleep(1000)\n"
        "stuck()\n"
    )
    with (
        worker(code.format(30), tmp_path) as few,
        worker(code.format(130), tmp_path) as many,
        worker("os.closerange(0, 100)\ntime.sleep(1000)\n", tmp_path) as none,
    ):
        stacks = ask_until(few.pid, "stuck")
        assert [stack.is_main for stack in stacks] == [False] * 30 + [True]
        answers: dict[int, Answer] = {}

        def all_are_there() -> bool:
            answers.update(ask_for_stacks([few.pid, many.pid, none.pid, 2**22 + 1], wait_s=5))
            told = answers[many.pid].stacks
            # The main thread is the last, and left out once there are more than can be told.
            return len(told) >= 100 and not any(stack.is_main for stack in told)

        wait_until(all_are_there)
        assert answers[few.pid].stacks == stacks
        assert len(answers[many.pid].stacks) == 100
        assert "descriptors" in answers[none.pid].because
        assert "ended" in answers[2**22 + 1].because


@pytest.mark.everyday
def test_a_stopped_worker_gets_no_signal(tmp_path: Path) -> None:
    with worker("def stuck():\n    time.sleep(1000)\nstuck()\n", tmp_path) as process:
        ask_until(process.pid, "stuck")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid, "State")[0] == "T")
        assert ask(process.pid) == Answer((), "the process is stopped")
        assert int(state_of(process.pid, "SigPnd"), 16) == 0
        assert int(state_of(process.pid, "ShdPnd"), 16) == 0
        os.kill(process.pid, signal.SIGCONT)
        ask_until(process.pid, "stuck")


def state_of(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize(
    ("code", "because"),
    [
        pytest.param(
            "os.execv('/bin/sh', ['sh', '-c', '>settled; exec sleep 1000'])",
            "not a Python program that Rallypoint started",
            marks=pytest.mark.everyday,
        ),
        (
            "for n in range(34, 64): signal.signal(n, signal.SIG_DFL)",
            "replaced the signal's handler",
        ),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))", "blocks the signal"),
    ],
)
def test_nothing_is_sent_to_who_would_not_take_it(code: str, because: str, tmp_path: Path) -> None:
    text = f"os.chdir({str(tmp_path)!r})\n{code}\nopen('settled', 'w').close()\ntime.sleep(1000)\n"
    with worker(text, tmp_path) as process:
        # What is asked before then may arrive when it would end the program.
        wait_until((tmp_path / "settled").exists)
        answer = ask(process.pid)
        assert because in answer.because
        assert answer.stacks == ()
        assert process.poll() is None


@pytest.mark.parametrize("words", [("-S",), ("-I",)])
def test_other_ways_to_run(words: tuple[str, ...], tmp_path: Path) -> None:
    with worker("def stuck():\n    time.sleep(1000)\nstuck()\n", tmp_path, *words) as process:
        if words == ("-S",):  # no hook, so no stacks
            assert "not a Python program that Rallypoint started" in ask(process.pid).because
        else:
            ask_until(process.pid, "stuck")
        assert process.poll() is None


def test_a_program_with_a_faulthandler_of_its_own(tmp_path: Path) -> None:
    code = (
        "import faulthandler\n"
        f"file = open({str(tmp_path / 'own')!r}, 'w+')\n"
        "faulthandler.register(signal.SIGUSR1, file=file)\n"
        "faulthandler.enable(file)\n"
        "def stuck():\n"
        "    while os.stat(file.name).st_size == 0: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "stuck()\n"
    )
    with worker(code, tmp_path) as process:
        ask_until(process.pid, "stuck")
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(60) == -signal.SIGSEGV
        text = (tmp_path / "own").read_text()
    assert text.count("in stuck") == 2
    assert "Fatal Python error: Segmentation fault" in text
    assert "rallypoint: " not in text


@pytest.mark.everyday
def test_a_forked_child(tmp_path: Path) -> None:
    code = (
        "pid = os.fork()\n"
        "def parent():\n    time.sleep(1000)\n"
        "def child():\n    time.sleep(1000)\n"
        "if pid:\n    parent()\nelse:\n    child()\n"
    )
    with worker(code, tmp_path) as process:
        ask_until(process.pid, "parent")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        try:
            (stack,) = ask_until(int(children), "child")
            assert stack.is_main
        finally:
            os.kill(int(children), signal.SIGKILL)


RUNS = """
def f(n):
    return n if n == 0 else f(n - 1) + 1
def spin():
    while True:
        f(300)
        exec(compile("def g(x):\\n    return [y for y in range(x)]\\ng(20)", "<x>", "exec"))
        sorted([3, 1, 2], key=lambda v: -v)
def churn():
    while True:
        thread = threading.Thread(target=f, args=(200,))
        thread.start()
        thread.join()
for body in (spin, churn):
    threading.Thread(target=body, daemon=True).start()
time.sleep(1000)
"""


def test_looking_at_running_threads_does_not_harm_them(tmp_path: Path) -> None:
    """faulthandler alone ends this process by SIGSEGV within some 20 looks."""
    with worker(RUNS, tmp_path) as process:
        answers = [ask(process.pid) for _ in range(300)]
        assert process.poll() is None
    if sys.version_info < (3, 13):  # from then on, none after the first that was broken off
        assert sum(bool(answer.stacks) for answer in answers) > 150
