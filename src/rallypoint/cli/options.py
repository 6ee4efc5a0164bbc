"""Parses a command line by a table of flags. It stops at the first word that is not a flag: from
there on, everything belongs to the user's program, word for word.

This is not argparse, because argparse would find flags among the program's own arguments, accepts
abbreviations, and costs 8 ms of each launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.errors import CallerError
from rallypoint.base.record import Record


class UsageError(CallerError):
    """The command line is invalid; the message is the one sentence to show."""


class Flag(Record):
    """One flag: ``--like-this`` (and ``--like_this``), with an optional short form and an optional
    value.

    Attributes:
        elsewhere: what other launchers call it.
    """

    name: str
    help: str
    value: str = ""  # the value's name in the help; empty: the flag takes none
    short: str = ""
    repeats: bool = False  # if given several times, the values are joined with commas
    elsewhere: tuple[str, ...] = ()

    @property
    def takes_value(self) -> bool:
        """Whether a value follows."""
        return bool(self.value)

    @property
    def variable(self) -> str:
        """The environment variable with the same meaning."""
        return "PET_" + self.name.lstrip("-").replace("-", "_").upper()


HELP = Flag("--help", "this text", short="-h")


class FlagGroup(Record):
    """Related flags, with a title."""

    title: str
    flags: tuple[Flag, ...]


def parse(
    words: Sequence[str], flags: Sequence[Flag], *, program: str, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Parse flags into ``{"--name": value}`` (``"1"`` for flags without a value), and the words
    after them.

    Flags that are not given are taken from ``PET_NAME`` in `environ`, as in torchrun.

    Raises:
        UsageError: a flag is unknown, or a value is missing or unwanted.
    """
    by_name = {spelling: flag for flag in flags for spelling in (flag.name, flag.short) if spelling}
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
            raise UsageError(_unknown(program, word.partition("=")[0], flags))
        position += 1
        if flag.takes_value and not equals:
            if position == len(words) or _spells_flag(words[position], by_name):
                raise UsageError(f"{program}: {flag.name} needs a value: {flag.name} {flag.value}.")
            value = words[position]
            position += 1
        elif equals and not flag.takes_value:
            raise UsageError(f"{program}: {flag.name} takes no value; leave out '={value}'.")
        before = f"{values[flag.name]}," if flag.repeats and flag.name in values else ""
        values[flag.name] = before + value if flag.takes_value else "1"
    for flag in flags:
        inherited = environ.get(flag.variable)
        if flag.name in values or not inherited or flag.name == HELP.name:
            continue
        if not flag.takes_value and inherited == "0":
            continue
        if not flag.takes_value and inherited != "1":
            raise UsageError(f"{program}: {flag.variable} is {inherited!r}; it must be 1 or 0.")
        values[flag.name] = inherited
    return values, list(words[position:])


def describe(flags: Sequence[Flag]) -> str:
    """The help text of the flags."""
    lines = []
    for flag in flags:
        names = f"{flag.short}, {flag.name}" if flag.short else flag.name
        left = f"  {names} {flag.value}".rstrip()
        first, *more = flag.help.split("\n")
        lines += [f"{left:<30} {first}" if len(left) < 30 else f"{left}\n{'':<30} {first}"]
        lines += [f"{'':<30} {line}" for line in more]
    return "\n".join(lines)


def describe_groups(groups: Sequence[FlagGroup]) -> str:
    """The help text of groups of flags, with titles."""
    return "\n\n".join(
        f"{group.title}:\n{describe(group.flags)}" if group.title else describe(group.flags)
        for group in groups
    )


def inherited_note(
    text: str, words: Sequence[str], flags: Sequence[Flag], environ: Mapping[str, str]
) -> str:
    """A note on those flags in an error that nobody typed, and where their values come from."""
    try:
        typed, _ = parse(words, flags, program="", environ={})
    except UsageError:
        return ""
    named = {word.strip(":;,.").partition("=")[0] for word in text.split()}
    variables = [
        f"{flag.variable}={environ[flag.variable]}"
        for flag in flags
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


def _spells_flag(word: str, by_name: Mapping[str, Flag]) -> bool:
    return word.partition("=")[0].replace("_", "-") in by_name


def _unknown(program: str, word: str, flags: Sequence[Flag]) -> str:
    name = word.replace("_", "-")
    meant = [flag.name for flag in flags if name in flag.elsewhere]
    known = [each for flag in flags for each in (flag.name, flag.short) if each]
    hint = f"; did you mean {meant[0]}?" if meant else suggestion(word, known)
    return f"{program}: unknown flag {word}{hint or f'; see {program} --help.'}"
