"""Messages from one rank to another, under torch.distributed's names.

A message goes to the first receive that was called for its sender and tag. When `send` returns, a
small message is on its way, and a large one has arrived. Ranks that wait for each other get an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, SupportsIndex

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import DTYPES, TOO_MANY
from rallypoint.process_group.arrays import Array, as_array, describe, dtype_name, packed
from rallypoint.process_group.calls.call import Form, room_of, short_way
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.default import Group, joined, peer
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import OneWork, Work
from rallypoint.store.store import seconds_of

if TYPE_CHECKING:
    from rallypoint.process_group.delegated.library_calls import DelegatedWork
    from rallypoint.process_group.delegated.library_group import LibraryGroup

_ANY = -1
_TAGS = 1 << 31


@short_way(Collective.SEND, Form.SEND, source="tensor")
def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> None:
    """Send an array to a rank; returns when the array may be changed again.

    With ``RALLYPOINT_SYNCHRONOUS_SEND=1`` it also waits until the message is received, which
    reveals programs that depend on buffering.

    Args:
        tensor: an array or CPU tensor of any shape.
        dst, group_dst: the receiver: its global rank, or its rank in the group.
        tag: an integer of 32 bits; the receiver must pass the same.

    Raises:
        InvalidTypeError: `tensor` is not an array or CPU tensor, or its dtype is not supported.
        InvalidArgumentError: `dst` is this rank or not in the group, or `tag` is too large.
        MismatchError: the receiver expects another size or dtype.
        DeadlockError: the receiver waits for this rank, so neither can make progress.
        PeerLostError: the receiver died or left the group.
        CollectiveTimeoutError: the message was not received within the group's timeout.
    """
    if (chosen := joined(group, "send")) is None:
        return
    other = _other(chosen, peer(chosen, dst, group_dst, "dst", None), "dst")
    post_message(chosen, "send", other, tag, tensor, timeout=timeout).wait()


@short_way(Collective.SEND, Form.RECEIVE, target="tensor")
def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> int:
    """Receive an array into `tensor`, from a rank or, if none is given, from any.

    Args:
        tensor: writable; of the size and dtype that is sent; filled in.
        src, group_src: the sender: its global rank, or its rank in the group.
        tag: as given by the sender.

    Returns:
        The sender's global rank; -1 if this rank is not in the group.

    Raises:
        InvalidTypeError: `tensor` is no array or CPU tensor, of an unsupported dtype, or read-only.
        InvalidArgumentError: `src` is this rank or not in the group, or `tag` is too large.
        MismatchError: the sender sent another size or dtype.
        DeadlockError: the sender waits for this rank, so neither can make progress.
        PeerLostError: the sender died or left the group.
        CollectiveTimeoutError: nothing was sent within the group's timeout.
    """
    if (chosen := joined(group, "recv")) is None:
        return -1
    other = _source(chosen, src, group_src)
    work = post_message(chosen, "recv", other, tag, tensor, timeout=timeout)
    work.wait()
    return chosen.ranks[work.peer]


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> Work | None:
    """Start to send an array, which must not be changed before the work is completed.

    Returns:
        The operation, or None if this rank is not in the group. Its `wait` raises the errors of
        send.

    Raises:
        InvalidTypeError: `tensor` is not an array or CPU tensor, or its dtype is not supported.
        InvalidArgumentError: `dst` is this rank or not a rank of the group, or too many messages
            are outstanding.
    """
    if (chosen := joined(group, "isend")) is None:
        return None
    other = _other(chosen, peer(chosen, dst, group_dst, "dst", None), "dst")
    return post_message(chosen, "isend", other, tag, tensor, timeout=timeout, site=Site.of_caller())


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> Work | None:
    """Start to receive an array, from any rank if none is given.

    Returns:
        The operation, or None if this rank is not in the group. Its `wait` raises the errors of
        recv; its `source_rank()` is the sender.

    Raises:
        InvalidTypeError: `tensor` is no array or CPU tensor, of an unsupported dtype, or read-only.
        InvalidArgumentError: `src` is this rank or not a rank of the group, or too many messages
            are outstanding.
    """
    if (chosen := joined(group, "irecv")) is None:
        return None
    other = _source(chosen, src, group_src)
    return post_message(chosen, "irecv", other, tag, tensor, timeout=timeout, site=Site.of_caller())


@dataclass(frozen=True, slots=True)
class P2POp:
    """A send or receive for batch_isend_irecv; `op` is isend or irecv."""

    op: Callable[..., Work | None]
    tensor: Any
    peer: int | None = None
    group: Group = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise InvalidArgumentError(f"P2POp: op must be isend or irecv, not {self.op!r}")


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start sends and receives, in any order; returns their works.

    Raises:
        InvalidArgumentError: the list is empty, or contains something else.
    """
    if not p2p_op_list or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise InvalidArgumentError("p2p_op_list must be a list of at least one P2POp")
    with ExitStack() as batches:
        for library in _libraries_of(p2p_op_list):
            batches.enter_context(library.batch("batch_isend_irecv"))
        works = [
            one.op(one.tensor, one.peer, one.group, one.tag, one.group_peer) for one in p2p_op_list
        ]
    return [work for work in works if work is not None]


def _libraries_of(p2p_op_list: Sequence[P2POp]) -> list[LibraryGroup]:
    found: dict[int, LibraryGroup] = {}
    for one in p2p_op_list:
        group = joined(one.group, one.op.__name__)
        if group is None or not group.ends:
            continue
        library = group.end_of(as_array(one.tensor, one.op.__name__), one.op.__name__)
        if library is not None:
            found[id(library)] = library
    return list(found.values())


def post_message(
    group: ProcessGroup,
    operation: str,
    other: int,
    tag: int,
    tensor: object,
    *,
    timeout: timedelta | None,
    site: Site | None = None,
    results: Sequence[Any] | None = None,
    then: Callable[[], None] | None = None,
    work_type: type[OneWork] = OneWork,
) -> OneWork | DelegatedWork:
    """Start a send or receive, as `operation` says. `other` is a rank in the group, or -1.

    `results`, `then` and `work_type` are as in `CollectiveCall`.
    """
    if not (isinstance(tag, SupportsIndex) and -_TAGS <= tag.__index__() < _TAGS):
        raise InvalidArgumentError(
            f"{operation}: tag must be an integer from -2**31 to 2**31 - 1, not {tag!r}"
        )
    sends = operation in ("send", "isend")
    array = as_array(tensor, operation, writes=not sends)
    if results is None:
        results = [] if sends else [tensor]
    library = group.end_of(array, operation)
    if library is not None:
        from rallypoint.process_group.delegated import library_calls  # few groups have a library

        return library_calls.post(
            group,
            library,
            operation,
            other,
            tag,
            array,
            timeout=timeout,
            results=results,
            then=then,
        )
    memory = packed(array) if sends else room_of(array)
    is_copied = not sends and memory is not array

    def finish() -> None:
        if is_copied:
            array[...] = memory
        if then is not None:
            then()

    posted = group.communicator.post(
        sends,
        other,
        tag,
        memory,
        dtype=DTYPES.index(dtype_name(array)),
        timeout_s=-1.0 if timeout is None else seconds_of(timeout),
    )
    if posted == TOO_MANY:
        raise InvalidArgumentError(
            f"{operation}: too many sends and receives are outstanding; wait for some of them first"
        )
    if isinstance(posted, int):
        raise InvalidArgumentError(f"{operation} cannot take {describe(tensor)}")
    called = CallDetails(operation, array, site=site)
    has_more = is_copied or then is not None
    return work_type(posted, group, called, results, finish if has_more else None)


def _source(group: ProcessGroup, src: int | None, group_src: int | None) -> int:
    if src is None and group_src is None:
        return _ANY
    return _other(group, peer(group, src, group_src, "src", None), "src")


def _other(group: ProcessGroup, rank: int, name: str) -> int:
    if rank == group.own_rank:
        raise InvalidArgumentError(
            f"{name}={group.ranks[rank]} is this rank itself; name another one"
        )
    return rank
