"""Facts as JSON and back: frozen classes <-> objects, strictly checked by their annotations.

Nodes send them to each other, and an ended job leaves them in a file. Fields with their default
values are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import GenericAlias, NoneType, UnionType
from typing import TypeVar, get_args, get_type_hints

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record

T = TypeVar("T")
Hint = type | UnionType | GenericAlias  # of a field


def encode(value: object) -> object:
    """An object for `json.dumps`."""
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    kind: Hint = type(value)
    if not _is_frozen_class(kind):
        return value
    defaults = _defaults(kind)
    told = {name: getattr(value, name) for name in _hints(kind)}
    return {
        name: encode(each)
        for name, each in told.items()
        if name not in defaults or each != defaults[name]
    }


def decode(kind: type[T], data: object) -> T:
    """Read an object from `json.loads`.

    Raises:
        ControlMessageError: it is not of that kind, or of another version.
    """
    try:
        hint: Hint = kind
        value = _reader(hint)(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise ControlMessageError(f"these facts are invalid: {error}") from None
    assert isinstance(value, kind)
    return value


def _is_frozen_class(kind: Hint) -> bool:
    return isinstance(kind, type) and (issubclass(kind, Record) or is_dataclass(kind))


@cache
def _hints(kind: Hint) -> Mapping[str, Hint]:
    return {name: hint for name, hint in get_type_hints(kind).items() if name[0] != "_"}


@cache
def _defaults(kind: Hint) -> Mapping[str, object]:
    if isinstance(kind, type) and issubclass(kind, Record):
        return dict(kind._defaults)
    assert is_dataclass(kind)
    return {each.name: each.default for each in fields(kind) if each.default is not MISSING}


@cache
def _reader(hint: Hint) -> Callable[[object], object]:
    """A function that reads a value of that type, or raises TypeError."""
    if isinstance(hint, UnionType):
        (kind,) = [each for each in get_args(hint) if each is not NoneType]
        read = _reader(kind)
        return lambda data: None if data is None else read(data)
    if isinstance(hint, GenericAlias):
        item = _reader(get_args(hint)[0])
        return lambda data: tuple([item(each) for each in _list(data)])
    if _is_frozen_class(hint):
        return lambda data: _read_class(hint, data)
    return lambda data: _read_plain(hint, data)


def _read_class(kind: type, data: object) -> object:
    if not isinstance(data, dict):
        raise TypeError(f"{data!r:.60} is not a {kind.__name__}")
    hints = _hints(kind)
    unknown = data.keys() - hints.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: _reader(hints[name])(value) for name, value in data.items()})


def _read_plain(kind: type, data: object) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is not bool and isinstance(data, bool)):
        raise TypeError(f"{data!r:.60} is not a {kind.__name__}")
    return data


def _list(data: object) -> list[object]:
    if not isinstance(data, list):
        raise TypeError(f"{data!r:.60} is not a list")
    return data
