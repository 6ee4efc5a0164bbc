"""The pages' own commands, typed as a reader types them; tests/pages.py says which those are.

Each page has a directory: its titled blocks are files there, and its commands run in their order.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import HOW_TO_GET
from tests.hosts import Hosts
from tests.pages import Block, blocks, pages
from tests.system.conftest import Launch
from tests.system.test_launched import LIMIT_S, NOT_OURS

pytestmark = pytest.mark.system

TYPED_HERE = [
    page for page in pages() if any(block.is_run and not block.title for block in blocks(page))
]


def environ() -> dict[str, str]:
    """A shell's of somebody who has installed Rallypoint."""
    ours = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    ours["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ours['PATH']}"
    return ours


class Terminal:
    """A directory with what a page has put there, and what runs beside it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.background: subprocess.Popen[bytes] | None = None

    def start(self, block: Block) -> None:
        self.background = subprocess.Popen(
            ["sh", "-ec", f"exec {block.text}"],
            cwd=self.directory,
            env=environ(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def run(self, block: Block, printed: str) -> None:
        """Type it; beside something else, until that is far enough for the answer."""
        expected = re.search(r"exits with (\d+)(?: or (\d+))?", block.said)
        statuses = {int(status) for status in expected.groups() if status} if expected else {0}
        until = time.monotonic() + LIMIT_S
        while True:
            done = subprocess.run(
                ["sh", "-ec", block.text],
                cwd=self.directory,
                env=environ(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            missing = not_printed(printed, done.stdout)
            if done.returncode in statuses and not missing:
                return
            is_early = self.background is not None and time.monotonic() < until
            assert is_early, f"{block.place}: {done.returncode}, no {missing} in:\n{done.stdout}"
            time.sleep(0.1)

    def close(self) -> None:
        """What was started beside the commands has ended, by them; else that is a failure."""
        if self.background is not None:
            try:
                self.background.wait(LIMIT_S)
            finally:
                if self.background.poll() is None:
                    self.background.send_signal(signal.SIGTERM)
                    self.background.wait(LIMIT_S)


def not_printed(expected: str, printed: str) -> list[str]:
    """The lines of a page that a program did not print; `...` stands for anything.

    Workers that print at the same time may share a row, so a line need not stand alone.
    """

    def is_there(line: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in line.rstrip().split("..."))
        return re.search(pattern, printed) is not None

    return [line for line in expected.splitlines() if line.strip() and not is_there(line)]


@pytest.mark.everyday
def test_what_is_not_printed_is_found() -> None:
    assert not_printed("a ... c\nd\n", "d\na b c\n") == []
    assert not_printed("a ... c\nd\n", "a b\nc\n") == ["a ... c", "d"]


FIRST = "docs/index.md"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(FIRST, marks=pytest.mark.everyday),
        *(page for page in TYPED_HERE if page != FIRST),
    ],
)
def test_page(page: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    has_torch = importlib.util.find_spec("torch") is not None
    is_complete = True
    of_page = list(blocks(page))
    for block, following in zip(of_page, [*of_page[1:], None], strict=True):
        printed = following.text if following and following.language == "text" else ""
        if block.title and not block.mark:
            (tmp_path / block.title).write_text(block.text)
        elif block.is_run and block.language == "python":
            (tmp_path / "block.py").write_text(block.text)
            command = "rallypoint run --nproc-per-node 2 block.py"
            terminal.run(replace(block, text=command), printed)
        elif not block.is_run:
            continue
        elif "needs torch" in block.said and not has_torch:
            is_complete = False
        elif "in the background" in block.said:
            terminal.start(block)
        else:
            terminal.run(block, printed)
    terminal.close()
    if not is_complete:
        pytest.skip(HOW_TO_GET["torch"])


def block_of(page: str, name: str) -> str:
    """The block that says that the test `name` tests it."""
    (found,) = [block for block in blocks(page) if block.said.endswith(f"test_pages.py::{name}")]
    return found.text


def test_catching_errors(launch: Launch) -> None:
    script = launch.script(
        "import os, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "gradient = np.ones(4)\n"
        "dist.all_reduce(gradient)\n"
        "if dist.get_rank() == 1:\n"
        "    os._exit(0)\n"  # the launcher ends all others if a worker fails
        + block_of("docs/reference/exceptions.md", "test_catching_errors")
        + "assert group is dist.group.WORLD and dist.get_world_size() == 2\n"
        "dist.all_reduce(gradient, group=group)\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert launch.out.count("rank 1 was lost in all_reduce") == 2


def test_when_a_rank_dies(launch: Launch) -> None:
    script = launch.script(
        "import os, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "gradient = np.ones(4)\n"
        "dist.all_reduce(gradient)\n"
        "rank = dist.get_rank()\n"
        "if rank == 1:\n"
        "    os._exit(0)\n"  # the launcher ends all others if a worker fails
        "def step():\n"
        "    dist.all_reduce(gradient)\n"
        + block_of("docs/guides/process-groups.md", "test_when_a_rank_dies")
        + "assert dist.get_world_size() == 2\n"
        "os.write(1, f'agreed {done}\\n'.encode())\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert launch.out.count("agreed 0") == 2


@pytest.mark.everyday
def test_a_token(tmp_path: Path) -> None:
    text = block_of("docs/security.md", "test_a_token") + "echo $RALLYPOINT_TOKEN"
    tokens = {subprocess.check_output(["sh", "-ec", text], text=True) for _ in range(2)}
    assert len(tokens) == 2
    assert all(re.fullmatch(r"[0-9a-f]{32}\n", token) for token in tokens)


def test_two_hosts(needs_hosts: None, tmp_path: Path) -> None:
    page = "docs/tutorial.md"
    (script,) = [block for block in blocks(page) if block.title == "first.py"]
    (tmp_path / "first.py").write_text(script.text)
    text = block_of(page, "test_two_hosts").replace("node1", "host1")
    with Hosts(2) as hosts:
        jobs = [
            host.popen(["sh", "-ec", text], cwd=tmp_path, env=environ(), stdout=subprocess.PIPE)
            for host in hosts.hosts
        ]
        printed = [job.communicate(timeout=LIMIT_S)[0].decode() for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0]
    lines = sorted(re.findall(r"worker [^]]+]", "".join(printed)))
    assert lines == [f"worker {rank} of 8 has [36. 36. 36. 36.]" for rank in range(8)]
