"""Reads a worker's flight record: what it was in, group by group, also after its end.

The layout is native/engine/flight_record.h's. The worker may be writing meanwhile: an entry counts
only if its word was the same before and after, so each page is read three times. What makes no
sense is left out, because a broken worker must not break who reads.
"""

from __future__ import annotations

import os
import struct

from rallypoint.base.record import Record

_MAGIC, _VERSION = 0x52504652, 1
_PAGE, _PAGES = 4096, 1024
_CALLS, _TRANSFERS = 32, 16
_HEADER = struct.Struct("=IIiII")
_GROUP = struct.Struct("=IIQ")
_SITE = struct.Struct("=Q184s")
_CALL = struct.Struct("=QQHBBiQII24x")
_DESCRIPTION_BYTES = 1024 - _GROUP.size - 2 * _SITE.size
_FIRST_SITE = _GROUP.size + _DESCRIPTION_BYTES
_FIRST_CALL = 1024
_FIRST_TRANSFER = _FIRST_CALL + _CALLS * _CALL.size
_HERE, _LEFT = 1, 2
_STATES = {1: "running", 2: "done", 3: "failed"}
_RECEIVE, _ANY_RANK = 0xFFFF, 0xFFFFFFFF


class Call(Record, kw_only=True):
    """One operation of a worker.

    Attributes:
        number: of the operations of its kind in its group, from 0.
        operation: its name, e.g. ``"all_reduce"``, ``"recv"``.
        state: "running", "done", or "failed".
        since_ns: when it began, by the machine's monotonic clock.
        root: a rank in the group; of a send or recv: the tag.
        count: items of a block.
        peer: of a send or recv: the other rank in the group, or -1 for any; of a collective None.
        site: the line of the program that waits for it, if it has waited for some time.
    """

    number: int
    operation: str
    state: str
    since_ns: int
    dtype: str
    operator: str
    root: int
    count: int
    peer: int | None = None
    site: str = ""


class Group(Record, kw_only=True):
    """What a worker was in, in one group.

    Attributes:
        name: what people call it.
        key: the same on all members.
        members: their global ranks, in the order of their ranks in it, e.g. ``"0-3,7"``; or empty.
        has_left: the worker has left it.
        queued: collectives that were begun in the background and are not done.
        calls: its last collectives, the latest last.
        transfers: sends and receives that go on, or failed.
    """

    name: str
    key: str
    members: str
    has_left: bool
    queued: int
    calls: tuple[Call, ...]
    transfers: tuple[Call, ...]

    def global_rank(self, rank: int) -> int | None:
        """What a rank in the group is called outside, if that is known."""
        for part in self.members.split(",") if self.members else ():
            first, _, last = part.partition("-")
            size = int(last or first) - int(first) + 1
            if rank < size:
                return int(first) + rank
            rank -= size
        return None


def read_groups(descriptor: int, offset: int) -> tuple[Group, ...]:
    """The groups of the worker whose record begins there, in the order in which it joined them.

    Empty if it keeps none, or one of another version.
    """
    import json

    header = os.pread(descriptor, _PAGE, offset)
    if len(header) < _PAGE:
        return ()
    magic, version, _, count, _ = _HEADER.unpack_from(header)
    if (magic, version) != (_MAGIC, _VERSION) or count >= _PAGES:
        return ()
    looks = [os.pread(descriptor, count * _PAGE, offset + _PAGE) for _ in range(3)]
    try:
        names = json.loads(header[_HEADER.size :].rstrip(b"\0"))
        groups = [
            _group([look[at : at + _PAGE] for look in looks], names)
            for at in range(0, count * _PAGE, _PAGE)
        ]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return ()
    return tuple(group for group in groups if group is not None)


def _group(looks: list[bytes], names: dict[str, list[str]]) -> Group | None:
    import json

    presence, _, queued = _GROUP.unpack_from(looks[1])
    if presence not in (_HERE, _LEFT):
        return None
    text = looks[1][_GROUP.size : _FIRST_SITE].rstrip(b"\0")
    said = json.loads(text)
    sites = [_site(looks, _FIRST_SITE + i * _SITE.size) for i in range(2)]
    calls = _calls(looks, _FIRST_CALL, _CALLS, names, sites[0])
    transfers = _calls(looks, _FIRST_TRANSFER, _TRANSFERS, names, sites[1])
    return Group(
        name=str(said.get("name", "")),
        key=str(said.get("key", "")),
        members=str(said.get("members", "")),
        has_left=presence == _LEFT,
        queued=queued,
        calls=calls,
        transfers=tuple(call for call in transfers if call.state != "done"),
    )


def _site(looks: list[bytes], at: int) -> tuple[int, str]:
    """The number of the call that waits there, plus one, and where."""
    (before, _), (number, text), (after, _) = (_SITE.unpack_from(look, at) for look in looks)
    if not before == number == after:
        return 0, ""
    return number, text.partition(b"\0")[0].decode(errors="replace")


def _calls(
    looks: list[bytes], first: int, most: int, names: dict[str, list[str]], site: tuple[int, str]
) -> tuple[Call, ...]:
    found = []
    for at in range(first, first + most * _CALL.size, _CALL.size):
        (before, *_), fields, (after, *_) = (_CALL.unpack_from(look, at) for look in looks)
        word, since_ns, operation, dtype, operator, root, count, peer, _ = fields
        # It may have ended between the looks: the number must be the same, the state is the last.
        if not before >> 2 == word >> 2 == after >> 2 != 0:
            continue
        number = (word >> 2) - 1
        found.append(
            Call(
                number=number,
                operation="recv" if operation == _RECEIVE else names["operations"][operation],
                state=_STATES[after & 3],
                since_ns=since_ns,
                dtype=names["dtypes"][dtype],
                operator=names["operators"][operator],
                root=root,
                count=count,
                peer=None if first == _FIRST_CALL else -1 if peer == _ANY_RANK else peer,
                site=site[1] if site[0] == number + 1 else "",
            )
        )
    return tuple(sorted(found, key=lambda call: call.number))
