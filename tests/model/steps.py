"""What the programs of a model are made of.

A program is a generator: it yields one step after the other and gets what each one read. It keeps
that in local variables, which are numbers or tuples of numbers: by these, and by the line that it
stands at, `explore` knows how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tests.model.code import Site


class ViolationError(Exception):
    """What must never happen."""


def check(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ViolationError(otherwise)


@dataclass(frozen=True, slots=True)
class Step:
    """Of a program. `at`: a location; each has a name."""

    at: str = ""
    site: Site | None = None
    value: int = 0
    expected: int = 0


class Load(Step):
    pass


class Store(Step):
    pass


class Add(Step):
    """Yields the value before."""


class CompareExchange(Step):
    """Yields the value before."""


class Fence(Step):
    pass


class Read(Step):
    """Of data that are no atomics."""


class Write(Step):
    pass


class Sleep(Step):
    """FUTEX_WAIT for another value than `expected`; with a `value`, it has a time-out."""


class Wake(Step):
    """FUTEX_WAKE of all."""


class IsDead(Step):
    """Whether the program of number `value` was killed, as a pidfd shows it."""


Looked: TypeAlias = tuple[str, Site, Callable[[int], bool]]  # where, and what is wanted


def equals(wanted: int) -> Callable[[int], bool]:
    return lambda value: value == wanted


def above(least: int) -> Callable[[int], bool]:
    return lambda value: value > least


@dataclass(frozen=True, slots=True)
class Look(Step):
    """Look at locations until one has what is wanted; yields its number.

    With a `value` it may give up, and then yields -1, when nothing else can happen any more.
    """

    options: tuple[Looked, ...] = ()


Program: TypeAlias = Generator[Step, int, None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Programs, what the locations hold at first, and who may be killed at any step."""

    name: str
    programs: tuple[tuple[str, Callable[[], Program]], ...]
    atomics: Mapping[str, int]
    data: tuple[str, ...] = ()
    mortal: frozenset[int] = frozenset()
