"""Records as JSON and back, strictly checked by their annotations.

    by name        {"rank": 1, "host": "a"}    for files and programs; defaults may be omitted
    by position    [1, "a"]                    for messages of which thousands are sent

A record is a `Record` or a dataclass. Its fields are plain values, enums (written as their names),
other records, tuples or mappings of these, or one of these or None; of type `object`, any JSON.
Data that differ in any way from the annotations are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from math import isfinite
from types import GenericAlias, NoneType, UnionType

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

TOO_LARGE = 1 << 53  # what follows can still be packed in 64 bits
_PLAIN = frozenset({str, int, float, bool, NoneType})
_Reader = Callable[[object], object]
_Hint = type | UnionType | GenericAlias  # of a field


def to_json(value: object, *, with_defaults: bool = False) -> object:
    """Records for `json.dumps`, by name; fields that have their defaults only `with_defaults`."""

    def write(value: object) -> object:
        kind: _Hint = type(value)
        fields = _fields(kind)
        if fields is None:
            return _write_plain(value, write)
        told = {name: getattr(value, name) for name in fields}
        return {
            name: write(each)
            for name, each in told.items()
            if with_defaults or each != fields[name]
        }

    return write(value)


def to_row(value: object) -> object:
    """A record, or a field of one, for `json.dumps`: by position."""
    kind: _Hint = type(value)
    if kind in _PLAIN:
        return value
    fields = _fields(kind)
    if fields is None:
        return _write_plain(value, to_row)
    values = [getattr(value, name) for name in fields]
    return [each if type(each) in _PLAIN else to_row(each) for each in values]


def from_json(kind: type[T], data: object) -> T:
    """Read what `to_json` gave, from `json.loads`."""
    return _read(kind, data, by_position=False)


def from_row(kind: type[T], data: object) -> T:
    """Read what `to_row` gave, as `from_json`, but numbers must be exactly of their types, and
    integers below `TOO_LARGE`, either way.
    """
    return _read(kind, data, by_position=True)


def _read(kind: type[T], data: object, *, by_position: bool) -> T:
    hint: _Hint = kind
    try:
        value = _reader(hint, by_position)(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ControlMessageError(f"these facts are invalid: {error}") from None
    assert isinstance(value, kind)
    return value


def _write_plain(value: object, write: Callable[[object], object]) -> object:
    if isinstance(value, (tuple, list)):
        return [write(each) for each in value]
    if isinstance(value, Mapping):
        return {key: write(each) for key, each in value.items()}
    return value.name if isinstance(value, Enum) else value


@cache
def _fields(kind: _Hint) -> Mapping[str, object] | None:
    """The fields of a record and their defaults (...: it has none); None: it is not a record."""
    if isinstance(kind, type) and issubclass(kind, Record):
        return {name: kind._defaults.get(name, ...) for name in kind._fields}
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is None:
        return None
    from dataclasses import MISSING

    return {name: ... if each.default is MISSING else each.default for name, each in fields.items()}


@cache
def _reader(hint: _Hint, by_position: bool) -> _Reader:
    """A function that reads a value of that type, or raises TypeError or ValueError."""
    if isinstance(hint, UnionType):
        (kind,) = [each for each in hint.__args__ if each is not NoneType]
        read_it = _reader(kind, by_position)
        return lambda data: None if data is None else read_it(data)
    if isinstance(hint, GenericAlias):
        readers = [_reader(each, by_position) for each in hint.__args__ if each is not ...]
        if hint.__origin__ is not tuple:
            return _mapping_reader(hint.__args__[0], readers[1])
        return _list_reader(readers, is_open=hint.__args__[-1] is ...)
    make = _plain_reader if _fields(hint) is None else _record_reader
    return make(hint, by_position=by_position)


def _plain_reader(kind: type, *, by_position: bool) -> _Reader:
    names: Mapping[str, object] = getattr(kind, "__members__", {})  # of an enum
    checks: dict[type, Callable[..., bool]] = {float: isfinite}
    if by_position:
        checks[int] = _is_small
    is_fit = checks.get(kind)

    def read(data: object) -> object:
        if type(data) is kind and (is_fit is None or is_fit(data)):
            return data  # a bool is not an int here
        if kind is float and type(data) is int and not by_position:
            return float(data)
        if type(data) is str and data in names:
            return names[data]
        raise _refusal(data, kind.__name__)

    return (lambda data: data) if kind is object else read


def _is_small(number: int) -> bool:
    return -TOO_LARGE < number < TOO_LARGE


def _list_reader(readers: list[_Reader], *, is_open: bool) -> _Reader:
    def read(data: object) -> object:
        if type(data) is not list:
            raise _refusal(data, "list")
        each = readers * len(data) if is_open else readers
        return tuple([read_it(item) for read_it, item in zip(each, data, strict=True)])

    return read


def _mapping_reader(key: type, read: _Reader) -> _Reader:
    def read_mapping(data: object) -> object:
        if type(data) is not dict:
            raise _refusal(data, "mapping")
        return {key(name): read(each) for name, each in data.items()}  # JSON's names are texts

    return read_mapping


def _record_reader(kind: type, *, by_position: bool) -> _Reader:
    def read_object(data: object) -> object:
        if type(data) is not dict:
            raise _refusal(data, kind.__name__)
        readers = _readers(kind, False)
        if unknown := data.keys() - readers.keys():
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: readers[name](each) for name, each in data.items()})

    def read_row(data: object) -> object:
        readers = _readers(kind, True)
        if type(data) is not list or len(data) != len(readers):
            raise _refusal(data, kind.__name__)
        pairs = zip(readers.items(), data, strict=True)
        return kind(**{name: read(each) for (name, read), each in pairs})

    return read_row if by_position else read_object


@cache
def _readers(kind: type, by_position: bool) -> Mapping[str, _Reader]:
    """By field. They are made with the first record, because it may contain others of its kind."""
    from typing import get_type_hints

    hints = get_type_hints(kind)
    return {name: _reader(hints[name], by_position) for name in _fields(kind) or ()}


def _refusal(data: object, kind: str) -> TypeError:
    return TypeError(f"{data!r:.60} is not a {kind}")
