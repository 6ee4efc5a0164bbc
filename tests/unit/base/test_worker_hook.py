"""The worker's end of the control socket, each time in a process of its own."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

import rallypoint
from rallypoint.base.control_message import Hello, Message, WorkerError, decode, encode
from rallypoint.base.worker_hook import identity_of
from rallypoint.launch.output.failure_report import read_error_file


def run_worker(
    code: str,
    *arguments: str,
    how: tuple[str, ...] = ("-c",),
    environ: Mapping[str, str] | None = None,
    stderr: IO[bytes] | int = subprocess.PIPE,
) -> tuple[subprocess.CompletedProcess[str], list[Message]]:
    """What became of it, and what it said; it finds the descriptor's number in KNOWN_FD, too."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            done = subprocess.run(
                [sys.executable, *how, code, *arguments],
                env={
                    **os.environ,
                    "RALLYPOINT_CONTROL_FD": str(theirs.fileno()),
                    "KNOWN_FD": str(theirs.fileno()),
                    **(environ or {}),
                },
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                check=False,
            )
        messages = []
        while packet := ours.recv(1 << 20):
            messages.append(decode(packet))
    return done, messages


def run_plain(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def only_error(messages: list[Message]) -> WorkerError:
    assert isinstance(messages[0], Hello)
    (error,) = messages[1:]
    assert isinstance(error, WorkerError)
    return error


def test_the_greeting_is_what_encode_makes() -> None:
    code = "import os; print(os.getpid())"
    done, messages = run_worker(code)
    assert messages == [Hello(int(done.stdout))]
    # decode reads this exact form without json; the hook writes it without json.
    assert encode(Hello(7)) == b'{"v": 1, "kind": "hello", "pid": %d}' % 7


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("raise ValueError('bad thing')", "ValueError", "bad thing"),
        ("class Mine(Exception): pass\nraise Mine()", "Mine", ""),
        ("import json; json.loads('x')", "json.decoder.JSONDecodeError", "Expecting value"),
        ("1/0", "ZeroDivisionError", "division by zero"),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion depth"),
        ("this is no python", "SyntaxError", "invalid syntax"),
    ],
)
def test_an_exception_is_reported_and_printed_as_ever(code: str, kind: str, message: str) -> None:
    done, messages = run_worker(code)
    error = only_error(messages)
    assert error.type == kind
    assert message in error.message
    assert "Traceback" in error.traceback or kind == "SyntaxError"
    assert error.traceback.rstrip().splitlines()[-1].startswith(kind.rpartition(".")[0] or kind[:4])
    assert not error.is_secondary
    plain = run_plain(code)
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, plain.stderr)


LOADED = "import sys; print('rallypoint.base.worker_hook' in sys.modules)"


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True), ("", True)])
def test_a_variable_turns_it_off(value: str, is_on: bool) -> None:
    done, messages = run_worker(LOADED, environ={"RALLYPOINT_WORKER_HOOK": value})
    assert done.stdout == f"{is_on}\n"
    assert len(messages) == is_on
    assert done.stderr == ""


def test_a_process_that_is_no_worker_does_not_load_it() -> None:
    assert run_plain(LOADED).stdout == "False\n"


@pytest.mark.parametrize("suffix", importlib.machinery.EXTENSION_SUFFIXES)
def test_stacks_are_offered_from_each_kind_of_wheel(suffix: str, tmp_path: Path) -> None:
    """That of Python 3.11 names the version, and that of 3.12 and later the stable ABI."""
    package = Path(rallypoint.__file__).parent
    copy = tmp_path / "rallypoint"
    shutil.copytree(package / "base", copy / "base")
    shutil.copy(package / "__init__.py", copy)
    (compiled,) = package.glob("_stacks*.so")
    shutil.copy(compiled, copy / f"_stacks{suffix}")
    code = "from rallypoint.base import worker_hook; print(worker_hook.stacks_signal > 0)"
    done, _ = run_worker(code, environ={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "True\n"


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)", "import os; os._exit(4)"])
def test_no_exception_no_report(code: str) -> None:
    _, messages = run_worker(code)
    assert len(messages) == 1


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)", "import sys; del sys.argv[:]"])
@pytest.mark.parametrize("name", ["script.py", "package/__main__.py"])
def test_a_script_that_ends_is_not_taken_for_missing(code: str, name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(code)
    path = script.parent if script.name == "__main__.py" else script
    _, messages = run_worker(str(path), how=())
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("how", "name", "kind"),
    [
        ((), "missing.py", "FileNotFoundError"),
        (("-m",), "no_such_module", "ModuleNotFoundError"),
        ((), "", "FileNotFoundError"),  # a directory without __main__.py
    ],
)
def test_a_missing_program_is_reported(
    how: tuple[str, ...], name: str, kind: str, tmp_path: Path
) -> None:
    done, messages = run_worker(name if how else str(tmp_path / name), how=how)
    error = only_error(messages)
    assert (error.type, error.is_startup) == (kind, True)
    assert done.returncode != 0


def test_the_programs_own_hook_still_runs_and_is_still_reported() -> None:
    code = "import sys\nsys.excepthook = lambda *_: print('mine')\nraise ValueError('x')"
    done, messages = run_worker(code)
    assert only_error(messages).type == "ValueError"
    assert done.stdout == "mine\n"
    assert done.stderr == ""


ECHO = "from rallypoint.base.errors import PeerLostError\n"


@pytest.mark.parametrize(
    "code",
    [
        ECHO + "raise PeerLostError('rank 1 died')",
        ECHO + "try:\n raise PeerLostError('x')\nexcept Exception as e:\n raise KeyError() from e",
        ECHO + "try:\n raise PeerLostError('x')\nfinally:\n {}['k']",
        "raise RuntimeError('[pair.cc:1] Connection closed by peer [127.0.0.1]:1')",
    ],
)
def test_the_loss_of_a_peer_is_an_echo(code: str) -> None:
    assert only_error(run_worker(code)[1]).is_secondary


def test_children_do_not_inherit_the_role() -> None:
    code = """
import os, subprocess, sys
assert "RALLYPOINT_CONTROL_FD" not in os.environ
assert "RALLYPOINT_FLIGHT_RECORD" not in os.environ
subprocess.run([sys.executable, "-c", "raise ValueError('child')"])
if os.fork() == 0:
    raise ValueError("fork")
os.wait()
print(sys.argv, __name__)
"""
    done, messages = run_worker(code, "a", "--b")
    assert len(messages) == 1
    assert done.stdout == "['-c', 'a', '--b'] __main__\n"


@pytest.mark.parametrize("value", ["", "x", "999", "-1", "1"])
def test_a_wrong_descriptor_breaks_nothing(value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "print('fine')"],
        env={**os.environ, "RALLYPOINT_CONTROL_FD": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_an_agent_that_does_not_read_stops_nobody() -> None:
    code = """
import sys
for _ in range(500):
    sys.excepthook(ValueError, ValueError("x" * 4000), None)
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RALLYPOINT_CONTROL_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("code", "is_startup"),
    [
        ("import no_such_module", True),
        ("from os import no_such_name", True),
        ("exec('def broken(:')", True),
        ("def work(): import no_such_module\nwork()", False),
        ("import runpy; runpy.run_module('no_such_module')", True),
        ("raise ValueError()", False),
        ("open('/no/such/file')", False),
    ],
)
def test_a_failure_before_the_programs_own_work_is_marked(code: str, is_startup: bool) -> None:
    _, messages = run_worker(code)
    assert only_error(messages).is_startup == is_startup


# The program closes what it did not open, as daemons do, and uses the number again.
CLOSING = """
import atexit, os, socket
os.closerange(3, 64)
{open_both}
os.dup2(write_end, int(os.environ["KNOWN_FD"]))
os.write(write_end, b"mine")
atexit.register(lambda: print(os.read(read_end, 9999)))
raise ValueError("after that")
"""
PAIR = "kept = socket.socketpair(type={}); write_end, read_end = (each.fileno() for each in kept)"


@pytest.mark.parametrize(
    "open_both",
    [
        "write_end, read_end = os.open('mine', os.O_WRONLY | os.O_CREAT), os.open('mine', 0)",
        "read_end, write_end = os.pipe()",
        PAIR.format("socket.SOCK_STREAM"),
        PAIR.format("socket.SOCK_SEQPACKET"),
    ],
)
def test_nothing_is_written_into_a_file_of_the_programs_own(
    open_both: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    script = tmp_path / "train.py"
    script.write_text(CLOSING.format(open_both=open_both))
    done, messages = run_worker(str(script), how=(), environ=environ)
    assert len(messages) == 1
    assert done.stdout == "b'mine'\n"
    assert "ValueError: after that" in done.stderr
    error = read_error_file((tmp_path / "error.json").read_text(), time_s=7.0)
    assert error is not None
    assert (error.type, error.message) == ("ValueError", "after that")
    assert 'raise ValueError("after that")' in error.traceback


def test_an_error_that_the_agent_does_not_read_is_left_in_the_file(tmp_path: Path) -> None:
    """Its socket is full."""
    code = """
import os
try:
    while True:
        os.write(int(os.environ["KNOWN_FD"]), b'{"v": 1, "kind": "hello", "pid": 1}')
except BlockingIOError:
    pass
from rallypoint.base.errors import PeerLostError
raise PeerLostError("rank 1 died")
"""
    path = tmp_path / "error.json"
    run_worker(code, environ={"TORCHELASTIC_ERROR_FILE": str(path)})
    error = read_error_file(path.read_text(), time_s=7.0)
    assert error is not None
    assert (error.message, error.is_secondary) == ("rank 1 died", True)


STRANGE = """
class Strange(Exception):
    def __str__(self):
        HOW

class Quiet(RuntimeError):
    def __str__(self):
        HOW

class Loud(BaseException):
    __module__ = None
    def __str__(self):
        HOW
"""


@pytest.mark.parametrize("kind", ["Strange", "Quiet", "Loud"])
@pytest.mark.parametrize(
    "how", ["raise KeyError('inner')", "return 7", "raise SystemExit(4)", "raise KeyboardInterrupt"]
)
def test_an_error_whose_message_cannot_be_made_is_reported(kind: str, how: str) -> None:
    code = STRANGE.replace("HOW", how) + f"raise {kind}('outer')"
    _, messages = run_worker(code)
    error = only_error(messages)
    assert error.type == kind
    assert "cannot be printed" in error.message


def test_such_an_error_as_a_cause_is_reported() -> None:
    code = STRANGE.replace("HOW", "raise KeyError('inner')")
    code += "try:\n raise Quiet()\nexcept Quiet as error:\n raise ValueError('outer') from error"
    assert only_error(run_worker(code)[1]).message == "outer"


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit('no data in /data')",
        "import sys; sys.exit('no data in /data')",
        "def f(): raise SystemExit('no data in /data')\nf()",
        "class Mine(SystemExit): pass\nraise Mine('no data in /data')",
        "import pathlib; raise SystemExit(pathlib.Path('no data in ') / 'data')",
        "import sys\nprint('x', file=sys.stderr)\nraise SystemExit('no data in /data')",
    ],
)
def test_the_text_of_an_exit_is_reported(code: str) -> None:
    done, messages = run_worker(code)
    error = only_error(messages)
    assert (error.type, error.traceback) == ("SystemExit", "")
    assert error.message.replace(" /data", "/data").startswith("no data in")
    plain = run_plain(code)
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n raise SystemExit('caught')\nexcept SystemExit:\n pass",
        "import sys; sys.stderr.write('a line\\n')",
        "import sys; print('a line', file=sys.stderr); raise SystemExit(3)",
    ],
)
def test_other_texts_are_no_exits(code: str) -> None:
    assert len(run_worker(code)[1]) == 1


@pytest.mark.parametrize(
    "name", ["json", "token", "traceback", "linecache", "re", "errno", "pathlib", "types"]
)
@pytest.mark.parametrize("is_imported", [False, True])
def test_a_module_beside_the_script_takes_nobodys_place(
    name: str, is_imported: bool, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text("MINE = True\n")
    script = tmp_path / "train.py"
    before = f"import sys; sys.modules.pop({name!r}, None); import {name}; assert {name}.MINE\n"
    after = f"\nimport atexit; atexit.register(lambda: print({name}.MINE, {name}.__name__))\n"
    own = before + after if is_imported and name not in ("errno", "types") else ""
    script.write_text(f"{own}raise ValueError('bad sample 17')")
    done, messages = run_worker(str(script), how=())
    error = only_error(messages)
    assert (error.type, error.message) == ("ValueError", "bad sample 17")
    assert "train.py" in error.traceback
    assert "raise ValueError('bad sample 17')" in error.traceback
    assert done.stdout == (f"True {name}\n" if own else "")


def test_an_error_is_reported_where_no_file_can_be_opened() -> None:
    code = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
open('data "é"')
"""
    error = only_error(run_worker(code)[1])
    assert error.type == "OSError"
    assert error.message == """[Errno 24] Too many open files: 'data "é"'"""
    assert error.time_s > 1e9


THROUGH_US = """
import sys
import rallypoint as dist
import numpy as np

def step(array):
    dist.all_reduce(array, op="what")

HOW
"""


@pytest.mark.parametrize(
    ("how", "last", "has_frames"),
    [
        ("step(np.ones(3))", "rallypoint.base.errors.", False),
        ("dist.init_process_group()", "rallypoint.base.errors.InvalidArgumentError: ", False),
        # Those of the program's own function, which we called; not ours in between.
        (
            "def work(state): {}['lost']\n"
            "from rallypoint.base.error_file import record\nrecord(work)(1)",
            "KeyError: 'lost'",
            False,
        ),
        # A defect of ours is told as it is.
        (
            "from rallypoint.store import wire\nwire.blob(1)",
            "TypeError: ",
            True,
        ),
    ],
)
def test_frames_of_ours_are_left_out(how: str, last: str, has_frames: bool) -> None:
    code = THROUGH_US.replace("HOW", how)
    environ = {"RANK": "", "TORCHELASTIC_ERROR_FILE": ""}
    done, messages = run_worker(code, environ=environ)
    error = only_error(messages)
    for text in (error.traceback, done.stderr):
        assert text.strip().splitlines()[-1].startswith(last), text
        assert "Traceback (most recent call last)" in text
        assert text.count("Traceback") == 1
        assert ("/rallypoint/" in text) is has_frames
    full = {**environ, "RALLYPOINT_FULL_TRACEBACKS": "1"}
    done, messages = run_worker(code, environ=full)
    for text in (only_error(messages).traceback, done.stderr):
        assert "/rallypoint/" in text


@pytest.mark.parametrize(
    ("raised", "is_shared", "is_printed"),
    [
        ("errors.MismatchError('different')", True, False),
        ("errors.PeerLostError('rank 1 died')", True, False),
        ("errors.MismatchError('different')", False, True),  # it has a file of its own
        ("errors.InvalidArgumentError('wrong')", True, True),  # this rank's own
        ("ValueError('bad')", True, True),
    ],
)
def test_errors_of_other_ranks_are_left_to_the_launcher(
    raised: str, is_shared: bool, is_printed: bool, tmp_path: Path
) -> None:
    """Where both print to one place, and it has been told."""
    code = f"from rallypoint.base import errors\nraise {raised}"
    with (tmp_path / "stderr").open("wb") as stderr, (tmp_path / "other").open("wb") as other:
        launchers = identity_of((stderr if is_shared else other).fileno())
        environ = {"RALLYPOINT_LAUNCHERS_STDERR": f"{launchers}"}
        _, messages = run_worker(code, environ=environ, stderr=stderr)
    assert only_error(messages).message in raised
    assert ("Traceback" in (tmp_path / "stderr").read_text()) is is_printed
    with (tmp_path / "stderr").open("wb") as stderr:
        environ = {"RALLYPOINT_LAUNCHERS_STDERR": f"{identity_of(stderr.fileno())}"}
        closing = f"import os; os.close(int(os.environ['KNOWN_FD']))\n{code}"
        run_worker(closing, environ=environ, stderr=stderr)
    assert "Traceback" in (tmp_path / "stderr").read_text()
