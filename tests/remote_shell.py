"""A stand-in for ssh on test hosts: starts a command on a host, by that host's name.

    python tests/remote_shell.py SOCKET HOST COMMAND...    as    ssh HOST COMMAND...

The server is a thread of the process that made the hosts. Its socket is a file, so it can be
reached from each host's network. A client passes on its input and outputs, and ends with the
command's status; if the client ends first, the command receives SIGHUP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a client runs this file alone
    from tests.hosts import Hosts

_MOST_BYTES = 1 << 16


class RemoteShell:
    """Starts commands on hosts for others. A context manager."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self._hosts = {host.name: host for host in hosts.hosts}
        self._path = directory / "remote-shell"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def command(self) -> tuple[str, ...]:
        """The command to use instead of ssh."""
        return (sys.executable, "-P", __file__, str(self._path))

    def __enter__(self) -> RemoteShell:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            data, descriptors, _, _ = socket.recv_fds(client, _MOST_BYTES, 3)
            if not data:
                return  # who connected has ended
            name, text = json.loads(data)
            try:
                if name not in self._hosts:
                    os.write(descriptors[2], f"cannot resolve the name {name}\n".encode())
                    client.sendall(bytes([255]))
                    return
                command = self._hosts[name].enter("sh", "-c", f"cd / && {text}")
                given, out, err = descriptors
                process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            threading.Thread(target=_hang_up, args=(client, process), daemon=True).start()
            status = process.wait()
            with contextlib.suppress(OSError):
                client.sendall(bytes([status % 256]))
                client.shutdown(socket.SHUT_RDWR)


def _hang_up(client: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Wait for the client's end, and then hang up."""
    with contextlib.suppress(OSError):
        client.recv(1)
    if process.poll() is None:
        for child in _below(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGHUP)


def _below(pid: int) -> list[int]:
    """The process of the command itself, below the one that entered the host."""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in found]
    return []


def main(path: str, *words: str) -> int:
    """Act as the client."""
    rest = list(words)
    while rest[0].startswith("-"):  # options of ssh, such as -x
        del rest[0]
    name, *command = rest
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        message = json.dumps([name.rpartition("@")[2], " ".join(command)]).encode()
        socket.send_fds(server, [message], [0, 1, 2])
        status = server.recv(1)
    return status[0] if status else 255


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
