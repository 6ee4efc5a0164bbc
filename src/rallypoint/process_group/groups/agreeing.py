"""Agreement among the survivors of a group: all get the same answer, even if some die meanwhile.

    agree                              decide
      1  all_reduce of the flags         1  each survivor writes its value to the store
      2  barrier                         2  one that sees a value of every living member writes
      3  if 1 or 2 failed: decide           the answer; the first answer counts

A rank that passes the barrier knows that every member has the result of the all_reduce. So if any
rank returns that result without the store, all ranks that use the store have it too, and write it
as the answer at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    RevokedError,
    StoreTimeoutError,
)
from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.store.store import Store

_ALL_REDUCE, _BARRIER = int(Collective.ALL_REDUCE), int(Collective.BARRIER)
_SURVIVED = PeerLostError, RevokedError, CollectiveTimeoutError
_FIRST_CHECK_S, _LONGEST_CHECK_S = 0.002, 0.05  # between checks whether a member has died


class Survivors(NamedTuple):
    """A group whose surviving ranks agree."""

    communicator: Communicator
    store: Store
    prefix: str  # of the group's keys at the store
    rank: int
    size: int
    timeout: timedelta  # how long a rank that is alive may take to come


def agree(group: Survivors, name: str, flag: int) -> int:
    """The bitwise AND of all survivors' flags, the same on each; see ProcessGroup.agree."""
    if type(flag) is not int or not -(1 << 63) <= flag < 1 << 63:
        raise InvalidArgumentError(f"agree takes an integer of 64 bits, not {flag!r}")
    communicator = group.communicator
    result = np.array([flag], np.int64)
    is_known = communicator.run(_ALL_REDUCE, ReduceOp.BAND, 0, result, result) == 0
    if is_known and communicator.run(_BARRIER, 0, 0, None, None) == 0:
        return int(result[0])
    error = communicator.error("agree")
    if not isinstance(error, _SURVIVED):
        raise error
    if is_known:
        return int(_answer(group, name, str(result[0])))
    return int(decide(group, name, str(flag), _and))


def _and(flags: Mapping[int, str]) -> str:
    return str(np.bitwise_and.reduce([np.int64(flag) for flag in flags.values()]))


def decide(
    group: Survivors,
    name: str,
    value: str,
    choose: Callable[[Mapping[int, str]], str],
    *,
    members: Iterable[int] | None = None,
) -> str:
    """Decide on an answer, the same on each survivor, from the values of all.

    A member that has not come within the group's timeout counts as lost.

    Args:
        name: of the decision; used only once.
        value: this rank's.
        choose: makes the answer, which must not be empty, from the values by rank in the group;
            members whose values it gets may have died since.
        members: the ranks in the group that take part; None: all.
    """
    store, own = group.store, group.rank
    keys = {rank: f"{group.prefix}/{name}/{rank}" for rank in members or range(group.size)}
    store.set(keys[own], value)
    until = time.monotonic() + group.timeout.total_seconds()
    wait_s = _FIRST_CHECK_S
    missing = set(keys) - {own}
    while True:
        gone = set(group.communicator.gone())  # before the keys: it may have come, and then died
        missing = {rank for rank in missing if not store.check([keys[rank]])}
        if missing <= gone or time.monotonic() > until:
            break
        try:
            store.wait([f"{group.prefix}/{name}"], timedelta(seconds=wait_s))
        except StoreTimeoutError:
            wait_s = min(2 * wait_s, _LONGEST_CHECK_S)
        else:
            return store.get(f"{group.prefix}/{name}").decode()
    came = sorted(set(keys) - missing)
    values = store.multi_get([keys[rank] for rank in came])
    by_rank = {rank: value.decode() for rank, value in zip(came, values, strict=True)}
    return _answer(group, name, choose(by_rank))


def _answer(group: Survivors, name: str, value: str) -> str:
    """The first answer, which is this one if there is none yet."""
    return group.store.compare_set(f"{group.prefix}/{name}", "", value).decode()
