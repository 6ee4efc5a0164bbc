"""Messages between agents as bytes: records of consensus/messages.py and others, and back.

    message:           JSON: [VERSION, KIND, FIELD, FIELD, ...]; a record in it: [FIELD, FIELD, ...]
    most heartbeats:   "B" numbers, key NUL candidate
    most answers:      "A" numbers, candidate

A coordinator of 10,000 members receives as many heartbeats each second, nearly all of members whose
workers run, or wait: those, and their answers, take a tenth of the time of JSON.

Whatever is not exactly a message of this version is refused: an agent must not act on half of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from math import isfinite, isnan, nan
from struct import Struct
from struct import error as StructError  # noqa: N812 - as exceptions are called

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.json_records import TOO_LARGE, from_row, to_row
from rallypoint.base.record import Record
from rallypoint.rendezvous.consensus import messages as protocol
from rallypoint.rendezvous.consensus.messages import Ack, Ballot, Heartbeat
from rallypoint.rendezvous.job.reports import NodeReport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    R = TypeVar("R", bound=Record)

VERSION = 10
# term, sent_at, stamp (NaN: none), number, round, ready, has_begun, is_over
BEAT_NUMBERS = Struct("!cQddqqQ??")
# term, sent_at, stamp, lease_s, number, waiting, is_stopping
ACK_NUMBERS = Struct("!cQdddqQ?")
BEAT, ACK = b"B", b"A"
# The latest lists in messages, by kind and field, as JSON: thousands of messages list the same
# voters.
_lists: dict[tuple[type, str], tuple[object, str]] = {}


class OtherVersionError(ControlMessageError):
    """A message of another version of this protocol.

    Attributes:
        is_refusal: its sender refuses this agent. The name of that message is the same in all
            versions.
    """

    def __init__(self, *, is_refusal: bool) -> None:
        super().__init__(
            "an agent runs another version of rallypoint; install the same version on all nodes."
        )
        self.is_refusal = is_refusal


def encode(message: Record) -> bytes:
    """Encode one message; other records can be encoded for storage in the same way."""
    pulse = _encode_pulse(message)
    if pulse:
        return pulse
    kind = type(message)
    parts = [f'[{VERSION},"{kind.__name__}"']
    parts += [_text(kind, name, getattr(message, name)) for name in kind._fields]
    return f"{','.join(parts)}]".encode("ascii")


def decode(data: bytes) -> protocol.Message:
    """Read one message, or raise ControlMessageError."""
    if data[:1] not in (BEAT, ACK):
        return decode_any(_kinds(), data)  # type: ignore[return-value]
    try:
        return _decode_pulse(data)
    except (ValueError, StructError) as error:
        raise _invalid(data, error) from None


def decode_record(kind: type[R], data: bytes) -> R:
    """Read a record of that kind, or raise ControlMessageError."""
    return decode_any({kind.__name__: kind}, data)


def decode_any(kinds: Mapping[str, type[R]], data: bytes) -> R:
    """Read a record of one of these kinds, which are given by their names."""
    import json

    try:
        version, name, *fields = json.loads(data)
        if version == VERSION:
            return from_row(kinds[name], fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid(data, error) from None
    raise OtherVersionError(is_refusal=name == "Refuse")


@cache
def _kinds() -> dict[str, type[Record]]:
    return {kind.__name__: kind for kind in protocol.Message.__args__}


def _invalid(data: bytes, error: Exception) -> ControlMessageError:
    return ControlMessageError(f"an agent sent an invalid message: {data[:80]!r} ({error!s:.200}).")


def _text(kind: type, name: str, value: object) -> str:
    import json

    known = _lists.get((kind, name)) if type(value) is tuple else None
    if known is not None and known[0] is value:
        return known[1]
    text = json.dumps(to_row(value), separators=(",", ":"))
    if type(value) is tuple:
        _lists[kind, name] = value, text
    return text


def _encode_pulse(message: object) -> bytes:
    """A heartbeat or an answer without further content; empty for all else."""
    if type(message) is Heartbeat:
        report, ballot = message.report, message.ballot
        known = (report.round, report.ready, report.has_begun, report.is_over)
        if report != _plain(*known):
            return b""
        stamp = nan if message.stamp is None else message.stamp
        numbers = (ballot.term, message.sent_at, stamp, message.number)
        names = f"{message.key}\0{ballot.candidate}".encode("ascii")
        return BEAT_NUMBERS.pack(BEAT, *numbers, *known) + names
    if type(message) is Ack and not message.done:
        times = (message.sent_at, message.stamp, message.lease_s)
        counts = (message.number, message.waiting)
        head = ACK_NUMBERS.pack(ACK, message.ballot.term, *times, *counts, message.is_stopping)
        return head + message.ballot.candidate.encode("ascii")
    return b""


def _decode_pulse(data: bytes) -> Heartbeat | Ack:
    """Read one, or raise ValueError or struct.error."""
    if data[:1] == BEAT:
        _, term, sent_at, stamp, number, *known = BEAT_NUMBERS.unpack_from(data)
        key, candidate = data[BEAT_NUMBERS.size :].decode("ascii").split("\0")
        if not isfinite(sent_at) or (not isfinite(stamp) and not isnan(stamp)):
            raise ValueError(data)
        _check(term, number, *known)
        return Heartbeat(
            key=key,
            ballot=_ballot(term, candidate),
            sent_at=sent_at,
            stamp=None if isnan(stamp) else stamp,
            number=number,
            report=_plain(*known),
        )
    _, term, sent_at, stamp, lease_s, number, waiting, stops = ACK_NUMBERS.unpack_from(data)
    if not isfinite(sent_at + stamp + lease_s):
        raise ValueError(data)
    _check(term, number, waiting)
    return Ack(
        ballot=_ballot(term, data[ACK_NUMBERS.size :].decode("ascii")),
        sent_at=sent_at,
        stamp=stamp,
        lease_s=lease_s,
        number=number,
        waiting=waiting,
        is_stopping=stops,
    )


def _check(*numbers: int) -> None:
    if max(map(abs, numbers)) >= TOO_LARGE:
        raise ValueError(numbers)


@lru_cache(maxsize=16)
def _ballot(term: int, candidate: str) -> Ballot:
    """Cached, because thousands follow the same one."""
    return Ballot(term, candidate)


@lru_cache(maxsize=16)
def _plain(round_number: int, ready: int, has_begun: bool, is_over: bool) -> NodeReport:
    """Nearly all are the same."""
    return NodeReport(round=round_number, ready=ready, has_begun=has_begun, is_over=is_over)
