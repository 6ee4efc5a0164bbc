"""`rallypoint top` on real jobs: what it says, what it leaves of itself, and of the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from functools import partial
from pathlib import Path

import pyte  # type: ignore[import-not-found,import-untyped,unused-ignore]
import pytest
from tests.hosts import Hosts
from tests.pages import blocks_tested_by
from tests.system.conftest import Launch, parent_of
from tests.system.everyday import wait_until
from tests.system.nodes import launches
from tests.system.test_jobs import rallypoint, start_waiting_job

pytestmark = pytest.mark.system

TOP = (sys.executable, "-m", "rallypoint", "top")
# Seven calls of different sizes a step, before which one rank works for longer than the others.
SLOW = """
import time, numpy as np, rallypoint as dist
dist.init_process_group()
rank = dist.get_rank()
open(f"ready.{rank}", "w")
while True:
    time.sleep(0.08 if rank == 2 else 0.05)
    for size in range(1, 8):
        dist.all_reduce(np.ones(1000 * size, np.float32))
"""


def followers(launcher: int) -> list[int]:
    """The processes of that agent that read its node."""
    found = []
    for entry in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if parent_of(entry) == launcher and words[-2:] == [b"follow", b""]:
                found.append(int(entry.name))
    return found


def seen(*words: str) -> dict[str, object]:
    done = rallypoint("top", "--once", "--json", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def ranks_of(told: dict[str, object]) -> list[dict[str, object]]:
    ranks = told["ranks"]
    assert isinstance(ranks, list)
    return ranks


def start_slow_job(launch: Launch) -> int:
    process = launch.start("--nproc-per-node", "4", launch.script(SLOW))
    launch.wait_for("ready.*", 4)
    return process.pid


@pytest.fixture(scope="module")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The launcher of a job that tests only look at."""
    with launches(tmp_path_factory.mktemp("slow"), 1) as (launch,):
        yield start_slow_job(launch)


@pytest.mark.everyday
def test_a_slow_rank_is_named(launch: Launch) -> None:
    pid = start_slow_job(launch)

    def is_named() -> bool:  # this machine may be busy, and stop others for longer
        told = seen(str(pid))
        print(told)
        slow = [each["rank"] for each in ranks_of(told) if each["is_slow"]]
        return slow == [2] and "slow rank 2: others wait for it " in str(told["headline"])

    wait_until(is_named)
    text = rallypoint("top", str(pid)).stdout  # there is no terminal: a screen as text
    assert re.search(r"^ ! +2 (runs|waits) +(after )?all_reduce #\d+ ", text, re.MULTILINE), text
    assert "\x1b" not in text


def test_the_guides_commands(slow_job: int) -> None:
    """Other jobs may run here, so each command is given its job."""
    for block in blocks_tested_by("tests/system/test_top.py::test_the_guides_commands"):
        for program, *words in block.commands():
            assert program == "rallypoint"
            done = rallypoint(*words, str(slow_job))
            assert done.returncode == 0, done.stderr
            if "--json" in words:
                assert len(ranks_of(json.loads(done.stdout))) == 4
            else:
                assert re.search(r"^.. +3 (runs|waits) ", done.stdout, re.MULTILINE)


def test_a_job_that_hangs_has_the_sentence_of_explain(launch: Launch) -> None:
    pid = start_waiting_job(launch)
    without_time = re.compile(r" \(\d+\.\d s\)\.\n?$")
    wait_until(lambda: seen(pid)["is_stalled"] is True)
    why, told = rallypoint("explain", pid).stdout, seen(pid)
    assert without_time.sub("", str(told["headline"])) == without_time.sub("", why)
    assert [each["rank"] for each in ranks_of(told) if each["is_at_fault"]] == [1]
    assert [str(each["at"]).rpartition("/")[2] for each in ranks_of(told)] == [
        "worker.py:11", "worker.py:10", "worker.py:11",
    ]  # fmt: skip


def test_all_who_follow_share_one_reader_that_ends_with_them(launch: Launch) -> None:
    pid = start_slow_job(launch)
    command = [*TOP, "--json", str(pid)]
    watchers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for watcher in watchers:
        assert watcher.stdout is not None
        for _ in range(3):
            assert len(ranks_of(json.loads(watcher.stdout.readline()))) == 4
    assert len(followers(pid)) == 1
    for watcher in watchers:
        watcher.kill()
        watcher.communicate()
    killed_at = time.monotonic()
    wait_until(lambda: not followers(pid))
    assert time.monotonic() - killed_at < 14

    # The agent sleeps again: it waits for events only.
    status = Path(f"/proc/{pid}/status")
    wait_until(lambda: sleeps_between(status, 2.0))


def sleeps_between(status: Path, seconds: float) -> bool:
    """Whether a process does not wake up for that long."""
    before = re.findall(r"ctxt_switches:\t(\d+)", status.read_text())
    time.sleep(seconds)
    return before == re.findall(r"ctxt_switches:\t(\d+)", status.read_text())


def test_a_killed_agent_leaves_no_reader(launch: Launch) -> None:
    pid = start_slow_job(launch)
    with subprocess.Popen([*TOP, "--json", str(pid)], stdout=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        (follower,) = followers(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{follower}").exists())
        watcher.stdout.read()
        assert watcher.wait(30) == 0  # the job is over


def test_a_frozen_host_is_silent_and_others_go_on(needs_hosts: None, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(SLOW)
    flags = "--nnodes 3 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf"
    flags += " keep_alive_interval=5,keep_alive_max_attempt=30 --nproc-per-node 1"
    with Hosts(3) as hosts:
        run = [sys.executable, "-m", "rallypoint", "run", *flags.split(), str(script)]
        nodes = [host.popen(run, cwd=tmp_path) for host in hosts.hosts]
        try:
            wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 3)

            def told(host: int) -> dict[str, object]:
                command = hosts[host].enter(*TOP, "--once", "--json")
                done = subprocess.run(command, check=False, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                return json.loads(done.stdout)  # type: ignore[no-any-return]

            def silent(host: int) -> list[object]:
                nodes = told(host)["nodes"]
                assert isinstance(nodes, list)
                return [each["host"] for each in nodes if each["silent_s"] is not None]

            def all_tell(host: int) -> bool:
                return len(ranks_of(told(host))) == 3 and not silent(host)

            def is_only_host3_silent(host: int) -> bool:
                return silent(host) == ["host3"]

            for host in (1, 3):
                wait_until(partial(all_tell, host))
            # Its agent and its reader, but not its worker: the job goes on.
            stopped = hosts[3].run("pgrep", "-f", "inspection follow|rallypoint run").split()
            hosts[3].run("kill", "-STOP", *stopped)
            try:
                wait_until(partial(is_only_host3_silent, 2))
                found = told(2)
                states = {each["host"]: each["state"] for each in ranks_of(found)}
                assert states.pop("host3") == "silent"
                assert set(states.values()) <= {"runs", "waits"}
                assert "has told nothing for" in str(found["headline"])
                assert not found["is_stalled"]
            finally:
                hosts[3].run("kill", "-CONT", *stopped)
                for node in nodes:
                    node.send_signal(signal.SIGCONT)  # nsenter stops with its child
            wait_until(lambda: not silent(1))
        finally:
            for node in nodes:
                node.kill()
                node.wait()


class Terminal:
    """A program in a terminal of its own, which a person would see as `text`."""

    def __init__(self, command: tuple[str, ...], columns: int = 80, rows: int = 24) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "PS1": "> "})
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def shows(self, pattern: str) -> bool:
        """Whether there is such a line on the screen, once all is read that was written."""
        while select.select([self._master], [], [], 0.05)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the last one has closed it
                break
            self.written += data
            self._stream.feed(data)
        return re.search(pattern, self.text, re.MULTILINE) is not None

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def settings(self) -> list[object]:
        """As `stty` would show them."""
        return termios.tcgetattr(self._master)

    def wait(self) -> int:
        """Until the program ends; its exit status, or the negative number of a signal."""
        ended: list[int] = []

        def has_ended() -> bool:
            self.shows("")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(pid)

        wait_until(has_ended)
        return ended[0]

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._master)


@contextmanager
def terminal(*command: str, columns: int = 80, rows: int = 24) -> Iterator[Terminal]:
    found = Terminal(command, columns, rows)
    try:
        yield found
    finally:
        print(found.text)
        found.close()


def is_left_as_it_was(written: bytes) -> bool:
    """Whether the alternate screen was left, and the cursor is shown."""
    modes = {}
    for number, switch in re.findall(rb"\x1b\[\?(\d+)([hl])", written):
        modes[int(number)] = switch
    return modes == {1049: b"l", 25: b"h", 7: b"h", 2026: b"l"}


def test_keys_and_sizes(slow_job: int) -> None:
    with terminal("sh", "-c", f"{' '.join(TOP)} {slow_job}; echo status $?; read line") as seen:
        before = seen.settings
        wait_until(lambda: seen.shows(r"^  +3 (runs|waits) "))
        assert seen.settings != before
        assert seen.text.split("\n")[-1].startswith("q quit")
        seen.type("\x1b[B\x1b[B")
        wait_until(lambda: seen.shows(r"^>"))
        seen.type("?")
        wait_until(lambda: seen.shows(r"^Keys and columns"))
        seen.type("\x1b")
        wait_until(lambda: not seen.shows(r"^Keys and columns"))
        seen.type("\r")
        wait_until(lambda: seen.shows(r"worker\.py:\d+ in\s+<module>"))
        seen.type("\x1b")
        seen.type("/no such rank\r")
        wait_until(lambda: seen.shows(r"/no such rank$") and not seen.shows(r"^..  +3 "))
        seen.type("/" + "\x7f" * 20 + "\rs")
        wait_until(lambda: seen.shows(r"sorted by rank$") and seen.shows(r"^..  +3 "))
        for columns, rows in ((100, 30), (40, 10), (200, 60), (80, 24)):
            seen.resize(columns, rows)
            wait_until(lambda: seen.shows(r"\nq quit.*\Z"))
            wait_until(lambda: seen.shows(r"^..  +3 (runs|waits) "))
        assert not is_left_as_it_was(seen.written)
        seen.type("q")
        wait_until(lambda: seen.shows(r"^status 0"))
        assert is_left_as_it_was(seen.written)
        assert seen.settings == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(slow_job: int, number: signal.Signals) -> None:
    with terminal(*TOP, str(slow_job)) as seen:
        before = seen.settings
        wait_until(lambda: seen.shows(r"^  +3 (runs|waits) "))
        os.kill(seen.pid, number)
        settings = before
        with suppress(termios.error):
            settings = seen.settings
        assert seen.wait() == 128 + number
        assert is_left_as_it_was(seen.written)
        assert settings == before or seen.written


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_it_stops_and_goes_on_as_other_programs_do(slow_job: int) -> None:
    with terminal("bash", "--norc", "--noediting", "-i") as seen:
        wait_until(lambda: seen.shows(r"^> *$"))
        before = seen.settings
        seen.type(f"{' '.join(TOP)} {slow_job}\n")
        wait_until(lambda: seen.shows(r"^  +3 (runs|waits) "))
        seen.type("\x1a")
        wait_until(lambda: seen.shows(r"Stopped"))
        assert is_left_as_it_was(seen.written)
        assert seen.settings == before
        seen.type("fg\n")
        written = len(seen.written)
        wait_until(lambda: seen.shows("") and b"\x1b[?1049h" in seen.written[written:])
        wait_until(lambda: seen.shows(r"^  +3 (runs|waits) "))
        seen.type("q")
        wait_until(lambda: seen.shows(r"^> *$"))
        seen.type("echo status $?\n")
        wait_until(lambda: seen.shows(r"^status 0"))
        assert is_left_as_it_was(seen.written)
        assert seen.settings == before


def test_hostile_names_leave_no_sequence(launch: Launch) -> None:
    """Neither a job's name nor what its workers write reaches the terminal as it is."""
    name = "job\x1b]0;pwned\x07\x1b[31m\u202e"
    script = SLOW.replace("rank = ", "print('\\x1b]0;pwned\\x07\\u202e', flush=True)\nrank = ")
    flags = ("--rdzv-id", name, "--log-dir", "logs", "--redirects", "3")
    pid = launch.start("--nproc-per-node", "4", *flags, launch.script(script)).pid
    launch.wait_for("ready.*", 4)
    with terminal(*TOP, str(pid)) as seen:
        wait_until(lambda: seen.shows(r"^  +3 (runs|waits) "))
        seen.type("l")
        wait_until(lambda: seen.shows(r"\\x1b\]0;pwned\\x07\\u202e"))
        seen.type("q")
        assert seen.wait() == 0
        rest = re.sub(rb"\x1b\[[?\d;]*[a-zA-Z]", b"", seen.written)
        assert b"\x1b" not in rest
        assert b"\x07" not in rest
        assert "\u202e".encode() not in rest
    assert "pwned" in seen.text or b"pwned" in seen.written


def test_without_colours(slow_job: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(*TOP, str(slow_job)) as seen:
        wait_until(lambda: seen.shows(r"^  +3 (runs|waits) "))
        seen.type("q")
        assert seen.wait() == 0
        assert set(re.findall(rb"\x1b\[([\d;]*)m", seen.written)) <= {b"0"}
