"""Workers' output: passed on untouched, or line by line behind a prefix."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

RUN = (sys.executable, "-m", "rallypoint", "run")


@pytest.mark.everyday(writer="the launcher")
def test_each_line_gets_its_prefix(launch: Launch) -> None:
    script = launch.script("""
import os, sys
sys.stdout.write("one\\n\\ntwo\\nno end")
sys.stderr.write("error\\n")
os.write(1, b"\\nraw \\xff\\n")
""")
    status = launch.run("--nproc-per-node", "2", "--log-prefix", "{rank}/{local_rank}> ", script)
    assert status == 0
    raw = (launch.directory / "stdout.txt").read_bytes().splitlines()
    for rank in (b"0/0> ", b"1/1> "):
        mine = [line.removeprefix(rank) for line in raw if line.startswith(rank)]
        assert mine == [b"one", b"", b"two", b"no end", b"raw \xff"]
    assert sorted(launch.err.splitlines()) == ["0/0> error", "1/1> error"]


CHATTY = """
import os, sys
rank = os.environ["RANK"]
for i in range(5000):
    stream = sys.stdout if i % 2 else sys.stderr
    stream.write(f"{i} " + rank * (i % 300) + "\\n")
"""


def check_lines(text: str, workers: int) -> None:
    seen: dict[str, list[int]] = {str(rank): [] for rank in range(workers)}
    for line in text.splitlines():
        rank, _, rest = line.partition(": ")
        number, _, body = rest.partition(" ")
        assert body == rank * (int(number) % 300)
        seen[rank].append(int(number))
    for numbers in seen.values():
        assert sorted(numbers) == list(range(5000))


def test_no_line_is_torn_or_lost_in_a_slow_pipe(launch: Launch) -> None:
    """Stdout and stderr in one pipe, whose reader takes little at a time."""
    process = subprocess.Popen(
        [*RUN, "--nproc-per-node", "3", "--log-prefix", "{rank}: ", launch.script(CHATTY)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    text = bytearray()
    while data := os.read(process.stdout.fileno(), 3000):
        text += data
    process.stdout.close()
    assert process.wait(60) == 0
    check_lines(text.decode(), 3)


def test_a_reader_that_stops_reading_does_not_stop_the_launcher(launch: Launch) -> None:
    """Workers wait for the reader; the launcher does not, and can be ended."""
    script = launch.script("while True: print('x' * 1000)\n")
    process = subprocess.Popen(
        [*RUN, "--nproc-per-node", "2", "--log-prefix", "{rank}: ", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)  # and then no more, for now
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    process.stdout.close()


def test_a_reader_that_is_gone_does_not_stop_the_launcher(launch: Launch) -> None:
    script = launch.script("while True: print('x' * 1000)\n")
    process = subprocess.Popen(
        [*RUN, "--nproc-per-node", "2", "--log-prefix", "{rank}: ", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()  # and now nobody reads
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


def test_nobody_reads_the_launchers_own_words(launch: Launch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [*RUN, launch.script("raise ValueError()")],
        stderr=writing,
    )
    os.close(writing)
    assert process.wait(60) == 1


@pytest.mark.everyday
def test_closed_standard_streams(launch: Launch) -> None:
    script = launch.script("import os; open('seen', 'w').write(os.readlink('/proc/self/fd/1'))")
    shell = f"exec {' '.join(RUN)} {script} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], cwd=launch.directory, check=False).returncode == 0
    assert (launch.directory / "seen").read_text() == "/dev/null"
