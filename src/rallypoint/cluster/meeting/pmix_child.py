"""A program of its own: asks PMIx for another process, which must not (pmix.py).

    stdin     one line: what rank 0 has to say; of the others, nothing
    arguments where libpmix may be, the likeliest first
    stdout    one line: what rank 0 said
    stderr    its last line says what failed

It has the rank of the process that started it, as it has its environment. Imports the standard
library only. Names and numbers are those of pmix_common.h, which PMIx keeps from version 2 on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

_KEY = b"rallypoint.meeting"
_STRING = 3  # PMIX_STRING
_GLOBAL = 3  # PMIX_GLOBAL


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


class _PmixError(Exception):
    """What failed, for people."""


def main(libraries: Sequence[str]) -> int:
    """Pass on the line at stdin; the exit status."""
    try:
        text = sys.stdin.readline().strip().encode()
        print(pass_on(_load(libraries), text).decode())
    except (_PmixError, AttributeError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def pass_on(pmix: ctypes.CDLL, text: bytes) -> bytes:
    """Say it, or wait until rank 0 has said it.

    Without PMIx_Fence, which MPI_Init calls as well: of the two, one over hosts may end too early.
    """
    me = _Proc()
    _call(pmix, "PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
    try:
        if text:
            held = ctypes.create_string_buffer(text)
            value = _Value(type=_STRING, data=ctypes.addressof(held))
            _call(pmix, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            _call(pmix, "PMIx_Commit")
            return text
        first = _Proc(nspace=me.nspace, rank=0)
        found = ctypes.POINTER(_Value)()
        none = ctypes.c_size_t(0)
        _call(pmix, "PMIx_Get", ctypes.byref(first), _KEY, None, none, ctypes.byref(found))
        if found.contents.type != _STRING or not found.contents.data:
            raise _PmixError(f"rank 0's value has type {found.contents.type}")
        return ctypes.string_at(found.contents.data)
    finally:
        pmix.PMIx_Finalize(None, ctypes.c_size_t(0))  # else mpirun takes us for one that died


def _load(libraries: Sequence[str]) -> ctypes.CDLL:
    why = "none was named"
    for path in libraries:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            why = str(error)
    raise _PmixError(f"no PMIx library can be loaded ({why})")


def _call(pmix: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(pmix, name)(*arguments)
    if status != 0:
        describe = pmix.PMIx_Error_string
        describe.restype = ctypes.c_char_p
        words = describe(ctypes.c_int(status)) or b""
        raise _PmixError(f"{name} failed: {words.decode(errors='replace')} ({status})")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
