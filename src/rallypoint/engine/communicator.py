"""A communicator: a group's interface to the native engine, with errors that people can act on.

It runs the programs that it is given; its argument `plan` decides which program serves which call.
Buffers are C-contiguous arrays; the packages above handle everything else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

from rallypoint._native import Communicator as _NativeCommunicator
from rallypoint.base.address import endpoint_of
from rallypoint.base.collective import Collective
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    MismatchError,
    PeerError,
    PeerLostError,
    RevokedError,
)
from rallypoint.engine.recording import keep_flight_record

# In the same order as in native/engine/reduce.h.
DTYPES = (
    "float32",
    "float64",
    "int32",
    "int64",
    "int8",
    "int16",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
)
_RECEIVE = -1  # in a record, in place of a collective's number
FAILED = -10  # `receive` returns this value minus the number of a Trouble
BAD_BUFFER = -1  # not contiguous CPU memory, an unknown dtype, or sizes that do not fit
BAD_OPERATOR = -2  # the operator does not apply to the dtype
TOO_MANY = -3  # too many sends and receives are outstanding


class ReduceOp(IntEnum):
    """The operators that combine elements; the numbers are torch.distributed's."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


class Trouble(IntEnum):
    """The reasons why an operation ended (native/engine/layout.h)."""

    NONE = 0
    PEER_LOST = 1
    PEER_LEFT = 2
    MISMATCH = 3
    TIMEOUT = 4
    INTERRUPTED = 5
    ABORTED = 6
    CORRUPT = 7
    LENGTHS = 8
    CIRCLE = 9
    UNREADABLE = 10
    UNREACHABLE = 11
    REVOKED = 12
    EXHAUSTED = 13


# The error of each trouble, and its message.
_ERRORS: dict[Trouble, tuple[type[PeerError], str]] = {
    Trouble.PEER_LOST: (PeerLostError, "{who} ended during {call}"),
    Trouble.PEER_LEFT: (
        PeerLostError,
        "{who} exited or left the group before {call} completed",
    ),
    Trouble.MISMATCH: (
        MismatchError,
        "ranks called different operations: rank {culprit} called {theirs}, rank {reporter} called "
        "{ours}{hint}",
    ),
    Trouble.TIMEOUT: (
        CollectiveTimeoutError,
        "{call} waited {waited_s:g} s for {who}; check what that rank is doing, or pass a longer "
        "timeout to init_process_group",
    ),
    Trouble.INTERRUPTED: (PeerLostError, "{who} was interrupted in {call}"),
    Trouble.ABORTED: (PeerError, "{who} aborted the group"),
    Trouble.CORRUPT: (PeerError, "{who} sent an invalid message during {call}"),
    Trouble.LENGTHS: (
        MismatchError,
        "rank {culprit} has {sent} bytes for rank {reporter}, which expects {expected}, in {call}; "
        "pass equal lengths",
    ),
    Trouble.CIRCLE: (
        DeadlockError,
        "ranks wait for each other and cannot make progress: {circle}; swap the order of send and "
        "receive on one of them, or use isend and irecv",
    ),
    Trouble.UNREADABLE: (
        PeerError,
        "rank {reporter} may no longer read the memory of {who} during {call}; set "
        "RALLYPOINT_DIRECT=0 on all ranks",
    ),
    Trouble.UNREACHABLE: (
        PeerLostError,
        "rank {reporter} cannot connect to {who}{where} ({reason}) for {call}; check that the rank "
        "is still running and that no firewall blocks connections between their hosts",
    ),
    Trouble.REVOKED: (RevokedError, "{who} revoked the group"),
    Trouble.EXHAUSTED: (
        PeerError,
        "the system refused {who} a connection ({reason}) during {call}; raise the limit that the "
        "error names on its host, e.g. with ulimit -n that of open files",
    ),
}
# Those whose messages need what only the reporter knows.
_DETAILED = Trouble.MISMATCH, Trouble.LENGTHS, Trouble.CIRCLE, Trouble.TIMEOUT
_MOST_S = 5.0  # calls under way end within milliseconds, unless this process does not run
UNUSABLE = (
    "; this process group is broken; call destroy_process_group() and init_process_group() to"
    " continue"
)


class PeerMemoryAccess(IntFlag):
    """Which of each other's memory all ranks of a host read directly (native/engine/peer_memory.h).

    PRIVATE memory is read where a trial has shown that it pays; with ALWAYS, without a trial.
    """

    NOTHING = 0
    ARENAS = 1
    PRIVATE = 2
    ALWAYS = 4


class FarPeer(NamedTuple):
    """A rank that shares no memory with this one, and descriptors of connections to it."""

    rank: int
    pid: int
    control: int  # for control messages
    mail: int  # for sends and receives
    data: list[int]  # for collectives; the lanes of programs use them in turn


class LateMesh(NamedTuple):
    """How to reach ranks on other hosts to which this one is not connected from the start.

    Attributes:
        secret, name: these identify connections of the group.
        congestion, long_congestion: the congestion control with which connections begin, and the
            one to which those with long round trips return; empty for the default.
    """

    listener: int  # the descriptor at which they connect; taken over by the communicator
    secret: bytes
    name: str
    streams: int  # data connections with each rank
    congestion: str
    long_congestion: str
    silence_s: int  # after which a host that does not answer counts as lost
    endpoints: list[tuple[int, str, int]]  # for each rank, its number, address and port
    neighbours: list[tuple[int, int]]  # ranks with a control connection, and its descriptor


class Communicator:
    """One rank's end of a group of ranks that share memory, or are connected.

    Args:
        fd: the region that the ranks of this host share (_native.region_bytes); not kept open.
        plan: makes programs (process_group.planning.Planner). Bits above the lowest eight of a
            collective's number are only passed on to it.
        timeout_s: how long an operation may wait for a peer.
        spins, yields: how often to poll before yielding the core, and to yield before sleeping.
        global_ranks: the ranks' numbers in messages, if they differ from their numbers here.
        is_alone: whether no other thread may communicate while one waits, so that ranks that wait
            for each other are deadlocked.
        synchronous_send: sends wait until they are received.
        peers: the ranks on other hosts; their descriptors are taken over. With a `mesh` they have
            no connections yet: -1 and no data.
        description: the group's, for the flight record, from `flight_record.describe`.
        site: returns the line of the program that waits, for the flight record.
        mesh: how to connect to `peers` on demand; None if the connections exist already.
    """

    def __init__(
        self,
        fd: int,
        *,
        rank: int,
        ranks: int,
        plan: Callable[[int, int, int, bool], tuple[bytes, bool]],
        timeout_s: float,
        spins: int,
        yields: int,
        global_ranks: Sequence[int] | None = None,
        is_alone: Callable[[], bool] = lambda: threading.active_count() == 1,
        synchronous_send: bool = False,
        peers: Sequence[FarPeer] = (),
        description: str = "{}",
        site: Callable[[], str] = str,
        mesh: LateMesh | None = None,
    ) -> None:
        names = [each.operation for each in Collective]
        keep_flight_record(names, DTYPES, [op.name for op in ReduceOp])
        self.rank = rank
        self.ranks = ranks
        self.here = sorted({*range(ranks)} - {peer.rank for peer in peers})  # ranks of this host
        self.reach = PeerMemoryAccess.NOTHING
        self._global_ranks = range(ranks) if global_ranks is None else global_ranks
        self.native = _NativeCommunicator(
            fd,
            rank,
            ranks,
            spins,
            yields,
            plan,
            timeout_s,
            is_alone,
            synchronous_send,
            list(peers),
            description,
            site,
            mesh,
        )
        endpoints = [] if mesh is None else mesh.endpoints
        self._endpoints = {peer: (host, port) for peer, host, port in endpoints}

        self.run = self.native.run
        self.run_apart = self.native.run_apart
        self.send = self.native.send
        self.receive = self.native.receive
        self.submit = self.native.submit  # the results of these two are for EngineWork
        self.post = self.native.post
        self.set_timeout = self.native.set_timeout
        self.hold = self.native.hold
        self.leave = self.native.leave
        self.abort = self.native.abort
        self.revoke = self.native.revoke
        self.gone = self.native.gone

    def watch_peers(self) -> None:
        """From now on, the death of a peer ends waits. Every rank must have mapped the region."""
        rank = self.native.watch_peers()
        if rank >= 0:
            missing = self._global_ranks[rank]
            raise PeerLostError(
                f"rank {missing} ended before the group was complete",
                rank=missing,
                operation="init_process_group",
            )

    @property
    def begun(self) -> int:
        """The number of collectives that this rank has begun."""
        return self.native.begun

    def probe_memory(self) -> PeerMemoryAccess:
        """Which memory this rank can read of all others on its host; all have mapped the region."""
        return PeerMemoryAccess(self.native.probe_memory())

    def set_reach(self, reach: PeerMemoryAccess, *, knows_itself: bool = True) -> None:
        """Set, before the first call, which of each other's memory the ranks of this host read.

        Args:
            reach: the same on all of them; messages from there are not copied on their way.
            knows_itself: False, for tests: ranks of one process read its memory as another's.
        """
        self.reach = reach
        self.native.set_reach(reach, knows_itself)

    def has_trouble(self) -> bool:
        """Whether a rank has left or died, or calls cannot succeed any more."""
        return bool(self.native.gone()) or self.native.trouble() is not None

    def withdraw(self) -> None:
        """Leave, once every call of this process has ended: with an error, unless it is done.

        Ranks that are still in a call which this one has completed can complete it, too.
        """
        self.native.end_calls(_MOST_S)
        self.native.leave()

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the communicator."""
        return self._global_ranks[rank]

    def error(self, operation: str) -> PeerError:
        """The error that describes this communicator's trouble."""
        error = self._describe(operation)
        if isinstance(error, CollectiveTimeoutError):
            error.members = tuple(self._global_ranks)
        return error

    def _describe(self, operation: str) -> PeerError:
        state = self.native.trouble()
        if state is None:
            # Of an earlier communicator of the group, which has been formed again meanwhile.
            return RevokedError(
                f"{operation} was running when the group was re-formed; call it again",
                operation=operation,
            )
        number, at_fault, found_by, is_full, theirs, ours, sent, expected, circle, waited_s = state
        trouble = Trouble(number)
        culprit, reporter = self._global_ranks[at_fault], self._global_ranks[found_by]
        who = f"rank {culprit} (pid {self.native.pid(at_fault)})"
        if not is_full and trouble in _DETAILED:
            text = (
                f"{operation}: rank {reporter} reported a failure of {who} "
                f"({trouble.name.lower()}) and ended before it could give details"
            )
            return _ERRORS[trouble][0](text + UNUSABLE, rank=culprit, operation=operation)
        if trouble in (Trouble.PEER_LOST, Trouble.UNREACHABLE):
            trouble = Trouble.UNREACHABLE if sent else Trouble.PEER_LOST
        kind, text = _ERRORS.get(trouble, _ERRORS[Trouble.ABORTED])
        host, port = self._endpoints.get(at_fault, ("", 0))
        has_reason = trouble in (Trouble.UNREACHABLE, Trouble.EXHAUSTED)
        text = text.format(
            who=who,
            call=f"{self._call(ours)} on rank {reporter}" if ours else operation,
            theirs=self._call(theirs) if trouble is Trouble.MISMATCH else "",
            ours=self._call(ours),
            hint=", but with a different algorithm" if theirs == ours else "",
            culprit=culprit,
            reporter=reporter,
            sent=sent,
            expected=expected,
            waited_s=waited_s,
            circle="; ".join(
                f"rank {self._global_ranks[rank]} is in {'send to' if sends else 'recv from'} rank "
                f"{self._global_ranks[peer]}, tag {tag}"
                for rank, sends, peer, tag in circle
            ),
            where=f" at {endpoint_of(host, port)}" if host else "",
            reason=os.strerror(sent) if has_reason else "",
        )
        return kind(text + UNUSABLE, rank=culprit, operation=operation)

    def _call(self, record: tuple[int, int, int, int, int, int] | None) -> str:
        if record is None:
            return "nothing yet"
        number, collective, op, dtype, root, count = record
        if collective == _RECEIVE:
            source = "any rank" if op < 0 else f"rank {self._global_ranks[op]}"
            return f"recv #{number} ({count} x {DTYPES[dtype]} from {source}, tag {root})"
        details = [f"{count} x {DTYPES[dtype]}"]
        if collective == Collective.SEND:
            details = [f"{details[0]} to rank {self._global_ranks[op]}", f"tag {root}"]
            return f"send #{number} ({', '.join(details)})"
        if collective >= len(Collective):
            return f"an operation #{number} ({details[0]})"
        called = Collective(collective)
        if called.reduces:
            details.append(ReduceOp(op).name)
        if called.has_root:
            details.append(f"{called.root_argument} {self._global_ranks[root]}")
        return f"{called.operation} #{number} ({', '.join(details)})"
