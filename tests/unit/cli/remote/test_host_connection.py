"""Lines from a host on their way through the starter."""

from __future__ import annotations

import os
import selectors

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.cli.remote.host_connection import RemoteOutput
from rallypoint.launch.output.file_work import FileWork
from rallypoint.launch.output.lines import Outlet
from rallypoint.launch.output.sink import Sink


class Pipes:
    """A stream into an outlet, whose other end is a pipe."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.files = FileWork(self.selector)
        self._end, out = os.pipe()
        self._out = out
        self._sink = Sink(out)
        self.outlet = Outlet(out, self._sink, self.selector, self.files)
        source, self.source = os.pipe()
        self.blocks: list[bytes] = []
        self.lines = RemoteOutput(source, self.outlet, self.selector, self._look)

    def write(self, data: bytes) -> None:
        """As the host; and let it pass."""
        os.write(self.source, data)
        for key, _ in self.selector.select(0):
            key.data()

    def close(self) -> bytes:
        """All that came through."""
        os.close(self.source)
        self.lines.finish()
        assert self._sink.flush(60)
        self.outlet.close()
        self.files.close()
        self.selector.close()
        os.close(self._out)
        found = b""
        while data := os.read(self._end, 1 << 16):
            found += data
        os.close(self._end)
        return found

    def _look(self, lines: bytes) -> bytes:
        self.blocks.append(lines)
        return lines


@settings(deadline=None)  # threads write, on a machine that may be busy
@given(st.lists(st.binary(min_size=1, max_size=40) | st.sampled_from([b"\n", b"\r", b"a\r\n"])))
def test_what_comes_out_is_what_went_in(pieces: list[bytes]) -> None:
    pipes = Pipes()
    for piece in pieces:
        pipes.write(piece)
    assert pipes.close() == b"".join(pieces)
    for block in pipes.blocks[:-1]:
        assert block.endswith((b"\n", b"\r"))  # only the end may be an unfinished line
