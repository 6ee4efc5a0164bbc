"""Messages between an agent and one worker: bytes <-> frozen records, and nothing else.

They travel over a SOCK_SEQPACKET socket, one JSON object per packet, at most MAX_MESSAGE_BYTES
long. The object's "v" is the version, "kind" the kind. Unknown kinds and unknown keys are ignored
(`decode` returns Unknown), so that either end may be newer. "v" changes only if the meaning of
existing messages changes; another version is refused.
"""

from __future__ import annotations

from enum import IntEnum

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Any


class Stage(IntEnum):
    """Within a round, a later stage is a higher number.

        SPARE --> READY --> ASSIGNED --> JOINED --> SYNCHRONIZED --> LEAVING --> LEFT
                               ^------------------------------------------'

    SPARE: on standby, without a place. READY: it waits for one. ASSIGNED: it knows its place in a
    round; a worker that was started with a rank begins so. JOINED: it has formed the round's group.
    SYNCHRONIZED: all of that group have the state. LEAVING: it has done its last update, and asks
    its agent whether others still need it: a place in a newer round means yes. LEFT: they do not.
    """

    SPARE = 0
    READY = 1
    ASSIGNED = 2
    JOINED = 3
    SYNCHRONIZED = 4
    LEAVING = 5
    LEFT = 6


_MOVES: dict[Stage, tuple[Stage, ...]] = {
    Stage.SPARE: (Stage.READY,),
    Stage.READY: (Stage.ASSIGNED,),
    Stage.ASSIGNED: (Stage.ASSIGNED, Stage.JOINED),
    Stage.JOINED: (Stage.ASSIGNED, Stage.JOINED, Stage.SYNCHRONIZED),
    Stage.SYNCHRONIZED: (Stage.ASSIGNED, Stage.JOINED, Stage.SYNCHRONIZED, Stage.LEAVING),
    Stage.LEAVING: (Stage.ASSIGNED, Stage.LEFT),
    Stage.LEFT: (Stage.JOINED,),  # in another function under elastic.run
}


def move(before: Stage, to: Stage) -> Stage:
    """The stage after that one."""
    if to not in _MOVES[before]:
        raise RuntimeError(f"a worker cannot go from {before.name} to {to.name}")
    return to


VERSION = 1
# What every healthy worker sends is read without the 6 ms that importing json takes.
_HELLO = b'{"v": 1, "kind": "hello", "pid": '
MAX_MESSAGE_BYTES = 64 << 10
_MAX_TYPE_CHARS = 256
_MAX_TIME_S = 253_402_300_800.0  # the year 10000, the first that datetime cannot print
# Tried from the left: a character can take twelve bytes of JSON.
_MAX_TEXT_CHARS = (48 << 10, 16 << 10, 4 << 10, 1 << 10)


class Hello(Record):
    """Worker to agent: a Python interpreter has started that reports its errors."""

    pid: int


class WorkerError(Record):
    """Worker to agent: an uncaught exception is ending the worker.

    Attributes:
        type: qualified name of the exception's class, e.g. ``"ValueError"``.
        time_s: when it was raised to the top, seconds since the epoch.
        is_secondary: it, or what it was raised from, only reports another rank's death.
        is_startup: it came before the program's own work: a missing file or module, bad syntax.
    """

    type: str
    message: str
    traceback: str
    time_s: float
    is_secondary: bool = False
    is_startup: bool = False


class LongWait(Record):
    """Worker to agent: a call has been waited for too long, or that one has now been done.

    native/engine/long_wait.cc writes it.
    """

    seconds: float
    is_over: bool = False


class CallTimedOut(Record):
    """Worker to agent: a call timed out, but the worker could continue without the rank that it
    waited for.

    Attributes:
        culprit: that rank, in this round.
        ranks: those of the call; empty: all.
    """

    round: int
    culprit: int
    ranks: tuple[int, ...] = ()


class LostContact(Record):
    """Worker to agent: it cannot reach a rank, and has not heard that this one was lost.

    Attributes:
        culprit: that rank, in this round; -1: it does not know which.
        had_formed: the group of this round had formed.
    """

    round: int
    culprit: int
    had_formed: bool


class WorkerReport(Record):
    """Worker to agent: how far it is.

    Attributes:
        round: the one to which `stage` belongs; -1: none yet.
        is_elastic: whether it continues in the next round when other workers are lost.
        begins_again: SYNCHRONIZED: it does a step again that it had begun before others were lost.
    """

    stage: Stage
    round: int = -1
    is_elastic: bool = False
    begins_again: bool = False

    def has(self, stage: Stage, number: int) -> bool:
        """Whether it has come so far in that round, or on to a newer one."""
        return (self.round, self.stage) >= (number, stage)


class PreloadReport(Record):
    """Template to agent: the module that it imports, or cannot fork with, or that it is ready.

    Attributes:
        because: what the module does, as the end of a sentence; empty: nothing that matters.
    """

    module: str
    because: str = ""
    is_ready: bool = False


class Place(Record):
    """Agent to worker: its place in a round, as environment variables.

    Attributes:
        is_urgent: a worker or the contact was lost: calls of the round before cannot succeed any
            more.
    """

    round: int
    environ: dict[str, str]
    is_urgent: bool = False


class Kept(Record):
    """Agent to worker: that round is over, and the worker will be in the next one."""

    round: int


class Released(Record):
    """Agent to worker: it may stop being elastic, as it has no place in a newer round."""


class UnknownMessage(Record):
    """A message of a kind that this version does not know; to be passed over."""

    kind: str


FromWorker = (
    Hello | WorkerError | LongWait | CallTimedOut | LostContact | WorkerReport | PreloadReport
)
FromAgent = Place | Kept | Released
Known = FromWorker | FromAgent
Message = Known | UnknownMessage


_KINDS: dict[str, type[Known]] = {
    "hello": Hello,
    "error": WorkerError,
    "wait": LongWait,
    "timed out": CallTimedOut,
    "lost contact": LostContact,
    "report": WorkerReport,
    "preload": PreloadReport,
    "place": Place,
    "kept": Kept,
    "released": Released,
}
_NAMES_OF_KINDS = {record: kind for kind, record in _KINDS.items()}
_KEYS = {"time_s": "time"}  # of fields that the object calls otherwise


def encode(message: Known) -> bytes:
    """One packet of at most MAX_MESSAGE_BYTES; long texts lose their middle."""
    import json

    fields = {_KEYS.get(name, name): getattr(message, name) for name in type(message)._fields}
    head = {"v": VERSION, "kind": _NAMES_OF_KINDS[type(message)]}
    for limit in _MAX_TEXT_CHARS:
        if isinstance(message, WorkerError):
            fields["type"] = shorten(message.type, _MAX_TYPE_CHARS)
            fields["message"] = shorten(message.message, min(limit, 4 << 10))
            fields["traceback"] = shorten(message.traceback, limit)
        elif isinstance(message, WorkerReport):
            fields["stage"] = message.stage.name
        packet = json.dumps({**head, **fields}).encode("ascii")
        if len(packet) <= MAX_MESSAGE_BYTES:
            break
    return packet


def decode(packet: bytes) -> Message:
    """Read one packet."""
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ControlMessageError(f"a control message has {len(packet)} bytes; refused it.")
    if packet.startswith(_HELLO) and packet[len(_HELLO) : -1].isdigit() and len(packet) < 64:
        return Hello(int(packet[len(_HELLO) : -1]))
    import json

    try:
        fields = json.loads(packet)
    except (ValueError, RecursionError):
        raise ControlMessageError("a control message is not JSON; refused it.") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ControlMessageError("a control message is not an object with a kind; refused it.")
    if fields.get("v") != VERSION:
        raise ControlMessageError(
            f"a control message has version {fields.get('v')!r:.40}, but this is version {VERSION};"
            " launch the worker with the rallypoint that is installed in its environment."
        )
    record = _KINDS.get(fields["kind"])
    if record is None:
        return UnknownMessage(fields["kind"][:64])
    values: dict[str, Any] = {}
    try:
        for name, hint in record.__annotations__.items():
            values[name] = _read(hint, fields.get(_KEYS.get(name, name)))
    except ValueError:
        raise ControlMessageError(
            f"a control message of kind {fields['kind']!r} lacks fields; refused it."
        ) from None
    return record(**values)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, from both its ends: where it began and what it says."""
    if len(text) <= limit:
        return text
    mark = f"\n... {len(text) - limit} characters left out ...\n"
    kept = max(0, limit - len(mark))
    head = kept // 2
    return text[:head] + mark + text[len(text) - (kept - head) :]


def _read(hint: str, value: object) -> object:
    """The value of a field by its annotation; None: the field is missing."""
    match hint, value:
        case "bool", _:
            return value is True
        case ("int", int()) | ("str", str()):
            return value
        case "float", int() | float() if 0 <= value < _MAX_TIME_S:
            return float(value)
        case "Stage", str() if value in Stage.__members__:
            return Stage[value]
        case "tuple[int, ...]", list():
            return tuple([each for each in value if type(each) is int])
        case "dict[str, str]", dict() if all(isinstance(each, str) for each in value.values()):
            return value
    raise ValueError(hint)
