"""A job's workers get torchrun's variables by torchrun's rules, and their command word for word."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.worker_env import WorkerEnv
from rallypoint.base.worker_hook import CONTROL_FD, FLIGHT_RECORD
from rallypoint.launch.job import (
    Job,
    Nodes,
    OnHang,
    Rendezvous,
    rank_variables,
    template_environ,
    with_silence,
    worker_environ,
)
from rallypoint.rendezvous.job.round import Endpoint, Member, seats_of

STORE = Endpoint(host="127.0.0.1", port=1234)


def make_job(*command: str, workers: int = 2, environ: Mapping[str, str] | None = None) -> Job:
    return Job(
        command=command or ("x",),
        local_world_size=workers,
        run_id="id",
        host="h",
        environ=environ or {},
    )


def environ_of(job: Job, error_file: str | None = "/e", local_rank: int = 1) -> dict[str, str]:
    seats = seats_of((job.member.__replace__(node_rank=0),), number=0, store=STORE)
    seat = seats[job.member.key]
    place = seat.placements[local_rank]
    return worker_environ(job, place=place, seat=seat, error_file=error_file)


@pytest.mark.parametrize(
    ("inherited", "on_hang", "after_s", "told"),
    [
        ({}, OnHang.REPORT, None, None),
        ({}, OnHang.REPORT, 30.0, "30"),
        ({}, OnHang.STOP, 2.5, "2.5"),
        ({}, OnHang.OFF, None, "0"),
        ({"RALLYPOINT_HANG_AFTER": "7"}, OnHang.REPORT, None, None),
    ],
)
def test_when_workers_complain(
    inherited: Mapping[str, str], on_hang: OnHang, after_s: float | None, told: str | None
) -> None:
    job = make_job(environ=inherited).__replace__(on_hang=on_hang, hang_after_s=after_s)
    assert environ_of(job).get("RALLYPOINT_HANG_AFTER") == told


@pytest.mark.parametrize(
    ("inherited", "agents_s", "told"),
    [({}, 5, None), ({}, 30, "30"), ({"RALLYPOINT_SILENCE": "7"}, 30, "7")],
)
def test_how_long_workers_wait_for_a_silent_machine(
    inherited: Mapping[str, str], agents_s: int, told: str | None
) -> None:
    job = with_silence(make_job(environ=inherited), agents_s)
    assert environ_of(job).get("RALLYPOINT_SILENCE") == told


def test_a_nodes_address_reaches_its_workers() -> None:
    """With which their groups are reached as their launcher is; never an outer launcher's."""
    job = make_job(environ={"RALLYPOINT_LOCAL_ADDR": "outer"})
    assert "RALLYPOINT_LOCAL_ADDR" not in environ_of(job)
    nodes = Nodes(count=2, master_port=29500, local_addr="node1")
    assert environ_of(job.__replace__(nodes=nodes))["RALLYPOINT_LOCAL_ADDR"] == "node1"
    rendezvous = Rendezvous(
        backend="c10d", endpoints=(STORE,), run_id="id", min_nodes=1, max_nodes=2, local_addr="n2"
    )
    assert environ_of(job.__replace__(rendezvous=rendezvous))["RALLYPOINT_LOCAL_ADDR"] == "n2"


def test_all_variables() -> None:
    assert environ_of(make_job(environ={"HOME": "/root", "RANK": "77"})) == {
        "HOME": "/root",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "id",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "RALLYPOINT_CONTROL_FD": "3",
        "RALLYPOINT_FLIGHT_RECORD": "4:4194304",
    }


def test_a_worker_reads_it_back() -> None:
    env = WorkerEnv.from_environ(environ_of(make_job()))
    assert (env.rank, env.world_size, env.master_port, env.use_agent_store) == (1, 2, 1234, True)


def test_what_the_user_set_stays() -> None:
    chosen = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert chosen.items() <= environ_of(make_job(environ=chosen)).items()


def test_workers_know_how_long_they_have() -> None:
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in environ_of(make_job())
    for inherited in ({}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}):
        job = make_job(environ=inherited).__replace__(shutdown_timeout_s=45.0)
        assert environ_of(job)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "45"
    job = make_job(environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"})  # and the flag says 30
    assert environ_of(job)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "30"


def test_one_worker_may_use_all_cores() -> None:
    job = make_job(workers=1)
    assert "OMP_NUM_THREADS" not in environ_of(job, local_rank=0)


def test_ranks_count_through_nodes_and_within_roles() -> None:
    nodes = [("trainer", 2), ("reader", 1), ("trainer", 3)]
    members = tuple(
        Member(key=str(i), node_rank=i, host="h", local_world_size=size, role=role)
        for i, (role, size) in enumerate(nodes)
    )
    job = Job(
        command=("x",),
        local_world_size=3,
        role="trainer",
        max_restarts=5,
        run_id="id",
        host="h",
        environ={},
        nodes=Nodes(count=3, node_rank=2, master_port=1),
    )
    seat = seats_of(members, number=2, store=STORE)[members[2].key]
    places = seat.placements
    assert [(place.rank, place.local_rank, place.role_rank) for place in places] == [
        (3, 0, 2),
        (4, 1, 3),
        (5, 2, 4),
    ]
    environ = worker_environ(job, place=places[1], seat=seat, error_file=None)
    expected = {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "5",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
    }
    assert expected.items() <= environ.items()


def test_an_outer_launchers_error_file_is_not_ours() -> None:
    outer = {"TORCHELASTIC_ERROR_FILE": "/outer"}
    assert "TORCHELASTIC_ERROR_FILE" not in environ_of(make_job(environ=outer), error_file=None)


def test_arguments_are_verbatim_but_for_the_local_rank() -> None:
    job = make_job("p", "--d=${local_rank}", "$local_rank", "$$", "%d", "", "${x}")
    assert job.worker_command(1) == ("p", "--d=1", "$local_rank", "$$", "%d", "", "${x}")


def test_impossible_jobs_cannot_be_built() -> None:
    with pytest.raises(InvalidArgumentError, match="no command"):
        Job(command=(), local_world_size=1, run_id="", host="", environ={})
    with pytest.raises(InvalidArgumentError, match="cannot run 0 workers"):
        make_job(workers=0)
    with pytest.raises(InvalidArgumentError, match="cannot run 4000 workers and 97 spares"):
        Job(command=("p",), local_world_size=4000, spares=97, run_id="", host="", environ={})
    with pytest.raises(InvalidArgumentError, match="--node-rank is 2; with --nnodes 2 it must be"):
        Nodes(count=2, node_rank=2, master_port=1)
    with pytest.raises(InvalidArgumentError, match="--master-port is 0"):
        Nodes(count=2)
    with pytest.raises(InvalidArgumentError, match="node ranks must be 0, 1"):
        seats_of((), number=0, store=STORE)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "5,7"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        (
            {"CUDA_VISIBLE_DEVICES": "5,7", "HIP_VISIBLE_DEVICES": "2, 3"},
            {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"},
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "5,7", "HIP_VISIBLE_DEVICES": ""},
            {"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": ""},
        ),
    ],
)
def test_a_virtual_local_rank_has_one_device(outer: dict[str, str], inner: dict[str, str]) -> None:
    job = make_job(environ=outer).__replace__(has_virtual_local_rank=True)
    environ = environ_of(job)
    found = {name: value for name, value in environ.items() if name.endswith("VISIBLE_DEVICES")}
    assert (environ["LOCAL_RANK"], found) == ("0", inner)


def test_too_few_devices_are_named() -> None:
    job = make_job(environ={"HIP_VISIBLE_DEVICES": "2"}).__replace__(has_virtual_local_rank=True)
    with pytest.raises(InvalidArgumentError, match="HIP_VISIBLE_DEVICES=2 has no device for local"):
        environ_of(job)


class TestTemplate:
    def test_it_has_what_all_workers_have(self) -> None:
        inherited = {"A": "1", "RANK": "7", "RALLYPOINT_TOKEN": "secret", "MASTER_ADDR": "x"}
        job = make_job(environ=inherited)
        environ = template_environ(job, error_file="/t")
        workers = [environ_of(job, local_rank=rank) for rank in range(2)]
        differing = {*rank_variables(job), CONTROL_FD, FLIGHT_RECORD}
        for worker in workers:
            shared = {name: text for name, text in worker.items() if name not in differing}
            assert shared | {"TORCHELASTIC_ERROR_FILE": "/t"} == environ
        assert environ["A"] == "1"
        assert environ["OMP_NUM_THREADS"] == "1"

    def test_devices_are_of_a_rank_if_each_has_its_own(self) -> None:
        job = make_job(environ={"CUDA_VISIBLE_DEVICES": "4,5"})
        assert template_environ(job, error_file=None)["CUDA_VISIBLE_DEVICES"] == "4,5"
        virtual = job.__replace__(has_virtual_local_rank=True)
        assert "CUDA_VISIBLE_DEVICES" not in template_environ(virtual, error_file=None)
        assert "CUDA_VISIBLE_DEVICES" in rank_variables(virtual)

    def test_it_is_there_only_if_it_can_pay(self) -> None:
        one = make_job(workers=1).__replace__(preload=("torch",))
        assert not one.has_template
        assert one.__replace__(max_restarts=1).has_template
        assert one.__replace__(spares=1).has_template
        assert one.__replace__(local_world_size=2).has_template
        assert not make_job().has_template
