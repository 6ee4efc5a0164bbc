"""One call of a collective or message at another backend: arrays to blocks, and results back.

Blocks of different lengths, and data that a library would overwrite, are handled here, so a library
only has to serve one form of each collective:

    given                                       passed to the library
    lists, or one large array                   a flat block for each rank
    not contiguous, or overlapping              a copy, and back
    all_gather of unequal blocks                blocks padded to the longest
    reduce_scatter of unequal blocks            an all_reduce of all of them
    gather, scatter of lengths that only        messages
    the root knows
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rallypoint.base.collective import Collective
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    PeerError,
)
from rallypoint.engine.engine_work import report
from rallypoint.process_group.arrays import Array, DeviceArray, copied, dtype_name, overlap, packed
from rallypoint.process_group.delegated.delegate import Block, LibraryCall, Pending
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import CollectiveCall, Future, Work
from rallypoint.store.store import seconds_of

_TAG = 0x52A1  # for messages that implement a collective; refused to users
_SHORTEST_S = 0.001  # gloo takes 0 for "no limit"


@dataclass(slots=True)
class _Prepared:
    """Blocks, and what to do after the call with those that are copies."""

    inputs: list[Block]
    outputs: list[Block]
    finish: Callable[[], None] = lambda: None


class _Several:
    """Messages as one operation."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for part in self._parts:
            part.wait(max(until - time.monotonic(), _SHORTEST_S))

    def is_done(self) -> bool:
        return all(part.is_done() for part in self._parts)

    def source(self) -> int:
        return -1


class DelegatedWork(Work):
    """One operation in progress; `finish` is called after success, before waiters are notified."""

    def __init__(
        self,
        group: ProcessGroup,
        library: LibraryGroup,
        pending: Pending,
        operation: str,
        outputs: Sequence[Any],
        finish: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.operation = operation
        self._ranks = group.ranks
        self._library = library
        self._pending = pending
        self._outputs = outputs
        self._finish = finish
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_over = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and not self._is_over and not self._is_done():
            self._wait_a_while(seconds_of(timeout))
        self._settle()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._is_over and self._is_done():
            self._settle()
        if self._error is not None or self._library.device == "cpu":
            return self._is_over
        # It may have been waited for on the device, where it may still continue.
        return self._is_over and self._pending.is_done()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[Any]:
        return list(self._outputs)

    @property
    def peer(self) -> int:
        """The sender's rank in the group, of a receive that is over."""
        return self._pending.source()

    def source_rank(self) -> int:
        if self.operation != "irecv" or not self.is_success():
            return -1
        return self._ranks[self.peer]

    def get_future(self) -> Future:
        return Future.of(self)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        def serve() -> None:  # in a thread that waits for the operation
            self._settle()
            try:
                callback(self)
            except BaseException as error:
                report(error)

        if self.is_completed():
            callback(self)
        else:
            threading.Thread(target=serve, name="rallypoint-callbacks", daemon=True).start()

    def _wait_a_while(self, wait_s: float) -> None:
        """Wait for as long as the caller allows, which the library does not know."""
        until, pause_s = time.monotonic() + wait_s, 1e-5
        while not self._is_done():
            if time.monotonic() > until:
                raise CollectiveTimeoutError(
                    f"{self.operation} was not completed within {wait_s:g} s; it is still "
                    "running, so wait again, or abort the group",
                    operation=self.operation,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def _is_done(self) -> bool:
        """Whether the library is done with it, with or without an error."""
        try:
            return self._error is not None or self._library.is_done(self._pending, self.operation)
        except PeerError as error:
            self._error, self._is_over = error, True
            return True

    def _settle(self) -> None:
        """Wait until it is over, then finish, once; concurrent callers wait."""
        with self._lock:
            if self._is_over:
                return
            try:
                left_s = max(self._until - time.monotonic(), 0.001)
                self._library.wait(self._pending, left_s, self._timeout_s, self.operation)
                self._finish()
            except PeerError as error:
                self._error = error
            self._is_over = True


def begin(
    group: ProcessGroup,
    library: LibraryGroup,
    call: CollectiveCall,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
) -> DelegatedWork:
    """Start a collective with these arrays."""
    if call.algorithm is not None:
        raise InvalidArgumentError(
            f"{call.operation}: {library.name} chooses its algorithms itself; "
            f"algorithm={call.algorithm!r} is for backend='rallypoint'"
        )
    dtype = dtype_name((inputs or outputs)[0])
    operator = call.op if call.collective.reduces else None
    if why := library.why_not(call.collective, dtype, operator):
        raise InvalidTypeError(f"{call.operation}: {why}")
    timeout_s = library.timeout_s if call.timeout is None else seconds_of(call.timeout)
    ready = _prepare(group, library, call, inputs, outputs)
    pending: Pending
    if call.uneven and call.collective in (Collective.GATHER, Collective.SCATTER):
        pending = _by_messages(group, library, call, ready)
    else:
        request = LibraryCall(
            collective=_made_even(group, library, call.collective, ready),
            dtype=dtype,
            inputs=ready.inputs,
            outputs=ready.outputs,
            operator=operator,
            root=call.root,
            timeout_s=timeout_s,
        )
        pending = library.begin(request, call.operation)

    def finish() -> None:
        ready.finish()
        if call.then is not None:
            call.then()

    results = outputs if call.results is None else call.results
    return DelegatedWork(group, library, pending, call.operation, results, finish, timeout_s)


def post(
    group: ProcessGroup,
    library: LibraryGroup,
    operation: str,
    other: int,
    tag: int,
    array: Array,
    *,
    timeout: timedelta | None,
    results: Sequence[Any],
    then: Callable[[], None] | None,
) -> DelegatedWork:
    """Start a send or receive; `other` is a rank in the group, or -1."""
    if type(tag) is not int or tag < 0:
        raise InvalidArgumentError(f"{operation}: tag={tag!r} must be an integer >= 0")
    if tag == _TAG:
        raise InvalidArgumentError(
            f"{operation}: tag={tag} belongs to gather and scatter at {library.name}; use "
            "another tag"
        )
    sends = operation in ("send", "isend")
    memory = packed(array)

    def finish() -> None:
        if not sends and memory is not array:
            _put_back(array, memory)
        if then is not None:
            then()

    timeout_s = library.timeout_s if timeout is None else seconds_of(timeout)
    pending = library.transfer(
        sends=sends, peer=other, tag=tag, block=library.adopt(memory), operation=operation
    )
    return DelegatedWork(group, library, pending, operation, results, finish, timeout_s)


def _prepare(
    group: ProcessGroup,
    library: LibraryGroup,
    call: CollectiveCall,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
) -> _Prepared:
    """The blocks for the library, and how to return its output to the caller's arrays."""
    collective, is_root = call.collective, group.own_rank == call.root
    if collective is Collective.BARRIER:
        return _Prepared([], [])
    rooms = [packed(array) for array in outputs]

    def finish() -> None:
        for array, room in zip(outputs, rooms, strict=True):
            if room is not array:
                _put_back(array, room)

    if collective.has_one_block:  # for input and output
        if not outputs:  # a copy, because the library may overwrite it
            return _Prepared([], [library.adopt(copied(inputs[0]))])
        if inputs and (inputs[0] is not outputs[0] or rooms[0] is not outputs[0]):
            _put_back(rooms[0], inputs[0])
        return _Prepared([], [library.adopt(rooms[0])], finish)
    sources = [packed(array) for array in inputs]
    if overlap(sources, rooms):
        sources = [copied(array) for array in sources]
    ranks = group.size()
    count_in = collective.input_blocks(ranks, is_root=is_root)
    count_out = collective.output_blocks(ranks, is_root=is_root)
    return _Prepared(
        _cut([library.adopt(array) for array in sources], count_in),
        _cut([library.adopt(array) for array in rooms], count_out),
        finish,
    )


def _cut(blocks: list[Block], count: int) -> list[Block]:
    """A block for each rank, cut from one that holds them all."""
    if len(blocks) != 1 or count <= 1:
        return blocks
    items = len(blocks[0]) // count
    return [blocks[0][index * items : (index + 1) * items] for index in range(count)]


def _made_even(
    group: ProcessGroup, library: LibraryGroup, collective: Collective, ready: _Prepared
) -> Collective:
    """Blocks of equal length instead of unequal ones; the collective that serves these."""
    blocks = ready.outputs if collective is Collective.ALL_GATHER else ready.inputs
    if len(blocks) <= 1 or collective is Collective.ALL_TO_ALL:
        return collective
    sizes = [len(block) for block in blocks]
    if len(set(sizes)) == 1:
        return collective
    before, finish = ready.outputs, ready.finish
    if collective is Collective.ALL_GATHER:
        most = max(sizes)
        source = library.empty(ready.inputs[0], most)
        source[: len(ready.inputs[0])] = ready.inputs[0]
        targets = [library.empty(source, most) for _ in sizes]

        def shorten() -> None:
            for block, target in zip(before, targets, strict=True):
                block[:] = target[: len(block)]
            finish()

        ready.inputs, ready.outputs, ready.finish = [source], targets, shorten
        return collective
    whole = library.empty(ready.inputs[0], sum(sizes))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    for start, block in zip(starts, ready.inputs, strict=True):
        whole[start : start + len(block)] = block
    start = starts[group.own_rank]

    def take_own() -> None:
        before[0][:] = whole[start : start + len(before[0])]
        finish()

    ready.inputs, ready.outputs, ready.finish = [], [whole], take_own
    return Collective.ALL_REDUCE


def _by_messages(
    group: ProcessGroup, library: LibraryGroup, call: CollectiveCall, ready: _Prepared
) -> _Several:
    """A gather or scatter of blocks whose lengths only the root and their owners know."""
    gathers, own = call.collective is Collective.GATHER, group.own_rank
    is_root = own == call.root
    blocks = ready.outputs if gathers == is_root else ready.inputs
    peers = dict(enumerate(blocks)) if is_root else {call.root: blocks[0]}
    if is_root:
        ready.outputs[own if gathers else 0][:] = ready.inputs[0 if gathers else own]
        del peers[own]
    return _Several(
        [
            library.transfer(
                sends=gathers != is_root, peer=peer, tag=_TAG, block=block, operation=call.operation
            )
            for peer, block in peers.items()
        ]
    )


def _put_back(array: Any, memory: Any) -> None:  # noqa: ANN401 - an Array, or a DeviceArray
    if isinstance(array, DeviceArray):
        array.tensor.copy_(memory.tensor.reshape(array.tensor.shape))
    else:
        array[...] = memory.reshape(array.shape)
