"""Heartbeats and their answers in bytes, exchanged by each member and its coordinator every second.

A coordinator of 10,000 members receives as many heartbeats each second, nearly all of members whose
workers run, or wait: those, and their answers, take a tenth of the time of codec.py's general form.
Their first byte distinguishes them from it.

    "B" numbers, key NUL candidate            "A" numbers, candidate
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite, isnan, nan
from struct import Struct

from rallypoint.rendezvous.consensus.messages import Ack, Ballot, Beat
from rallypoint.rendezvous.job.reports import NodeReport

# term, sent_at, stamp (NaN: none), number, round, ready, has_begun, is_over
BEAT_NUMBERS = Struct("!cQddqqQ??")
# term, sent_at, stamp, lease_s, number, waiting, is_stopping
ACK_NUMBERS = Struct("!cQdddqQ?")
BEAT, ACK = b"B", b"A"


def encode_pulse(message: object) -> bytes:
    """A heartbeat or an answer without further content; empty for all else."""
    if type(message) is Beat:
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


def decode_pulse(data: bytes) -> Beat | Ack:
    """Read one.

    Raises:
        ValueError, struct.error: it is not one.
    """
    if data[:1] == BEAT:
        _, term, sent_at, stamp, number, *known = BEAT_NUMBERS.unpack_from(data)
        key, candidate = data[BEAT_NUMBERS.size :].decode("ascii").split("\0")
        if not isfinite(sent_at) or (not isfinite(stamp) and not isnan(stamp)):
            raise ValueError(data)
        return Beat(
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
    return Ack(
        ballot=_ballot(term, data[ACK_NUMBERS.size :].decode("ascii")),
        sent_at=sent_at,
        stamp=stamp,
        lease_s=lease_s,
        number=number,
        waiting=waiting,
        is_stopping=stops,
    )


@lru_cache(maxsize=16)
def _ballot(term: int, candidate: str) -> Ballot:
    """Cached, because thousands follow the same one."""
    return Ballot(term, candidate)


@lru_cache(maxsize=16)
def _plain(round_number: int, ready: int, has_begun: bool, is_over: bool) -> NodeReport:
    """Nearly all are the same."""
    return NodeReport(round=round_number, ready=ready, has_begun=has_begun, is_over=is_over)
