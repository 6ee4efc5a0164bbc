"""How `rallypoint where` shows defaults, interfaces and routes."""

from __future__ import annotations

from rallypoint.cli.flags import RunOptions
from rallypoint.cli.read_job import read_job
from rallypoint.cli.where import defaults_text, interface_table, network_text, route_table
from rallypoint.cluster.interface_facts import (
    Address,
    Interface,
    InterfaceKind,
    InterfaceTarget,
    Route,
)

CARD = Interface(
    name="eth0",
    mtu=9000,
    speed_mbps=100_000,
    addresses=(
        Address(text="10.0.0.2", packed=b"\n\0\0\2", prefix=24),
        Address(text="fe80::1", packed=bytes(16), prefix=64, is_link_only=True),
    ),
)
IDLE = Interface(name="ib0", kind=InterfaceKind.INFINIBAND, is_up=False, mtu=2044)
EMPTY = Interface(name="docker0", kind=InterfaceKind.CONTAINER_BRIDGE)


def test_interfaces() -> None:
    assert interface_table([CARD, IDLE, EMPTY]) == (
        "interface  addresses                kind              speed and MTU\n"
        "eth0       10.0.0.2/24, fe80::1/64  network card      100 Gbit/s, MTU 9000\n"
        "ib0        down                     InfiniBand        MTU 2044\n"
        "docker0    none                     container bridge  MTU 1500"
    )


def target(address: str, route: Route | None) -> InterfaceTarget:
    return InterfaceTarget(
        name="n", address=address, packed=b"", route=route, why_not="unreachable"
    )


def test_routes() -> None:
    away = target("10.0.0.1", Route(interface="eth0", source="10.0.0.2"))
    own = target("10.0.0.2", Route(interface="lo", source="10.0.0.2", is_own=True))
    assert route_table({"n1": [away, target("fd00::1", None)], "n2": [own], "n3": []}) == (
        "towards  address    interface  from\n"
        "n1       10.0.0.1   eth0       10.0.0.2\n"
        "n1       fd00::1    no route   unreachable\n"
        "n2       10.0.0.2   lo         this machine's own\n"
        "n3       not known"
    )


def test_this_machine() -> None:
    said = network_text(["127.0.0.1", "no-such-host.invalid"], {})
    assert "127.0.0.1             127.0.0.1  lo         this machine's own" in said
    assert "no-such-host.invalid  not known" in said
    assert "For a job of several nodes: lo, 127.0.0.1" in said
    wrong = network_text([], {"RALLYPOINT_SOCKET_IFNAME": "nope"})
    assert "No interface for a job of several nodes: RALLYPOINT_SOCKET_IFNAME=nope: no" in wrong


def test_the_defaults_are_those_of_a_job() -> None:
    job, _ = read_job(RunOptions(), [__file__], {})
    told = defaults_text({})
    assert f"node        {job.nodes.node_rank} of {job.nodes.count} " in told
    assert f"workers     {job.local_world_size} " in told
    assert f"store at    {job.nodes.master_addr}, any free port " in told
    assert job.nodes.master_port == 0
    assert job.rendezvous is None
    changed = defaults_text({"PET_NNODES": "3", "PATH": "/bin"})
    assert changed == f"{told}\nexcept as set by PET_NNODES=3"
