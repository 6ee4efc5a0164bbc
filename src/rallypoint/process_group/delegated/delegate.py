"""The interface that each backend's library implements for a group.

Memory is passed as flat, contiguous blocks of one dtype, made from arrays by `Delegate.adopt`.
Collectives are those of base/collective.py, with blocks of equal length except in ALL_TO_ALL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from rallypoint.base.collective import Collective
from rallypoint.process_group.arrays import Array, DeviceArray
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.store.store import Store

Block = Any  # a NumPy array, or a tensor of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryMember:
    """A member of a group that forms, and its peers.

    Attributes:
        name: the backend's.
        store: the store through which the library's ranks connect; its keys begin with `prefix`.
        rank, ranks: of this process in the group, and the members' global ranks.
        address: at which the others reach this process; loopback if all are on its host.
        device: of this process; None: chosen by LOCAL_RANK.
        title: the group's name for people.
    """

    name: str
    store: Store
    prefix: str
    rank: int
    ranks: Sequence[int]
    timeout: timedelta
    address: str
    device: object
    title: str
    environ: Mapping[str, str]


class LibraryCall(NamedTuple):
    """One collective.

    Attributes:
        dtype: the items' name (engine.communicator.DTYPES).
        inputs, outputs: this rank's blocks, in the order of ranks. ALL_REDUCE, REDUCE and BROADCAST
            have one, in `outputs`, which is also the input; in a REDUCE it may be overwritten on
            all ranks.
        root: a rank in the group.
    """

    collective: Collective
    dtype: str
    inputs: Sequence[Block]
    outputs: Sequence[Block]
    operator: Operator | None
    root: int
    timeout_s: float


class Pending(Protocol):
    """An operation that a library has started. Its exceptions are passed to `Delegate.trouble`."""

    def wait(self, timeout_s: float) -> None:
        """Wait until it is over; on a device, until the caller's next work there comes after it."""

    def is_done(self) -> bool:
        """Whether it is over; never waits."""

    def source(self) -> int:
        """The sender's rank in the group, of a receive that is over."""


class LibraryFailure(Enum):
    """What a library's error means."""

    LOST = "a peer was lost"
    LATE = "it timed out"
    LENGTHS = "a message was longer than its receiver expected"
    OTHER = "something else"


class Delegate(Protocol):
    """One group's end of a library.

    Attributes:
        name: the backend's.
        device: the kind of device whose memory it takes.
        patience_s: the longest single wait; infinite if a wait that timed out cannot be repeated.
    """

    name: str
    device: str
    patience_s: float

    def why_not(self, collective: Collective, dtype: str, operator: Operator | None) -> str:
        """Which part of this the library does not support, and what does; empty if it does."""

    def adopt(self, array: Array | DeviceArray) -> Block:
        """The flat memory of a contiguous array, shared; checked to be on the right device."""

    def empty(self, model: Block, items: int) -> Block:
        """New memory for `count` items like the model's."""

    def begin(self, request: LibraryCall) -> Pending:
        """Start a collective."""

    def transfer(self, *, sends: bool, peer: int, tag: int, block: Block) -> Pending:
        """Start to send to a rank of the group, or to receive from it, or from any (-1)."""

    def open_batch(self) -> None:
        """Transfers from now on need not begin before `close_batch`."""

    def close_batch(self) -> None:
        """Begin them together, so that none waits for another."""

    def trouble(self, error: Exception) -> LibraryFailure:
        """What an error of the library means."""

    def close(self) -> None:
        """Free what the library holds; peers may still be in calls without this rank."""

    def abort(self) -> None:
        """The same at once; calls in progress may fail."""


class BuiltInDelegate(Delegate):
    """A library that this package knows.

    It has a method for each collective that it serves, called like it: ``_all_reduce``.
    """

    combines: Mapping[str, Collection[str]]  # the names of the operators that it has, by dtype

    @cached_property
    def _served(self) -> Mapping[Collective, Callable[[LibraryCall], Pending]]:
        names = {each: f"_{each.operation}" for each in Collective}
        return {each: getattr(self, name) for each, name in names.items() if hasattr(self, name)}

    def why_not(self, collective: Collective, dtype: str, operator: Operator | None) -> str:
        if collective not in self._served:
            return (
                f"{self.name} has no such operation; backend='rallypoint' has "
                f"{collective.operation}"
            )
        return why_not_combined(self.name, self.combines, dtype, operator)

    def begin(self, request: LibraryCall) -> Pending:
        return self._served[request.collective](request)


def why_not_combined(
    name: str, combines: Mapping[str, Collection[str]], dtype: str, operator: Operator | None
) -> str:
    """What a library cannot combine, and what can; empty if it can, or nothing is combined."""
    if operator is None:
        return ""
    if dtype not in combines:
        return f"{name} does not combine {dtype}; backend='rallypoint' does"
    kind = "PREMUL_SUM" if isinstance(operator, PremulSum) else operator.name
    if kind not in combines[dtype]:
        return (
            f"{name} has no {kind} of {dtype}, only {', '.join(combines[dtype])}; see "
            "docs/guides/backends.md"
        )
    return ""
