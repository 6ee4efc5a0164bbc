"""Types of the native core (native/bindings.cc)."""

from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# number of the call, collective, reduce op, dtype, root or tag, items of a block
Record: TypeAlias = tuple[int, int, int, int, int, int]

# trouble, culprit, reporter, whether the rest is known, what each of them called, bytes sent and
# expected, a circle (rank, whether it sends, peer, tag), and how long was waited
Trouble: TypeAlias = tuple[
    int,
    int,
    int,
    bool,
    Record | None,
    Record | None,
    int,
    int,
    list[tuple[int, bool, int, int]],
    float,
]

# rank, pid, and descriptors of connections: for control, for mail, for data
FarPeer: TypeAlias = tuple[int, int, int, int, list[int]]
# see rallypoint.engine.communicator.LateMesh
LateMesh: TypeAlias = tuple[
    int, bytes, str, int, str, str, int, list[tuple[int, str, int]], list[tuple[int, int]]
]

def open_flight_record(fd: int, offset: int, names: str, /) -> bool:
    """Have this process write its flight record there; whether it does (flight_record.h)."""

def open_steps_page() -> memoryview | None:
    """A page of the flight record for this process's steps; None: there is none."""

def tell_long_waits(fd: int, after_s: float, times_usual: float, /) -> None:
    """Report to the launcher, over the control socket, calls that are waited for this long.

    They also take this many times as long as usual in their group (engine/long_wait.h).
    """

def open_foreign_group(description: str, /) -> int:
    """A place in the flight record for a group of another backend; -1: there is none."""

def record_foreign_calls(group: int, backend: str, name: str, signal: int, /) -> bool:
    """Have a thread write what it is in, as PyTorch's recorder of that backend knows it.

    False: PyTorch has none. `name` is PyTorch's; the others are in native/scribe/scribe.h.
    """

def leave_foreign_group(group: int, /) -> None:
    """The process has no such group any more."""

def begin_foreign_transfer(
    group: int, sends: bool, peer: int, tag: int, count: int, dtype: str, /
) -> int:
    """A send or receive of such a group begins; -1: it is not recorded. `peer` -1: any."""

def end_foreign_transfer(group: int, transfer: int, has_failed: bool, /) -> None:
    """It is done, or has failed, or no caller waits for it any more."""

def add_foreign_wait(group: int, waited_ns: int, /) -> None:
    """The program has waited for this long for calls of such a group."""

def withdraw_foreign_transfer(group: int, transfer: int, /) -> None:
    """It was refused."""

def read_trace(
    json: bytes, is_of_hooks: bool, /
) -> (
    tuple[
        list[tuple[int, int, int]],
        list[tuple[int, str, str, int, int, str, str, str, list[int], int, bool, bool]],
    ]
    | None
):
    """What native/scribe/trace.h makes of a text; None: it is refused. For tests."""

def region_bytes(ranks: int) -> int:
    """Size in bytes of the shared region of a communicator."""

class Work:
    """An operation under way; see rallypoint.engine.engine_work."""

    def wait(self, timeout_s: float, /) -> int:
        """Wait until it is done or the time is over (negative: never); returns as `end`."""
    def test(self) -> int:
        """Get on without waiting; returns as `end`."""
    def end(self) -> int:
        """0 if it is done and went well, a trouble's number, or -1: it is not done."""
    def watch(self) -> bool:
        """Have it returned by `next_done`; False if it is done already."""
    def peer(self) -> int:
        """Of a send or receive: the other rank; -1 while any may be."""

def next_done() -> Work | None:
    """Wait for an operation that was watched to be done; None when the process ends."""

def close_work() -> None:
    """The process ends: nothing may touch Python any more."""

def allocate(nbytes: int) -> NDArray[np.uint8] | None:
    """Zeroed memory that other processes of this host can map; None if there is none left."""

def adopt(base: int, nbytes: int, fd: int) -> bool:
    """Let peers read memory where it lies: an unlinked file, whole, mapped until `abandon`.

    False if it is not such a file, or known already.
    """

def abandon(base: int, is_used: bool) -> None:
    """Take back `adopt`; with `is_used` False the memory's contents are not needed any more."""

def addresses_of(arrays: list[Any], /) -> bytes:
    """Where arrays lie in this process, 8 bytes for each.

    Raises:
        ValueError: an array cannot be used.
    """

def let_peers_read() -> None:
    """Let what descends from this process's parent read its memory, where Yama restricts that."""

class ShortWay:
    """A function that communicates, and its usual form without Python code; see
    process_group.calls.call.
    """

    def __init__(
        self,
        function: Callable[..., object],
        names: tuple[str, ...],
        positional: int,
        roles: tuple[int, ...],
        collective: int,
        form: int,
        default_root: int | None,
        needs_root: bool,
        /,
    ) -> None: ...
    def __call__(self, *args: object, **kwargs: object) -> object: ...

def know(
    array: type,
    group: type,
    op: type,
    timedelta: type,
    defaults: dict[str, object],
    error: Callable[..., BaseException],
    work: Callable[..., object],
) -> None:
    """What all short ways need: types, the namespace of ``_default``, and what makes errors and
    works.
    """

class Communicator:
    """One rank's end of a communicator; see rallypoint.engine.communicator."""

    def __init__(
        self,
        fd: int,
        rank: int,
        ranks: int,
        spins: int,
        yields: int,
        plan: Callable[[int, int, int, bool], tuple[bytes, bool]],
        timeout_s: float,
        is_alone: Callable[[], bool],
        synchronous_send: bool,
        peers: list[FarPeer],
        description: str,
        site: Callable[[], str],
        mesh: LateMesh | None = None,
    ) -> None: ...
    def watch_peers(self) -> int:
        """Watch the peers' processes; return the first rank that is not there, or -1."""
    @property
    def begun(self) -> int:
        """How many collectives this rank has begun."""
    def probe_memory(self) -> int:
        """What can be read of all other ranks of this host: 1 for arenas, 2 for private memory."""
    def set_reach(self, reach: int, knows_itself: bool = True) -> None:
        """Before the first call: what all ranks of this host can read of each other."""
    def read_memory(self, rank: int, addresses: bytes, arrays: list[Any], /) -> bool:
        """Copy what lies at these addresses of a rank of this host into arrays; whether it could.

        Raises:
            ValueError: an array cannot be used, or there is not an address for each.
        """
    def run(self, collective: int, op: int, root: int, source: object, target: object, /) -> int:
        """Run a collective: 0, a trouble's number, -1 (bad buffer) or -2 (bad operator)."""
    def run_apart(
        self, collective: int, op: int, root: int, source: object, target: object, /
    ) -> int:
        """The same for arrays that may not overlap, or lists of such: else -1."""
    def submit(
        self,
        collective: int,
        op: int,
        root: int,
        source: object,
        target: object,
        dtype: int = -1,
        factor: float = 1.0,
        uneven: bool = False,
        timeout_s: float = -1.0,
        plain: bool = False,
        in_place: bool = False,
        waits: bool = False,
    ) -> Work | int:
        """Begin a collective that continues in the background; those of one communicator in order.

        Args:
            source, target: an array of all blocks, or a list of arrays, one for each block; None
                where this rank has none. They are kept alive until the operation is over.
            dtype: what the items are (index into DTYPES), where the arrays cannot say it.
            factor: for PREMUL_SUM, what this rank's input is multiplied by.
            uneven: blocks may be of different lengths, also on other ranks; the same on all ranks.
                Lists of arrays of different lengths are uneven in any case.
            timeout_s: how long it may wait for a peer; negative for the communicator's.
            plain: refuse what has not been checked yet and `run_apart` would refuse. The memory
                that tensors have now is used, even if they are given other memory.
            in_place: then source and target may be the same array.
            waits: return only once it is done. What interrupts that, as Ctrl-C, ends the operation
                and the group, and leaves the arrays alone from then on.

        Returns:
            The work; or, with nothing done, -1 or -2 as `run`.
        """
    def send(self, to: int, tag: int, buffer: object, /) -> int:
        """Send to a rank: 0, a trouble's number, or -1."""
    def receive(self, source: int, tag: int, buffer: object, /) -> int:
        """Receive from a rank, or any (-1): the sender, -1, or -10 minus a trouble's number."""
    def post(
        self,
        sends: bool,
        peer: int,
        tag: int,
        buffer: object,
        dtype: int = -1,
        timeout_s: float = -1.0,
        plain: bool = False,
    ) -> Work | int:
        """Begin to send to a rank, or to receive from one; -1 is any rank.

        Messages of one tag from one rank arrive in the order in which they were sent. Up to 32 KiB
        are on their way when this returns (docs/decisions/041-mailbox.md). Otherwise as `submit`.

        Returns:
            The work, whose `peer` is the sender in the end; or, with nothing done, -1 as `run`, or
            -3: too many are outstanding.
        """
    def hold(self, is_held: bool, /) -> None:
        """Meanwhile `run`, `run_apart`, `send` and `receive` return -1, whatever they are given."""
    def set_timeout(self, timeout_s: float, /) -> None:
        """Of operations that begin from now on, unless they have one of their own."""
    def trouble(self) -> Trouble | None:
        """What ended this communicator, or None."""
    def leave(self) -> None:
        """Tell the peers that this rank takes part no more."""
    def abort(self) -> None:
        """End the waits of all ranks."""
    def revoke(self) -> None:
        """End the waits of all ranks, and their later calls, but take part still."""
    def gone(self) -> list[int]:
        """The other ranks that have left, or whose process is gone, as far as is known here."""
    def end_calls(self, most_s: float) -> bool:
        """Wait until no call is under way, revoking first if one is; False if it takes longer."""
    def pid(self, rank: int) -> int:
        """The process of a rank."""

class StoreServer:
    """The store's server loop in its own thread, serving from construction."""

    def __init__(self, listener: int, log: int, token: bytes, silence_s: int) -> None: ...
    def allow(self, hosts: bytes) -> None:
        """Let in only these hosts, 16 bytes each, and loopback."""
    def abandon(self) -> None:
        """In a forked child: close the descriptors and leave the rest alone."""
    def close(self) -> None: ...
    def counters(self) -> tuple[int, int, int]:
        """Connections, keys outside rounds, requests so far."""

class StoreMachine:
    """The server without its sockets, for tests."""

    def __init__(self, token: bytes = ...) -> None: ...
    def open(self, now: float, nonce: bytes = ...) -> int: ...
    def receive(self, connection: int, data: bytes) -> str | None: ...
    def close(self, connection: int) -> None: ...
    def paused(self, connection: int) -> bool: ...
    def late(self, now: float) -> list[int]: ...
    def take_output(self) -> list[tuple[int, bytes]]: ...

def exchange(fd: int, request: bytes) -> bytes:
    """Send a short request and return what one recv brings.

    Raises:
        BlockingIOError: the socket's time-out is over.
        OSError: the connection is lost.
    """

def signal_thread(pid: int, tid: int, number: int, /) -> int:
    """Send a signal to one thread (tgkill); 0, or the errno."""

def raise_in_thread(thread: int, exception: type[BaseException], /) -> bool:
    """Have a thread raise an exception at its next instruction in Python; False: there is none."""

def interrupted_frame() -> FrameType | None:
    """In a signal handler: the frame of the call of the engine that it has interrupted."""

def hmac_sha256(key: bytes, message: bytes) -> bytes: ...
