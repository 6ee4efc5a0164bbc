"""Passes a text from rank 0 to all ranks through PMI-1, which Hydra (MPICH, Intel MPI) and Flux
serve.

PMI-1 is a protocol of lines over an inherited descriptor (PMI_FD): a request, an answer. A value
can be read once all processes have passed a barrier. The session is not ended (`finalize`) before
the process ends, so that MPI_Init may begin it again; the descriptor is read only to the end of
each answer, and stays open.

    put KEY=text (rank 0)  ->  barrier_in .. barrier_out (all)  ->  get KEY (all)

Protocol: Flux RFC 13,
https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
from collections.abc import Mapping
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.base.worker_hook import identity_of
from rallypoint.cluster.pmi import Waiting

_KEY = "rallypoint-meeting"
_FAREWELL_S = 2.0
_MOST_LINE = 16384  # far above any server's lines
_NEXT_STEP = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start it with `rallypoint run`"

_cut_short: set[int] = set()  # descriptors whose next line may be an earlier request's answer


def pass_on(text: str, waiting: Waiting, environ: Mapping[str, str]) -> str:
    """Return rank 0's text, which is empty on the others. All processes of the job call it."""
    fd = _descriptor(environ)
    if fd in _cut_short:
        raise _trouble("an earlier exchange was interrupted")
    wire = _Wire(fd, waiting)
    _cut_short.add(fd)
    wire.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
    space = wire.ask("get_my_kvsname", "my_kvsname").get("kvsname", "")
    if not space:
        raise _trouble("its key-value space has no name")
    most = _number(wire.ask("get_maxes", "maxes").get("vallen_max", ""))
    if len(text) >= most:
        raise _trouble(f"values may have {most - 1} characters, but this needs {len(text)}")
    if text:
        wire.ask(f"put kvsname={space} key={_KEY} value={text}", "put_result")
    wire.ask("barrier_in", "barrier_out")
    told = wire.ask(f"get kvsname={space} key={_KEY}", "get_result").get("value", "")
    _cut_short.discard(fd)
    atexit.register(_end, fd, identity_of(fd), os.getpid())
    return told


def _end(fd: int, identity: object, pid: int) -> None:
    """End the session when this process ends, unless MPI has ended it or will.

    Hydra regards a rank that leaves without ending the session as dead, and kills the others.
    """
    with contextlib.suppress(OSError):  # the descriptor is closed: MPI has ended the session
        if os.getpid() == pid and identity_of(fd) == identity and not mpi_runs():
            os.write(fd, b"cmd=finalize\n")
            if select.select((fd,), (), (), _FAREWELL_S)[0]:
                os.read(fd, _MOST_LINE)


def mpi_runs() -> bool:
    """Whether MPI is initialised in this process and not finalised, as a loaded libmpi reports."""
    paths = {
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libmpi" in line
    }
    for path in paths:
        begun, ended = ctypes.c_int(0), ctypes.c_int(0)
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path, os.RTLD_NOLOAD)
            library.MPI_Initialized(ctypes.byref(begun))
            library.MPI_Finalized(ctypes.byref(ended))
        if begun.value and not ended.value:
            return True
    return False


class _Wire:
    """Sends requests and reads answers."""

    def __init__(self, fd: int, waiting: Waiting) -> None:
        self._fd = fd
        self._waiting = waiting
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def ask(self, request: str, expected: str) -> dict[str, str]:
        """Send a request; returns the fields of the answer, which must be as `expected`."""
        self._send(f"cmd={request}\n".encode("ascii"))
        line = self._receive()
        answer = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if answer.get("cmd") != expected:
            raise _trouble(f"{line[:80]!r} is not an answer to {request.partition(' ')[0]}")
        if answer.get("rc", "0") != "0":
            why = answer.get("msg", f"rc={answer['rc']}")
            raise _trouble(f"it refused {request.partition(' ')[0]}: {why[:80]}")
        return answer

    def _send(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                select.select((), (self._fd,), (), self._waiting.slice_s)
                self._waiting.check()
            except OSError as error:
                raise _trouble(error.strerror or str(error)) from None

    def _receive(self) -> str:
        """Read one line, and not a byte more: the rest belongs to another reader."""
        line = b""
        while not line.endswith(b"\n"):
            if not self._poll.poll(self._waiting.slice_s * 1000):
                self._waiting.check()
                continue
            try:
                data = os.read(self._fd, 1)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _trouble(error.strerror or str(error)) from None
            if not data:
                raise _trouble("it has closed the connection")
            line += data
            if len(line) > _MOST_LINE:
                raise _trouble("its answer has no end")
        if not line.isascii():
            raise _trouble(f"{line[:80]!r} is not an answer")
        return line.decode("ascii").rstrip("\n")


def _descriptor(environ: Mapping[str, str]) -> int:
    text = environ.get("PMI_FD", "")
    try:
        fd = int(text)
        os.fstat(fd)
    except (ValueError, OverflowError, OSError):
        raise _trouble(
            f"PMI_FD is {text!r}, which is not an open descriptor of this process"
        ) from None
    return fd


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise _trouble(f"it allows values of {text[:20]!r} characters")
    return int(text)


def _trouble(what: str) -> HostError:
    return HostError(f"the launcher cannot pass on rank 0's address (PMI): {what}; {_NEXT_STEP}")
