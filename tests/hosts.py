"""Test hosts: network namespaces on one bridge, each with a name, an address and faults to inject.

    host1 (10.77.0.1, fd77::1)   host2 (10.77.0.2, fd77::2)   ...
          \\                 /
           bridge, in a namespace of its own

A host has its own network, name, /etc/hosts, /dev/shm and process tree. When its first process
ends, all its processes end, and everything else is released with them. Nothing touches the
machine's own network. Needs root, or user namespaces; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

NETWORK, NETWORK_6 = "10.77.0", "fd77:"
_HOST = ("--net", "--uts", "--mount", "--ipc")
_TOOLS = ("unshare", "nsenter", "ip", "nft")


def why_not() -> str:
    """Why test hosts are impossible here; empty if they are possible."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (packages util-linux, iproute2, nftables)"
    done = subprocess.run(
        [*_unshare(), "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


def _unshare(*more: str) -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, *_HOST, *more]


class Namespace:
    """A namespace, held by its first process."""

    def __init__(self, holder: subprocess.Popen[str], pid: int, *, has_processes: bool) -> None:
        self._holder = holder
        self.pid = pid
        self._kinds = [*_HOST, *(["--pid"] if has_processes else [])]

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` inside, in the root directory."""
        as_root = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "-t", str(self.pid), *as_root, *self._kinds, "--", *command]

    def run(self, *command: str) -> str:
        """Run a command to its end; returns its output.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        done = subprocess.run(self.enter(*command), check=True, capture_output=True, text=True)
        return done.stdout

    def kill(self) -> None:
        """Kill it and all its processes at once, as by a power failure."""
        if self._holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()
        for pipe in (self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()


class Host(Namespace):
    """One host; `number` counts from 1."""

    def __init__(
        self, number: int, holder: subprocess.Popen[str], pid: int, directory: Path
    ) -> None:
        super().__init__(holder, pid, has_processes=True)
        self._directory = directory  # for temporary files, which a power failure leaves behind
        self.number = number
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number}"
        self.address_6 = f"{NETWORK_6}:{number:x}"

    def enter(self, *command: str) -> list[str]:
        """As of a namespace; without a TMPDIR, temporary files end with the hosts."""
        directory = '[ "$TMPDIR" ] || export TMPDIR="$0"; exec "$@"'
        return super().enter("sh", "-c", directory, str(self._directory), *command)

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host, in the current directory unless `cwd` is given."""
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', os.fspath(cwd or Path.cwd()), *command]
        return subprocess.Popen(
            self.enter(*inside),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
        )


class Hosts:
    """A context manager: `count` hosts that reach only each other.

    Attributes:
        names: the /etc/hosts file of all hosts; must be modified in place.
    """

    def __init__(self, count: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="rallypoint-hosts-"))
        self.names = self._directory / "hosts"
        self.hosts: list[Host] = []
        self._switch: Namespace | None = None
        try:
            self._build(count)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        """The host with that number, from 1 on."""
        return self.hosts[number - 1]

    def close(self) -> None:
        """End everything on all hosts, and the hosts."""
        for host in self.hosts:
            host.kill()
        if self._switch is not None:
            self._switch.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    # Faults.

    def pull_cable(self, number: int) -> None:
        """Drop everything to and from the host, without notifying anybody."""
        self.switch.run("ip", "link", "set", f"port{number}", "down")

    def plug_cable(self, number: int) -> None:
        """Undo `pull_cable`."""
        self.switch.run("ip", "link", "set", f"port{number}", "up")

    def partition(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Silently drop everything between the two sides."""
        rules = [
            "add table bridge faults",
            "add chain bridge faults drops { type filter hook forward priority 0; }",
        ]
        for one in left:
            for other in right:
                for source, target in ((one, other), (other, one)):
                    ports = f"iifname port{source} oifname port{target}"
                    rules.append(f"add rule bridge faults drops {ports} drop")
        self.switch.run("nft", "\n".join(rules))

    def heal(self) -> None:
        """Undo `partition`."""
        self.switch.run("nft", "delete table bridge faults")

    def repair(self) -> None:
        """Undo all faults."""
        for host in self.hosts:
            self.plug_cable(host.number)
        if self.switch.run("nft", "list", "tables"):
            self.heal()

    # Building.

    @property
    def switch(self) -> Namespace:
        """The namespace of the bridge."""
        assert self._switch is not None
        return self._switch

    def _build(self, count: int) -> None:
        numbers = range(1, count + 1)
        lines = [f"{NETWORK}.{number} host{number}\n" for number in numbers]
        self.names.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
        holder = self._hold([], "exec sleep infinity")
        self._switch = Namespace(holder, holder.pid, has_processes=False)
        self._switch.run("ip", "link", "add", "br0", "type", "bridge")
        self._switch.run("ip", "link", "set", "br0", "up")
        for number in numbers:
            self.hosts.append(self._host(number, self.names))
            self._connect(self.hosts[-1])

    def _host(self, number: int, names: Path) -> Host:
        script = (
            f"hostname host{number} && mount --make-rprivate / && mount --bind {names} /etc/hosts"
            " && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec sleep infinity"
        )
        # --fork: the child is the first process of a new tree, whose end is the end of the tree.
        holder = self._hold(["--pid", "--fork", "--kill-child", "--mount-proc"], script)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return Host(number, holder, int(children[0]), self._directory)

    def _hold(self, more: list[str], script: str) -> subprocess.Popen[str]:
        *steps, last = script.split(" && ")
        text = " && ".join([*steps, "echo ready", last])
        holder = subprocess.Popen(
            [*_unshare(*more), "sh", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # unshare prints a message when its child is killed
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            with holder:  # which closes its pipes
                why = holder.stderr.read()
            raise RuntimeError(f"a test host could not be made: {text} failed: {why}")
        return holder

    def _connect(self, host: Host) -> None:
        port = f"port{host.number}"
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self.switch.run("ip", "link", "add", port, *pair)
        self.switch.run("ip", "link", "set", port, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "addr", "add", f"{host.address_6}/64", "dev", "eth0", "nodad")
