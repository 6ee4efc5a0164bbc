"""Parses a command line by a table of flags. It stops at the first word that is not a flag: from
there on, everything belongs to the user's program, word for word.

A table is a class with one row for each flag, and its instances are the command lines:

    class RunOptions(Options):
        max_restarts = Flag("how many times", "N", whole, 0)    # --max-restarts N

    options.max_restarts    an int, read when it is asked for: what has no effect is not judged

This is not argparse, because argparse would find flags among the program's own arguments, accepts
abbreviations, and costs 8 ms of each launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from rallypoint.base.errors import CallerError, RallypointError
from rallypoint.base.record import Record
from rallypoint.base.wording import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar, Generic, TypeVar

    T = TypeVar("T")
    T_co = TypeVar("T_co", covariant=True)
    D_co = TypeVar("D_co", covariant=True)
    Table = TypeVar("Table", bound="Options")
else:
    T_co, D_co, Generic = 0, 1, {(0, 1): object}  # importing typing would cost 4 ms

_NONE: Mapping[str, str] = MappingProxyType({})
_MISUSED = 2  # exit status of a wrong command line


class UsageError(CallerError):
    """The command line is invalid; the message is the one sentence to show, without the command's
    name.
    """


class Flag(Record, Generic[T_co, D_co]):
    """One row of a table: ``--like-this`` (and ``--like_this``) for the attribute `like_this`, with
    an optional short form and an optional value.

    Attributes:
        value: the value's name in the help; empty if the flag takes none.
        read: makes a value of a text and the flag's name.
        default: the value of a flag that is not given.
        repeats: if given several times, the values are joined with commas.
        elsewhere: what other launchers call it.
        completes: the values that a shell offers.
    """

    help: str
    value: str
    read: Callable[[str, str], T_co]
    default: D_co
    short: str = ""
    repeats: bool = False
    elsewhere: tuple[str, ...] = ()
    completes: str = ""
    name: str = ""

    @staticmethod
    def switch(help: str, short: str = "") -> Flag[bool, bool]:  # noqa: A002 - as in Flag
        """A flag without a value."""
        return Flag(help, "", lambda _text, _name: True, False, short=short)

    def __set_name__(self, table: type, attribute: str) -> None:
        object.__setattr__(self, "name", "--" + attribute.replace("_", "-"))

    def __get__(self, options: Options, table: type) -> T_co | D_co:
        text = options.texts.get(self.name)
        return self.default if text is None else self.read(text, self.name)

    @property
    def takes_value(self) -> bool:
        """Whether a value follows."""
        return bool(self.value)

    @property
    def variable(self) -> str:
        """The environment variable with the same meaning."""
        return "PET_" + self.name.lstrip("-").replace("-", "_").upper()


class FlagGroup(Record):
    """Related flags, with a title."""

    title: str
    flags: tuple[Flag[object, object], ...]


class Options(Record):
    """A command line, and the base of all tables of flags.

    Attributes:
        texts: the flags that are given, by name; those without a value have the text "1".
        groups, flags: the rows of the table, those of its bases first.
        not_flags: what to do instead, for words that are taken for flags.
    """

    texts: Mapping[str, str] = _NONE
    if TYPE_CHECKING:
        groups: ClassVar[tuple[FlagGroup, ...]]
        flags: ClassVar[Mapping[str, Flag[object, object]]]
        not_flags: ClassVar[Mapping[str, str]]
    else:
        groups = ()
        not_flags = _NONE

    def __init_subclass__(cls, *, title: str = "") -> None:
        super().__init_subclass__()
        own = tuple(row for row in vars(cls).values() if isinstance(row, Flag))
        groups = [
            group for base in cls.__bases__ if issubclass(base, Options) for group in base.groups
        ]
        cls.groups = (*groups, FlagGroup(title, own)) if own else tuple(groups)
        cls.flags = {flag.name: flag for group in cls.groups for flag in group.flags}

    def words(self, without: Collection[str]) -> list[str]:
        """What was given, in the order of the table, except for the flags of those names."""
        given = [each for each in self.flags.values() if each.name in self.texts]
        return [
            f"{flag.name}={self.texts[flag.name]}" if flag.takes_value else flag.name
            for flag in given
            if flag.name not in without
        ]

    def check_values(self) -> None:
        """Refuse wrong values at once, and not only where they are first used."""
        for flag in self.flags.values():
            flag.__get__(self, type(self))

    def __contains__(self, name: str) -> bool:
        return self.flags[name].name in self.texts  # KeyError: the table has no such flag


# Readers of values: they make a value of a text and the flag's name, or raise UsageError.


def text(text: str, _: str) -> str:
    """The value as it is."""
    return text


def reader(make: Callable[[str], T], sentence: str) -> Callable[[str, str], T]:
    """A reader that refuses what `make` refuses with ValueError or KeyError.

    `sentence` may use {name}, {text} and {error}.
    """

    def read(text: str, name: str) -> T:
        try:
            return make(text)
        except (ValueError, KeyError) as error:
            raise UsageError(sentence.format(name=name, text=text, error=error)) from None

    return read


def one_of(*known: str) -> Callable[[str, str], str]:
    """A reader that takes these only."""
    expected = f"{', '.join(known[:-1])} or {known[-1]}"
    same = {each: each for each in known}
    return reader(same.__getitem__, f"{{name}} is {{text!r}}; it must be {expected}.")


def is_whole(text: str) -> bool:
    """Whether the text is a whole number of plausible size. int() accepts more: "1_0", other
    digits.
    """
    return text.isascii() and text.isdigit() and len(text) < 10


def integer(text: str, least: int = 0, most: int = 999_999_999) -> int:
    """The text as a whole number of this size, or ValueError."""
    if not is_whole(text) or not least <= int(text) <= most:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= float(text) < 1e9:
        raise ValueError(text)
    return float(text)


whole = reader(integer, "{name} is {text!r}; it must be an integer of at least 0.")
seconds = reader(_seconds, "{name} is {text!r}; it must be a number of seconds.")


HELP = Flag.switch("this text", "-h")
JSON = Flag.switch("print everything as one JSON object, for programs")


def parse(
    words: Sequence[str], table: type[Table], *, program: str, environ: Mapping[str, str] = _NONE
) -> tuple[Table, list[str]]:
    """Parse flags, and return the words after them.

    Flags that are not given are taken from ``PET_NAME`` in `environ`, as in torchrun.
    """
    flags = table.flags
    by_name = {**flags, **{flag.short: flag for flag in flags.values() if flag.short}}
    values: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        flag = by_name.get(name)
        if flag is None and word[1] != "-" and (short := by_name.get(word[:2])) is not None:
            # The value may follow without a space, as in -r3.
            flag, equals, value = short, "=", word[2:]
        if flag is None:
            raise UsageError(_unknown(program, word.partition("=")[0], by_name, table.not_flags))
        position += 1
        if flag.takes_value and not equals:
            if position == len(words) or _spells_flag(words[position], by_name):
                raise UsageError(f"{flag.name} needs a value: {flag.name} {flag.value}.")
            value = words[position]
            position += 1
        elif equals and not flag.takes_value:
            raise UsageError(f"{flag.name} takes no value; leave out '={value}'.")
        before = f"{values[flag.name]}," if flag.repeats and flag.name in values else ""
        values[flag.name] = before + value if flag.takes_value else "1"
    for flag in flags.values():
        inherited = environ.get(flag.variable)
        if flag.name in values or not inherited or flag.name.startswith(HELP.name):
            continue
        if not flag.takes_value and inherited == "0":
            continue
        if not flag.takes_value and inherited != "1":
            raise UsageError(f"{flag.variable} is {inherited!r}; it must be 1 or 0.")
        values[flag.name] = inherited
    return table(MappingProxyType(values)), list(words[position:])


def perform(
    program: str,
    words: Sequence[str],
    table: type[Table],
    act: Callable[[Table, list[str]], int],
    *,
    usage: str,
    groups: Sequence[FlagGroup] = (),
    ending: str = "",
    environ: Mapping[str, str] = _NONE,
    statuses: Sequence[tuple[type[Exception], int]] = (),
    has_subject: bool = False,
) -> int:
    """Run a command with these words, or print its help; returns the exit status.

    Args:
        act: called with the flags and the words after them.
        groups: what the help shows, unless that is the whole table.
        statuses: the exit statuses for errors; that for a UsageError is 2.
        has_subject: flags may also follow the first word that is not a flag.
    """
    try:
        options, rest = parse(words, table, program=program, environ=environ)
        if has_subject and rest:
            more, extra = parse(rest[1:], table, program=program)
            options, rest = table({**options.texts, **more.texts}), [rest[0], *extra]
        if HELP.name in options:
            described = describe(groups or table.groups)
            print(usage, described, *([ending] if ending else ()), sep="\n")
            return 0
        return act(options, rest)
    except (RallypointError, OSError) as error:
        known = (status for kind, status in statuses if isinstance(error, kind))
        status = _MISUSED if isinstance(error, UsageError) else next(known, None)
        if status is None or isinstance(error, BrokenPipeError):
            raise
        is_callers = isinstance(error, CallerError)
        note = _inherited_note(str(error), words, table, environ) if is_callers else ""
        sentence = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            sentence = f"{error.filename}: {error.strerror}"
        print(printable(f"{program}: {sentence}{note}"), file=sys.stderr)
        return status


def refuse_words(rest: Sequence[str]) -> None:
    """Refuse words that are not flags."""
    if rest:
        raise UsageError(f"{rest[0]!r} is not a flag; it takes no other arguments.")


def describe(groups: Sequence[FlagGroup]) -> str:
    """The help text of groups of flags, with titles."""
    parts = []
    for group in groups:
        lines = [f"{group.title}:"] if group.title else []
        for flag in group.flags:
            names = f"{flag.short}, {flag.name}" if flag.short else flag.name
            left = f"  {names} {flag.value}".rstrip()
            first, *more = flag.help.split("\n")
            lines += [f"{left:<30} {first}" if len(left) < 30 else f"{left}\n{'':<30} {first}"]
            lines += [f"{'':<30} {line}" for line in more]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def selected(groups: Sequence[FlagGroup], names: Collection[str]) -> list[FlagGroup]:
    """Only the flags of those names, and only the groups that have some."""
    found = [
        FlagGroup(group.title, tuple(flag for flag in group.flags if flag.name in names))
        for group in groups
    ]
    return [group for group in found if group.flags]


def _inherited_note(
    text: str, words: Sequence[str], table: type[Options], environ: Mapping[str, str]
) -> str:
    """A note in an error on flags that came from the environment, and where their values come
    from.
    """
    try:
        typed, _ = parse(words, table, program="")
    except UsageError:
        return ""
    named = {word.strip(":;,.").partition("=")[0] for word in text.split()}
    variables = [
        f"{flag.variable}={environ[flag.variable]}"
        for flag in table.flags.values()
        if flag.name in named and flag.name not in typed and environ.get(flag.variable)
    ]
    return f" (The environment has {', '.join(variables)}.)" if variables else ""


def suggestion(word: str, known: Sequence[str]) -> str:
    """``"; did you mean --this?"``, or nothing."""
    import difflib
    import os.path

    word = word.replace("_", "-")
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    if not near:  # prefer a common prefix to similar letters: --nproc, not --role
        alike = max(known, key=lambda name: len(os.path.commonprefix([word, name])))
        is_begun = len(os.path.commonprefix([word, alike])) > len("--no")
        near = [alike] if is_begun else difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _spells_flag(word: str, by_name: Mapping[str, Flag[object, object]]) -> bool:
    return word.partition("=")[0].replace("_", "-") in by_name


def _unknown(
    program: str,
    word: str,
    by_name: Mapping[str, Flag[object, object]],
    not_flags: Mapping[str, str],
) -> str:
    name = word.replace("_", "-")
    if name in not_flags:
        return f"unknown flag {word}; {not_flags[name]}"
    meant = [flag.name for flag in by_name.values() if name in flag.elsewhere]
    hint = f"; did you mean {meant[0]}?" if meant else suggestion(word, list(by_name))
    return f"unknown flag {word}{hint or f'; see {program} --help.'}"
