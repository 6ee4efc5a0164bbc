"""Converts facts to JSON and back: each dataclass by its own annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def pack(value: object) -> object:
    """Convert a value to what json.dumps accepts."""
    if dataclasses.is_dataclass(value):
        return {each.name: pack(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): pack(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [pack(each) for each in value]
    return value


def unpack(kind: type[T], value: object) -> T:
    """Convert back: a dataclass of tuples, mappings, enums, dataclasses and plain values."""
    found = _unpack(kind, value)
    if not isinstance(found, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return found


def _unpack(kind: object, value: object) -> object:
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        return kind(**{name: _unpack(hints[name], each) for name, each in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[str(value)]
    if origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(_unpack(each, item) for each, item in zip(kinds, value, strict=True))
    if origin is Mapping and isinstance(value, Mapping):
        return {_unpack(inner[0], key): _unpack(inner[1], each) for key, each in value.items()}
    if kind in (int, float) and isinstance(value, (int, float, str)):
        return int(value) if kind is int else float(value)
    is_it = origin not in (tuple, Mapping) and any(
        isinstance(value, each) for each in (inner or (kind,)) if isinstance(each, type)
    )  # a union, as in int | None, or a plain type
    if not is_it:
        raise TypeError(f"{value!r} is not a {kind}")
    return value
