"""Several hosts, played by a script instead of ssh: orders, answers, and hosts that fail."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import HostError
from rallypoint.lab.bench import on_hosts as module
from rallypoint.lab.bench.crew import CrewError
from rallypoint.lab.bench.on_hosts import ContenderHosts

# Addresses for documentation (RFC 5737), which no host has.
ONE, TWO = "198.51.100.1", "198.51.100.2"
# A host notes its orders. What it answers, a file of its name says by order; or nothing, if that
# is null, or it ends.
HOST = """
import json, sys
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2].rpartition("@")[2]
answers = json.loads((folder / f"{name}.json").read_text())
print("Welcome to", name)
print("rallypoint bench", json.dumps(answers["greeting"]), flush=True)
with open(folder / f"{name}.orders", "a") as orders:
    for line in sys.stdin:
        print(line, end="", file=orders, flush=True)
        answer = answers.get(json.loads(line)["do"], "ends")
        if answer == "ends":
            print("out of memory", file=sys.stderr)
            break
        if answer is not None:
            print(json.dumps(answer), flush=True)
"""


class Cluster:
    """Two such hosts, with a rank on each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "host.py").write_text(HOST)
        self.answers: dict[str, dict[str, Any]] = {
            name: {
                "greeting": {"version": version("rallypoint"), "cpu": cpu, "cores": "2"},
                "begin": {"port": 0},
                "open": {"port": 7000 + rank},
                "start": {"answers": [{"rank": rank, "version": "5.0"}]},
                "ask": {"answers": [{"seconds": 0.5 + rank}]},
                "end": {},
            }
            for rank, (name, cpu) in enumerate(((ONE, "New"), (TWO, "Old")))
        }

    def connect(self) -> ContenderHosts:
        for name, answers in self.answers.items():
            (self._directory / f"{name}.json").write_text(json.dumps(answers))
        rsh = [sys.executable, "-I", "-S", str(self._directory / "host.py"), str(self._directory)]
        return ContenderHosts([ONE, f"me@{TWO}"], rsh, ranks=1, begin={"pin": True})

    def orders(self, name: str) -> list[dict[str, Any]]:
        text = (self._directory / f"{name}.orders").read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_what_hosts_are_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    hosts = cluster.connect()
    assert hosts.describe() == f"{ONE}, {TWO}: New, 2 cores; Old, 2 cores"
    assert hosts.load() == ""
    team = hosts.start("mpich", {"operation": "barrier"})
    assert (team.name, team.version) == ("mpich", "5.0")
    assert team.ask({"order": "time"}) == [{"seconds": 0.5}, {"seconds": 1.5}]
    team.end()
    hosts.close()
    one, two = cluster.orders(ONE), cluster.orders(TWO)
    assert [order["do"] for order in one] == ["begin", "open", "start", "ask", "end"]
    begin, _, start, ask, _ = one
    assert (begin["ranks"], begin["pin"], begin["environ"]["UCX_TLS"]) == (1, True, "tcp")
    assert len(begin["environ"]["RALLYPOINT_TOKEN"]) == 32
    assert "HOME" not in begin["environ"]
    assert (start["node"], start["port"], start["hosts"]) == (0, 7000, [ONE, TWO])
    assert start["begin"] == {"operation": "barrier"}
    assert ask == {"do": "ask", "crew": "mpich", "order": {"order": "time"}}
    assert two == [begin, one[1], {**start, "node": 1}, ask, one[4]]


@pytest.mark.parametrize(
    ("order", "answers", "message"),
    [
        ("greeting", {"version": "0.0.1"}, f"{TWO}: it has Rallypoint 0.0.1, but this machine"),
        ("begin", {"error": "mpich is not installed"}, f"{TWO}: mpich is not installed"),
        ("open", "ends", f"me@{TWO}: the connection ended: {sys.executable} "),
        ("start", {"error": "mpich: it did not start"}, f"{TWO}: mpich: it did not start"),
        ("start", {"answers": [{"rank": 0}]}, "mpich: its 2 processes did not find each other"),
        ("ask", None, f"{TWO}: no answer within 0.05 s"),
    ],
)
def test_a_host_that_fails_is_named(
    cluster: Cluster,
    order: str,
    answers: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.answers[TWO][order] = answers
    with pytest.raises(HostError) as raised:
        hosts = cluster.connect()
        try:
            team = hosts.start("mpich", {})
            monkeypatch.setattr(module, "ANSWER_S", 0.0)
            monkeypatch.setattr(module, "_GRACE_S", 0.05)
            team.ask({})
        finally:
            hosts.close()
    assert message in str(raised.value)
    assert ("out of memory" in str(raised.value)) == (answers == "ends")


def test_a_failure_is_told_although_another_host_is_silent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while: the other may be about to fail, too."""
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    cluster.answers[ONE]["ask"] = None
    cluster.answers[TWO]["ask"] = {"error": "MemoryError: too long"}
    hosts = cluster.connect()
    team = hosts.start("mpich", {})
    with pytest.raises(HostError, match=f"{TWO}: MemoryError: too long"):
        team.ask({})
    hosts.close()


def test_all_hosts_answer_before_a_failure_is_told(cluster: Cluster) -> None:
    """So their next answers are those to the next order."""
    cluster.answers[ONE]["ask"] = {"error": "MemoryError: too long"}
    hosts = cluster.connect()
    team = hosts.start("mpich", {})
    with pytest.raises(CrewError, match=f"{ONE}: MemoryError: too long"):
        team.ask({})
    assert hosts.order("open", 60.0) == [{"port": 7000}, {"port": 7001}]
    hosts.close()


def test_a_remote_shell_that_does_not_exist() -> None:
    with pytest.raises(HostError, match=f"{ONE}: cannot run no-such-shell [(]No such file"):
        ContenderHosts([ONE], ["no-such-shell"], ranks=1, begin={})
