"""Tables of typed flags: what an attribute is, and when its text is judged."""

from __future__ import annotations

import pytest

from rallypoint.cli.options import HELP, Flag, Options, UsageError, one_of, parse, text, whole


class Animals(Options, title="Animals"):
    cats = Flag("how many", "N", whole, 3, short="-c")
    dog_name = Flag("what it is called", "NAME", text, None)
    is_wild = Flag.switch("none of them is tame")


class Zoo(Animals):
    cats = Flag("how many lions", "N", whole, 1)
    size = Flag("of the zoo", "SIZE", one_of("small", "big", "huge"), "small")
    help = HELP


def read(*words: str) -> Zoo:
    return parse(words, Zoo, program="zoo")[0]


def test_a_flag_is_an_attribute() -> None:
    found = read("--dog-name", "Rex", "--cats=2", "--is_wild")
    assert (found.cats, found.dog_name, found.is_wild, found.size) == (2, "Rex", True, "small")
    assert "--cats" in found
    assert "--size" not in found
    with pytest.raises(KeyError):
        _ = "--siz" in found
    assert (Animals().cats, read().cats, read().is_wild) == (3, 1, False)


def test_a_table_has_the_rows_of_its_bases_and_may_have_others_for_them() -> None:
    assert [(group.title, len(group.flags)) for group in Zoo.groups] == [("Animals", 3), ("", 3)]
    assert list(Zoo.flags) == ["--cats", "--dog-name", "--is-wild", "--size", "--help"]
    assert Zoo.flags["--cats"].help == "how many lions"


def test_a_text_is_judged_when_it_is_asked_for() -> None:
    found = read("--cats", "many", "--size", "tiny")
    with pytest.raises(
        UsageError, match=r"^--cats is 'many'; it must be an integer of at least 0\.$"
    ):
        _ = found.cats
    with pytest.raises(UsageError, match=r"^--size is 'tiny'; it must be small, big or huge\.$"):
        _ = found.size


def test_braces_of_a_text_mean_nothing() -> None:
    with pytest.raises(UsageError, match=r"^--size is '\{name\}'; it must be"):
        _ = read("--size", "{name}").size


def test_words_give_the_same_command_line_again() -> None:
    found = read("--is-wild", "--cats", "2", "--dog-name=a b")
    assert found.words(without=()) == ["--cats=2", "--dog-name=a b", "--is-wild"]
    assert read(*found.words(without=["--cats"])).texts == {"--dog-name": "a b", "--is-wild": "1"}
