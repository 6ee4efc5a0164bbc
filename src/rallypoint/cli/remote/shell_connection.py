"""A connection to a host through a process: ssh, or the command that --rsh names, which runs
remote_node.py there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from rallypoint.base.process_end import ProcessEnd
from rallypoint.cluster.remote_shell import end, last_lines, start

_NOT_FOUND = (126, 127)  # exit statuses of a shell that cannot run the program


class ShellConnection:
    """See Connection.

    Args:
        name: of the host.
        command: runs remote_node.py there.

    Raises:
        HostError: the command does not exist.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._command = command
        pipe = subprocess.PIPE
        self._process = start(name, command, stdin=pipe, stdout=pipe, stderr=pipe)
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        # Plain descriptors from here on: nothing below waits for one of them.
        self.stdin, self.stdout, self.stderr = (os.dup(each.fileno()) for each in streams if each)
        for stream in streams:
            if stream is not None:
                stream.close()
        self._end = ProcessEnd(self._process.pid)
        self.ended = self._end.fileno()

    def end(self) -> None:
        """See Connection."""
        end(self._process, 0.0)

    def close(self) -> None:
        """See Connection."""
        self._end.close()
        end(self._process, time.monotonic() + 1.0)  # it has ended; this reaps it

    def why(self, said: str) -> str:
        """The reason why the program on the host did not start, or ended early."""
        status = self._process.returncode
        told = f"status {status}" if status >= 0 else f"signal {-status}"
        ended = f"{os.path.basename(self._command[0])} ended with {told}"
        last = last_lines(said)[-1:]
        if status in _NOT_FOUND:
            ended = f"{sys.executable} must exist on all hosts, with Rallypoint installed"
        elif "No module named" in said:
            ended = f"install Rallypoint there as well, for {sys.executable}"
        return "; ".join([line.strip().rstrip(".") for line in last] + [ended])
