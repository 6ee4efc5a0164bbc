"""Groups of processes that different launchers started, each of which has its own default group."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
LIMIT_S = 120.0


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, out.decode()


def start(words: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def check(jobs: Sequence[subprocess.Popen[bytes]]) -> None:
    """What the servers and the trainers of the example print."""
    (served, servers), (trained, trainers) = map(ended, jobs)
    assert (served, trained) == (0, 0), servers + trainers
    assert "trainer: sent 3 times, at last 4.5" in trainers
    assert "server 0: got 4.5" in servers
    assert "server 1: got 4.5" in servers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("new_weights.py", marks=pytest.mark.everyday),
        pytest.param("new_weights_torch.py", marks=pytest.mark.needs_torch),
    ],
)
def test_the_example(tmp_path: Path, free_port: int, name: str) -> None:
    script = tmp_path / name
    text = (EXAMPLES / name).read_text()
    script.write_text(re.sub(r"\b2961\d\b", str(free_port), text))
    check(
        [
            start([*RUN, "--nproc-per-node", "2", str(script), role], tmp_path)
            for role in ("serve", "train")
        ]
    )


ACROSS = """
import os, sys, time
import numpy as np
import rallypoint as dist
place, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group()
assert dist.get_world_size() == 1
group = dist.form_process_group(init_method=place, world_size=3, rank=rank, group_name="g")
assert dist.get_rank() == 0 and dist.get_rank(group) == rank
assert dist.get_process_group_ranks(group) == [0, 1, 2]
for _ in range(3):
    values = np.full(100_000, rank + 1.0)
    dist.all_reduce(values, group=group)
    assert (values == 6).all()
    dist.barrier()  # of the default group
if rank == 2:
    os.kill(os.getpid(), 9)
began = time.monotonic()
try:
    dist.barrier(group)
except dist.PeerLostError as error:
    took_s = time.monotonic() - began
    os.write(1, f"rank {error.rank} was lost after {took_s:.1f} s: {error}\\n".encode())
dist.destroy_process_group(group)
dist.barrier()
assert dist.is_initialized()
again = dist.form_process_group(init_method=place, world_size=2, rank=rank, group_name="again")
dist.barrier(again)
dist.destroy_process_group()
os.write(1, b"well\\n")
"""


def test_on_three_hosts(needs_hosts: None, tmp_path: Path) -> None:
    """Their jobs have other names and other tokens; one of them dies."""
    script = tmp_path / "across.py"
    script.write_text(ACROSS)
    with Hosts(3) as hosts:
        jobs = [
            host.popen(
                ["env", f"RALLYPOINT_TOKEN=of {host.name}", *RUN, "--nproc-per-node", "1",
                 str(script), "tcp://10.77.0.1:29610", str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank, host in enumerate(hosts.hosts)
        ]  # fmt: skip
        *survivors, dead = [ended(job) for job in jobs]
    for status, text in survivors:
        assert status == 0, text
        assert text.endswith("well\n"), text
        assert "rank 2 was lost after" in text, text
        assert float(text.split(" after ")[1].split()[0]) < SOON_S
    assert dead[0] != 0


@pytest.mark.needs_torch
def test_pytorchs_helper_with_our_backend(needs_hosts: None, tmp_path: Path) -> None:
    """As OpenRLHF, verl and vLLM form such groups; here the jobs have different tokens."""
    script = tmp_path / "new_weights_torch.py"
    text = (EXAMPLES / script.name).read_text()
    script.write_text(text.replace("127.0.0.1", "10.77.0.1"))
    with Hosts(2) as hosts:
        jobs = [
            host.popen(
                ["env", f"RALLYPOINT_TOKEN=of {host.name}", *RUN, "--nproc-per-node", "2",
                 str(script), role],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host, role in zip(hosts.hosts, ("train", "serve"), strict=True)
        ]  # fmt: skip
        check(jobs[::-1])
