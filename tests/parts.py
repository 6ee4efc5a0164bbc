"""Which tests `make test` runs every day, and which only `make test-all` does.

`--part everyday` takes the system tests that are marked `everyday`, and all others except those
marked `long`; of a matrix that is marked `sampled`, it takes a sample. `--part rest` takes exactly
the others, but of such a matrix a third, and no system test that is marked `seldom`. `make
check-long` runs those, too, with RALLYPOINT_TEST_EACH_WAY=1. Without `--part`, as when a test is
named, all run.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EVERYDAY, REST = "everyday", "rest"
REAL_PROCESSES = (PurePath("tests/system"), PurePath("tests/gpu"))


def starts_processes(nodeid: str) -> bool:
    """True for tests of whole jobs, which depend on when their processes are scheduled."""
    path = PurePath(nodeid.partition("::")[0])
    return any(path.is_relative_to(folder) for folder in REAL_PROCESSES)


def select(
    items: Sequence[pytest.Item], part: str, *, each_way: bool
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those of that part, and the others. With `each_way`, the rest has all cases."""
    _check_marks(items)
    sampled = _sampled(items)
    selected: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        if starts_processes(item.nodeid):
            is_everyday = item.get_closest_marker("everyday") is not None
        else:
            is_everyday = item.get_closest_marker("long") is None
            is_everyday = is_everyday and sampled.get(item.nodeid, True)
        is_spared = item.get_closest_marker("seldom") is not None or (
            item.nodeid in sampled and not _is_in_third(item.nodeid)
        )
        is_in = is_everyday if part == EVERYDAY else not is_everyday and (each_way or not is_spared)
        selected[is_in].append(item)
    return selected[True], selected[False]


def may_have(path: Path, part: str) -> bool:
    """Whether a file of tests has any of that part, by the marks in its text.

    To read the others would take longer than many tests, as some import PyTorch.
    """
    marks = _deciding_marks(path)
    is_decided = (part == EVERYDAY) == ("everyday" in marks)
    return not is_decided or any(_is_written(mark, path) for mark in marks)


@cache
def _deciding_marks(path: Path) -> tuple[str, ...]:
    """Those without which a test of this file is in one part."""
    is_real = starts_processes(path.relative_to(ROOT).as_posix())
    return ("everyday",) if is_real else ("long", "sampled")


@cache
def _is_written(mark: str, path: Path) -> bool:
    return f"mark.{mark}" in path.read_text()


def _check_marks(items: Sequence[pytest.Item]) -> None:
    """Marks that a test has from another file would be missed by `may_have`."""
    for item in items:
        for mark in _deciding_marks(item.path):
            if item.get_closest_marker(mark) and not _is_written(mark, item.path):
                raise pytest.UsageError(f"{item.path}: write `pytest.mark.{mark}` in this file")


def _is_in_third(name: str) -> bool:
    return zlib.crc32(f"third of {name}".encode()) % 3 == 0


def _sampled(items: Sequence[pytest.Item]) -> dict[str, bool]:
    """For each case of a matrix that is marked `sampled`, whether it is in the sample."""
    matrices = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and isinstance(item, pytest.Function):
            matrices[item.nodeid.partition("[")[0], mark.kwargs["one_in"]].append(item)
    found: dict[str, bool] = {}
    for (_, one_in), cases in matrices.items():
        names = [case.nodeid for case in cases]
        # One name for each `parametrize`, also where that has several arguments.
        values = [dict(enumerate(case.callspec._idlist)) for case in cases]
        found |= dict(zip(names, sample(names, values, one_in), strict=True))
    return found


def sample(
    names: Sequence[str], values: Sequence[Mapping[Any, Hashable]], one_in: int
) -> list[bool]:
    """Choose one case in so many by its name, and each value of each parameter at least once.

    Args:
        names: of the cases.
        values: for each case, which value each parameter has.
        one_in: how many cases there are for each that is chosen, about.
    """
    hashes = [zlib.crc32(name.encode()) for name in names]
    chosen = [hash_ % one_in == 0 for hash_ in hashes]
    seen = {
        value for case, is_in in zip(values, chosen, strict=True) if is_in for value in case.items()
    }
    in_turn = sorted(range(len(names)), key=hashes.__getitem__)
    for how_many_new in (all, any):
        for index in in_turn:
            if how_many_new(value not in seen for value in values[index].items()):
                seen |= values[index].items()
                chosen[index] = True
    return chosen
