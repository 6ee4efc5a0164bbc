"""What a launch takes from its surroundings, and what its flags say first."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from rallypoint.base.address import numeric_family
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli import slurm_names
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import UsageError
from rallypoint.cli.read_job import read_place
from rallypoint.cli.surroundings import fill_in, recognized
from rallypoint.cli.where import reading_text, without_us
from rallypoint.cluster.network import UnknownHostError
from rallypoint.rendezvous.job.round import Endpoint

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "2",
}
MEETING = tuple(Endpoint(host=f"n{number}", port=25539) for number in (1, 2, 3))
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.fixture(autouse=True)
def known_names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the name service knows, instead of this machine's own."""
    known = {"n1", "n2", "n3", "n4"}

    def addresses_of(host: str) -> list[str]:
        if host not in known and numeric_family(host) is None:
            raise UnknownHostError(f"cannot find the host {host!r}")
        return [host]

    monkeypatch.setattr(slurm_names, "addresses_of", addresses_of)
    return known


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in, which prints what is in the file `nodes`."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/nodes\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def filled(
    environ: Mapping[str, str] = STEP, /, **flags: str
) -> tuple[Mapping[str, str], list[str]]:
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    options, notes = fill_in(RunOptions(given), environ)
    return options.texts, notes


def test_a_step_is_a_job_of_all_its_nodes() -> None:
    values, notes = filled()
    found = read_place(RunOptions(values)).rendezvous
    assert found is not None
    assert (found.min_nodes, found.max_nodes, found.node_rank) == (4, 4, 2)
    assert (found.backend, found.endpoints, found.run_id) == ("c10d", MEETING, "slurm-1234.0")
    assert notes == [
        "Slurm step 1234.0 (SLURM_STEP_NODELIST): node 2 of 4, rendezvous at n1:25539, n2:25539,"
        " n3:25539; --on here ignores this"
    ]


def test_flags_say_the_rest() -> None:
    values, _ = filled(nnodes="2:4", rdzv_id="mine", rdzv_conf="timeout=7", node_rank="2")
    found = read_place(RunOptions(values)).rendezvous
    assert found is not None
    assert (found.min_nodes, found.max_nodes, found.run_id) == (2, 4, "mine")
    assert (found.endpoints, dict(found.configuration)) == (MEETING, {"timeout": "7"})


@pytest.mark.parametrize(
    "flags",
    [
        {"on": "here"},
        {"standalone": "1"},
        {"nnodes": "1"},
        {"nnodes": "2", "master_addr": "a"},
        {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "a:1"},
    ],
    ids=str,
)
def test_who_says_where_nodes_meet_is_taken_at_that_word(flags: dict[str, str]) -> None:
    values, notes = filled(**flags)
    assert (len(values), notes) == (len(flags), [])


def test_a_variable_switches_it_off() -> None:
    assert filled({**STEP, "RALLYPOINT_CLUSTER": "none"}) == ({}, [])
    with pytest.raises(InvalidArgumentError, match="RALLYPOINT_CLUSTER dstack: this is not dstack"):
        filled({**STEP, "RALLYPOINT_CLUSTER": "dstack"})
    assert filled({**STEP, "RALLYPOINT_CLUSTER": "none"}, on="slurm") == filled(on="slurm")
    assert filled(on="auto")[1] == filled()[1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"nnodes": "3"}, r"--nnodes is 3, but Slurm step 1234.0 says 4 \(SLURM_STEP_NODELIST\)"),
        ({"nnodes": "5:8"}, "--nnodes is 5:8, but Slurm step"),
        ({"node_rank": "1"}, r"--node-rank is 1, but Slurm step 1234.0 says 2 \(SLURM_NODEID\)"),
    ],
)
def test_a_contradiction_is_refused_with_both_sources(flags: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        filled(**flags)


def test_tasks_that_are_workers_are_refused() -> None:
    with pytest.raises(UsageError, match="srun --ntasks-per-node=1 rallypoint run --nproc-per-no"):
        filled({**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"})


def test_an_allocation_without_a_step_is_one_machine_and_says_so() -> None:
    batch = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
    values, notes = filled(batch, nproc_per_node="8")
    assert values == {"--nproc-per-node": "8"}
    assert len(notes) == 1
    assert notes[0].startswith("this uses one of the 2 nodes of Slurm job 1234")
    with pytest.raises(UsageError, match="--nnodes is 2, but Slurm job 1234, outside of its steps"):
        filled(batch, nnodes="2")


def test_one_node_is_nothing_to_tell() -> None:
    one = {**STEP, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert filled({**one, "SLURM_STEP_TASKS_PER_NODE": "1"}) == ({}, [])


def test_how_many_pods_there_are_is_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    values, notes = filled(INDEXED)
    assert values == {}
    assert len(notes) == 1
    assert "Indexed Job (JOB_COMPLETION_INDEX): this pod runs its own job" in notes[0]
    with pytest.raises(UsageError, match="headless Service"):
        filled(INDEXED, nnodes="2")


def test_where_shows_each_value_with_its_variable() -> None:
    found = recognized("", STEP)
    assert found is not None
    assert (
        reading_text(found)
        == """\
detected    Slurm step 1234.0             SLURM_STEP_NODELIST
node        2 of 4                        SLURM_NODEID, SLURM_STEP_NODELIST
rendezvous  n1:25539, n2:25539, n3:25539  SLURM_STEP_NODELIST
job's name  slurm-1234.0                  SLURM_JOB_ID, SLURM_STEP_ID

The same with flags: rallypoint run --nnodes 4 --node-rank 2 --rdzv-backend c10d \
--rdzv-endpoint n1:25539,n2:25539,n3:25539 --rdzv-id slurm-1234.0
To ignore it: --on here, or RALLYPOINT_CLUSTER=none"""
    )


def test_a_name_that_only_slurm_knows_becomes_its_address(
    known_names: set[str], scontrol: Path
) -> None:
    known_names.clear()
    (scontrol / "nodes").write_text(
        "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=box1 Comment=a b\n"
        "NodeName=n2 Arch=x86_64 NodeAddr=n2 NodeHostName=box2\n"
        "NodeName=n3 Arch=x86_64 NodeAddr=fd00::3 NodeHostName=box3\n"
    )
    found = recognized("", STEP)
    assert found is not None
    assert found.endpoints == ("10.0.0.1:25539", "n2:25539", "[fd00::3]:25539")
    assert found.sources["meeting at"] == "SLURM_STEP_NODELIST, scontrol show node"
    assert (scontrol / "asked").read_text() == "--oneliner show node n1,n2,n3\n"


def test_slurm_is_asked_only_for_what_nobody_knows(known_names: set[str], scontrol: Path) -> None:
    (scontrol / "nodes").write_text("NodeName=n2 NodeAddr=10.0.0.2\n")
    filled()
    assert not (scontrol / "asked").exists()
    known_names.remove("n2")
    values, _ = filled()
    assert values["--rdzv-endpoint"] == "n1:25539,10.0.0.2:25539,n3:25539"
    assert (scontrol / "asked").read_text() == "--oneliner show node n2\n"


def test_names_that_nobody_knows_are_refused(
    known_names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol
    known_names.remove("n1")
    assert filled()[0]["--rdzv-endpoint"].startswith("n1:25539")  # n2 may do
    known_names.remove("n2")  # this node's own name is no help
    with pytest.raises(
        InvalidArgumentError, match=r"this machine cannot resolve the hosts n1, n2 \(SLURM_S"
    ):
        filled()


def test_a_scontrol_that_hangs_is_not_waited_for(
    known_names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("scontrol", 20)

    monkeypatch.setattr(subprocess, "run", hangs)
    known_names.clear()
    with pytest.raises(InvalidArgumentError, match="this machine cannot resolve"):
        filled()


def test_where_shows_what_a_program_takes_by_itself() -> None:
    hydra = {
        "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    }  # fmt: skip
    assert (
        without_us("", hydra)
        == """\
A program that Hydra's mpiexec starts directly: init_process_group() takes
rank        1 of 4                      PMI_RANK, PMI_SIZE
local rank  1 of 2                      MPI_LOCALRANKID, MPI_LOCALNRANKS
rendezvous  a port that rank 0 chooses  PMI_FD
To ignore it: RALLYPOINT_CLUSTER=none"""
    )
    assert "rendezvous  nothing; import mpi4py.MPI" in without_us("", {**hydra, "PMI_FD": ""})
    step = {**STEP, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    assert "rendezvous  n1:25539, n1:27136, ...  SLURM_STEP_NODELIST" in without_us("", step)
    assert without_us("here", hydra) == without_us("", {}) == ""


def test_where_says_why_a_program_fails_by_itself() -> None:
    fails = "Without `rallypoint run`, init_process_group() fails here: "
    assert without_us("", {"SLURM_JOB_ID": "7"}).startswith(f"{fails}srun has not started this")
    assert without_us("", STEP).startswith(f"{fails}SLURM_PROCID is not set")
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert without_us("", {"SLURM_JOB_ID": "7", **said}) == (
        "init_process_group() takes RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which are set."
    )
