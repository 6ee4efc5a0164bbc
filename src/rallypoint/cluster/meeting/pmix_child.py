"""A separate program that uses PMIx on behalf of another process, which must not (pmix.py).

    stdin     one line: rank 0's message; of the others, nothing. The next line, or the end: that
              process ends
    arguments where libpmix may be, the likeliest first
    stdout    one line: rank 0's message
    stderr    its last line says what failed

It has the environment of the process that started it, hence its rank, and lives as long: if a rank
left PMIx and came again, as MPI does, MPI_Init could wait for ever. It imports the standard library
only. Names and numbers are those of pmix_common.h, unchanged since version 2.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence

_KEY = b"rallypoint.meeting."
_STRING = 3  # PMIX_STRING
_NOT_FOUND = -46  # PMIX_ERR_NOT_FOUND
_PAUSES_S = (0.02, 0.5)  # between questions, the first and the longest


class _Proc(ctypes.Structure):
    """pmix_proc_t: which process."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """pmix_value_t: its type, and a union, of which this uses the pointer."""

    _fields_ = (
        ("type", ctypes.c_uint16),
        ("data", ctypes.c_void_p),
        ("rest", ctypes.c_uint64 * 8),  # more than any version's union has
    )


class _Info(ctypes.Structure):
    """pmix_info_t: what is published. The only one of its array, as its size may be another."""

    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _Found(ctypes.Structure):
    """pmix_pdata_t: what is looked up, and who published it. The only one of its array, too."""

    _fields_ = (("proc", _Proc), ("key", ctypes.c_char * 512), ("value", _Value))


class _PmixError(Exception):
    """What failed, for people."""


def main(libraries: Sequence[str]) -> int:
    """Pass on the line at stdin, and stay; the exit status."""
    try:
        text = sys.stdin.readline().strip().encode()
        pmix = _load(libraries)
        me = _Proc()
        _call(pmix, "PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
        try:
            print(pass_on(pmix, _KEY + me.nspace, text).decode(), flush=True)
            sys.stdin.readline()
        finally:
            pmix.PMIx_Finalize(None, ctypes.c_size_t(0))  # else mpirun takes us for one that died
    except (_PmixError, AttributeError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def pass_on(pmix: ctypes.CDLL, key: bytes, text: bytes) -> bytes:
    """Say it, or wait until rank 0 has said it.

    By PMIx's public notes: what PMIx_Put and PMIx_Fence leave on the servers is MPI_Init's, too.
    """
    if not text:
        return _look_up(pmix, key)
    held = ctypes.create_string_buffer(text)
    note = _Info(key=key, value=_Value(type=_STRING, data=ctypes.addressof(held)))
    _call(pmix, "PMIx_Publish", ctypes.byref(note), ctypes.c_size_t(1))
    return text


def _look_up(pmix: ctypes.CDLL, key: bytes) -> bytes:
    """Whoever started this program ends it when there was time enough."""
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
