"""Which interface a rank is reached at."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster.interface import host_identity, listening_address, matching

NAMES = ["lo", "eth0", "eth1", "ib0", "docker0"]


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ("eth", ["eth0", "eth1"]),
        ("ib,eth", ["ib0", "eth0", "eth1"]),
        ("eth1,eth", ["eth1", "eth0"]),
        ("=eth", []),
        ("=eth1,ib0", ["eth1", "ib0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=eth0,lo", ["eth1", "ib0", "docker0"]),
        ("nothing", []),
    ],
)
def test_matching_as_nccl_does(wish: str, found: list[str]) -> None:
    assert matching(wish, NAMES) == found


def test_the_first_variable_that_is_set_counts() -> None:
    variables = {"GLOO_SOCKET_IFNAME": "nope", "RALLYPOINT_SOCKET_IFNAME": "lo"}
    assert listening_address("10.0.0.1", variables) == "127.0.0.1"
    del variables["RALLYPOINT_SOCKET_IFNAME"]
    with pytest.raises(HostError, match="GLOO_SOCKET_IFNAME=nope: no interface"):
        listening_address(None, variables)


def test_a_store_on_loopback_means_loopback() -> None:
    assert listening_address("localhost", {}) == "127.0.0.1"
    assert listening_address("::1", {}) == "::1"


def test_without_a_hint_some_address_of_this_machine() -> None:
    with socket.socket() as probe:
        probe.bind((listening_address(None, {}), 0))


def test_processes_of_one_host_have_one_identity() -> None:
    """tests/system/test_hosts.py has those of several."""
    code = "from rallypoint.cluster.interface import host_identity; print(host_identity())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == host_identity() + "\n"
