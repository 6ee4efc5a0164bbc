"""The starter's end of the connection to one host: orders in, output back.

    starter  --orders--> stdin  ssh  ...  remote_node.py --> launcher
             <--lines--- stdout, stderr   <--------------+

`HostStreams` carry them: of an ssh process (starter.py), or of a Ray actor. Lines are passed
on unchanged and whole. The starter never blocks: neither for a host that does not read its
orders, nor for a reader of its own output (launch/output/lines.py: Outlet).
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from rallypoint.cli.remote.remote_node import GREETING
from rallypoint.cluster.remote_shell import read_greeting, version_trouble
from rallypoint.launch.output.lines import MAX_LINE_BYTES, Outlet, StreamReader

_MAX_SAID = 1 << 16


class HostListener(ABC):
    """Is told what happens to a host, which is given by its number."""

    @abstractmethod
    def greeted(self, host: int, port: int) -> None:
        """The host is ready for a launcher, which may listen at that port."""

    @abstractmethod
    def failed(self, host: int, why: str) -> None:
        """No launcher can be started there."""

    @abstractmethod
    def ended(self, host: int, status: int | None) -> None:
        """The launcher has ended; None if its status is unknown."""


class HostStreams(ABC):
    """What carries orders to remote_node.py on a host, and its output back.

    Attributes:
        stdin, stdout, stderr: descriptors, which the link closes.
        ended: becomes readable when the connection has ended; closed by `close`.
    """

    stdin: int
    stdout: int
    stderr: int
    ended: int

    @abstractmethod
    def end(self) -> None:
        """End the connection and the program that runs there, at once."""

    @abstractmethod
    def close(self) -> None:
        """Release everything here, after the connection has ended."""

    @abstractmethod
    def why(self, said: str) -> str:
        """Why it ended before remote_node.py answered; `said`: what it printed instead."""


class RemoteOutput(StreamReader):
    """A stream from a host to one of the starter's own; `look` says what is shown of lines."""

    def __init__(
        self,
        fd: int,
        outlet: Outlet,
        selector: selectors.BaseSelector,
        look: Callable[[bytes], bytes],
    ) -> None:
        self._look = look
        self._partial = b""
        super().__init__(fd, outlet, selector)

    def _take(self, data: bytes) -> None:
        data = self._partial + data
        # A carriage return ends a line, too; otherwise a progress bar would appear only at its end.
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - cut > MAX_LINE_BYTES:
            cut = len(data) - MAX_LINE_BYTES // 2
        self._partial = data[cut:]
        self._give(data[:cut])

    def _rest(self) -> bytes:
        return self._partial

    def _give(self, block: bytes) -> None:
        super()._give(self._look(block) if block else b"")


class HostConnection:
    """The connection to one host, which the listener knows by this number.

    `connection` leads to remote_node.py there, which gets `order` first. The outlets are ours.
    """

    def __init__(
        self,
        number: int,
        connection: HostStreams,
        order: Mapping[str, object],
        outlets: tuple[Outlet, Outlet],
        selector: selectors.BaseSelector,
        listener: HostListener,
    ) -> None:
        self._number = number
        self._connection = connection
        self._selector = selector
        self._listener = listener
        self._mark = f"\0rallypoint {secrets.token_hex(16)} "
        self._said = ""  # output before the greeting
        self._is_greeted = False
        self._is_started = False
        self._has_ended = False
        self._status: int | None = None  # the launcher's exit status
        self._unsent = b""
        self._stdin = connection.stdin
        os.set_blocking(self._stdin, False)
        self._out = RemoteOutput(connection.stdout, outlets[0], selector, self._look_at_stdout)
        self._err = RemoteOutput(connection.stderr, outlets[1], selector, self._look_at_stderr)
        selector.register(connection.ended, selectors.EVENT_READ, self._ended)
        self._tell(order)

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the launcher: Python with these arguments and these additional variables."""
        self._is_started = True
        self._tell({"words": words, "environ": environ, "mark": self._mark})

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        self._tell({"signal": number})

    def let_go(self) -> None:
        """Close its input: the program there then ends."""
        if self._stdin >= 0:
            if self._unsent:
                self._selector.unregister(self._stdin)
                self._unsent = b""
            os.close(self._stdin)
            self._stdin = -1

    def drop(self) -> None:
        """End the connection at once; what runs there ends as well."""
        self.let_go()
        self._connection.end()

    def close(self) -> None:
        """Release everything of this link."""
        if not self._has_ended:
            self.drop()
            self._finish()

    def _tell(self, order: Mapping[str, object]) -> None:
        if self._stdin < 0:
            return
        if not self._unsent:
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self._send)
        self._unsent += json.dumps(order).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        if not self._unsent:
            return
        try:
            self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # the end of the connection will show
            self._unsent = b""
        if not self._unsent:
            self._selector.unregister(self._stdin)

    def _look_at_stdout(self, lines: bytes) -> bytes:
        if self._is_greeted:
            shown, mark, told = lines.partition(self._mark.encode())
            if mark and told.strip().isdigit():
                self._status = int(told)
            return shown
        for line in lines.splitlines():
            found = read_greeting(GREETING, line)
            if found is None:
                self._keep(line)
                continue
            self._is_greeted = True
            trouble = found.get("error") or version_trouble(found)
            if trouble:
                self._listener.failed(self._number, str(trouble))
                self.drop()
            else:
                self._listener.greeted(self._number, int(found["port"]))
        return b""

    def _look_at_stderr(self, lines: bytes) -> bytes:
        if self._is_greeted:
            return lines
        self._keep(lines)
        return b""

    def _keep(self, said: bytes) -> None:
        self._said = f"{self._said}{said.decode(errors='replace')}\n"[-_MAX_SAID:]

    def _ended(self) -> None:
        if self._has_ended:
            return
        self._finish()
        if self._is_started:
            self._listener.ended(self._number, self._status)
        else:
            self._listener.failed(self._number, self._connection.why(self._said))

    def _finish(self) -> None:
        self._has_ended = True
        self._selector.unregister(self._connection.ended)
        self._connection.close()
        self.let_go()
        self._out.finish()
        self._err.finish()
