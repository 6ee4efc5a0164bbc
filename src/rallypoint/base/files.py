"""Opens and reads files that may be missing, or not be regular files, without ever waiting; and
tells hosts and kernels apart by the system's files.
"""

from __future__ import annotations

import errno
import os
import stat


def open_regular(path: str, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """A descriptor of a regular file at a path that another user may have chosen.

    Opening a pipe waits for its other end, and so forever if there is none. `directory` is the one
    below which `path` is. A file that this makes is its user's alone.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


BOOT_ID = "/proc/sys/kernel/random/boot_id"  # another one after each start of the machine


def kernel_identity(*namespaces: str) -> str:
    """Equal for processes of one running kernel that share the namespaces of these kinds.

    Raises OSError where there is no /proc, or not that part of it.
    """
    with open(BOOT_ID, encoding="ascii") as file:  # noqa: PTH123 - imports less
        boot = file.read().strip()
    numbers = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in namespaces]  # noqa: PTH116
    return "/".join([boot, *map(str, numbers)])


def host_identity() -> str:
    """Equal for two processes exactly if they can share memory and see each other."""
    try:
        return kernel_identity("net", "pid")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
            return os.uname().nodename  # there is no /proc, or not that part of it
        raise  # it is the same host, even if no descriptor is left to see it


def machine_of(identity: str) -> str:
    """The part of a host identity that is equal for all processes that run on one kernel."""
    return identity.partition("/")[0]


def read_text(path: str) -> str:
    """The text of a file of the kernel or the system; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - imports less
            return file.read()
    except OSError:
        return ""
