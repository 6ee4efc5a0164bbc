"""A terminal that shows one frame after the other, and gives back keys. However the program ends or
is stopped, the terminal is as it was before.

Only lines that have changed are written, all in one write, which terminals that can do so show at
once (mode 2026).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType, TracebackType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # the alternate screen; no cursor; no wrapping
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter",
    b"\x7f": "backspace", b"\x08": "backspace", b"\x1b": "escape",
}  # fmt: skip
_LONGEST = max(map(len, _KEYS))


class Screen:
    """The terminal of standard input and output, while entered.

    Raises:
        SystemExit: when entered, on SIGTERM and SIGHUP.
    """

    def __init__(self) -> None:
        self._input, self._output = 0, 1
        self._encoding = sys.stdout.encoding
        self._lines: list[str] = []
        self._before: list[object] = []
        self._signals: set[int] = set()  # that have come, and are to be obeyed
        self._handlers: dict[signal.Signals, object] = {}
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)

    def __enter__(self) -> Screen:
        self._before = termios.tcgetattr(self._input)
        for number in _HANDLED:
            self._handlers[number] = signal.signal(number, self._signalled)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        with suppress(OSError, termios.error):  # the terminal is gone
            self._give_back()
        os.close(self._woken)
        os.close(self._wakes)

    @property
    def size(self) -> os.terminal_size:
        """Columns and rows."""
        columns, rows = os.get_terminal_size(self._output)
        return os.terminal_size((columns or 80, rows or 24))

    def wake(self) -> None:
        """Have `wait` return; from any thread."""
        with suppress(OSError):
            os.write(self._wakes, b"\0")

    def wait(self, descriptors: Sequence[int], timeout_s: float) -> None:
        """Wait until one of these can be read, or a key was pressed, or something else happened."""
        select.select([*descriptors, self._input, self._woken], [], [], timeout_s)
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 10)
        self._obey()

    def pressed(self) -> Iterator[str]:
        """The keys that were pressed: characters, and names as "up" and "enter"."""
        data = b""
        while select.select([self._input], [], [], 0)[0]:
            part = os.read(self._input, 1 << 10)
            if not part:  # the terminal is gone
                raise SystemExit(128 + signal.SIGHUP)
            data += part
        while data:
            for length in range(min(_LONGEST, len(data)), 0, -1):
                if data[:length] in _KEYS:
                    yield _KEYS[data[:length]]
                    data = data[length:]
                    break
            else:
                text = data.decode(errors="ignore")
                if not text:
                    return
                yield text[0]
                data = text[1:].encode()

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines, one for each row."""
        before = self._lines + [""] * (len(lines) - len(self._lines))
        changed = [
            f"\x1b[{row};1H{line}\x1b[0m\x1b[K"
            for row, (line, old) in enumerate(zip(lines, before, strict=False), 1)
            if line != old
        ]
        self._lines = list(lines)
        if changed:
            self._write(f"{_BEGIN}{''.join(changed)}{_END}")

    def _signalled(self, number: int, _: FrameType | None) -> None:
        """Only what ends the program is done at once: anything else may be half done."""
        if number in _ENDING:
            raise SystemExit(128 + number)
        self._signals.add(number)

    def _obey(self) -> None:
        signals, self._signals = self._signals, set()
        if signal.SIGTSTP in signals:
            self._give_back()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # here it stops, and goes on with SIGCONT
            signal.signal(signal.SIGTSTP, self._signalled)
        if signals & {signal.SIGTSTP, signal.SIGCONT}:
            self._take()
        elif signals:
            self._lines = []
            self._write("\x1b[2J")

    def _take(self) -> None:
        tty.setcbreak(self._input, termios.TCSADRAIN)
        self._lines = []
        self._write(_ENTER)

    def _give_back(self) -> None:
        self._write(_LEAVE)
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def _write(self, text: str) -> None:
        data = text.encode(self._encoding, errors="replace")
        while data:
            data = data[os.write(self._output, data) :]
