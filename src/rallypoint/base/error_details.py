"""Details that exceptions leave out: which limit was reached, which file system was full, how a
data loader's process died.

The failing worker collects them, because no other process knows what it was doing. Imported only
after a failure.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rallypoint.base.refusals import NO_THREAD, refusal_in

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
    """The error's message, with what it leaves out."""
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
    place = Path(path).absolute()
    if place.parts[1:2] in (("proc",), ("sys",), ("dev",)) and place.parts[2:3] != ("shm",):
        return ""
    while not place.exists():
        place = place.parent
    space = os.statvfs(place)
    if not space.f_blocks or space.f_bavail * space.f_frsize >= _ALMOST_NONE_BYTES:
        return ""
    while not place.is_mount():
        place = place.parent
    return str(place)
