"""Reads a worker's flight record: the calls it was in, by group, even after it has ended.

The layout is defined in native/engine/flight_record.h. The worker may be writing at the same time:
an entry counts only if its word was the same before and after, so each page is read three times.
Invalid data is skipped, because a broken worker must not break the reader.
"""

from __future__ import annotations

import os
import struct

from rallypoint.base.foreign_page import FOREIGN_BYTES, read_foreign_group
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup

Names = dict[str, list[str]]  # the meaning of numbers: of operations, dtypes, operators
Copied = tuple[bytes, list[bytes]]  # a header, and the pages, read three times

_MAGIC = 0x52504652
_VERSIONS = (1, 2)  # version 1 has no ends of calls
_PAGE, _PAGES = 4096, 1024
_CALLS, _TRANSFERS = 32, 16
_HEADER = struct.Struct("=IIiII")
_GROUP = struct.Struct("=IIQ")
_SITE = struct.Struct("=Q184s")
_CALL = struct.Struct("=QQHBBiQIIQ16x")
_DESCRIPTION_BYTES = 1024 - _GROUP.size - 2 * _SITE.size
_FIRST_SITE = _GROUP.size + _DESCRIPTION_BYTES
_FIRST_CALL = 1024
_FIRST_TRANSFER = _FIRST_CALL + _CALLS * _CALL.size
_HERE, _LEFT, _FOREIGN, _FOREIGN_LEFT = 1, 2, 3, 4
_ASKED = struct.Struct("=II")  # at the end of the header
_NAMES_END = _PAGE - 40  # followed by words of inspection/tracing.py, and of readers' questions
STATES = {1: "running", 2: "done", 3: "failed"}
_RECEIVE, _ANY_RANK = 0xFFFF, 0xFFFFFFFF


def read_groups(descriptor: int, offset: int) -> tuple[RecordedGroup, ...]:
    """The groups of the worker whose record begins there, in the order in which it joined them.

    Empty if it keeps none, or one of another version.
    """
    return groups_in(copy_record(descriptor, offset))


def read_pages(descriptor: int, offset: int) -> tuple[Names, dict[int, RecordedGroup]]:
    """The same by the pages on which they are, and what the numbers in the record mean."""
    return _pages_in(copy_record(descriptor, offset))


def copy_record(descriptor: int, offset: int) -> Copied:
    """The record as it is now, which `groups_in` takes 0.2 ms to read for each group."""
    header = os.pread(descriptor, _PAGE, offset)
    if len(header) < _PAGE:
        return b"", []
    magic, version, _, count, _ = _HEADER.unpack_from(header)
    if magic != _MAGIC or version not in _VERSIONS or count >= _PAGES:
        return b"", []
    return header, [os.pread(descriptor, count * _PAGE, offset + _PAGE) for _ in range(3)]


def groups_in(copied: Copied) -> tuple[RecordedGroup, ...]:
    """The groups, as from `read_groups`."""
    return tuple(_pages_in(copied)[1].values())


def _pages_in(copied: Copied) -> tuple[Names, dict[int, RecordedGroup]]:
    import json

    header, looks = copied
    if not header:
        return {}, {}
    try:
        names: Names = json.loads(header[_HEADER.size : _NAMES_END].rstrip(b"\0"))
        groups = {
            number + 1: _group([look[at : at + FOREIGN_BYTES] for look in looks], names)
            for number, at in enumerate(range(0, len(looks[1]), _PAGE))
        }
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}, {}
    return names, {page: group for page, group in groups.items() if group is not None}


def name_operation(operation: int, names: Names) -> str:
    """What an operation of that number is called."""
    return "recv" if operation == _RECEIVE else names["operations"][operation]


def name_peer(peer: int) -> int:
    """The rank, or -1 for any."""
    return -1 if peer == _ANY_RANK else peer


def ask_for_more(descriptor: int, offset: int) -> None:
    """Have the worker write the last calls of other backends' groups too, within 0.2 s or so."""
    at = offset + _PAGE - _ASKED.size
    asked, _ = _ASKED.unpack(os.pread(descriptor, _ASKED.size, at))
    os.pwrite(descriptor, struct.pack("=I", (asked + 1) & 0xFFFFFFFF), at)


def has_told_more(descriptor: int, offset: int) -> bool:
    """Whether it has done so."""
    asked, answered = _ASKED.unpack(os.pread(descriptor, _ASKED.size, offset + _PAGE - _ASKED.size))
    return bool(asked == answered)


def _group(looks: list[bytes], names: Names) -> RecordedGroup | None:
    import json

    presence, _, queued = _GROUP.unpack_from(looks[1])
    if presence in (_FOREIGN, _FOREIGN_LEFT):
        return read_foreign_group(looks, has_left=presence == _FOREIGN_LEFT)
    if presence not in (_HERE, _LEFT):
        return None
    text = looks[1][_GROUP.size : _FIRST_SITE].rstrip(b"\0")
    if any(look[_GROUP.size : _FIRST_SITE].rstrip(b"\0") != text for look in looks):
        return None  # the page changes hands: its group was gone, or another is just forming
    said = json.loads(text)
    sites = [_site(looks, _FIRST_SITE + i * _SITE.size) for i in range(2)]
    calls = _calls(looks, _FIRST_CALL, _CALLS, names, sites[0])
    transfers = _calls(looks, _FIRST_TRANSFER, _TRANSFERS, names, sites[1])
    return RecordedGroup(
        name=str(said.get("name", "")),
        key=str(said.get("key", "")),
        members=str(said.get("members", "")),
        has_left=presence == _LEFT,
        queued=queued,
        calls=calls,
        transfers=tuple(call for call in transfers if call.state != "done"),
        transfers_begun=transfers[-1].number + 1 if transfers else 0,
    )


def _site(looks: list[bytes], at: int) -> tuple[int, str, int | None]:
    """The number of the call that waits there, plus one; where; the tag that came instead."""
    (before, _), (number, text), (after, _) = (_SITE.unpack_from(look, at) for look in looks)
    if not before == number == after:
        return 0, "", None
    site, _, rest = text.partition(b"\0")
    tag = rest.partition(b"\0")[0]
    return number, site.decode(errors="replace"), int(tag) if tag else None


def _calls(
    looks: list[bytes],
    first: int,
    most: int,
    names: Names,
    site: tuple[int, str, int | None],
) -> tuple[RecordedCall, ...]:
    found = []
    for at in range(first, first + most * _CALL.size, _CALL.size):
        (before, *_), fields, (after, *_) = (_CALL.unpack_from(look, at) for look in looks)
        word, since_ns, operation, dtype, operator, root, count, peer, _, ended_ns = fields
        # The call may have ended between the readings: the number must be the same; the last state
        # counts.
        if not before >> 2 == word >> 2 == after >> 2 != 0:
            continue
        number = (word >> 2) - 1
        found.append(
            RecordedCall(
                number=number,
                operation=name_operation(operation, names),
                state=STATES[after & 3],
                since_ns=since_ns,
                dtype=names["dtypes"][dtype],
                operator=names["operators"][operator],
                root=root,
                count=count,
                peer=None if first == _FIRST_CALL else name_peer(peer),
                site=site[1] if site[0] == number + 1 else "",
                came_tag=site[2] if site[0] == number + 1 else None,
                # An end left by an earlier call is before the beginning.
                ended_ns=ended_ns if STATES[word & 3] != "running" and ended_ns >= since_ns else 0,
            )
        )
    return tuple(sorted(found, key=lambda call: call.number))
