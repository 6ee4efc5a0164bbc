"""Reads a worker's flight record: the calls it was in, by group, even after it has ended.

The layout is defined in native/engine/flight_record.h. The worker may be writing at the same time:
an entry counts only if its word was the same before and after, so each page is read three times.
Invalid data is skipped, because a broken worker must not break the reader.

Pages of groups of other backends (native/engine/foreign_page.h) have their own layout: calls
are recorded as PyTorch's Flight Recorder reports them, and are read alternately with its counters.
The counters are newer: a call that they count as finished is finished, and a call that only they
count has no name yet.

A page of steps (recorded_steps.py) has a word that is odd while the page is being written.
"""

from __future__ import annotations

import os
import struct
import time
from functools import lru_cache
from math import prod

from rallypoint.base import recorded_steps as layout
from rallypoint.base.recorded_call import GroupCounts, RecordedCall, RecordedGroup
from rallypoint.base.recorded_steps import RecordedSteps

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Any

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
_END = _FIRST_TRANSFER + _TRANSFERS * _CALL.size
_HERE, _LEFT, _FOREIGN, _FOREIGN_LEFT = 1, 2, 3, 4
_ASKED = struct.Struct("=II")  # at the end of the header
_WATCHED_BEFORE_END, _WATCHED_S = 12, 4  # a time in whole seconds
_NAMES_END = _PAGE - 40  # followed by words of inspection/tracing.py, and of readers' questions
STATES = {1: "running", 2: "done", 3: "failed"}
_STEPS_KIND = struct.pack("=II", layout.PRESENCE, layout.VERSION)
_ATTEMPTS = 5  # to read a page of steps that is being written
_RUNNING, _DONE, _FAILED = 1, 2, 3
_COUNTS_VERSION = 1
_SQUARE_BITS = 30  # a unit of the sum of squares is (2^15 ns)^2
_RECEIVE, _ANY_RANK = 0xFFFF, 0xFFFFFFFF
# A group of another backend has two pages.
_FOREIGN_BYTES = 2 * _PAGE
_FOREIGN_STATUS = struct.Struct("=IIQQQQQ")
_FOREIGN_CALL = struct.Struct("=QQQQ48s16s8qI28x")
_FOREIGN_COUNTS_AT, _FOREIGN_COUNTS = 168, struct.Struct("=QQ")  # in the first two of these
_FOREIGN_TRANSFER = struct.Struct("=QQQIiI28s")
_FIRST_FOREIGN_TRANSFER = _FIRST_CALL + _CALLS * _FOREIGN_CALL.size
_OWN_CALLS = range(_FIRST_CALL, _FIRST_TRANSFER, _CALL.size)
_FOREIGN_CALLS = range(_FIRST_CALL, _FIRST_FOREIGN_TRANSFER, _FOREIGN_CALL.size)
# PyTorch's names for them in C++.
_DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
    **{"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}


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
    count = _pages_used(descriptor, offset)
    if count == 0:
        return b"", []
    return header, [os.pread(descriptor, count * _PAGE, offset + _PAGE) for _ in range(3)]


def groups_in(copied: Copied) -> tuple[RecordedGroup, ...]:
    """The groups, as from `read_groups`."""
    return tuple(_pages_in(copied)[1].values())


def _pages_in(copied: Copied) -> tuple[Names, dict[int, RecordedGroup]]:
    header, looks = copied
    if not header:
        return {}, {}
    try:
        names = _names_in(header)
        groups = {
            number + 1: _group([look[at : at + _FOREIGN_BYTES] for look in looks], names)
            for number, at in enumerate(range(0, len(looks[1]), _PAGE))
        }
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}, {}
    return names, {page: group for page, group in groups.items() if group is not None}


def read_counts(descriptor: int, offset: int) -> tuple[RecordedGroup, ...]:
    """The groups with their `counts`, and only the latest call of each: a tenth of the work.

    For those who read each second.
    """
    header, looks = copy_record(descriptor, offset)
    if not header:
        return ()
    found = []
    for at in range(0, len(looks[1]), _PAGE):
        try:
            pages = [look[at : at + _FOREIGN_BYTES] for look in looks]
            found.append(_counted_group(pages, _names_in(header)))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            continue  # it is being written
    return tuple(group for group in found if group is not None)


def _names_in(header: bytes) -> Names:
    return _parsed(header[_HEADER.size : _NAMES_END])


@lru_cache(maxsize=1024)
def _parsed(text: bytes) -> dict[str, Any]:
    """An object of JSON, not to be changed; the same ones are read again and again."""
    import json

    parsed: dict[str, Any] = json.loads(text.rstrip(b"\0"))
    return parsed


def read_steps(descriptor: int, offset: int, *, with_log: bool = True) -> RecordedSteps | None:
    """The steps of the worker whose record begins there; None if it recorded none.

    Without the log, and what is derived from it, it takes a tenth of the time.
    """
    for at in range(offset + _PAGE, offset + (_pages_used(descriptor, offset) + 1) * _PAGE, _PAGE):
        if os.pread(descriptor, 8, at) == _STEPS_KIND:
            for _ in range(_ATTEMPTS):
                page = os.pread(descriptor, _PAGE, at)
                if page[8:16] == os.pread(descriptor, 8, at + 8) and page[8] % 2 == 0:
                    break  # otherwise it is being written, or its writer was killed meanwhile
            return _steps_in(page, with_log=with_log)
    return None


def _pages_used(descriptor: int, offset: int) -> int:
    head = os.pread(descriptor, _HEADER.size, offset)
    if len(head) < _HEADER.size:
        return 0
    magic, version, _, count, _ = _HEADER.unpack(head)
    return count if magic == _MAGIC and version in _VERSIONS and count < _PAGES else 0


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


def watch_closely(descriptor: int, offset: int) -> None:
    """Have the worker look at other backends' groups fifty times a second, for three seconds.

    It samples how long the program waits for them.
    """
    until_s = int(time.monotonic()) + _WATCHED_S
    os.pwrite(descriptor, struct.pack("=I", until_s), offset + _PAGE - _WATCHED_BEFORE_END)


def has_told_more(descriptor: int, offset: int) -> bool:
    """Whether it has done so."""
    asked, answered = _ASKED.unpack(os.pread(descriptor, _ASKED.size, offset + _PAGE - _ASKED.size))
    return bool(asked == answered)


def _group(looks: list[bytes], names: Names) -> RecordedGroup | None:
    presence, _, queued = _GROUP.unpack_from(looks[1])
    if presence in (_FOREIGN, _FOREIGN_LEFT):
        return _foreign_group(looks, has_left=presence == _FOREIGN_LEFT)
    if presence not in (_HERE, _LEFT):
        return None
    text = looks[1][_GROUP.size : _FIRST_SITE].rstrip(b"\0")
    if any(look[_GROUP.size : _FIRST_SITE].rstrip(b"\0") != text for look in looks):
        return None  # the page changes hands: its group was gone, or another is just forming
    said = _parsed(text)
    sites = [_site(looks, _FIRST_SITE + i * _SITE.size) for i in range(2)]
    calls = _calls(looks, _OWN_CALLS, names, sites[0])
    transfers = _calls(looks, range(_FIRST_TRANSFER, _END, _CALL.size), names, sites[1])
    return RecordedGroup(
        name=str(said.get("name", "")),
        key=str(said.get("key", "")),
        members=str(said.get("members", "")),
        has_left=presence == _LEFT,
        queued=queued,
        calls=calls,
        transfers=tuple(call for call in transfers if call.state != "done"),
        transfers_begun=transfers[-1].number + 1 if transfers else 0,
        counts=_counts(looks[1]),
    )


def _counted_group(looks: list[bytes], names: Names) -> RecordedGroup | None:
    page = looks[1]
    presence, _, queued = _GROUP.unpack_from(page)
    is_foreign = presence in (_FOREIGN, _FOREIGN_LEFT)
    if presence not in (_HERE, _LEFT) and not is_foreign:
        return None
    words = memoryview(page).cast("Q")

    def latest(offsets: range) -> range:
        at = max(offsets, key=lambda at: words[at // 8])
        return range(at, at + offsets.step, offsets.step)

    if is_foreign:
        calls = _foreign_calls(looks, latest(_FOREIGN_CALLS))
        transfers = _foreign_transfers(looks)
    else:
        calls = list(_calls(looks, latest(_OWN_CALLS), names, _site(looks, _FIRST_SITE)))
        site = _site(looks, _FIRST_SITE + _SITE.size)
        transfers = tuple(
            call
            for at in range(_FIRST_TRANSFER, _END, _CALL.size)
            if words[at // 8] & 3 in (_RUNNING, _FAILED)
            for call in _calls(looks, range(at, at + _CALL.size, _CALL.size), names, site)
        )
    first, end = (_FOREIGN_STATUS.size, _FIRST_CALL) if is_foreign else (_GROUP.size, _FIRST_SITE)
    said = _parsed(page[first:end])
    return RecordedGroup(
        name=str(said.get("name", "")),
        key=str(said.get("key", "")),
        members=str(said.get("members", "")),
        has_left=presence in (_LEFT, _FOREIGN_LEFT),
        queued=0 if is_foreign else queued,
        calls=tuple(calls),
        transfers=transfers,
        backend=str(said.get("backend", "rallypoint")),
        counts=_foreign_counts(page) if is_foreign else _counts(page),
    )


def _counts(page: bytes) -> GroupCounts | None:
    """The counters, each a word that only grows: its greatest value is its latest one."""
    if _GROUP.unpack_from(page)[1] != _COUNTS_VERSION:
        return None
    words = memoryview(page).cast("Q")
    calls = range(_FIRST_CALL // 8, _FIRST_TRANSFER // 8, _CALL.size // 8)
    transfers = range(_FIRST_TRANSFER // 8, _END // 8, _CALL.size // 8)
    latest = max(calls, key=words.__getitem__)
    bytes_of_transfers, waited_in_transfers = words[transfers[0] + 6], words[transfers[0] + 7]
    known = [at for at in transfers if words[at] >> 2]
    return GroupCounts(
        calls=words[latest] >> 2,
        transfers=max((words[at] >> 2 for at in known), default=0),
        bytes=max(words[at + 6] for at in calls) + bytes_of_transfers,
        waited_ns=max(words[at + 7] for at in calls) + waited_in_transfers,
        waited_squared_ns2=words[transfers[1] + 6] << _SQUARE_BITS,
        running_since_ns=words[latest + 1] if words[latest] & 3 == _RUNNING else 0,
        peers=tuple({name_peer(words[at + 4] & _ANY_RANK) for at in known}),
    )


def _site(looks: list[bytes], at: int) -> tuple[int, str, int | None]:
    """The number of the call that waits there, plus one; where; the tag that came instead."""
    (before, _), (number, text), (after, _) = (_SITE.unpack_from(look, at) for look in looks)
    if not before == number == after:
        return 0, "", None
    site, _, rest = text.partition(b"\0")
    tag = rest.partition(b"\0")[0]
    return number, site.decode(errors="replace"), int(tag) if tag else None


def _entries(
    looks: list[bytes], offsets: range, layout: struct.Struct
) -> list[tuple[int, int, tuple[Any, ...]]]:
    """The entries there, in the order of their numbers: the number, the last state, all fields.

    A call may have ended between the readings: its number must be the same; the last state counts.
    """
    found = []
    for at in offsets:
        (before, *_), fields, (after, *_) = (layout.unpack_from(look, at) for look in looks)
        if before >> 2 == fields[0] >> 2 == after >> 2 != 0:
            found.append(((after >> 2) - 1, after & 3, fields))
    return sorted(found, key=lambda entry: entry[0])


def _calls(
    looks: list[bytes], offsets: range, names: Names, site: tuple[int, str, int | None]
) -> tuple[RecordedCall, ...]:
    found = []
    for number, state, fields in _entries(looks, offsets, _CALL):
        word, since_ns, operation, dtype, operator, root, count, peer, _, ended_ns = fields
        found.append(
            RecordedCall(
                number=number,
                operation=name_operation(operation, names),
                state=STATES[state],
                since_ns=since_ns,
                dtype=names["dtypes"][dtype],
                operator=names["operators"][operator],
                root=root,
                count=count,
                peer=None if offsets.start < _FIRST_TRANSFER else name_peer(peer),
                site=site[1] if site[0] == number + 1 else "",
                came_tag=site[2] if site[0] == number + 1 else None,
                # An end left by an earlier call is before the beginning.
                ended_ns=ended_ns if STATES[word & 3] != "running" and ended_ns >= since_ns else 0,
            )
        )
    return tuple(found)


# Groups of other backends.


def _foreign_group(looks: list[bytes], *, has_left: bool) -> RecordedGroup:
    said = _parsed(looks[1][_FOREIGN_STATUS.size : _FIRST_CALL])
    calls = _foreign_calls(looks, _FOREIGN_CALLS)
    return RecordedGroup(
        name=str(said.get("name", "")),
        key=str(said.get("key", "")),
        members=str(said.get("members", "")),
        has_left=has_left,
        queued=sum(call.state == "running" for call in calls),
        calls=tuple(calls),
        transfers=_foreign_transfers(looks),
        counts=_foreign_counts(looks[1]),
        backend=str(said.get("backend", "")),
        is_complete=said.get("is_complete") is True,
    )


def _foreign_counts(pages: bytes) -> GroupCounts | None:
    if _GROUP.unpack_from(pages)[1] != _COUNTS_VERSION:
        return None
    _, _, _, _, enqueued, _, transfers = _FOREIGN_STATUS.unpack_from(pages)
    # Python's waits, and all as they were sampled, which are fewer where calls are short.
    waited_ns, squared = max(
        _FOREIGN_COUNTS.unpack_from(pages, call + _FOREIGN_COUNTS_AT) for call in _FOREIGN_CALLS[:2]
    )
    peers = {
        name_peer(peer)
        for at in range(_FIRST_FOREIGN_TRANSFER, len(pages), _FOREIGN_TRANSFER.size)
        for word, _, _, peer, *_ in [_FOREIGN_TRANSFER.unpack_from(pages, at)]
        if word >> 2
    }
    return GroupCounts(
        calls=enqueued,
        transfers=transfers,
        bytes=0,
        waited_ns=waited_ns,
        waited_squared_ns2=squared << _SQUARE_BITS,
        peers=tuple(peers),
    )


def _foreign_call(number: int, operation: str, state: str, since_ns: int) -> RecordedCall:
    """A call of which no more than that is known."""
    return RecordedCall(
        number=number,
        operation=operation,
        state=state,
        since_ns=since_ns,
        dtype="",
        operator="",
        root=-1,
        count=0,
    )


def _foreign_calls(looks: list[bytes], offsets: range) -> list[RecordedCall]:
    found = []
    _, _, looked_ns, changed_ns, enqueued, completed, begun = _FOREIGN_STATUS.unpack_from(looks[1])
    for number, state, fields in _entries(looks, offsets, _FOREIGN_CALL):
        _, since_ns, ended_ns, count_of_backend, operation, dtype, *shape, dimensions = fields
        is_done = state == _DONE or count_of_backend <= completed
        is_known = dimensions <= len(shape)
        sizes = tuple(shape[:dimensions]) if is_known else ()
        call = _foreign_call(number, _text(operation), "done" if is_done else "running", since_ns)
        found.append(
            call.__replace__(
                dtype=_DTYPES.get(_text(dtype), _text(dtype).lower()),
                count=prod(sizes) if is_known else 0,
                ended_ns=ended_ns if ended_ns >= since_ns else 0,
                shape=sizes,
            )
        )
    latest = enqueued - begun - 1  # the backend counts from 1, and counts both
    if looked_ns and latest > (found[-1].number if found else -1):
        state_now = "done" if completed >= enqueued else "running"
        found.append(_foreign_call(latest, "", state_now, changed_ns))
    return found


def _foreign_transfers(looks: list[bytes]) -> tuple[RecordedCall, ...]:
    found = []
    offsets = range(_FIRST_FOREIGN_TRANSFER, _FOREIGN_BYTES, _FOREIGN_TRANSFER.size)
    for number, state, fields in _entries(looks, offsets, _FOREIGN_TRANSFER):
        _, since_ns, count, peer, tag, sends, dtype = fields
        if state == _DONE:
            continue
        call = _foreign_call(number, "send" if sends else "recv", STATES[state], since_ns)
        found.append(
            call.__replace__(dtype=_text(dtype), root=tag, count=count, peer=name_peer(peer))
        )
    return tuple(found)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


# Steps.


def _steps_in(page: bytes, *, with_log: bool = True) -> RecordedSteps | None:
    view = memoryview(page)
    words, numbers, floats = view.cast("I"), view.cast("q"), view.cast("d")
    values, logged = words[layout.VALUES_AT], words[layout.LOGGED_AT] if with_log else 0
    source, total = words[layout.SOURCE_AT], numbers[layout.TOTAL_AT]
    is_valid = values <= layout.MOST_VALUES and logged <= layout.MOST_LOGGED
    if not is_valid or not 0 < source < len(layout.SOURCES):
        return None
    names = [
        _text(page[at : at + layout.NAME_BYTES])
        for at in range(
            layout.FIRST_NAME, layout.FIRST_NAME + values * layout.NAME_BYTES, layout.NAME_BYTES
        )
    ]
    times = view.cast("f")[layout.FIRST_LOGGED_S : layout.FIRST_LOGGED_S + logged]
    steps = numbers[layout.FIRST_LOGGED_STEP : layout.FIRST_LOGGED_STEP + logged]
    began_s, step = floats[layout.BEGAN_AT], numbers[layout.STEP_AT]
    log = [(began_s + time_s, done) for time_s, done in zip(times, steps, strict=True)]
    return RecordedSteps(
        step=step,
        total=total if total > 0 else None,
        at_ns=numbers[layout.TIME_AT],
        source=layout.SOURCES[source],
        values=dict(
            zip(names, floats[layout.FIRST_VALUE : layout.FIRST_VALUE + values], strict=True)
        ),
        step_s=layout.step_time_s(log),
        remaining_s=layout.remaining_s(log, step, total) if total > 0 else None,
        log=tuple(log),
    )
