"""All errors that Rallypoint raises, in one tree sorted by whose fault they are.

    RallypointError
        CallerError    the caller asked for something that cannot be done
        PeerError      another process died, fell silent or called something else
        HostError      the machine, the network or a server failed or refused
        WorkersFailedError  worker processes started by this process failed

Each message says in one sentence what happened, to whom, and what to do next; details are
attributes. Each error is also the built-in that Python users expect (ValueError, TimeoutError,
...).
"""

from __future__ import annotations


class RallypointError(Exception):
    """The root of all errors of this package."""


# The caller's fault.


class CallerError(RallypointError):
    """The caller asked for something that cannot be done; nothing was changed."""


class InvalidArgumentError(CallerError, ValueError):
    """An argument has an impossible value."""


class InvalidTypeError(CallerError, TypeError):
    """An argument has a type, dtype or memory layout that the operation does not take."""


class NotInitializedError(CallerError, ValueError, RuntimeError):
    """A call needs a process group, but none is initialized."""


class AlreadyInitializedError(CallerError, ValueError, RuntimeError):
    """`init_process_group` was called twice."""


# A peer's fault.


class PeerError(RallypointError, RuntimeError):
    """Another rank caused the failure. The communicator on which it happened is unusable
    afterwards.

    Attributes:
        rank: the global rank at fault, or None where it is not known.
        operation: the operation that was interrupted, e.g. ``"all_reduce"``.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.operation = operation


class PeerLostError(PeerError):
    """A peer died, left the group, or its connection broke.

    Attributes:
        lost: the global ranks that are known to be lost, `rank` among them if it is known.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message, rank=rank, operation=operation)
        self.lost: tuple[int, ...] = () if rank is None else (rank,)


class RevokedError(PeerError):
    """The group's communicator was given up, by this rank or another, before or during the call.

    A group that `rallypoint.elastic` has formed again is usable afterwards.
    """


class MembershipChangedError(PeerError):
    """Ranks were lost or wait to join; the current step must be retried, or is complete.

    `elastic.run` handles it; a program that catches it must pass it on.
    """


class StateLostError(PeerError):
    """Every rank that had a part of the state was lost, so no rank can continue from memory."""


class TooFewPeersError(PeerError, TimeoutError):
    """Fewer ranks than `min_size` of `elastic.run` took part, for longer than the group's
    timeout.
    """


class MismatchError(PeerError):
    """Ranks called different operations, or the same one with different sizes, dtypes or roots.

    Attributes:
        calls: global rank -> what it called and where, for the ranks that could be asked.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        operation: str | None = None,
        calls: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message, rank=rank, operation=operation)
        self.calls = calls or {}


class DeadlockError(PeerError):
    """Ranks wait for each other's sends and receives in a cycle, so none can make progress."""


class CollectiveTimeoutError(PeerError, TimeoutError):
    """A peer did not take part within the group's timeout.

    Attributes:
        members: the global ranks of the group, if they are known.
    """

    members: tuple[int, ...] = ()


# The environment's fault.


class HostError(RallypointError, RuntimeError):
    """The machine, the network or a server failed, or refused a request.

    Attributes:
        rank: the global rank that cannot be reached, if that is the failure.
    """

    rank: int | None = None


class SystemCallError(HostError):
    """The system refused a call that Rallypoint needs: a limit is reached, or a sandbox forbids it.

    Attributes:
        call: the system call, e.g. ``"memfd_create"``.
        errno: its error number, e.g. ``errno.EPERM``.
    """

    def __init__(self, message: str, *, call: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.call = call
        self.errno = errno


class OutOfMemoryError(HostError, MemoryError):
    """The system cannot provide the memory that was requested."""


class StoreError(HostError):
    """A key-value store operation failed.

    Attributes:
        endpoint: ``"host:port"`` of the server, or the path of a file store.
        operation: the store operation, e.g. ``"get"``.
        key: the first key concerned, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        endpoint: str | None = None,
        operation: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.operation = operation
        self.key = key


class StoreConnectionError(StoreError, ConnectionError):
    """The store's server cannot be reached, or the connection to it was lost."""


class StoreRefusedError(StoreConnectionError):
    """The store's server answered, but did not accept the token."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear within the timeout."""


class ControlMessageError(HostError, ValueError):
    """Data on the socket between agent and worker is not a control message of this version."""


class StoreFencedError(StoreError):
    """The round that the client belongs to has ended."""


class QueueEmptyError(StoreError, LookupError):
    """A queue of the store is empty and the caller chose not to wait."""


class RendezvousError(HostError):
    """The rendezvous did not admit this node to a round."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: no further rounds will begin."""


class RendezvousGracefulExitError(RendezvousClosedError):
    """The rendezvous was closed while this node was a spare that had never taken part in a
    round.
    """


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """No round that this node could join began within the timeout."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The rendezvous backend cannot be reached, or refused this node."""


class RendezvousStateError(RendezvousError, ValueError):
    """The store holds a value that the rendezvous did not write."""


# The job's fault.


class UnreadableCallError(RallypointError, RuntimeError):
    """A worker cannot load the function that it should run; a retry would fail in the same way."""


class WorkersFailedError(RallypointError, RuntimeError):
    """Workers that this process started failed, or were stopped.

    Attributes:
        status: the exit status that the launcher would have had.
        failures: rank -> traceback, for the workers that raised an exception.
    """

    def __init__(
        self, message: str, *, status: int = 1, failures: dict[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.failures = failures or {}
