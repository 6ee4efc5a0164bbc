"""Records behave as the dataclasses that they stand for: one of each, asked the same questions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rallypoint.base.record import Record


class Point(Record):
    x: int
    y: int = 2


@dataclass(frozen=True, slots=True)
class TwinPoint:
    x: int
    y: int = 2


class Circle(Record, kw_only=True, secret=("word",)):
    radius: int = 1
    word: str

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError("a radius is 0 or more")

    @property
    def diameter(self) -> int:
        return 2 * self.radius


class Disk(Circle, kw_only=True, secret=("color",)):
    color: str = "red"
    weight: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight < 0:
            raise ValueError("a weight is 0 or more")


def outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except (TypeError, AttributeError) as error:
        return TypeError if isinstance(error, TypeError) else AttributeError


QUESTIONS: dict[str, Callable[[Any], object]] = {
    "positions": lambda cls: (cls(1, 3).x, cls(1, 3).y),
    "a default": lambda cls: cls(1).y,
    "names": lambda cls: (cls(y=3, x=1).x, cls(1, y=4).y),
    "missing": lambda cls: cls(y=3),
    "too many": lambda cls: cls(1, 2, 3),
    "twice": lambda cls: cls(1, x=2),
    "unknown": lambda cls: cls(1, z=2),
    "unknown beside all": lambda cls: cls(1, 2, z=3),
    "equal": lambda cls: (cls(1) == cls(1, 2), cls(1) == cls(2), cls(1) != cls(1)),
    "not a tuple": lambda cls: cls(1) == (1, 2),
    "hash": lambda cls: len({cls(1), cls(1, 2), cls(2)}),
    "unhashable": lambda cls: hash(cls([])),
    "set": lambda cls: setattr(cls(1), "x", 2),
    "set another": lambda cls: setattr(cls(1), "z", 2),
    "delete": lambda cls: delattr(cls(1), "x"),
    "no dict": lambda cls: hasattr(cls(1), "__dict__"),
    "slots": lambda cls: cls.__slots__,
    "repr": lambda cls: repr(cls("a")).replace("Twin", ""),
    "order of patterns": lambda cls: cls.__match_args__,
    "pickle": lambda cls: pickle.loads(pickle.dumps(cls(1))) == cls(1),
    "copy": lambda cls: copy.deepcopy(cls([1])) == cls([1]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_record_answers_as_a_dataclass(question: str) -> None:
    ask = QUESTIONS[question]
    expected = outcome(lambda: ask(TwinPoint))
    if question in ("set another",):  # where Python 3.11's own answer is a TypeError, by mistake
        expected = AttributeError
    assert outcome(lambda: ask(Point)) == expected


def test_two_classes_are_never_equal() -> None:
    assert Point(1) != TwinPoint(1)


def test_keywords_only() -> None:
    assert Circle(word="w").radius == 1
    with pytest.raises(TypeError, match="without a name"):
        Circle(1, "w")  # type: ignore[misc]
    assert not hasattr(Circle, "__match_args__")


def test_what_must_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="radius"):
        Disk(radius=-1, word="w", weight=1)
    with pytest.raises(ValueError, match="weight"):
        Disk(word="w", weight=-1)


def test_a_subclass_has_its_parents_fields_too() -> None:
    disk = Disk(word="w", weight=5)
    assert (disk.radius, disk.word, disk.color, disk.weight) == (1, "w", "red", 5)
    assert disk.diameter == 2
    assert disk != Disk(word="other", weight=5)


def test_secrets_are_not_shown() -> None:
    assert repr(Circle(word="w")) == "Circle(radius=1)"
    assert repr(Disk(word="w", weight=5)) == "Disk(radius=1, weight=5)"


def test_replacing_makes_another() -> None:
    disk = Disk(word="w", weight=5)
    assert disk.__replace__(weight=6) == Disk(word="w", weight=6)
    assert disk.weight == 5
