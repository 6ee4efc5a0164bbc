"""Pods on test hosts: what a Job's controller, the kubelet and CoreDNS do with a manifest of ours.

An emulation, and no cluster. It does: one pod for each index, with its variables (also of secrets),
host name, /etc/hosts, search domains and 64 MiB of /dev/shm; the container's command as the first
process of its own tree; names that are known late, and that caches deny for longer; SIGTERM, the
grace period, SIGKILL; a replacement with the same name at another address; podFailurePolicy,
backoffLimit and successPolicy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from tests.hosts import Host, Hosts
from tests.system.nodes import children

_DOMAIN = "default.svc.cluster.local"
_SET_UP = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/resolv.conf'
    ' && mount -t tmpfs -o size=64m tmpfs /dev/shm && cd "$4" && shift 4 && exec "$@"'
)


class Pod:
    """One pod, from its start to its end."""

    def __init__(self, index: int, host: Host, process: subprocess.Popen[bytes]) -> None:
        self.index, self.host, self.process = index, host, process
        self.is_disrupted = False
        self.kill_at: float | None = None

    def first_process(self) -> int | None:
        """As the machine knows it; in the pod it is number 1. None: none yet, or any more."""
        with suppress(OSError, ValueError):
            (unshare,) = children(self.process.pid)
            (first,) = children(unshare)
            return first
        return None

    def send(self, number: signal.Signals) -> bool:
        """A signal to its first process; whether there is one."""
        first = self.first_process()
        if first is not None:
            with suppress(ProcessLookupError):
                os.kill(first, number)
        return first is not None

    def terminate(self, grace_s: float) -> None:
        """To be said again until there is something to end."""
        if self.send(signal.SIGTERM):
            self.kill_at = time.monotonic() + grace_s


class Job:
    """An Indexed Job on hosts 2 and up; the first one is the name server's.

    Leave it as a context: all is ended then.

    Attributes:
        pods: by index; the newest of each.
        is_complete, has_failed: as the Job's conditions.
    """

    def __init__(
        self,
        hosts: Hosts,
        manifest: Path,
        directory: Path,
        *,
        secrets: Mapping[tuple[str, str], str],
        known_after_s: float = 0.0,
        negative_s: float = 0.0,
    ) -> None:
        """Start it.

        Args:
            directory: where the containers' command begins.
            secrets: by name and key.
            known_after_s, negative_s: how late a pod's name is known, and for how much longer
                caches deny it.
        """
        documents = {each["kind"]: each for each in yaml.safe_load_all(manifest.read_text())}
        self._spec = documents["Job"]["spec"]
        self._name = documents["Job"]["metadata"]["name"]
        self._service = documents["Service"]["metadata"]["name"]
        self._pod = self._spec["template"]["spec"]
        assert documents["Service"]["spec"]["publishNotReadyAddresses"]
        assert self._pod["subdomain"] == self._service
        self._hosts, self._directory, self._secrets = hosts, directory, secrets
        self._known_after_s = known_after_s
        self._next_host = 2
        self._names: dict[str, tuple[str, float]] = {}
        self._failures = 0
        self.pods: dict[int, Pod] = {}
        self.is_complete = self.has_failed = False
        self._write_names()
        server = [sys.executable, str(Path(__file__).with_name("name_server.py"))]
        server += [hosts[1].address, str(directory / "names.json"), str(negative_s)]
        self._server = hosts[1].popen(server, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        for index in range(self._spec["completions"]):
            self._start(index)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            while pod.process.poll() is None:
                pod.send(signal.SIGKILL)
                time.sleep(0.01)
        for child in children(self._server.pid):
            os.kill(child, signal.SIGKILL)
        self._server.communicate()

    def evict(self, index: int) -> None:
        """As a drained node, or one that a more important pod needs."""
        pod = self.pods[index]
        pod.is_disrupted = True
        pod.terminate(self._pod["terminationGracePeriodSeconds"])

    def work(self) -> None:
        """What the controllers do about what has happened since."""
        for index, pod in list(self.pods.items()):
            if pod.kill_at is not None and time.monotonic() >= pod.kill_at:
                pod.send(signal.SIGKILL)
                pod.kill_at = None
            status = pod.process.poll()
            if status is None or self.is_complete or self.has_failed:
                continue
            if status == 0:  # successPolicy: one is enough
                assert self._spec["successPolicy"]["rules"] == [{"succeededCount": 1}]
                self.is_complete = True
            elif self._fails_for_good(pod, status):
                self.has_failed = True
            else:
                self._start(index)
        if self.is_complete or self.has_failed:
            for pod in self.pods.values():
                if pod.process.poll() is None and pod.kill_at is None:
                    pod.terminate(self._pod["terminationGracePeriodSeconds"])

    def wait(self, within_s: float = 60.0) -> None:
        """Until the Job is over, and all pods are gone."""
        deadline = time.monotonic() + within_s
        while any(pod.process.poll() is None for pod in self.pods.values()) or not (
            self.is_complete or self.has_failed
        ):
            assert time.monotonic() < deadline, self.story()
            self.work()
            time.sleep(0.02)

    def story(self) -> str:
        """All that the pods wrote."""
        outputs = sorted(self._directory.glob("output.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in outputs)

    def _fails_for_good(self, pod: Pod, status: int) -> bool:
        """By the first rule that fits, or by the number of failures."""
        for rule in self._spec["podFailurePolicy"]["rules"]:
            for condition in rule.get("onPodConditions", ()):
                if condition["type"] == "DisruptionTarget" and pod.is_disrupted:
                    return bool(rule["action"] == "FailJob")
            if status in rule.get("onExitCodes", {}).get("values", ()):
                return bool(rule["action"] == "FailJob")
        self._failures += 1
        return self._failures > int(self._spec["backoffLimit"])

    def _start(self, index: int) -> None:
        host = self._hosts[self._next_host]
        self._next_host += 1
        name = f"{self._name}-{index}"
        full_name = f"{name}.{self._service}.{_DOMAIN}"
        self._names[full_name] = (host.address, time.time() + self._known_after_s)
        self._write_names()
        table = self._directory / f"hosts.{host.number}"
        table.write_text(f"127.0.0.1\tlocalhost\n{host.address}\t{full_name}\t{name}\n")
        resolver = self._directory / f"resolver.{host.number}"
        search = f"{_DOMAIN} {_DOMAIN.partition('.')[2]} cluster.local"
        resolver.write_text(
            f"search {search}\nnameserver {self._hosts[1].address}\noptions ndots:5\n"
        )
        (container,) = self._pod["containers"]
        start = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        start += ["sh", "-c", _SET_UP, "sh", name, str(table), str(resolver), str(self._directory)]
        with (self._directory / f"output.{index}.{host.number}").open("wb") as output:
            process = subprocess.Popen(
                host.enter(*start, *container["command"]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ(index, container),
            )
        self.pods[index] = Pod(index, host, process)

    def _environ(self, index: int, container: Mapping[str, Any]) -> dict[str, str]:
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(self._directory),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            "JOB_COMPLETION_INDEX": str(index),
        }
        for each in container["env"]:
            key = each["valueFrom"]["secretKeyRef"]
            environ[each["name"]] = self._secrets[key["name"], key["key"]]
        return environ

    def _write_names(self) -> None:
        part = self._directory / "names.part"
        part.write_text(json.dumps(self._names))
        part.replace(self._directory / "names.json")
