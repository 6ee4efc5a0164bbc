"""The program of a worker that runs a function: `python -m rallypoint.launch.api.call FILE NUMBER`.

FILE is the caller's, on this machine and readable only by the caller: a pickle of search path, main
module, function and arguments. The function's result or exception is written to FILE.NUMBER.

Functions and classes are passed by name. Those without a name in other processes (of a notebook, or
defined in a function) are passed whole by cloudpickle, where that is installed.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.base.errors import InvalidArgumentError, UnreadableCallError
from rallypoint.base.fatal_error import text_of, traceback_of

is_reading = False  # this process is a worker that imports what it needs for its call


def write_call(
    path: str, function: Callable[..., Any], args: Sequence[object], *, with_number: bool
) -> None:
    """Write a call for the workers; `with_number`: each gets its number as the first argument."""
    main = sys.modules["__main__"]
    # Objects defined in the caller's script are found by running that script under another name.
    name = getattr(main.__spec__, "name", None)
    if name == __name__ and main.is_reading:  # this module, as the program of a worker
        raise InvalidArgumentError(
            "the script starts processes when it is imported, which each of these does; put that"
            ' call below `if __name__ == "__main__":`'
        )
    script = None if name else getattr(main, "__file__", None)
    script = os.path.abspath(script) if script and os.path.exists(script) else None
    try:
        data = _pickled((function, tuple(args), with_number), has_main=bool(name or script))
    except Exception as error:
        raise InvalidArgumentError(
            f"{getattr(function, '__qualname__', function)!s} or its arguments cannot be passed "
            f"to other processes: {text_of(error)}"
        ) from error
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pickle.dump((sys.path, name, script), file)
        file.write(data)


def _pickled(value: object, *, has_main: bool) -> bytes:
    """Bytes that another process can load, with or without this process's main module."""
    try:
        data = pickle.dumps(value)
        # By name; a string that happens to contain it costs only the detour.
        if has_main or b"__main__" not in data:
            return data
        reason = "the main module has no file that they could import (as in a notebook)"
    except Exception as error:  # pickle raises many kinds
        reason = text_of(error)
    try:
        import cloudpickle
    except ImportError:
        raise TypeError(
            f"{reason}; define them at the top level of a module or script, or install cloudpickle"
            " (pip install cloudpickle)"
        ) from None
    by_value: bytes = cloudpickle.dumps(value)
    return by_value


def read_result(path: str, number: int) -> tuple[object, BaseException | None, str] | None:
    """What a call returned, what it raised, and the traceback; None if it left no result."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # its name in the worker
    try:
        with open(f"{path}.{number}", "rb") as file:
            result: tuple[object, BaseException | None, str] = pickle.load(file)
            return result
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, TypeError):
        return None


def run(path: str, number: int) -> None:
    """Perform the call, and write its result."""
    try:
        function, args, with_number = _read_call(path)
    except Exception as error:
        _leave(path, number, None, error)
        raise
    try:
        value = function(number, *args) if with_number else function(*args)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            _leave(path, number, None, error)
        raise
    _leave(path, number, value, None)


def _run_quietly(path: str, number: int) -> None:
    """As `run`; the process that reads the result reports an exception."""
    try:
        run(path, number)
    except SystemExit:
        raise
    except BaseException:
        if not os.path.exists(f"{path}.{number}"):
            raise
        sys.exit(1)


def _read_call(path: str) -> tuple[Callable[..., Any], Sequence[object], bool]:
    global is_reading  # noqa: PLW0603 - a process has one call
    is_reading = True
    try:
        return _load_call(path)
    finally:
        is_reading = False


def _load_call(path: str) -> tuple[Callable[..., Any], Sequence[object], bool]:
    with open(path, "rb") as file:
        search_path, name, script = pickle.load(file)
        sys.path[:] = search_path
        if name or script:
            try:
                _run_main(name, script)
            except (ImportError, SyntaxError) as error:
                raise UnreadableCallError(
                    f"the caller's main module {name or script} cannot be imported: {error}"
                ) from error
        try:
            call: tuple[Callable[..., Any], Sequence[object], bool] = pickle.load(file)
        except Exception as error:  # any exception of the arguments' classes
            raise UnreadableCallError(
                "the function or its arguments cannot be loaded in the worker:"
                f" {type(error).__name__}: {text_of(error)}"
            ) from error
    return call


def _run_main(name: str | None, script: str | None) -> None:
    """As multiprocessing's spawn does: the script's definitions, but not its main part."""
    from multiprocessing import spawn

    main: dict[str, str] = {}
    if name:
        main["init_main_from_name"] = name
    elif script and os.path.exists(script):
        main["init_main_from_path"] = script
    spawn.prepare(main)


def _leave(path: str, number: int, value: object, error: BaseException | None) -> None:
    trace = "" if error is None else traceback_of(error)
    try:
        # The caller can import what is defined there, if not by name then by cloudpickle's number.
        data = _pickled((value, error, trace), has_main=True)
        pickle.loads(data)  # some exceptions can be pickled, but not read back
    except Exception as reason:
        if error is None:
            raise TypeError(f"the worker's return value cannot be passed back: {reason}") from None
        data = pickle.dumps((None, None, trace))
    with open(f"{path}.{number}.part", "wb") as file:
        file.write(data)
    os.rename(f"{path}.{number}.part", f"{path}.{number}")  # complete, or not at all


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _run_quietly(sys.argv[1], int(sys.argv[2]))
    else:
        run(sys.argv[1], int(os.environ["RANK"]))
