"""`rallypoint run --dry-run`: what is printed; that workers get it is a system test."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.unit.cli.test_surroundings import STEP

from rallypoint.cli.run import run


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.delenv("RALLYPOINT_TOKEN", raising=False)


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["--dry-run", *words]) == 0
    return capfd.readouterr().out


@pytest.mark.usefixtures("in_directory")
class TestDryRun:
    def test_one_machine(self, capfd: pytest.CaptureFixture[str]) -> None:
        told = printed(capfd, "--nproc-per-node", "2", "train.py", "--shard=${local_rank}", "a b")
        assert told.startswith("A dry run (?: known only at the start). Nothing is started.\n")
        assert re.search(
            r"^Job train-[0-9a-f]{4}, node 0 of 1 \(\S+\), 2 workers\.$", told, re.MULTILINE
        )
        shared, *workers = told.split("\nrank ")
        assert "  WORLD_SIZE=2\n" in shared
        assert "  MASTER_PORT=?\n" in shared
        assert len(workers) == 2
        assert workers[1].startswith("1, local rank 1\n  LOCAL_RANK=1\n")
        assert workers[1].endswith(f"  {sys.executable} -u train.py --shard=1 'a b'\n")

    def test_a_process_that_forks_the_workers(self, capfd: pytest.CaptureFixture[str]) -> None:
        flags = ("--nproc-per-node=2", "--preload=torch,numpy")
        told = printed(capfd, *flags, "train.py")
        assert told.endswith("\n\nOne process imports torch, numpy and forks the workers.\n")
        assert "One process" not in printed(capfd, "--preload=torch", "train.py")

    def test_a_node_of_several(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RALLYPOINT_TOKEN", "open sesame")
        flags = ("--nnodes=2", "--node-rank=1", "--master-addr=h", "--nproc-per-node=2")
        told = printed(capfd, *flags, "train.py")
        assert "Job none, node 1 of 2 " in told
        assert "  MASTER_ADDR=h\n  MASTER_PORT=29500\n" in told
        assert "\nrank 2, local rank 0\n" in told
        assert "  RALLYPOINT_TOKEN=(a secret)\n" in told
        assert "sesame" not in told

    def test_nodes_that_come_and_go(self, capfd: pytest.CaptureFixture[str]) -> None:
        flags = ("--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--spares=1")
        told = printed(capfd, *flags, "train.py")
        assert "Job none, node ? of 2 to 4 " in told
        assert "1 worker; rendezvous at h:1 (c10d).\n" in told
        for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
            assert f"  {name}=?\n" in told
        assert "\nrank ?, local rank 0\n" in told
        assert told.endswith("and 1 spare to replace lost workers\n")

    def test_a_node_that_slurm_has_numbered(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rallypoint.cli.slurm_names._unknown", lambda hosts: [])
        for name, text in STEP.items():
            monkeypatch.setenv(name, text)
        told = printed(capfd, "train.py")
        assert "Job slurm-1234.0, node 2 of 4 " in told
        assert "rendezvous at n1:25539, n2:25539" in told
        assert "\nrank 2, local rank 0\n" in told

    def test_hosts(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RALLYPOINT_TOKEN", "open sesame")
        flags = ("--hosts", "a,me@b:2", "--rsh", "rsh -l {host}")
        told = printed(capfd, *flags, "train.py", "--dry-run")  # the script's own
        assert "and no host is contacted.\n" in told
        assert "  RALLYPOINT_TOKEN=(a secret)\n" in told
        assert "sesame" not in told
        _, first, second = told.split("\nnode ")
        assert first.startswith(f"0, a\n  rsh -l a {sys.executable} -P -m rallypoint.cli.remote.")
        assert second.startswith("1, me@b\n")
        assert "which starts: python -m rallypoint run --nnodes=2 " in second
        assert second.endswith(" --node-rank=1 --nproc-per-node=2 -- train.py --dry-run\n")
        assert "'--rdzv-endpoint=a:?,b:?'" in second
        assert second.count("--dry-run") == 1

    def test_ray(self, capfd: pytest.CaptureFixture[str]) -> None:
        told = printed(capfd, "--on", "ray", "--nnodes", "2:3", "train.py")
        assert "\n2 to 3 nodes of the Ray cluster, of which node 0 would run\n" in told
        assert "  python -m rallypoint run --nnodes=2:3 " in told

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["missing.py"], "script 'missing.py' does not exist"),
            ([], "no script given"),
            (["--nnodes", "0", "train.py"], "--nnodes is '0'"),
            (["--hosts", "a", "--standalone", "train.py"], "leave out --standalone"),
            (["--on", "ray", "--hosts", "a", "train.py"], "leave out --hosts"),
            (
                [
                    *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1"),
                    *("--rdzv-conf", "patience=1", "train.py"),
                ],
                "c10d has no option 'patience'",
            ),
        ],
    )
    def test_wrong_command_lines(
        self, words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["--dry-run", *words]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert sentence in err
