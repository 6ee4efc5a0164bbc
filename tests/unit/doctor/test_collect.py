"""What a node finds out about itself: files of a made-up kernel, paths, and facts as JSON."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.doctor import collect as look_module
from rallypoint.doctor import paths, quick
from rallypoint.doctor.cluster_facts import (
    DRIVER,
    ClusterFacts,
    ConnectOutcome,
    Disk,
    EndpointProbe,
    Lookup,
    NodeFacts,
    PathState,
    Probe,
    Usage,
)
from rallypoint.doctor.collect import (
    NAME_S,
    LookOrder,
    choose,
    cpu_quota,
    disk_paths,
    is_this_node,
    look,
    look_at_disk,
    look_at_limits,
    look_at_settings,
    look_at_versions,
    look_up,
    proxy_bypasses,
    take_ports,
)
from rallypoint.doctor.paths import look_at_path
from rallypoint.store.port_holder import holder_of

PATIENT_S = 600.0


class Hanging:
    """Work that hangs, and threads that are waited for until they end, or until they do that work.

    Attributes:
        waited_s: for how long, together, threads that hang have been waited for.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._hung: set[threading.Thread] = set()
        self._is_over = threading.Event()

    def hang(self, *_: object, **__: object) -> list[object]:
        self._hung.add(threading.current_thread())
        self._is_over.wait()
        return []

    def end(self) -> None:
        self._is_over.set()

    def monotonic(self) -> float:
        return self.waited_s

    def thread(self, **options: Any) -> threading.Thread:
        made = threading.Thread(**options)
        real_join = made.join

        def join(timeout: float | None) -> None:
            while made.is_alive() and made not in self._hung:
                real_join(0.01)
            if made.is_alive() and timeout is not None:
                self.waited_s += timeout

        made.join = join  # type: ignore[assignment, method-assign]
        return made


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """For threads that the collector starts."""
    found = Hanging()
    monkeypatch.setattr(look_module, "time", found)
    monkeypatch.setattr(look_module, "threading", SimpleNamespace(Thread=found.thread))
    yield found
    found.end()


def put(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_limits_from_the_kernels_files(tmp_path: Path) -> None:
    put(tmp_path, "/proc/sys/net/netfilter/nf_conntrack_count", "7\n")
    put(tmp_path, "/proc/sys/net/netfilter/nf_conntrack_max", "10\n")
    put(tmp_path, "/proc/sys/net/ipv4/ip_local_port_range", "1000\t1099\n")
    put(tmp_path, "/proc/sys/net/ipv4/tcp_mem", "1 2 40\n")
    put(
        tmp_path,
        "/proc/net/sockstat",
        "sockets: used 9\nTCP: inuse 5 orphan 0 tw 3 alloc 7 mem 4\n",
    )
    put(tmp_path, "/sys/fs/cgroup/memory.current", "900\n")
    put(tmp_path, "/sys/fs/cgroup/memory.max", "1000\n")
    put(tmp_path, "/sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 300\nactive_file 100\n")
    put(tmp_path, "/sys/fs/cgroup/pids.current", "90\n")
    put(tmp_path, "/sys/fs/cgroup/pids.max", "100\n")
    put(tmp_path, "/proc/sys/net/ipv4/tcp_congestion_control", "bbr\n")
    found = look_at_limits(str(tmp_path))
    assert (found.pids, found.congestion_control) == (Usage(used=90, most=100), "bbr")
    assert 0 <= found.free_pids <= 10
    assert found.conntrack == Usage(used=7, most=10)
    assert found.ports == Usage(used=8, most=100)
    assert found.tcp_pages == Usage(used=4, most=40)
    assert found.memory == Usage(used=500, most=1000)
    assert look_at_limits(str(tmp_path / "none")).conntrack.share == 0


@pytest.mark.parametrize(("text", "cpus"), [("200000 100000\n", 2.0), ("max 100000\n", 0.0)])
def test_the_quota_of_cpus(tmp_path: Path, text: str, cpus: float) -> None:
    put(tmp_path, "/sys/fs/cgroup/cpu.max", text)
    assert cpu_quota(str(tmp_path)) == cpus


def test_versions(tmp_path: Path) -> None:
    put(tmp_path, "/sys/module/nvidia/version", "550.54.14\n")
    found = look_at_versions(str(tmp_path))
    assert found[DRIVER] == "550.54.14"
    assert {"Python", "Rallypoint", "NumPy"} <= found.keys()


def test_settings_without_secrets() -> None:
    environ = {
        "HTTP_PROXY": "http://me:word@proxy:1",
        "https_proxy": "me:w@rd/@proxy:3128",
        "all_proxy": "socks5://proxy",
        "RALLYPOINT_TOKEN": "x",
        "NCCL_IB_DISABLE": "",
    }
    assert look_at_settings(environ) == {
        "HTTP_PROXY": "http://***@proxy:1",  # as it is called, for who is to unset it
        "https_proxy": "***@proxy:3128",
        "all_proxy": "socks5://proxy",
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ()), ("n1", ("n1",)), ("*", ("n1", "n2.lan")), (".lan, N1", ("n1", "n2.lan"))],
)
def test_what_no_proxy_names(text: str, found: tuple[str, ...]) -> None:
    assert proxy_bypasses({"no_proxy": text}, ["n1", "n2.lan"]) == found


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("pass\n")
    assert look_at_path(str(tmp_path), wait_s=PATIENT_S).state is PathState.GOOD
    assert list(tmp_path.iterdir()) == [tmp_path / "script.py"]  # nothing is left there
    script = look_at_path(str(tmp_path / "script.py"), is_script=True, wait_s=PATIENT_S)
    assert (script.state, len(script.digest)) == (PathState.GOOD, 64)
    missing = look_at_path(str(tmp_path / "none" / "x"), wait_s=PATIENT_S)
    assert (missing.state, missing.detail) == (PathState.MISSING, "No such file or directory")
    read_only = look_at_path("/proc/sys", wait_s=PATIENT_S)
    assert read_only.state is PathState.READ_ONLY
    os.mkfifo(tmp_path / "fifo")
    assert look_at_path(str(tmp_path / "fifo"), wait_s=0.3).state is PathState.HANGS


def test_a_child_that_begins_late_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    real = Path(paths._CHILD).read_text()
    began = '    print("looking", flush=True)\n'
    assert real.count(began) == 1
    child.write_text(real.replace(began, f"    import time; time.sleep(0.5)\n{began}"))
    monkeypatch.setattr(paths, "_CHILD", str(child))
    assert look_at_path(str(tmp_path), wait_s=0.4).state is PathState.GOOD


def test_disks(tmp_path: Path) -> None:
    places = disk_paths({"TMPDIR": str(tmp_path)}, str(tmp_path / "not" / "yet"))
    found = [look_at_disk(*place) for place in places]
    assert [(each.what, each.path) for each in found[-2:] if each is not None] == [
        ("the directory for temporary files", str(tmp_path)),
        ("--log-dir", str(tmp_path)),
    ]


def test_a_disk_that_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = str(tmp_path / "logs")
    with hanging(monkeypatch) as work:

        def look_at(what: str, path: str) -> Disk | None:
            if path == logs:
                work.hang()
            return look_at_disk(what, path)

        monkeypatch.setattr(look_module, "look_at_disk", look_at)
        facts = look(LookOrder(log_dir=logs), {"TMPDIR": str(tmp_path)})
    assert 0 < work.waited_s <= look_module._LOOK_S
    assert [each.what for each in facts.disks][-1] == "the directory for temporary files"
    assert [(each.path, each.state) for each in facts.paths] == [(logs, PathState.HANGS)]


def test_names() -> None:
    assert look_up("127.0.0.1", PATIENT_S).addresses == ("127.0.0.1",)
    assert look_up("no-such-host.invalid").error != ""
    assert is_this_node(look_up("localhost", PATIENT_S))
    assert not is_this_node(Lookup(host="n9", addresses=("192.0.2.1",)))


@pytest.fixture
def silent_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """A name service that does not answer."""
    with hanging(monkeypatch) as work:
        monkeypatch.setattr(socket, "getaddrinfo", work.hang)
        yield work


def test_a_name_service_that_hangs_takes_its_time_once(silent_names: Hanging) -> None:
    order = LookOrder(hosts=("n1", "n2", "n3", "127.0.0.2"), local_addr="me")
    facts = look(order, os.environ)
    assert silent_names.waited_s == NAME_S
    silent = "the name service does not answer within 2 s"
    assert [each.error for each in facts.names] == [silent, silent, silent, ""]
    assert "--local-addr me: cannot find the host 'me'" in facts.choice.error


def test_a_name_service_that_hangs_is_found_before_an_error(
    silent_names: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "LIMIT_S", None)
    found = quick.finding_about([("n0", 29400)], {}, count=2)
    assert found.startswith("the name n0 cannot be resolved (the name service does not answer wi")


def test_what_waiting_does_not_change_is_found_at_the_start() -> None:
    first = partial(quick.first_finding, environ={}, count=2)
    assert "(--master-addr or --rdzv-endpoint)" in first([("127.0.0.1", 1)], is_listener=False)
    assert "can only be reached from this machine" in first([("::1", 1)], is_listener=True)
    # Several: `run --hosts localhost,127.0.0.1`, which has named them.
    assert first([("localhost", 1), ("127.0.0.1", 2)], is_listener=False) == ""
    found = first([("no-such-host.invalid", 1)], is_listener=False)
    assert found.startswith("the name no-such-host.invalid cannot be resolved")


def test_a_program_in_the_first_nodes_place_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        found = quick.first_finding([("127.0.0.1", port)], {}, count=2, is_listener=False)
        assert found.startswith(f"127.0.0.1:{port} is held by process {os.getpid()} (")
        found = quick.first_finding([("127.0.0.1", port)], {}, count=2, is_listener=True)
        assert "is held" not in found


def test_who_has_not_come_yet_is_no_finding_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection: node 0 may be started later."""
    refused = EndpointProbe(source=0, host="n0", port=29400, outcome=ConnectOutcome.REFUSED)
    monkeypatch.setattr(quick, "probe_endpoints", lambda *_: [refused])
    node = NodeFacts(number=0, name="n1", own_name=Lookup(host="n1"))
    monkeypatch.setattr(quick, "look_at_network", lambda *_: node)
    assert quick.first_finding([("n0", 29400)], {}, count=2, is_listener=False) == ""
    assert "refuses connections" in quick.finding_about([("n0", 29400)], {}, count=2)


def test_the_address_that_is_given_out() -> None:
    assert choose([], {"RALLYPOINT_SOCKET_IFNAME": "lo"}, {}).interface in ("lo", "")
    wrong = choose([], {"GLOO_SOCKET_IFNAME": "nosuch0"}, {})
    assert (wrong.address, wrong.by) == ("", "GLOO_SOCKET_IFNAME=nosuch0")
    assert "no interface of this machine" in wrong.error


def test_a_port_that_somebody_holds() -> None:
    def taken(port: int) -> None:
        raise OSError(errno.EADDRINUSE, "")

    def forbidden(port: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    facts = look(LookOrder(), {})
    (port,) = take_ports(facts, [("localhost", 1)], taken).ports
    assert (port.endpoint, port.held_by) == ("localhost:1", holder_of(1))
    (port,) = take_ports(facts, [("localhost", 1)], lambda port: None).ports
    assert (port.held_by, port.error) == ("", "")
    (port,) = take_ports(facts, [("localhost", 1)], forbidden).ports
    assert (port.held_by, port.error) == ("", "Permission denied")


def test_facts_travel_as_json() -> None:
    order = LookOrder(number=3, hosts=("127.0.0.1",), paths=("/", "/none"), workers="2")
    assert from_json(LookOrder, json.loads(json.dumps(to_json(order)))) == order
    facts = look(order, os.environ)
    cluster = ClusterFacts(
        count=2,
        nodes=(facts,),
        probes=(Probe(source=0, target=1, outcome=ConnectOutcome.DROPPED),),
        endpoint_probes=(
            EndpointProbe(source=0, host="h", port=1, outcome=ConnectOutcome.REFUSED),
        ),
        clocks_s={3: 0.5},
        hosts={"n3": 3},
        endpoints=(("h", 1),),
    )
    for with_defaults in (False, True):
        told = json.dumps(to_json(cluster, with_defaults=with_defaults))
        assert from_json(ClusterFacts, json.loads(told)) == cluster
    for wrong in ({"number": "x"}, {"nothing": 1}, {"paths": 5}):
        with pytest.raises(ControlMessageError):
            from_json(NodeFacts, wrong)


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            return "2.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert look_at_versions("/missing") == {"Python": platform.python_version(), "NumPy": "2.0"}


def test_the_check_of_a_path_that_fails_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text("print('looking', flush=True)\nraise SystemExit(3)\n")
    monkeypatch.setattr(paths, "_CHILD", str(child))
    found = look_at_path("/data", wait_s=PATIENT_S)
    assert found.state is PathState.UNREADABLE
    assert found.detail == "the check of it ended with status 3"


@pytest.mark.parametrize("value", [7, ["host"], {"host": 7}, {"host": "a", "addresses": "b"}])
def test_facts_that_are_none(value: object) -> None:
    with pytest.raises(ControlMessageError, match="is not a"):
        from_json(Lookup, value)
