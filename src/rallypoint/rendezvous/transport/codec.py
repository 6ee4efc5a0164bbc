"""Messages between agents as JSON: frozen records <-> bytes, strictly checked by their annotations.

    message:  [VERSION, KIND, FIELD, FIELD, ...]
    record in a message:   [FIELD, FIELD, ...]
    most beats, and their answers: bytes (heartbeat.py)

Whatever is not exactly a message of this version is refused: an agent must not act on half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from math import isfinite
from struct import error as StructError  # noqa: N812 - as exceptions are called
from types import GenericAlias, UnionType

from rallypoint.base.errors import ControlMessageError, InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.rendezvous.consensus import messages as protocol
from rallypoint.rendezvous.transport.heartbeat import ACK, BEAT, decode_pulse, encode_pulse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    R = TypeVar("R", bound=Record)

VERSION = 9


@cache
def _kinds() -> dict[str, type[Record]]:
    return {kind.__name__: kind for kind in protocol.Message.__args__}


def encode(message: Record) -> bytes:
    """Encode one message; other records can be encoded for storage in the same way."""
    pulse = encode_pulse(message)
    if pulse:
        return pulse
    import json

    kind = type(message)
    parts = [str(VERSION), f'"{kind.__name__}"']
    for part in _record_codec(kind)[0](message):
        if type(part) is not _Shared:
            parts.append(json.dumps(part, separators=(",", ":")))
            continue
        if not part.text:  # thousands are told about the same voters
            part.text = json.dumps(part, separators=(",", ":"))
        parts.append(part.text)
    return f"[{','.join(parts)}]".encode("ascii")


def decode(data: bytes) -> protocol.Message:
    """Read one message.

    Raises:
        ControlMessageError: it is not a message, or of another version.
    """
    return _decode(_kinds(), data)  # type: ignore[return-value]


def decode_record(kind: type[R], data: bytes) -> R:
    """Read a record of that kind.

    Raises:
        ControlMessageError: it is another one, or of another version.
    """
    return _decode({kind.__name__: kind}, data)  # type: ignore[return-value]


def _decode(kinds: Mapping[str, type[Record]], data: bytes) -> object:
    try:
        if data[:1] in (BEAT, ACK):
            return decode_pulse(data)
        import json

        version, name, *fields = json.loads(data)
        if version != VERSION:
            raise ControlMessageError(
                "an agent runs another version of rallypoint; install the same version on all "
                "nodes."
            )
        message = _record_codec(kinds[name])[1](fields)
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError, StructError),
        InvalidArgumentError,
    ) as error:
        if isinstance(error, ControlMessageError):
            raise
        raise ControlMessageError(f"an agent sent an invalid message: {data[:80]!r}.") from None
    return message


class _Shared(list[object]):
    """A list that the next message may contain as well, and its text, once that was needed."""

    text = ""


# A pair of functions for each kind of value: to JSON's types, and back.
_Codec = tuple[Callable[..., object], Callable[..., object]]


def _same(value: object) -> object:
    return value


@cache
def _record_codec(kind: type[Record]) -> tuple[Callable[..., list[object]], Callable[..., object]]:
    from typing import get_type_hints

    hints = get_type_hints(kind)
    names = kind._fields
    codecs = [_codec(hints[name]) for name in names]
    writers = [
        (name, None if codec[0] is _same else codec[0])
        for name, codec in zip(names, codecs, strict=True)
    ]
    readers = [codec[1] for codec in codecs]

    def write(record: Record) -> list[object]:
        return [
            getattr(record, name) if writer is None else writer(getattr(record, name))
            for name, writer in writers
        ]

    def read(values: object) -> object:
        if not isinstance(values, list) or len(values) != len(names):
            raise TypeError(values)
        return kind(
            **{
                name: reader(value)
                for name, reader, value in zip(names, readers, values, strict=True)
            }
        )

    return write, read


def _codec(hint: object) -> _Codec:
    if isinstance(hint, UnionType):
        (kind,) = [each for each in hint.__args__ if each is not type(None)]
        return _or_none(_codec(kind))
    if isinstance(hint, GenericAlias):  # tuple[X, ...]
        return _tuple_of(_codec(hint.__args__[0]))
    assert isinstance(hint, type)
    if issubclass(hint, Record):
        return _record_codec(hint)
    if issubclass(hint, Enum):
        return (lambda value: value.value), hint
    return _same, _exactly(hint)


def _exactly(kind: type) -> Callable[[object], object]:
    def read(value: object) -> object:
        if type(value) is not kind:  # a bool is no number here
            raise TypeError(value)
        return value

    def read_number(value: object) -> object:
        if type(value) is not float or not isfinite(value):
            raise TypeError(value)
        return value

    return read_number if kind is float else read


def _or_none(inner: _Codec) -> _Codec:
    write, read = inner
    return (
        lambda value: None if value is None else write(value),
        lambda value: None if value is None else read(value),
    )


def _tuple_of(inner: _Codec) -> _Codec:
    write, read = inner

    def read_all(values: object) -> tuple[object, ...]:
        if not isinstance(values, list):
            raise TypeError(values)
        return tuple([read(value) for value in values])

    last: tuple[object, _Shared] = ((), _Shared())

    def write_all(values: tuple[object, ...]) -> _Shared:
        nonlocal last
        if values is not last[0]:
            last = values, _Shared([write(value) for value in values])
        return last[1]

    return write_all, read_all
