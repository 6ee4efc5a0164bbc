"""Slurm's lists of hosts, compared with python-hostlist's reading of them."""

from __future__ import annotations

from random import Random

import pytest
from hostlist import expand_hostlist  # type: ignore[import-untyped]

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.environments.hostlist import expand


def some_ranges(chance: Random) -> str:
    first, digits = chance.randrange(120), chance.randint(1, 4)
    last = first + chance.randrange(12)
    low = f"{first:0{digits}d}"
    return low if chance.random() < 0.5 else f"{low}-{last:0{digits}d}"


def some_item(chance: Random) -> str:
    parts = []
    for _ in range(chance.randint(1, 3)):
        parts.append("".join(chance.choices("abz09-.", k=chance.randint(1, 4))))
        if chance.random() < 0.6:
            inside = ",".join(some_ranges(chance) for _ in range(chance.randint(1, 3)))
            parts.append(f"[{inside}]")
    return "".join(parts)


def test_as_python_hostlist(seed: int) -> None:
    chance = Random(seed)
    for _ in range(500):
        text = ",".join(some_item(chance) for _ in range(chance.randint(1, 4)))
        assert expand(text) == expand_hostlist(text, allow_duplicates=True, sort=False), text


def test_in_its_order() -> None:
    assert expand("b[02-03,7],a,c[1-2]x[8-10]") == [
        "b02", "b03", "b7", "a", "c1x8", "c1x9", "c1x10", "c2x8", "c2x9", "c2x10",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "n[1-", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "n[1-2", "n[[1]]", "n[1,]",
     "n[-1]", "n[1-2-3]", "n[0-999999999]", "n[1-400][1-400]", "n[1-\u0663]"],
)  # fmt: skip
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="LIST"):
        expand(text, "LIST")
