"""What faulthandler writes, in the forms of each Python, and what is no text of its own."""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from pathlib import Path

from rallypoint.diagnosis.facts import Frame
from rallypoint.launch.inspection.python_stacks import parse_stacks

PYTHON_3_11 = """\
Thread 0x00007f9d4b1866c0 (most recent call first):
  File "/a b/th\\xf6\\u20ac\\U0001f600.py", line 5 in target
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f9d4cde2b80 (most recent call first):
  Garbage-collecting
  File "<string>", line 10 in __del__
  File ???, line ??? in ???
  ...
"""
PYTHON_3_14 = """\
Thread 0x00007f9d4b1866c0 [Thread-1 (work)] (most recent call first):
  File "x.py", line 5 in work

Thread 0x00007f9d4b1866d0 [saver] (most recent call first):
  <no Python frame>

Current thread 0x00007f9d4cde2b80 [python] (most recent call first):
  File "x.py", line 9 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x31 [0x5603d9]
"""


def test_python_3_11() -> None:
    first, main = parse_stacks(PYTHON_3_11)
    assert first.thread == "0x00007f9d4b1866c0"
    assert first.frames[0] == Frame(
        file="/a b/th\N{LATIN SMALL LETTER O WITH DIAERESIS}\N{EURO SIGN}\N{GRINNING FACE}.py",
        line=5,
        function="target",
    )
    assert (first.is_main, first.collects_garbage, len(first.frames)) == (False, False, 2)
    assert (main.is_main, main.collects_garbage) == (True, True)
    assert main.frames[1] == Frame(file="", line=0, function="???")


def test_python_3_14() -> None:
    stacks = parse_stacks(PYTHON_3_14)
    assert [stack.name for stack in stacks] == ["Thread-1 (work)", "saver", "python"]
    assert [len(stack.frames) for stack in stacks] == [1, 0, 1]
    assert [stack.is_main for stack in stacks] == [False, False, True]


def test_the_main_thread_may_be_among_those_that_are_left_out() -> None:
    one = 'Thread 0x{:016x} (most recent call first):\n  File "x.py", line 1 in f\n\n'
    text = "".join(map(one.format, range(100))) + "...\n"
    stacks = parse_stacks(text)
    assert len(stacks) == 100
    assert not any(stack.is_main for stack in stacks)


def test_the_frame_below_a_forked_script_is_left_out() -> None:
    text = (
        "Current thread 0x01 (most recent call first):\n"
        '  File "train.py", line 3 in <module>\n'
        '  File "<string>", line 5 in <module>\n'
    )
    (main,) = parse_stacks(text)
    assert main.frames == (Frame(file="train.py", line=3, function="<module>"),)


def test_other_text() -> None:
    assert parse_stacks("") == ()
    assert parse_stacks('nonsense\n  File "x.py", line 1 in f\n\0\0') == ()
    assert parse_stacks(PYTHON_3_14[:90])[0].frames == ()


def test_this_python(tmp_path: Path) -> None:
    """The same as traceback says of the same frames."""
    goes_on, is_there = threading.Event(), threading.Event()

    def work() -> None:
        is_there.set()
        goes_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_there.wait()
    with (tmp_path / "text").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = parse_stacks(file.read())
    frame = sys._current_frames()[thread.ident or 0]
    goes_on.set()
    thread.join()
    (found,) = [stack for stack in stacks if int(stack.thread, 16) == thread.ident]
    expected = [line.name for line in reversed(traceback.extract_stack(frame))]
    functions = [one.function for one in found.frames]
    assert functions[functions.index("work") :] == expected[expected.index("work") :]
    assert stacks[-1].is_main
    assert "test_this_python" in [one.function for one in stacks[-1].frames]
