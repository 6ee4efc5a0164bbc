"""Frozen records: the part of dataclasses that launcher and ranks need, without its cost at start.

`dataclasses` imports a reader of source text, and generates and compiles code for each class: a
fifth of the launcher's start (docs/decisions/015-records.md). Here all classes share the same
methods. To type checkers a `Record` is a frozen dataclass with slots. Use real dataclasses where
neither a launch nor every rank imports the module.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[type], type]:
        """A word to type checkers only; importing typing would cost 4 ms."""
        return lambda cls: cls


class _RecordType(type):
    """Makes a class's annotations its slots, and keeps their defaults aside."""

    _fields: tuple[str, ...]
    _defaults: dict[str, Any]
    _puts: tuple[tuple[str, Callable[[object, object], None]], ...]  # how to set each, frozen

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **how: object
    ) -> _RecordType:
        own = tuple(namespace.get("__annotations__", ()))
        defaults = {field: namespace.pop(field) for field in own if field in namespace}
        parent = bases[0] if bases else None
        namespace["__slots__"] = own
        namespace["_fields"] = (*getattr(parent, "_fields", ()), *own)
        namespace["_defaults"] = {**getattr(parent, "_defaults", {}), **defaults}
        cls = super().__new__(mcs, name, bases, namespace, **how)
        puts = [(field, vars(cls)[field].__set__) for field in own]
        cls._puts = (*getattr(parent, "_puts", ()), *puts)
        return cls


@dataclass_transform(frozen_default=True)
class Record(metaclass=_RecordType):
    """The base of all: ``class Point(Record, kw_only=True): x: int; y: int = 0``.

    Defaults are shared, and so must not change. What `secret` names is left out of the repr.
    """

    _kw_only = False
    _secret = frozenset[str]()

    def __init_subclass__(cls, *, kw_only: bool = False, secret: tuple[str, ...] = ()) -> None:
        cls._kw_only = kw_only
        cls._secret = cls._secret.union(secret)
        if not kw_only:
            setattr(cls, "__match_args__", cls._fields)  # noqa: B010 - not for type checkers

    def __init__(self, *values: object, **named: object) -> None:
        cls = type(self)
        if values:
            cls._name(values, named)
        if len(named) != len(cls._fields):
            named = {**cls._defaults, **named}
        try:
            for field, put in cls._puts:
                put(self, named[field])
        except KeyError:
            raise TypeError(f"{cls.__name__} needs {field}") from None
        if len(named) != len(cls._fields):
            unknown = ", ".join(sorted(named.keys() - set(cls._fields)))
            raise TypeError(f"{cls.__name__} has no {unknown}")
        self.__post_init__()

    @classmethod
    def _name(cls, values: tuple[object, ...], named: dict[str, Any]) -> None:
        """Add the values given by position."""
        if len(values) > (0 if cls._kw_only else len(cls._fields)):
            raise TypeError(f"{cls.__name__} takes no {len(values)} arguments without a name")
        for field, value in zip(cls._fields, values, strict=False):
            if field in named:
                raise TypeError(f"{cls.__name__} got {field} twice")
            named[field] = value

    def __post_init__(self) -> None:
        """For subclasses: refuse what must not be."""

    def _values(self) -> tuple[object, ...]:
        return tuple([getattr(self, field) for field in type(self)._fields])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Record) or type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        cls = type(self)
        shown = [field for field in cls._fields if field not in cls._secret]
        return f"{cls.__name__}({', '.join(f'{each}={getattr(self, each)!r}' for each in shown)})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")

    def __replace__(self, **named: object) -> Self:
        return type(self)(**{**dict(zip(type(self)._fields, self._values(), strict=True)), **named})

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self._values())


def _restore(cls: type[Record], values: tuple[object, ...]) -> Record:
    return cls(**dict(zip(cls._fields, values, strict=True)))
