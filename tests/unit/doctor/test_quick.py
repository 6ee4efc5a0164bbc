"""What is added to an error, from made-up looks at the network."""

from __future__ import annotations

import os
import threading

import pytest

from rallypoint.doctor import quick
from rallypoint.doctor.cluster_facts import (
    AddressFact,
    ConnectOutcome,
    EndpointProbe,
    InterfaceFact,
    Lookup,
    NodeFacts,
)

ENDPOINT = ("n0", 29400)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "LIMIT_S", None)


def found(
    monkeypatch: pytest.MonkeyPatch,
    outcome: ConnectOutcome = ConnectOutcome.REACHED,
    *,
    lookup: Lookup | None = None,
    choice: AddressFact | None = None,
    is_caller: bool = True,
) -> str:
    """What a node n1 finds on its way to n0."""
    docker = InterfaceFact(name="docker0", addresses=("172.17.0.1",))
    node = NodeFacts(
        number=0,
        name="n1",
        own_name=Lookup(host="n1", addresses=("127.0.1.1",)),
        names=(lookup or Lookup(host="n0", addresses=("10.0.0.1",)),),
        addresses=("10.0.0.2", "172.17.0.1"),
        interfaces=(InterfaceFact(name="eth0", addresses=("10.0.0.2",)), docker),
        choice=choice or AddressFact(address="10.0.0.2", interface="eth0"),
    )
    probe = EndpointProbe(source=0, host="n0", port=29400, outcome=outcome)
    usual = AddressFact(address="10.0.0.2", interface="eth0")
    monkeypatch.setattr(quick, "look_at_network", lambda *_: node)
    monkeypatch.setattr(quick, "probe_endpoints", lambda *_: [probe])
    monkeypatch.setattr(quick, "choose", lambda *_: usual)
    return quick.finding_about([ENDPOINT], {}, count=2, is_caller=is_caller)


def test_nothing_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch) == ""  # its own name does not matter: nobody meets there
    assert quick.told_with("it failed", "") == "it failed"


def test_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    text = found(monkeypatch, ConnectOutcome.DROPPED)
    assert text.startswith("n0:29400, the rendezvous endpoint, does not answer; allow TCP to po")
    assert "check that the job has been started on n0" in found(monkeypatch, ConnectOutcome.REFUSED)
    whole = quick.told_with("it failed.", text)
    assert whole == f"it failed; found on {os.uname().nodename}: {text}"


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = Lookup(host="n0", addresses=("127.0.1.1",))
    text = found(monkeypatch, ConnectOutcome.REFUSED, lookup=loopback)
    assert text.startswith("the name n0 resolves to 127.0.1.1, a loopback address")
    unknown = Lookup(host="n0", error="Name or service not known")
    text = found(monkeypatch, ConnectOutcome.UNKNOWN, lookup=unknown)
    assert text.startswith(
        "the name n0 cannot be resolved (Name or service not known); add its address"
    )


def test_the_interface_that_a_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = AddressFact(address="172.17.0.1", interface="docker0", by="GLOO_SOCKET_IFNAME=docker")
    text = found(monkeypatch, choice=chosen)
    assert text.startswith("it advertises the address 172.17.0.1 (docker0), as GLOO_SOCKET_IFN")
    assert text.endswith("; set GLOO_SOCKET_IFNAME=eth0 there, or unset it")
    same = AddressFact(address="10.0.0.2", interface="eth0", by="GLOO_SOCKET_IFNAME=eth0")
    assert found(monkeypatch, choice=same) == ""


def test_who_waits_for_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    text = found(monkeypatch, is_caller=False)
    assert "a firewall may block the other direction; allow TCP from n0 to this host" in text


def test_a_look_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "LIMIT_S", 0.05)
    is_over = threading.Event()

    def hang(*_: object) -> None:
        is_over.wait()
        raise OSError

    monkeypatch.setattr(quick, "look_at_network", hang)
    assert quick.finding_about([], {}, count=2) == ""
    is_over.set()
