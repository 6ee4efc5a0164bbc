"""Every error that Rallypoint raises, in one tree sorted by whose fault it is.

    RallypointError
        CallerError    the caller asked for something that cannot be done
        PeerError      another process died, fell silent or called something else
        HostError      the machine, the network or a server refused
        WorkersFailedError  processes that this one started

Each says what happened, to whom, and what to do next, in one sentence, and carries what is known
as attributes. Each is also the built-in that Python users expect (ValueError, TimeoutError, ...).
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
    """A call needs a process group and there is none."""


class AlreadyInitializedError(CallerError, ValueError, RuntimeError):
    """`init_process_group` was called twice."""


# A peer's fault.


class PeerError(RallypointError, RuntimeError):
    """Another rank is the cause. The communicator it happened on is unusable from then on.

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
    """A peer died or its connection broke."""


class MismatchError(PeerError):
    """Ranks called different operations, or the same one with different sizes, dtypes or roots.

    Attributes:
        calls: by global rank, what it called and where, of those that could be asked.
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
    """Ranks wait for each other's sends and receives in a circle, and can never go on."""


class CollectiveTimeoutError(PeerError, TimeoutError):
    """A peer did not take part within the group's timeout."""


# The environment's fault.


class HostError(RallypointError, RuntimeError):
    """The machine, the network or a server refused what was needed."""


class OutOfMemoryError(HostError, MemoryError):
    """The system has no more memory of the kind that was asked for."""


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
    """The store's server is there, and demands another token."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear within the timeout."""


class ControlMessageError(HostError, ValueError):
    """What came over the socket between agent and worker is not a message of this version."""


class StoreFencedError(StoreError):
    """The round that the client belongs to has ended."""


class QueueEmptyError(StoreError, LookupError):
    """A queue of the store holds nothing and the caller did not want to wait."""


class RendezvousError(HostError):
    """A rendezvous gave no place in a round."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed for good: there is no further round."""


class RendezvousGracefulExitError(RendezvousClosedError):
    """It was closed while this node was a spare one: there was never a place for it."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """No round that this node could take part in began in time."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """What holds the rendezvous cannot be reached, or does not let this node in."""


class RendezvousStateError(RendezvousError, ValueError):
    """What the rendezvous keeps in a store is nothing that it could have written."""


# The job's fault.


class UnreadableCallError(RallypointError, RuntimeError):
    """A worker cannot read the function that it is to run; another try would end the same."""


class WorkersFailedError(RallypointError, RuntimeError):
    """Workers that were started by this process failed, or were stopped.

    Attributes:
        status: the exit status that the launcher would have had.
        failures: by rank, the tracebacks of the workers that raised an exception.
    """

    def __init__(
        self, message: str, *, status: int = 1, failures: dict[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.failures = failures or {}
