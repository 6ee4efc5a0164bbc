"""Passes a text from rank 0 to all ranks through PMIx, which Open MPI's mpirun serves.

A process can initialise the PMIx library only once; if we did, MPI_Init would fail later. Therefore
a child process does it, which ends after this process. It runs this file as a program, which
imports only the standard library at its start:

    stdin     one line: rank 0's message; of the others, nothing. The next line, or the end: that
              process ends
    arguments where libpmix may be, the likeliest first
    stdout    one line: rank 0's message
    stderr    its last line says what failed

It has the environment, and hence the rank, of the process that started it, and lives as long. If a
rank left PMIx and joined again, as MPI does, MPI_Init could wait forever. Names and numbers are
those of pmix_common.h, unchanged since version 2.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

    from rallypoint.cluster.pmi import Waiting

_NAME = "libpmix.so.2"
_FAREWELL_S = 2.0
_MOST_BYTES = 65536
_KEY = b"rallypoint.meeting."
_STRING = 3  # PMIX_STRING
_NOT_FOUND = -46  # PMIX_ERR_NOT_FOUND
_PAUSES_S = (0.02, 0.5)  # pauses between requests: the first and the longest


def pass_on(text: str, waiting: Waiting, environ: Mapping[str, str]) -> str:
    """Return rank 0's text, which is empty on the others. All processes of the job call it."""
    import subprocess

    from rallypoint.base.errors import HostError

    child = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *libraries(environ)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # signals to this process must not reach it
    )
    try:
        _tell(child, text)
        said = _line_of(child, waiting)
    except BaseException:
        child.kill()
        child.communicate()
        raise
    if not said:
        _, err = child.communicate()
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit status {child.returncode}"
        raise HostError(
            f"the launcher cannot pass on rank 0's address (PMIx): {why}; import mpi4py.MPI"
            " before init_process_group, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    atexit.register(_end, child, os.getpid())
    return said.decode().strip()


def _tell(child: subprocess.Popen[bytes], text: str) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its own output says why it ended
        child.stdin.write(f"{text}\n".encode())
        child.stdin.flush()


def _line_of(child: subprocess.Popen[bytes], waiting: Waiting) -> bytes:
    """The child's first line; empty if it has failed."""
    assert child.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        if not select.select((child.stdout,), (), (), waiting.slice_s)[0]:
            waiting.check()
        elif not (part := os.read(child.stdout.fileno(), _MOST_BYTES)):
            return b""
        else:
            said += part
    return said


def _end(child: subprocess.Popen[bytes], pid: int) -> None:
    """Let the child end with this process, but not with forked ones, which hold the pipe too."""
    import subprocess

    if os.getpid() != pid:
        return
    _tell(child, "")
    try:
        child.communicate(timeout=_FAREWELL_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def libraries(environ: Mapping[str, str]) -> list[str]:
    """Where the library may be: beside the mpirun that started this process, or in the system."""
    import ctypes.util
    import shutil

    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    roots = [environ.get("PMIX_PREFIX", ""), environ.get("OPAL_PREFIX", "")]
    roots += [os.path.dirname(os.path.dirname(os.path.realpath(mpirun)))] if mpirun else []
    found = [
        os.path.join(root, "lib", folder, _NAME)
        for root in dict.fromkeys(roots)
        if root
        for folder in ("", "openmpi")
    ]
    known = ctypes.util.find_library("pmix")
    return [*filter(os.path.exists, found), *([known] if known else []), _NAME]


# The child.


class _Proc(ctypes.Structure):
    """pmix_proc_t: identifies a process."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """pmix_value_t: a type and a union, of which only the pointer is used here."""

    _fields_ = (
        ("type", ctypes.c_uint16),
        ("data", ctypes.c_void_p),
        ("rest", ctypes.c_uint64 * 8),  # more than any version's union needs
    )


class _Info(ctypes.Structure):
    """pmix_info_t: a published value. Arrays have only one, because its size may differ."""

    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _Found(ctypes.Structure):
    """pmix_pdata_t: the value to look up, and its publisher. Arrays have only one, too."""

    _fields_ = (("proc", _Proc), ("key", ctypes.c_char * 512), ("value", _Value))


class _PmixError(Exception):
    """A failure, described for people."""


def main(libraries: Sequence[str]) -> int:
    """Pass on the line at stdin, and stay; returns the exit status."""
    try:
        text = sys.stdin.readline().strip().encode()
        pmix = _load(libraries)
        me = _Proc()
        _call(pmix, "PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
        try:
            print(_passed_on(pmix, _KEY + me.nspace, text).decode(), flush=True)
            sys.stdin.readline()
        finally:
            # Otherwise mpirun regards this rank as dead.
            pmix.PMIx_Finalize(None, ctypes.c_size_t(0))
    except (_PmixError, AttributeError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _passed_on(pmix: ctypes.CDLL, key: bytes, text: bytes) -> bytes:
    """Publish the text, or wait until rank 0 has published it.

    It uses PMIx's publish and lookup: what PMIx_Put and PMIx_Fence leave on the servers would be
    visible to MPI_Init.
    """
    if not text:
        return _look_up(pmix, key)
    held = ctypes.create_string_buffer(text)
    note = _Info(key=key, value=_Value(type=_STRING, data=ctypes.addressof(held)))
    _call(pmix, "PMIx_Publish", ctypes.byref(note), ctypes.c_size_t(1))
    return text


def _look_up(pmix: ctypes.CDLL, key: bytes) -> bytes:
    """Look the key up until it is there; the parent process ends this one after its time limit."""
    pause_s, longest_s = _PAUSES_S
    found, one, none = _Found(key=key), ctypes.c_size_t(1), ctypes.c_size_t(0)
    while (status := pmix.PMIx_Lookup(ctypes.byref(found), one, None, none)) == _NOT_FOUND:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    _check(pmix, "PMIx_Lookup", status)
    if found.value.type != _STRING or not found.value.data:
        raise _PmixError(f"rank 0's value has type {found.value.type}")
    return ctypes.string_at(found.value.data)


def _load(libraries: Sequence[str]) -> ctypes.CDLL:
    why = "no PMIx server was named"
    for path in libraries:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            why = str(error)
    raise _PmixError(f"no PMIx library can be loaded ({why})")


def _call(pmix: ctypes.CDLL, name: str, *arguments: object) -> None:
    _check(pmix, name, getattr(pmix, name)(*arguments))


def _check(pmix: ctypes.CDLL, name: str, status: int) -> None:
    if status != 0:
        describe = pmix.PMIx_Error_string
        describe.restype = ctypes.c_char_p
        words = describe(ctypes.c_int(status)) or b""
        raise _PmixError(f"{name} failed: {words.decode(errors='replace')} ({status})")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
