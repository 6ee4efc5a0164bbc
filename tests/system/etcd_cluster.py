"""Real etcd clusters on this machine, whose members die when a test says so."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from rallypoint.rendezvous.keyvalue.etcd_client import TRY_TIMEOUT_S, EtcdClient


def need_etcd() -> None:
    """Skip the test if etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt install etcd-server")


def member_command(
    number: int, directory: Path, clients: Sequence[str], peers: Sequence[str], *more: str
) -> list[str]:
    """One member's command line, of as many as there are URLs; elections are quick."""
    everyone = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
    words = ["etcd", "--name", f"m{number}", "--data-dir", str(directory / f"m{number}")]
    words += ["--listen-client-urls", clients[number], "--advertise-client-urls", clients[number]]
    words += ["--listen-peer-urls", peers[number]]
    words += ["--initial-advertise-peer-urls", peers[number], "--initial-cluster", everyone]
    words += ["--logger", "zap", "--log-level", "error"]
    return [*words, "--heartbeat-interval", "50", "--election-timeout", "500", *more]


class Cluster:
    """On loopback."""

    def __init__(self, directory: Path, size: int, *more: str, scheme: str = "http") -> None:
        need_etcd()
        holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * size)]
        ports = [holder.getsockname()[1] for holder in holders]
        for holder in holders:
            holder.close()
        self.endpoints = [("127.0.0.1", port) for port in ports[:size]]
        clients = [f"{scheme}://127.0.0.1:{port}" for port in ports[:size]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        self.members = [
            subprocess.Popen(
                member_command(i, directory, clients, peers, *more), stderr=subprocess.DEVNULL
            )
            for i in range(size)
        ]

    def client(
        self, *, timeout_s: float = 60.0, try_timeout_s: float = TRY_TIMEOUT_S
    ) -> closing[EtcdClient]:
        return closing(EtcdClient(self.endpoints, timeout_s=timeout_s, try_timeout_s=try_timeout_s))

    def leader(self) -> int:
        for i, (host, port) in enumerate(self.endpoints):
            url = f"http://{host}:{port}/v3/maintenance/status"
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(urllib.request.Request(url, b"{}"), timeout=5) as answer:
                status = json.load(answer)
            if status.get("leader") == status["header"]["member_id"]:
                return i
        raise AssertionError("no member leads")

    def kill(self, i: int) -> None:
        self.members[i].kill()
        self.members[i].wait()

    def close(self) -> None:
        for i in range(len(self.members)):
            self.kill(i)
