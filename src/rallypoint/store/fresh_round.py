"""Agree on a name that no earlier group has used, at a store that may have outlived many groups.

Nothing that the members know distinguishes this meeting from earlier ones; a launcher's restart
count does not help if each member has its own launcher. So each member counts its arrivals in the
store. Rank 0's count becomes the number of the round, and rank 0 answers each arrival by its count:

    rank 0   came/0 += 1 -> n.  For each r with came/r = c > 0: answer/r/c = n
    rank r   came/r += 1 -> c.  If came/0 = n > 0: n/r = c
    rank 0   waits for n/r from each r, whose c it answers: answer/r/c = n
    rank r   waits for answer/r/c, then sets n/r to "" and goes on; answers to it are deleted

Both count before they look, so at least one of them sees the other. An answer belongs to one
arrival of one rank, which rank 0 has seen, so keys left by dead processes are never read.
docs/decisions/064 has more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from rallypoint.base.errors import StoreError, StoreTimeoutError
from rallypoint.store.init_method import REPORT_EVERY, missing_ranks, to_stderr
from rallypoint.store.store import Store


def fresh_round(
    store: Store, prefix: str, *, rank: int, names: Sequence[int], timeout: timedelta
) -> str:
    """A prefix below `prefix` under which nothing has been set, for `len(names)` ranks.

    All of them call it; init_method.await_ranks with what it returns must follow.

    Args:
        names: what the ranks are called in messages.
    """
    count = store.add(f"{prefix}/came/{rank}", 1)
    if rank == 0:
        _gather(store, prefix, count, names, timeout)
        return f"{prefix}/{count}"
    number = store.add(f"{prefix}/came/0", 0)
    if number:
        store.set(f"{prefix}/{number}/{rank}", str(count))
    answer = f"{prefix}/answer/{rank}/{count}"
    _wait_telling(
        store,
        [answer],
        timeout,
        lambda: (f"rank {names[0]}, which gathers {len(names)} ranks", rank == 1),
    )
    told = store.get(answer).decode()
    # If rank 0 was quicker, it has taken our previous arrival for this one.
    left = [answer, f"{prefix}/answer/{rank}/{count - 1}"]
    if number and str(number) != told:  # we were quicker: this is its last round, which is over
        left.append(f"{prefix}/{number}/{rank}")
    with suppress(StoreError, RuntimeError):  # some of torch's stores cannot
        for key in left:
            store.delete_key(key)
    return f"{prefix}/{told}"


def _gather(
    store: Store, prefix: str, number: int, names: Sequence[int], timeout: timedelta
) -> None:
    here = f"{prefix}/{number}"
    others = range(1, len(names))

    answered: set[tuple[int, int]] = set()

    def answer(rank: int, count: int) -> None:
        if (rank, count) not in answered:  # otherwise it would remain, as nobody reads it again
            answered.add((rank, count))
            store.set(f"{prefix}/answer/{rank}/{count}", str(number))

    store.set(f"{here}/0", "")
    for rank in others:
        if seen := store.add(f"{prefix}/came/{rank}", 0):
            answer(rank, seen)

    def missing() -> tuple[str, bool]:
        there = [rank for rank in range(len(names)) if store.check([f"{here}/{rank}"])]
        return missing_ranks(there, names), True

    keys = [f"{here}/{rank}" for rank in others]
    if not keys:
        return
    _wait_telling(store, keys, timeout, missing)
    for rank, told in zip(others, store.multi_get(keys), strict=True):
        if told:  # otherwise it has had its answer
            answer(rank, int(told))


def _wait_telling(
    store: Store, keys: Sequence[str], timeout: timedelta, missing: Callable[[], tuple[str, bool]]
) -> None:
    """Wait for `keys`; `missing` tells what is waited for, and whether this rank is to say so."""
    started = time.monotonic()
    while True:
        left = timeout - timedelta(seconds=time.monotonic() - started)
        try:
            store.wait(keys, max(min(left, REPORT_EVERY), timedelta(milliseconds=1)))
        except StoreTimeoutError as error:
            what, speaks = missing()
            line = f"waited {time.monotonic() - started:.0f} s for {what}"
            if left <= REPORT_EVERY:
                raise StoreTimeoutError(
                    f"{line}; look for their first error",
                    endpoint=error.endpoint,
                    operation="await_ranks",
                    key=keys[0],
                ) from None
            if speaks:
                to_stderr(line)
        else:
            return
