"""A call on its way to a worker, and its result on the way back; here both in one process."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import InvalidArgumentError, UnreadableCallError
from rallypoint.launch.api import call as module
from rallypoint.launch.api.call import read_result, run, write_call

CODE = """
class Odd(Exception):
    '''One that can be pickled, but not read back.'''
    def __init__(self, first, second):
        super().__init__(first)

class Bad:
    '''As an argument that only its writer can load.'''
    def __reduce__(self):
        return (int, ("x",))

def give(*values):
    return values

def fail(error):
    raise error

def fail_oddly():
    raise Odd(1, 2)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with these functions, as both processes import it, below a notebook's main."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made: Any = types.ModuleType("work_of_a_test")
    exec(CODE, vars(made))
    monkeypatch.setitem(sys.modules, "work_of_a_test", made)
    return made


def test_a_value_comes_back(work: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "call")
    write_call(path, work.give, ("a", 7), with_number=True)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    for number in (0, 3):
        assert read_result(path, number) is None
        run(path, number)
        assert read_result(path, number) == ((number, "a", 7), None, "")
    plain = str(tmp_path / "plain")
    write_call(plain, work.give, ("a",), with_number=False)
    run(plain, 1)
    assert read_result(plain, 1) == (("a",), None, "")


def test_an_exception_comes_back_with_its_traceback(work: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "call")
    write_call(path, work.fail, (ValueError("too large"),), with_number=False)
    with pytest.raises(ValueError, match="too large"):
        run(path, 0)
    result = read_result(path, 0)
    assert result is not None
    value, error, trace = result
    assert (value, repr(error)) == (None, "ValueError('too large')")
    assert trace.rstrip().endswith("ValueError: too large")


def test_an_exception_that_cannot_be_read_back_leaves_its_traceback(
    work: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "call")
    write_call(path, work.fail_oddly, (), with_number=False)
    with pytest.raises(work.Odd):
        run(path, 0)
    result = read_result(path, 0)
    assert result is not None
    assert result[:2] == (None, None)
    assert result[2].rstrip().endswith("Odd: 1")


@pytest.mark.parametrize(("code", "leaves"), [(0, False), (None, False), (3, True), ("no", True)])
def test_an_exit_is_a_failure_unless_it_says_otherwise(
    work: Any, tmp_path: Path, code: object, leaves: bool
) -> None:
    path = str(tmp_path / "call")
    write_call(path, work.fail, (SystemExit(code),), with_number=False)
    with pytest.raises(SystemExit):
        run(path, 0)
    assert (read_result(path, 0) is not None) == leaves


def test_a_value_that_cannot_be_passed_back(work: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "call")
    write_call(path, work.give, (), with_number=False)
    work.give = threading.Lock
    with pytest.raises(TypeError, match=r"the worker's return value cannot be passed back: .*lock"):
        run(path, 0)


def test_an_argument_that_cannot_be_loaded(work: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "call")
    write_call(path, work.give, (work.Bad(),), with_number=False)
    with pytest.raises(UnreadableCallError, match="cannot be loaded in the worker: ValueError: in"):
        run(path, 0)
    assert not module.is_reading
    result = read_result(path, 0)
    assert result is not None
    assert isinstance(result[1], UnreadableCallError)


def test_a_script_that_cannot_be_imported_again(work: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import none_such\n")
    sys.modules["__main__"].__file__ = str(script)
    path = str(tmp_path / "call")
    write_call(path, work.give, (), with_number=False)
    del sys.modules["__main__"].__file__  # of the worker
    with pytest.raises(UnreadableCallError, match=f"main module {script} cannot be imported: No "):
        run(path, 0)


def test_functions_without_a_name_need_cloudpickle(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(InvalidArgumentError, match=r"<lambda> or its arguments .* install cloudpi"):
        write_call(str(tmp_path / "call"), lambda: 1, (), with_number=False)
    work.give.__module__ = "__main__"
    sys.modules["__main__"].give = work.give  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgumentError, match="the main module has no file that they could"):
        write_call(str(tmp_path / "call"), work.give, (), with_number=False)


def test_a_script_that_starts_processes_when_it_is_imported(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start more and more of them."""
    monkeypatch.setitem(sys.modules, "__main__", module)  # as in a worker
    monkeypatch.setattr(module, "is_reading", True)
    with pytest.raises(InvalidArgumentError, match="put that call below `if __name__ == "):
        write_call(str(tmp_path / "call"), work.give, (), with_number=False)


@pytest.mark.parametrize("data", [b"", b"\x80\x05}.", b"cno_such\nname\n."])
def test_a_result_that_is_none(data: bytes, tmp_path: Path) -> None:
    """Of a worker that was killed while it wrote, or whose class is unknown here."""
    (tmp_path / "call.0").write_bytes(data[:-1] if data.startswith(b"\x80") else data)
    assert read_result(str(tmp_path / "call"), 0) is None
