"""Slurm's lists of hosts: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7 and login.

    list:   item,item,...      item: text and [ranges], in any order       ranges: A-B,C,...

A number has at least as many digits as the first of its range. We parse it ourselves because
python-hostlist is under the GPL, which a dependency of this package must not be; tests compare with
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from rallypoint.base.errors import InvalidArgumentError

MOST_HOSTS = 100_000
_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str, name: str = "the list of hosts") -> list[str]:
    """All hosts of the list, in its order."""
    hosts: list[str] = []
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _wrong(text, name)
    for item in items:
        parts = [_part(inside, plain) for inside, plain in _PART.findall(item)]
        if not all(parts):
            raise _wrong(text, name)
        hosts += islice(map("".join, product(*parts)), MOST_HOSTS)
        if len(hosts) >= MOST_HOSTS:
            raise InvalidArgumentError(f"{name} has {MOST_HOSTS} hosts or more; that is too many.")
    return hosts


def _part(inside: str, plain: str) -> list[str]:
    """The strings that the part in brackets stands for; empty if it is not clear."""
    if plain:
        return [plain]
    found: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            return []
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            return []
        found += _numbers(first, last)
    return found


def _numbers(first: str, last: str) -> Iterator[str]:
    return (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _wrong(text: str, name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name} is {text[:80]!r}, which is not a list of hosts such as node[1-4,7]; --on here"
        " ignores it."
    )
