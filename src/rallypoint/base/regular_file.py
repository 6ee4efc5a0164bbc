"""Opens files at paths that somebody else may have chosen: only regular ones, without ever waiting.

Opening a pipe waits for its other end, and so for ever if there is none.
"""

from __future__ import annotations

import errno
import os
import stat


def open_regular(path: str, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """A descriptor of the file; `directory`: the one below which `path` is.

    A file that this makes is its user's alone.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd
