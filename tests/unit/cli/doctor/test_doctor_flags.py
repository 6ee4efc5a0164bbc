"""Which flags of `rallypoint run` say what to examine."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.doctor.doctor_flags import PROGRAM, DoctorOptions, DoctorRequest, read_request
from rallypoint.cli.options import UsageError, parse
from rallypoint.cluster.remote_shell import SSH


def read(words: str, environ: Mapping[str, str] | None = None) -> DoctorRequest:
    options, command = parse(words.split(), DoctorOptions, program=PROGRAM, environ=environ or {})
    return read_request(options, command, environ or {})


def test_this_machine() -> None:
    found = read("--path /a --path /b --nproc-per-node 4 --log-dir logs train.py --path /c")
    assert (found.most, found.endpoints, found.meets) == (1, (), False)
    assert (found.look.paths, found.look.script) == (("/a", "/b"), "train.py")
    assert (found.look.workers, found.look.log_dir) == ("4", "logs")
    assert read("-m package.train").look.script == ""


def test_hosts() -> None:
    environ = {"RALLYPOINT_TOKEN": "x", "NCCL_DEBUG": "INFO", "HOME": "/root"}
    found = read("--hosts a,me@b:4 --rdzv-endpoint a:29400 --port-range 21000-21015", environ)
    assert [host.address for host in found.hosts] == ["a", "b"]
    assert (found.rsh, found.most, found.endpoints) == (SSH, 2, (("a", 29400),))
    assert (found.meets, found.look.port_range) == (False, "21000-21015")
    assert found.look.environ == {"RALLYPOINT_TOKEN": "x", "NCCL_DEBUG": "INFO"}
    assert read("--hosts a --master-addr a").endpoints == (("a", 29500),)


def test_the_same_command_on_each_node() -> None:
    found = read("--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --wait 3")
    assert (found.fewest, found.most, found.node_rank) == (2, 2, 1)
    assert (found.endpoints, found.meets, found.is_static) == ((("10.0.0.1", 29500),), True, True)
    assert found.wait_s == 3
    found = read("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint a:1,b")
    assert (found.fewest, found.most, found.node_rank) == (2, 4, None)
    assert found.endpoints == (("a", 1), ("b", 29400))
    assert (found.meets, found.is_static) == (True, False)


@pytest.mark.parametrize(
    ("words", "endpoints"),
    [
        ("", ()),
        ("--nnodes 1", ()),
        ("--standalone --rdzv-endpoint a:1", ()),
        ("--rdzv-backend c10d --nnodes 1", ()),
        ("--rdzv-backend c10d --nnodes 1 --rdzv-endpoint elsewhere:29400", ()),
        ("--rdzv-backend c10d --nnodes 1 --rdzv-endpoint 127.0.0.1:29400", (29400,)),
        ("--rdzv-backend c10d --rdzv-endpoint localhost", (29400,)),
        ("--rdzv-endpoint 127.0.0.1:2900", (2900,)),
        ("--master-port 2900", (2900,)),
    ],
)
def test_the_port_of_a_single_node_is_looked_at(words: str, endpoints: tuple[int, ...]) -> None:
    """The same one at which `run` would listen."""
    found = read(words)
    assert (found.most, found.meets) == (1, False)
    assert found.endpoints == tuple(("127.0.0.1", port) for port in endpoints)


def test_the_keeper_of_a_single_node_is_looked_at() -> None:
    found = read("--nnodes 1 --rdzv-backend etcd --rdzv-endpoint keeper:2379")
    assert (found.most, found.meets, found.endpoints) == (1, False, (("keeper", 2379),))


def test_places_where_nodes_do_not_meet_each_other() -> None:
    found = read("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint keeper:2379")
    assert (found.meets, found.endpoints) == (False, (("keeper", 2379),))
    found = read("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint file:///shared/run")
    assert (found.meets, found.endpoints, found.look.paths) == (False, (), ("/shared/run",))
    assert read("--nnodes 2 --node-rank 0").meets is False  # at the loopback


def test_what_a_slurm_step_says() -> None:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": f"{os.uname().nodename},localhost",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
    }
    found = read("", step)
    assert (found.most, found.node_rank, found.surroundings.place) == (2, 0, "Slurm step 7.0")
    crowded = {**step, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    found = read("", crowded)
    assert found.surroundings.wrong != ""
    alone = read("", {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
    assert (alone.most, alone.surroundings.note != "") == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts a,b --node-rank 1", "leave out --node-rank"),
        ("--hosts ,", "--hosts names no host"),
        ("--hosts a --rsh '", "--rsh"),
        ("--port-range 9", "the port range is '9'"),
        ("--nnodes 2 --node-rank 2 --master-addr a", "--node-rank is 2"),
        ("--wait x", "--wait"),
        ("--on ray --nnodes 2", "it cannot reach nodes through Ray (--on ray); name them with"),
        ("--pathh x", "unknown flag --pathh; did you mean --path?"),
    ],
)
def test_wrong_use(words: str, message: str) -> None:
    with pytest.raises((UsageError, InvalidArgumentError)) as raised:
        read(words)
    assert message in str(raised.value)
