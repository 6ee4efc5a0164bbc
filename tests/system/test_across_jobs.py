"""Groups of processes that different launchers started, each of which has its own default group."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts
from tests.pages import blocks_tested_by

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
LIMIT_S = 120.0
SCRIPT = Path(__file__).parent / "device_weights.py"
PATH = os.pathsep.join((str(Path(__file__).parents[2]), *sys.path))  # for tests.stand_in


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
    for rank in range(2):
        assert re.search(rf"server {rank}: got \[?4\.5(?!\d)", servers), servers


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


@pytest.mark.needs_torch
def test_the_example_in_device_memory(tmp_path: Path, free_port: int) -> None:
    """On the stand-in for a GPU, in buckets of several tensors and of one."""
    pytest.importorskip("torch")
    text = (EXAMPLES / "new_weights_torch.py").read_text()
    text = text.replace("29611", str(free_port)).replace("256 << 20", "40_500")
    main = 'if __name__ == "__main__":'
    script = tmp_path / "new_weights_torch.py"
    script.write_text(
        text.replace(main, f"from tests import stand_in\n\nstand_in.install()\n{main}")
    )
    words = ["env", f"PYTHONPATH={PATH}", *RUN, "--nproc-per-node", "2", str(script)]
    check([start([*words, role], tmp_path) for role in ("serve", "train")])


FLAT = "tests/system/test_across_jobs.py::test_parameters_in_one_flat_tensor"


@pytest.mark.needs_torch
def test_parameters_in_one_flat_tensor() -> None:
    torch = pytest.importorskip("torch")
    (block,) = blocks_tested_by(FLAT)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    before = [each.clone() for each in model.parameters()]
    sent = []

    class Dist:
        @staticmethod
        def broadcast(tensor: Any, **_: object) -> None:
            sent.append(tensor)

    exec(block.text, {"model": model, "dist": Dist, "group": None})
    assert all(map(torch.equal, before, model.parameters()))
    (flat,) = sent
    assert flat.numel() == sum(each.numel() for each in before)
    flat.fill_(3)  # as if it had come from elsewhere
    assert all(bool((each == 3).all()) for each in model.parameters())


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


def start_both(directory: Path, port: int, *words: str) -> dict[str, subprocess.Popen[bytes]]:
    """The jobs of device_weights.py."""
    environ = {"PYTHONPATH": PATH, "RALLYPOINT_ALGORITHM": "direct"}  # it adds in rank order
    setting = [f"{name}={value}" for name, value in environ.items()]
    return {
        job: start(
            ["env", *setting, *RUN, "--nproc-per-node", "2", str(SCRIPT), job, str(port), *words],
            directory,
        )
        for job in ("train", "serve")
    }


def told(text: str, first: str) -> dict[str, str]:
    """What each rank has said in its line that begins so."""
    lines = [line.split(" ", 2) for line in text.splitlines() if line.startswith(first)]
    return {rank: said for _, rank, said in lines}


GROUP = ["train0", "serve0", "serve1"]  # by rank in the group "weights"


@pytest.mark.needs_torch
@pytest.mark.exact
def test_weights_in_device_memory_have_the_bits_of_the_way_by_the_host(
    tmp_path: Path, free_port: int
) -> None:
    pytest.importorskip("torch")
    by_way = []
    for way in ("memory", "host"):
        ends = [ended(job) for job in start_both(tmp_path, free_port, "exchange", way).values()]
        text = "".join(said for _, said in ends)
        assert [status for status, _ in ends] == [0, 0], text
        by_way.append(told(text, "exchanged"))
        assert ("ranks share a GPU" in text) == (way == "memory")
    assert by_way[0].keys() == {*GROUP, "train1"}
    assert all(said.startswith("0 wrong, ") for said in by_way[0].values()), by_way
    assert by_way[0] == by_way[1]


KILLS = [
    ("broadcast", "train0", "before arriving"),
    ("broadcast", "train0", "opening"),  # it writes into all memory
    ("broadcast", "train0", "before it is done"),
    ("broadcast", "serve1", "some time"),
    ("send", "train0", "before arriving"),
    ("send", "serve1", "opening"),  # it reads the trainer's
    ("send", "serve0", "before it is done"),
]


@pytest.mark.needs_torch
@pytest.mark.parametrize("kill", KILLS, ids=" ".join)
def test_a_rank_of_another_job_is_killed(
    tmp_path: Path, free_port: int, kill: tuple[str, str, str]
) -> None:
    pytest.importorskip("torch")
    jobs = start_both(tmp_path, free_port, "lose", *kill)
    check_told({job: ended(process) for job, process in jobs.items()}, kill[1])


@pytest.mark.needs_torch
def test_another_jobs_launcher_is_killed(tmp_path: Path, free_port: int) -> None:
    pytest.importorskip("torch")
    jobs = start_both(tmp_path, free_port, "lose", "broadcast", "train0", "nowhere")
    deadline = time.monotonic() + LIMIT_S
    while not all((tmp_path / f"up.{rank}").exists() for rank in GROUP):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    jobs["train"].kill()
    check_told({job: ended(process) for job, process in jobs.items()}, "train0")


def check_told(ends: dict[str, tuple[int, str]], victim: str) -> None:
    """The other ranks of the group were told who was lost; the victim's job alone has failed."""
    text = "".join(said for _, said in ends.values())
    assert {job for job, (status, _) in ends.items() if status != 0} == {victim[:-1]}, text
    culprit = f"rank {GROUP.index(victim)}"
    assert told(text, "told") == {rank: culprit for rank in GROUP if rank != victim}, text
