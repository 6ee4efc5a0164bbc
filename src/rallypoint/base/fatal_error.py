"""A worker's report of the exception that ends it; imported only then.

Frames of this package are left out of tracebacks, also of the one that the worker itself prints:
they say where the package noticed the error, not what the program did. They stay if the error is
the package's own, or if RALLYPOINT_FULL_TRACEBACKS=1.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rallypoint.base.control_message import WorkerError, encode
from rallypoint.base.refusals import NO_THREAD, refusal_in

FULL_TRACEBACKS = "RALLYPOINT_FULL_TRACEBACKS"

_PACKAGE = __file__.rpartition("/base/")[0] + "/"
# It calls PyTorch's C++ code, whose errors appear to come from there.
_WRAPPERS = f"{_PACKAGE}pytorch/other_backends.py"
_LIBRARY = os.__file__.rpartition("/")[0] + "/"
# The files that import the function's module in a worker that runs a function, not a script.
_LOADERS = ("/rallypoint/launch/api/call.py", "/multiprocessing/spawn.py")
_LONGEST_CHAIN = 64  # they can be cyclic


def tell(
    error: BaseException,
    trace: TracebackType | None,
    write: Callable[[bytes], bool],
    error_file: str,
) -> bool:
    """Report it, and leave this package's frames out of its traceback from now on.

    Returns whether `write` has reported it to the agent. If that is not possible, as the program
    has closed the connection or the agent reads nothing, it is left in `error_file`, where the
    agent looks, too.
    """
    report = report_of(error, trace)
    if write(encode(report)):
        return True
    if error_file:
        write_report(error_file, report)
    return False


def report_of(error: BaseException, trace: TracebackType | None) -> WorkerError:
    """What is reported of it."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__", None):
        name = f"{kind.__module__}.{name}"
    message = text_of(error)
    with suppress(BaseException):  # its __str__ may raise anything
        message = completed(message, error, trace)
    is_startup, is_secondary = _is_startup(error, trace), _is_echo(error)
    hide_own_frames(error)
    is_exit = kind is SystemExit  # a deliberate exit: its place says nothing
    lines = [] if is_exit else traceback.format_exception(kind, error, error.__traceback__)
    return WorkerError(name, message, "".join(lines), time.time(), is_secondary, is_startup)


def write_report(path: str, report: WorkerError) -> None:
    """Write it to a file, in torch's form (error_file.py).

    What cannot be written is left out: it must not replace the error that it reports.
    """
    extra: dict[str, object] = {
        "py_callstack": report.traceback,
        "timestamp": str(int(report.time_s)),
    }
    for name in ("is_secondary", "is_startup"):
        if getattr(report, name):
            extra[name] = True
    message = {"message": f"{report.type}: {report.message}", "extraInfo": extra}
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - workers pay for pathlib
            json.dump({"message": message}, file)
    except OSError:
        return


def text_of(error: BaseException) -> str:
    """Its message, whatever its class makes of that."""
    try:
        return str(error)
    except BaseException as reason:
        return f"<message cannot be printed: its __str__ raised {type(reason).__name__}>"


def traceback_of(error: BaseException) -> str:
    """Its traceback as Python prints it, without the frames of this package."""
    hide_own_frames(error)
    return "".join(traceback.format_exception(error))


def hide_own_frames(error: BaseException) -> None:
    """Leave this package's frames out of the tracebacks of an exception and its causes."""
    if os.environ.get(FULL_TRACEBACKS) == "1":
        return
    for each in _chain(error):
        if _is_deliberate(each) or not _has_failed_itself(_innermost(each.__traceback__)):
            each.__traceback__ = _without_own(each.__traceback__)
        if _is_deliberate(each):
            _drop_causes_within(each)


def _is_deliberate(error: BaseException) -> bool:
    """Whether it is an error that this package raises with a sentence for the user."""
    return any(base.__name__ == "RallypointError" for base in type(error).__mro__)


def _drop_causes_within(error: BaseException) -> None:
    """What its sentence has been made of, and happened in this package alone."""
    cause = error.__cause__ or error.__context__
    frames = [] if cause is None else list(_frames(cause.__traceback__))
    if frames and all(_is_own(each) or _is_library(each) for each in frames):
        error.__cause__ = None
        error.__suppress_context__ = True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    return list(_frames(trace))[-1] if trace is not None else None


def _is_own(entry: TracebackType | None) -> bool:
    return entry is not None and entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _has_failed_itself(entry: TracebackType | None) -> bool:
    """Whether an error that comes from there is this package's own."""
    is_wrapper = entry is not None and entry.tb_frame.f_code.co_filename == _WRAPPERS
    return _is_own(entry) and not is_wrapper


def _is_library(entry: TracebackType) -> bool:
    name = entry.tb_frame.f_code.co_filename
    return name.startswith("<frozen ") or (name.startswith(_LIBRARY) and "-packages/" not in name)


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    frames = list(_frames(trace))
    program = [each for each in frames if not _is_own(each) and not _is_library(each)]
    began = frames.index(program[0]) if program else len(frames)
    if not any(_is_own(each) for each in frames[:began]):
        began = 0  # else we have begun the program, by way of the library
    shown: TracebackType | None = None
    for each in reversed(frames[began:]):
        if not _is_own(each):
            shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _is_startup(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether the program failed while it was still being read and imported."""
    if isinstance(error, FileNotFoundError) and trace is None:
        return True
    if type(error).__qualname__ == "UnreadableCallError":
        return True
    if not isinstance(error, (ImportError, SyntaxError)):
        return False
    for each in _frames(trace):
        code = each.tb_frame.f_code
        # Frames of module bodies, and of what imports or runs them; any other frame means that a
        # function was running.
        name = code.co_filename
        runs_modules = name == "<frozen runpy>" or "importlib" in name or name.endswith(_LOADERS)
        if code.co_name != "<module>" and not runs_modules:
            return False
    return True


def _is_echo(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, reports the loss of a peer."""
    for each in _chain(error):
        if any(base.__name__ == "PeerLostError" for base in type(each).__mro__):
            return True
        text = text_of(each) if isinstance(each, RuntimeError) else ""
        # Messages of gloo in PyTorch's own process groups.
        if "Connection closed by peer" in text or "Connection reset by peer" in text:
            return True
    return False


_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EFBIG)
_ALMOST_NONE_BYTES = 1 << 20
_MOST_PATHS = 256
_MOST_CHARACTERS = 4096
_NO_SPACE = "No space left on device"
# The errors of torch.save, while writing and while closing, and of ndarray.tofile: they give no
# reason.
_NOT_WRITTEN = re.compile(
    f"{_NO_SPACE}|PytorchStreamWriter failed writing|unexpected pos|requested and .* written"
)
_LOADER_ENDED = "exited unexpectedly"
_LOADER_KILLED = "is killed by signal"


def completed(message: str, error: BaseException, trace: TracebackType | None) -> str:
    """The error's message, with what it leaves out: which limit was reached, which file system was
    full, how a data loader's process died. Only the failing worker knows what it was doing.
    """
    if _LOADER_ENDED in message and _LOADER_KILLED in str(error.__cause__):
        return str(error.__cause__)
    if str(error) == NO_THREAD or (isinstance(error, OSError) and error.errno in _LIMITS):
        refusal = refusal_in(error)
        return message if refusal is None else f"{message} ({str(refusal).rstrip('.')})"
    lacks_space = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not lacks_space and not _NOT_WRITTEN.search(message):
        return message
    directory = next(filter(None, map(_full, _paths(error, trace))), "")
    if not directory:
        return message
    if _NO_SPACE in message:
        return message.replace(_NO_SPACE, f"{_NO_SPACE}: {directory} is full", 1)
    return f"{message} ({_NO_SPACE}: {directory} is full)"


def _paths(error: BaseException, trace: TracebackType | None) -> Iterator[str]:
    """What the program may have been writing to, the likeliest first."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        yield error.filename
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    seen = 0
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            seen += 1
            if seen > _MOST_PATHS:
                return
            path = getattr(value, "name", value) if hasattr(value, "write") else value
            if isinstance(path, (str, os.PathLike)):
                yield str(os.fspath(path))
    for link in Path("/proc/self/fd").iterdir():
        try:
            yield str(link.readlink())
        except OSError:  # the directory's own
            continue
    yield "."


def _full(path: str) -> str:
    """The root of the file system on which the path is, if that is full."""
    if len(path) > _MOST_CHARACTERS or "\0" in path:
        return ""
    directory = Path(path).absolute()
    if directory.parts[1:2] in (("proc",), ("sys",), ("dev",)) and directory.parts[2:3] != ("shm",):
        return ""
    while not directory.exists():
        directory = directory.parent
    space = os.statvfs(directory)
    if not space.f_blocks or space.f_bavail * space.f_frsize >= _ALMOST_NONE_BYTES:
        return ""
    while not directory.is_mount():
        directory = directory.parent
    return str(directory)
