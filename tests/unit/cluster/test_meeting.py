"""Processes of one job meet, each a thread here: through a launcher, or at ports that they know."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tests.ports import reserved_port, reserved_ports
from tests.unit.cluster.pmi_server import PmiServer

from rallypoint.base.errors import (
    HostError,
    InvalidArgumentError,
    StoreConnectionError,
    StoreRefusedError,
    StoreTimeoutError,
)
from rallypoint.cluster.environments import LaunchedProcess, find_process
from rallypoint.cluster.pmi import Waiting, meeting, pmi
from rallypoint.cluster.pmi.meeting import Meeting, announce, open_launched, withdraw
from rallypoint.store import session
from rallypoint.store.client import TCPStore

SOON = timedelta(seconds=60)
ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


@pytest.fixture(autouse=True)
def as_a_new_process() -> Iterator[None]:
    with (
        patch.object(meeting, "_meeting", new=None),
        patch.object(meeting, "_announced", new=()),
        patch.object(meeting, "_FIRST_TRY_S", new=60.0),  # of a store that does not answer
        patch.object(pmi, "_cut_short", new=set()),
        patch("atexit.register"),
    ):
        yield
        if meeting._meeting is not None:
            close(meeting._meeting)


def close(met: Meeting) -> None:
    met.store.close()
    if met.server is not None:
        met.server.close()


def meet_all(*jobs: tuple[LaunchedProcess, dict[str, str]]) -> list[Meeting]:
    """By all processes at once; close what comes."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        begun = [pool.submit(meeting._meet, process, SOON, environ) for process, environ in jobs]
        return [each.result() for each in begun]


def under_pmi(
    server: PmiServer, size: int, **more: str
) -> list[tuple[LaunchedProcess, dict[str, str]]]:
    jobs = []
    for rank in range(size):
        environ = {**server.environ(rank), **more}
        process = find_process(environ)
        assert process is not None
        jobs.append((process, environ))
    return jobs


def step(
    rank: int, size: int, run_id: str, ports: list[int]
) -> tuple[LaunchedProcess, dict[str, str]]:
    endpoints = tuple(f"127.0.0.1:{port}" for port in ports)
    process = LaunchedProcess(
        place="a step", by="X", rank=rank, size=size, run_id=run_id, endpoints=endpoints
    )
    return process, {}


# Through a launcher.


def test_all_meet_at_a_store_whose_port_nobody_chose() -> None:
    with PmiServer(3) as server:
        jobs = under_pmi(server, 3)
        found = meet_all(*jobs)
    assert {(each.address, each.port, each.token) for each in found} == {
        ("127.0.0.1", found[0].port, found[0].token)
    }
    assert [each.server is not None for each in found] == [True, False, False]
    places = [each.open(SOON) for each in found]
    assert [(each.rank, each.world_size, each.is_rank_0s) for each in places] == [
        (rank, 3, True) for rank in range(3)
    ]
    places[0].store.set("key", "value")
    assert places[2].store.get("key") == b"value"
    for place in places:
        place.store.close()
    for each in found:
        close(each)


def test_the_store_demands_the_token_that_the_launcher_passed_on() -> None:
    with PmiServer(2) as server:
        jobs = under_pmi(server, 2)
        found = meet_all(*jobs)
    assert len(found[1].token) == 32
    assert [environ["RALLYPOINT_TOKEN"] for _, environ in jobs] == [found[0].token.decode()] * 2
    with pytest.raises(StoreRefusedError):
        TCPStore(found[0].address, found[0].port, timeout=SOON)
    for each in found:
        close(each)


def test_rank_0s_own_token_is_passed_on() -> None:
    with PmiServer(2) as server:
        (first, environ), other = under_pmi(server, 2)
        environ["RALLYPOINT_TOKEN"] = "häuser, und mehr"
        found = meet_all((first, environ), other)
    assert other[1]["RALLYPOINT_TOKEN"] == "häuser, und mehr"
    for each in found:
        close(each)


def test_processes_that_may_be_elsewhere_are_given_all_addresses() -> None:
    with PmiServer(2) as server:
        found = meet_all(*under_pmi(server, 2, MPI_LOCALNRANKS="1"))
        (text,) = server.keys.values()
    _, _, *addresses = text.split(",")
    assert addresses
    assert [each.address for each in found] == ["127.0.0.1"] * 2  # all were here after all
    for each in found:
        close(each)


def test_many_addresses_are_cut_to_what_a_launcher_can_pass_on() -> None:
    many = tuple(f"fd77:1111:2222:3333:4444:5555:6666:{number:04x}" for number in range(40))
    process = LaunchedProcess(place="x", by="X", rank=0, size=2)
    server = SimpleNamespace(port=40001)
    with patch.object(meeting, "own_addresses", return_value=many):
        text = meeting._invitation(server, b"t" * 32, process, {})  # type: ignore[arg-type]
    assert 800 < len(text) <= 900
    places, token = meeting._read(text)
    assert places[0] == (many[0], 40001)
    assert token == b"t" * 32


@pytest.mark.parametrize("text", ["", "1", "x,61,127.0.0.1", "1,6g,127.0.0.1", "unknown"])
def test_an_invitation_that_is_none(text: str) -> None:
    with pytest.raises(HostError, match="need the same version of rallypoint"):
        meeting._read(text)


def test_a_launcher_that_passes_on_nothing() -> None:
    process = LaunchedProcess(place="PALS", by="PALS_RANKID", rank=1, size=2)
    with pytest.raises(HostError, match=r"PALS started this as rank 1 of 2 \(PALS_RANKID\).*mpi4p"):
        meeting._meet(process, SOON, {})


def test_mpi4py_passes_on_if_it_is_there_and_the_same_job() -> None:
    said: list[tuple[str, int]] = []

    def bcast(text: str, root: int) -> str:
        said.append((text, root))
        return "40001,6162,10.0.0.1"

    world = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2, bcast=bcast)
    mpi = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False, COMM_WORLD=world)
    process = LaunchedProcess(place="Open MPI", by="X", rank=1, size=2)
    waiting = Waiting(SOON, "", speaks=False)
    with patch.dict(sys.modules, {"mpi4py.MPI": mpi}):
        assert meeting._pass_on(process, "", waiting, {}) == "40001,6162,10.0.0.1"
        other = process.__replace__(size=3)
        with pytest.raises(HostError, match="offers no means"):
            meeting._pass_on(other, "", waiting, {})
    assert said == [("", 0)]


# At ports that follow from the step.


def test_a_step_meets_at_one_of_its_ports() -> None:
    def open_store(host: str, port: int, timeout: timedelta, **named: Any) -> TCPStore:
        limit = timedelta(seconds=0.1) if port == ports[0] else timeout
        return TCPStore(host, port, timeout=limit, **named)

    with reserved_ports(3) as ports, patch.object(meeting, "TCPStore", open_store):
        with socket.create_server(("127.0.0.1", ports[0])):  # and never answers
            found = meet_all(*(step(rank, 2, "a", ports) for rank in range(2)))
        assert {each.port for each in found} == {ports[1]}
    for each in found:
        close(each)


def test_two_steps_with_the_same_ports_do_not_mix() -> None:
    with reserved_ports(4) as ports:
        jobs = [step(rank, 3, run_id, ports) for run_id in "ab" for rank in (2, 1, 0)]
        found = meet_all(*jobs)
    assert len({each.port for each in found[:3]}) == 1
    assert len({each.port for each in found[3:]}) == 1
    assert found[0].port != found[3].port
    for each in found:
        close(each)


def test_no_port_of_a_step_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        process, environ = step(0, 2, "a", [holder.getsockname()[1]])
        with pytest.raises(StoreConnectionError, match=r"cannot listen at any of .*in use by"):
            meeting._meet(process, SOON, environ)


def test_rank_0_does_not_come() -> None:
    refused = pytest.raises(StoreConnectionError, match=r"rank 1 could not reach rank 0's store at")
    with reserved_port() as port, refused:
        process, environ = step(1, 2, "a", [port])
        meeting._meet(process, timedelta(seconds=0.2), environ)


def test_another_rank_does_not_come() -> None:
    """Only the wait for it is short."""
    with (
        patch.object(session, "_CANCEL_S", 60.0),
        reserved_port() as port,
        pytest.raises(StoreTimeoutError, match="1 of 2 ranks; missing: 1"),
    ):
        process, environ = step(0, 2, "a", [port])
        meeting._meet(process, timedelta(seconds=0.2), environ)


# Who is asked, and what is set.


def test_one_process_meets_itself_and_again_at_the_same_store() -> None:
    environ = dict(ALONE)
    first = open_launched(environ, timeout=SOON)
    assert first is not None
    assert {name: environ[name] for name in environ if name not in ALONE} == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    first.store.set("key", "value")
    first.store.close()
    second = open_launched(environ, rank=0, world_size=1, timeout=SOON)
    assert second is not None
    assert second.store.get("key") == b"value"
    second.store.close()


def test_where_ranks_meet_can_be_said_without_who_they_are() -> None:
    environ = {**ALONE, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert open_launched(environ, timeout=SOON) is None
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("0", "1")
    half = {**ALONE, "MASTER_ADDR": "a"}
    assert open_launched(half, timeout=SOON) is None  # env:// says that MASTER_PORT is missing


def test_what_this_process_has_announced_is_its_own() -> None:
    environ = dict(ALONE)
    found = open_launched(environ, timeout=SOON)
    assert found is not None
    found.store.close()
    announce(environ, "127.0.0.1", 40001)
    again = open_launched(environ, timeout=SOON)
    assert again is not None
    again.store.close()
    withdrawn = dict(environ)
    withdraw(withdrawn)
    assert "MASTER_PORT" not in withdrawn
    environ["MASTER_PORT"] = "40002"
    withdraw(environ)
    assert open_launched(environ, timeout=SOON) is None


def test_nothing_is_found_where_nothing_is() -> None:
    environ: dict[str, str] = {}
    assert open_launched(environ, timeout=SOON) is None
    assert environ == {}


def test_a_batch_script_is_told_what_to_do() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    with pytest.raises(InvalidArgumentError, match="start it with srun -n N"):
        open_launched(environ, timeout=SOON)
    assert "RANK" not in environ
