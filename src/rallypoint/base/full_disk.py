"""Which file system was full when a program failed for want of space: its error seldom says so.

In the worker that fails, because nobody else knows what it was writing to. Imported only then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_ALMOST_NONE_BYTES = 1 << 20
_MOST_PATHS = 256
_MOST_CHARACTERS = 4096
_SIGNS = (
    "No space left on device",
    "PytorchStreamWriter failed writing",  # torch.save: it does not pass on why
    "unexpected pos",  # the same, as its writer is closed
)


def named(message: str, error: BaseException, trace: TracebackType | None) -> str:
    """The error's message, with the full file system's directory if that is the matter."""
    lacks_space = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not lacks_space and not any(sign in message for sign in _SIGNS):
        return message
    directory = next(filter(None, map(_full, _paths(error, trace))), "")
    if not directory:
        return message
    if _SIGNS[0] in message:
        return message.replace(_SIGNS[0], f"{_SIGNS[0]} ({directory} is full)", 1)
    return f"{message} ({_SIGNS[0]}: {directory} is full)"


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
