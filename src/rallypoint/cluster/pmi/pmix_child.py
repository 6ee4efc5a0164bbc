"""A separate program that uses PMIx on behalf of another process, which must not (pmix.py).

    stdin     one line: rank 0's message; of the others, nothing. The next line, or the end: that
              process ends
    arguments where libpmix may be, the likeliest first
    stdout    one line: rank 0's message
    stderr    its last line says what failed

It has the environment, and hence the rank, of the process that started it, and lives as long: if a
rank left PMIx and joined again, as MPI does, MPI_Init could wait for ever. It imports only the
standard library. Names and numbers are those of pmix_common.h, unchanged since version 2.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence

_KEY = b"rallypoint.meeting."
_STRING = 3  # PMIX_STRING
_NOT_FOUND = -46  # PMIX_ERR_NOT_FOUND
_PAUSES_S = (0.02, 0.5)  # pauses between requests: the first and the longest


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
            print(pass_on(pmix, _KEY + me.nspace, text).decode(), flush=True)
            sys.stdin.readline()
        finally:
            # Otherwise mpirun regards this rank as dead.
            pmix.PMIx_Finalize(None, ctypes.c_size_t(0))
    except (_PmixError, AttributeError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def pass_on(pmix: ctypes.CDLL, key: bytes, text: bytes) -> bytes:
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
    """Look the key up repeatedly; the process that started this program ends it after its time
    limit.
    """
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
