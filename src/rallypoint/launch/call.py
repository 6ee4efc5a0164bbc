"""The program of a worker that runs a function: `python -m rallypoint.launch.call FILE NUMBER`.

FILE is the caller's, on this machine and readable by it alone: a pickle of search path, main
module, function and arguments. What the function returns or raises goes to FILE.NUMBER.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def write_call(
    path: str, function: Callable[..., Any], args: Sequence[object], *, with_number: bool
) -> None:
    """Put a call where workers find it; with `with_number` each gets its number as first argument.

    Raises:
        Whatever pickle raises for a function or arguments that cannot be handed over.
    """
    main = sys.modules["__main__"]
    # What is defined in the caller's script is found by running that script under another name.
    name = getattr(main.__spec__, "name", None)
    place = None if name else getattr(main, "__file__", None)
    place = os.path.abspath(place) if place else None
    data = pickle.dumps((function, tuple(args), with_number))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pickle.dump((sys.path, name, place), file)
        file.write(data)


def read_result(path: str, number: int) -> tuple[object, BaseException | None, str] | None:
    """What a call returned, what it raised and the traceback; None if it left nothing."""
    try:
        with open(f"{path}.{number}", "rb") as file:
            result: tuple[object, BaseException | None, str] = pickle.load(file)
            return result
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, TypeError):
        return None


def run(path: str, number: int) -> None:
    """Perform the call, and leave what came of it."""
    with open(path, "rb") as file:
        search_path, name, place = pickle.load(file)
        sys.path[:] = search_path
        if name or place:
            _run_main(name, place)
        function, args, with_number = pickle.load(file)
    try:
        value = function(number, *args) if with_number else function(*args)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            _leave(path, number, None, error, traceback.format_exc())
        raise
    _leave(path, number, value, None, "")


def _run_main(name: str | None, place: str | None) -> None:
    """As multiprocessing's spawn does: the script's definitions, but not its main part."""
    from multiprocessing import spawn

    main: dict[str, str] = {}
    if name:
        main["init_main_from_name"] = name
    elif place and os.path.exists(place):
        main["init_main_from_path"] = place
    spawn.prepare(main)


def _leave(path: str, number: int, value: object, error: BaseException | None, trace: str) -> None:
    try:
        data = pickle.dumps((value, error, trace))
        pickle.loads(data)  # some exceptions can be pickled, but not read back
    except Exception as reason:
        if error is None:
            raise TypeError(f"what the worker returned cannot be handed back: {reason}") from None
        data = pickle.dumps((None, None, trace))
    with open(f"{path}.{number}.part", "wb") as file:
        file.write(data)
    os.rename(f"{path}.{number}.part", f"{path}.{number}")  # whole, or not at all


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2] if len(sys.argv) > 2 else os.environ["RANK"]))
