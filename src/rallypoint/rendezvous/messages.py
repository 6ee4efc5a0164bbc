"""Reports and orders between agents as JSON: frozen records <-> bytes, strictly checked.

Whatever is not exactly a message of this version is refused: an agent must not act on half of one.
"""

from __future__ import annotations

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record
from rallypoint.rendezvous.protocol import Agreement
from rallypoint.rendezvous.reports import (
    Broken,
    Ended,
    Finish,
    Join,
    Leave,
    Notice,
    Order,
    Outcome,
    Refuse,
    Report,
    Start,
    Stop,
    StopAsked,
)
from rallypoint.rendezvous.round import Endpoint, Member, Round, Seat
from rallypoint.rendezvous.verdict import Cause

VERSION = 2


class Opened(Record, kw_only=True):
    """A round begins, told to all members in the same words: each looks for its own seat."""

    round: Round
    because: str


Message = Report | Order | Opened | Agreement | Member | Join | Notice | Refuse

# Per record: its fields and their types; a list of one type is a tuple of such records.
_FIELDS: dict[type, dict[str, object]] = {
    Cause: {
        "rank": int,
        "node_rank": int,
        "text": str,
        "time_s": float,
        "is_echo": bool,
        "is_startup": bool,
    },
    Broken: {"node_rank": int, "round": int, "text": str},
    Ended: {
        "node_rank": int,
        "round": int,
        "succeeded": bool,
        "causes": [Cause],
        "unkillable": int,
        "was_cut_off": bool,
    },
    StopAsked: {"node_rank": int, "text": str},
    Leave: {"text": str},
    Notice: {"text": str},
    Refuse: {"key": str, "why": str},
    Join: {
        "run_id": str,
        "last_round": int,
        "min_nodes": int,
        "max_nodes": int,
        "member": Member,
        "attempt": int,
        "job": str,
        "running": int,
    },
    Member: {
        "key": str,
        "node_rank": int,
        "host": str,
        "local_world_size": int,
        "role": str,
        "wish": (int, None),
        "address": str,
        "port": int,
    },
    Endpoint: {"host": str, "port": int},
    Round: {"number": int, "members": [Member], "store": Endpoint},
    Seat: {
        "number": int,
        "store": Endpoint,
        "node_rank": int,
        "nodes": int,
        "local_world_size": int,
        "first_rank": int,
        "world_size": int,
        "first_role_rank": int,
        "role_world_size": int,
    },
    Opened: {"round": Round, "because": str},
    Start: {"seat": Seat, "because": str},
    Stop: {"round": int, "because": str, "at_once": bool},
    Finish: {"outcome": Outcome, "because": str, "culprit": (int, None), "what": str},
    Agreement: {
        "number": int,
        "members": [Member],
        "round": int,
        "runs": bool,
        "restarts": int,
        "because": str,
        "host": str,
        "finish": (Finish, None),
    },
}
REPORTS = (Broken, Ended, StopAsked, Leave)
ORDERS = (Start, Stop, Finish)
_MESSAGES = {
    kind.__name__: kind
    for kind in (*REPORTS, *ORDERS, Opened, Agreement, Member, Join, Notice, Refuse)
}


def encode(message: Message) -> bytes:
    """One message."""
    import json

    body = {"v": VERSION, "kind": type(message).__name__, **_plain(message)}
    return json.dumps(body).encode("ascii")


def decode(data: bytes) -> Message:
    """Read one message.

    Raises:
        ControlMessageError: it is none, or one of another version.
    """
    import json

    try:
        fields = json.loads(data)
        if fields.pop("v") != VERSION:
            raise ControlMessageError(
                "an agent of another version of rallypoint takes part; install the same everywhere."
            )
        message = _record(_MESSAGES[fields.pop("kind")], fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ControlMessageError):
            raise
        raise ControlMessageError(f"an agent sent what is no message: {data[:80]!r}.") from None
    assert isinstance(message, Message)
    return message


def _plain(record: object) -> dict[str, object]:
    return {name: _plain_value(getattr(record, name)) for name in _FIELDS[type(record)]}


def _plain_value(value: object) -> object:
    if isinstance(value, Outcome):
        return value.value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return _plain(value) if type(value) in _FIELDS else value


def _record(kind: type, fields: dict[str, object]) -> object:
    expected = _FIELDS[kind]
    if fields.keys() != expected.keys():
        raise TypeError(kind)
    values = {name: _value(expected[name], value) for name, value in fields.items()}
    return kind(**values)


def _value(expected: object, value: object) -> object:
    if expected is Outcome:
        return Outcome(value)
    if isinstance(expected, list):
        if not isinstance(value, list):
            raise TypeError(value)
        return tuple(_value(expected[0], each) for each in value)
    if isinstance(expected, tuple):
        return None if value is None else _value(expected[0], value)
    if isinstance(expected, type) and expected in _FIELDS:
        if not isinstance(value, dict):
            raise TypeError(value)
        return _record(expected, value)
    if type(value) is not expected:  # a bool is no number here
        raise TypeError(value)
    return value
