"""The workers' calls when something went wrong: their flight records, as text.

The memory is created here and passed to the workers, so that it outlives them
(docs/decisions/047-flight-record.md). base/flight_record.py knows its layout.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.wording import brief, name_ranks
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES, FLIGHT_RECORD_NAME

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.base.flight_record import Copied
    from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
    from rallypoint.base.recorded_steps import RecordedSteps

_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2  # a Python of old headers has no names
_MAGIC_BYTES = 4  # at the beginning of each record
_MOST_PARTS = 12  # the most parts of a line
_AGE_NS = 250_000_000  # records of other backends' groups may be this old
_MOST_LINES = 8
_MOST_SITES = 3


def _without_memfd(size: int, why: OSError | AttributeError) -> int:
    from rallypoint.base.errors import SystemCallError
    from rallypoint.base.memory_file import unnamed_file

    try:
        return unnamed_file(FLIGHT_RECORD_NAME, size, why)
    except SystemCallError:  # there is none then: nothing depends on it
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class FlightRecords:
    """The memory that the workers of one round on this node write; read once, at `seen_ns`."""

    def __init__(self, workers: int) -> None:
        self._copied: dict[int, Copied] = {}  # by rank
        self._groups: dict[int, tuple[RecordedGroup, ...]] = {}  # what was read in that
        self.seen_ns = 0
        self._is_memfd = True
        size = workers * FLIGHT_RECORD_BYTES
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._descriptor = os.memfd_create(FLIGHT_RECORD_NAME, flags)
            os.truncate(self._descriptor, size)
        except (OSError, AttributeError) as error:
            self._is_memfd = False
            self._descriptor = _without_memfd(size, error)
        try:  # only a memfd can be sealed
            # Unless it is, the guardian does not read it, as it would die of what is cut off.
            fcntl.fcntl(self._descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
        except OSError:
            return

    def fileno(self) -> int:
        """The descriptor for the workers."""
        return self._descriptor

    @property
    def descriptors(self) -> list[int]:
        """The descriptors for programs that inspect the workers; empty if it is closed."""
        return [self._descriptor] if self._descriptor >= 0 else []

    def make_room(self, slot: int) -> None:
        """Extend the memory to a slot in which a worker will write."""
        size = (slot + 1) * FLIGHT_RECORD_BYTES
        try:
            if os.fstat(self._descriptor).st_size >= size:
                return
            if self._is_memfd:
                os.truncate(self._descriptor, size)
            else:
                os.posix_fallocate(self._descriptor, 0, size)
        except OSError:  # nothing depends on it
            return

    def clear(self, slot: int) -> None:
        """Free a slot's memory after its worker has ended; another worker may use it."""
        import mmap

        offset = slot * FLIGHT_RECORD_BYTES
        try:
            if not self._is_memfd:  # its pages remain reserved
                os.pwrite(self._descriptor, bytes(FLIGHT_RECORD_BYTES), offset)
                return
            with mmap.mmap(self._descriptor, FLIGHT_RECORD_BYTES, offset=offset) as memory:
                memory.madvise(mmap.MADV_REMOVE)
        except (OSError, ValueError):
            return

    def forget(self) -> None:
        """Drop what was read, because its round is over."""
        self._copied, self._groups, self.seen_ns = {}, {}, 0

    def look(self, slots: Mapping[int, int]) -> bool:
        """Record the current calls of the workers (global rank -> slot); only once.

        Returns whether this was the first call.
        """
        if self.seen_ns or self._descriptor < 0:
            return False
        from rallypoint.base.flight_record import copy_record

        self.seen_ns = time.monotonic_ns()
        self._copied = {
            rank: copy_record(self._descriptor, slot * FLIGHT_RECORD_BYTES)
            for rank, slot in slots.items()
        }
        return True

    @property
    def has_groups(self) -> bool:
        """Whether any worker had been in a group by then."""
        return any(map(self.groups_of, self._copied))

    def groups_of(self, rank: int) -> tuple[RecordedGroup, ...]:
        """A worker's groups at that time."""
        if rank not in self._groups and rank in self._copied:
            from rallypoint.base.flight_record import groups_in

            self._groups[rank] = groups_in(self._copied[rank])
        return self._groups.get(rank, ())

    def lines(self, *, least_s: float = 0.0) -> list[str]:
        """The calls, folded: a line for each group in which a rank was in an operation.

        Empty if none had been in one for `least_s` seconds.
        """
        seen = {rank: self.groups_of(rank) for rank in self._copied}
        is_long = any(
            self.seen_ns - call.since_ns >= least_s * 1e9
            for groups in seen.values()
            for group in groups
            for call in _under_way(group, self.seen_ns)
        )
        return describe(seen, self.seen_ns) if is_long else []

    def events(self) -> list[dict[str, object]]:
        """The same for programs: an object for each operation in progress, and each last one."""
        return [
            {
                "rank": rank,
                "group": group.name,
                "members": group.members,
                "operation": call.operation,
                "number": call.number,
                "state": call.state,
                "dtype": call.dtype,
                "count": call.count,
                "since_s": round((self.seen_ns - call.since_ns) / 1e9, 3),
                "site": call.site or None,
                "queued": group.queued,
            }
            for rank in self._copied
            for group in self.groups_of(rank)
            if not group.has_left or _under_way(group, self.seen_ns)
            for call in (*group.calls[-1:], *group.transfers)
        ]

    def steps(self, slots: Iterable[int]) -> RecordedSteps | None:
        """How far the program is that writes these slots; None if that is not known."""
        offsets = [slot * FLIGHT_RECORD_BYTES for slot in slots]
        if self._descriptor < 0 or not any(
            any(os.pread(self._descriptor, _MAGIC_BYTES, offset)) for offset in offsets
        ):
            return None  # no worker has a record
        from rallypoint.base.flight_record import read_steps
        from rallypoint.base.recorded_steps import steps_of_job

        # Logs take ten times as long to read: only one is needed, while survivors wait.
        found = [read_steps(self._descriptor, offset, with_log=False) for offset in offsets]
        best = steps_of_job(found)
        return read_steps(self._descriptor, offsets[found.index(best)]) if best else None

    def close(self) -> None:
        """Free the memory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def describe(seen: Mapping[int, Sequence[RecordedGroup]], now_ns: int) -> list[str]:
    """A line for each group in which a rank is in an operation; `seen` is by global rank."""
    from rallypoint.base.recorded_call import current_groups

    by_key: dict[str, dict[int, RecordedGroup]] = {}
    for rank in sorted(seen):
        for group in current_groups(seen[rank]):
            by_key.setdefault(group.key, {})[rank] = group
    texts = (_describe_group(states, sorted(seen), now_ns) for states in by_key.values())
    lines = list(filter(None, texts))
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and in {len(lines) - _MOST_LINES} more groups"]
    return lines


def _describe_group(states: Mapping[int, RecordedGroup], here: Sequence[int], now_ns: int) -> str:
    folded: dict[str, list[tuple[int, RecordedCall]]] = {}
    latest = -1
    for rank, group in states.items():
        for call in _under_way(group, now_ns):
            folded.setdefault(_in_words(call, group), []).append((rank, call))
            if call.peer is None:
                latest = max(latest, call.number)
    if not folded:
        return ""
    parts = [_waiting(text, calls, now_ns) for text, calls in folded.items()]
    if latest >= 0:
        parts += _others(states, here, latest, now_ns)
    if len(parts) > _MOST_PARTS:
        parts = [*parts[:_MOST_PARTS], f"and {len(parts) - _MOST_PARTS} more"]
    return f"{next(iter(states.values())).name}: {'; '.join(parts)}"


def _under_way(group: RecordedGroup, now_ns: int) -> list[RecordedCall]:
    """The calls that a worker is in, or was in when they failed."""
    under_way = [call for call in (*group.calls[-1:], *group.transfers) if call.state != "done"]
    if group.backend != "rallypoint":  # its last call may have ended since
        under_way = [call for call in under_way if now_ns - call.since_ns > _AGE_NS]
    return [call for call in under_way if call.state == "failed" or not group.has_left]


def _in_words(call: RecordedCall, group: RecordedGroup) -> str:
    """``all_reduce #17 (1024 x float32, SUM)``: equal for ranks in the same call."""
    from rallypoint.base.collective import reduces, root_argument  # no launch pays for enums

    details = [f"{call.count} x {call.dtype}"] if call.count else []
    if call.peer is not None:
        direction = "to" if call.operation == "send" else "from"
        other = "any rank" if call.peer < 0 else _name(group, call.peer)
        return f"{call.operation} {direction} {other} ({', '.join([*details, f'tag {call.root}'])})"
    if reduces(call.operation) and call.operator:
        details.append(call.operator)
    if root_argument(call.operation) and call.root >= 0:
        details.append(f"{root_argument(call.operation)} {_name(group, call.root)}")
    text = ", ".join(details)
    if group.queued > 1:
        text += f"{'; ' if text else ''}{group.queued - 1} more queued"
    return _title(call) + (f" ({text})" if text else "")


def _title(call: RecordedCall) -> str:
    """``all_reduce #17``; of some calls of other backends only the number is known."""
    return f"{call.operation or 'call'} #{call.number}"


def _name(group: RecordedGroup, rank: int) -> str:
    known = group.global_rank(rank)
    return f"rank {rank} of the group" if known is None else f"rank {known}"


def _waiting(text: str, calls: Sequence[tuple[int, RecordedCall]], now_ns: int) -> str:
    """Which ranks are in a call, for how long, and where."""
    since_ns = min(call.since_ns for _, call in calls)
    sites = sorted({call.site for _, call in calls if call.site})
    at = f", at {', '.join(sites[:_MOST_SITES])}" if sites else ""
    ranks = name_ranks(sorted({rank for rank, _ in calls}))
    return f"{ranks} in {text} for {_seconds(since_ns, now_ns)}{at}"


def _others(
    states: Mapping[int, RecordedGroup], here: Sequence[int], latest: int, now_ns: int
) -> list[str]:
    """The state of the ranks that are not in the latest collective, if they are expected there."""
    one = next(iter(states.values()))
    by_reason: dict[str, list[int]] = {}
    for rank in here:
        if group := states.get(rank):
            reason = _reason_absent(group, latest, now_ns)
        else:
            reason = "never joined the group" if rank in one.ranks else ""
        if reason:
            by_reason.setdefault(reason, []).append(rank)
    return [f"{name_ranks(ranks)} {reason}" for reason, ranks in by_reason.items()]


def _reason_absent(group: RecordedGroup, latest: int, now_ns: int) -> str:
    last = group.calls[-1] if group.calls else None
    if last is not None and last.state != "done":
        return ""  # it has been listed already
    if group.has_left:
        return "had left the group" + (f" after {_title(last)}" if last else "")
    if last is None:
        return f"never entered #{latest}: has made no call yet"
    if last.number < latest:
        ago = _seconds(last.since_ns, now_ns)
        return f"never entered #{latest}: last done {_title(last)}, {ago} ago"
    return f"had done {_title(last)}"


def _seconds(since_ns: int, now_ns: int) -> str:
    return brief(max(0, now_ns - since_ns) / 1e9)
