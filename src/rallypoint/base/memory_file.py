"""Memory that processes share by a descriptor: a memfd, or what is most like one.

A memfd has no name, and is limited by nothing but memory. Where the kernel or a sandbox refuses it,
or Python was built without it, a file replaces it, which is unlinked at once. It is in /dev/shm,
or, if that is too small, in TMPDIR. Its link in /proc/PID/fd shows the same name, and it cannot be
sealed. Its pages are reserved from the start, because otherwise a full file system would kill a
process that touches them.
"""

from __future__ import annotations

import errno
import os

from rallypoint.base.errors import SystemCallError

_MEMORY_DIRECTORY = "/dev/shm"
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG)  # of any other file, too


def memory_file(name: str, size: int = 0) -> int:
    """A descriptor of `size` zeroed bytes, which programs do not inherit."""
    descriptor = -1
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
    except (OSError, AttributeError) as error:  # AttributeError: Python was built without it
        if descriptor >= 0:
            os.close(descriptor)
        return unnamed_file(name, size, error)
    return descriptor


def unnamed_file(name: str, size: int, why: OSError | AttributeError) -> int:
    """The same without a memfd, which is not to be had: `why`."""
    number = why.errno if isinstance(why, OSError) and why.errno else errno.ENOSYS
    if number in _LIMITS:
        raise _refused("memfd_create", number)
    troubles = []
    for directory in (_MEMORY_DIRECTORY, os.environ.get("TMPDIR") or "/tmp"):
        try:
            return _unlinked(f"{directory}/{name}.{os.urandom(8).hex()}", size)
        except OSError as error:
            if error.errno in _LIMITS:
                raise _refused("open", error.errno) from None
            troubles.append(f"{directory}: {error.strerror}")
    raise SystemCallError(
        f"cannot allocate {size >> 10} KiB of shared memory: memfd_create is refused "
        f"({os.strerror(number)}), and no file can replace it ({'; '.join(troubles)}); allow "
        f"memfd_create, or make room in {_MEMORY_DIRECTORY} (docker run --shm-size)",
        call="memfd_create",
        errno=number,
    )


def _refused(call: str, number: int) -> SystemCallError:
    from rallypoint.base.refusals import refused  # others do not pay for it

    return refused(call, number)


def _unlinked(path: str, size: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.unlink(path)  # noqa: PTH108 - importing pathlib would cost each worker 8 ms
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
