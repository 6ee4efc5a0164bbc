"""Every order of the members' operations, after rounds that died at every point of every order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest

from rallypoint.base.errors import StoreTimeoutError
from rallypoint.store.init_method import fresh_round
from rallypoint.store.local_store import HashStore

Values = dict[str, str]
Log = tuple[Any, ...]


class BlockedError(Exception):
    """The rank cannot make another step now."""


class Replay:
    """A rank's store: repeats what the log says, then performs one operation and stops."""

    def __init__(self, values: Values, log: Log) -> None:
        self.values = values
        self.log = list(log)
        self._position = 0
        self._may_act = True

    def _step(self, perform: Callable[[], Any]) -> Any:
        if self._position == len(self.log):
            if not self._may_act:
                raise BlockedError
            self._may_act = False
            self.log.append(perform())
        self._position += 1
        return self.log[self._position - 1]

    def set(self, key: str, value: str) -> None:
        self._step(lambda: self.values.__setitem__(key, value))

    def add(self, key: str, amount: int) -> int:
        def added() -> int:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])

        return int(self._step(added))

    def wait(self, keys: list[str], _: timedelta) -> None:
        if self._position == len(self.log) and not all(key in self.values for key in keys):
            raise BlockedError
        self._step(lambda: None)

    def get(self, key: str) -> bytes:
        return str(self._step(lambda: self.values[key])).encode()

    def delete_key(self, key: str) -> None:
        self._step(lambda: self.values.pop(key, None))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [str(each).encode() for each in self._step(lambda: [self.values[k] for k in keys])]


def advance(values: Values, log: Log, rank: int, ranks: int) -> tuple[Values, Log, str | None]:
    """One more operation of one rank; its result if it has one by then.

    Raises:
        BlockedError: it waits.
    """
    store = Replay(dict(values), log)
    result = None
    try:
        result = fresh_round(
            cast(Any, store), "p", rank=rank, names=range(ranks), timeout=timedelta(seconds=9)
        )
        store.set(f"{result}/{rank}", "")  # as await_ranks begins
    except BlockedError:
        if len(store.log) == len(log):
            raise
        result = None
    return store.values, tuple(store.log), result


def runs(values: Values, ranks: int) -> Iterator[tuple[Values, list[str | None], bool]]:
    """All states that a round can reach: store, ranks' results, and whether it can go on."""
    start: Any = (tuple(sorted(values.items())), ((),) * ranks, (None,) * ranks)
    seen, waiting = {repr(start)}, [start]
    while waiting:
        items, logs, results = waiting.pop()
        can_go_on = False
        for rank in range(ranks):
            if results[rank] is not None:
                continue
            try:
                after, log, result = advance(dict(items), logs[rank], rank, ranks)
            except BlockedError:
                continue
            can_go_on = True
            state = (
                tuple(sorted(after.items())),
                (*logs[:rank], log, *logs[rank + 1 :]),
                (*results[:rank], result, *results[rank + 1 :]),
            )
            if repr(state) not in seen:
                seen.add(repr(state))
                waiting.append(state)
        yield dict(items), list(results), can_go_on


def stores_of_the_dead(before: list[Values], ranks: int) -> list[Values]:
    found = {}
    for values in before:
        for after, _, _ in runs(values, ranks):
            found[tuple(sorted(after.items()))] = after
    return list(found.values())


@pytest.mark.parametrize(("ranks", "dead_rounds"), [(1, 2), (2, 2), (3, 0)])
def test_ranks_meet_where_no_dead_round_left_anything(ranks: int, dead_rounds: int) -> None:
    stores: list[Values] = [{}]
    for _ in range(dead_rounds):
        stores = stores_of_the_dead(stores, ranks)
    ends = 0
    for before in stores:
        for _, results, can_go_on in runs(before, ranks):
            if can_go_on:
                continue
            ends += 1
            assert None not in results, f"stuck after {before}"
            assert len(set(results)) == 1
            assert not any(key.startswith(f"{results[0]}/") for key in before)
    assert ends >= len(stores)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 3), (3, 1)])
def test_rounds_that_end_well_leave_no_answers(ranks: int, rounds: int) -> None:
    stores: list[Values] = [{}]
    for _ in range(rounds):
        ends = {}
        for before in stores:
            for after, _, can_go_on in runs(before, ranks):
                if not can_go_on:
                    assert not any(key.startswith("p/answer/") for key in after)
                    ends[tuple(sorted(after.items()))] = after
        stores = list(ends.values())


def test_a_count_of_restarts_that_ranks_do_not_share_is_not_needed() -> None:
    """Rank 1's launcher has restarted it, rank 0's has not."""
    values: Values = {"p/came/1": "7"}
    for _, results, can_go_on in runs(values, 2):
        assert can_go_on or results == ["p/1", "p/1"]


def test_the_missing_are_named() -> None:
    timeout = timedelta(seconds=0.05)
    with pytest.raises(StoreTimeoutError, match="2 of 3 ranks; missing: 5, 6"):
        fresh_round(HashStore(), "p", rank=0, names=(4, 5, 6), timeout=timeout)
    with pytest.raises(StoreTimeoutError, match="rank 4, which gathers 3 ranks"):
        fresh_round(HashStore(), "p", rank=2, names=(4, 5, 6), timeout=timeout)
