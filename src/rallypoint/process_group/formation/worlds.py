"""Which default group is forming at a store: rank 0 opens a world, the others join it.

    latest     the number of the world that was opened last, from 1 on, and of the one before
    N/0        exists while rank 0 of that world does (init_method.say_here)
    N/all      set when it is known whether all have joined: nobody joins any more
    N/next     the number of the world that rank 0 opened after it; deleted when that has formed
    process/R  the process that has rank R, as long as its connection to the store lasts

When all have formed a world, N/0 and N/all are deleted too (formation.py); nobody joins that world
either. So nothing of an earlier group is mistaken for this one's, and a process that replaces a
dead one finds the world of the survivors, however many worlds each has been in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from rallypoint.base.errors import StoreConnectionError, StoreTimeoutError
from rallypoint.store.client import TCPStore
from rallypoint.store.init_method import JoinedStore, say_here, shows_deaths, to_stderr
from rallypoint.store.store import Store

_PAUSE_S = 0.02  # a server that ends takes so long, or longer
_MOST_S = 5.0  # rank 0 waits until all have read what its store has for them
_ENDING_S = 2.0  # for a process that has just ended, until the server has taken note of it
_opened: dict[str, int] = {}  # by base: the number of the world that this process opened last


class MeetingPoint(NamedTuple):
    """One world.

    Attributes:
        prefix: the beginning of its keys.
        way: a key that led its ranks to it, which is not needed once it has formed.
    """

    prefix: str
    way: str


def meet(
    open_place: Callable[[], JoinedStore], base: str, timeout: timedelta, *, is_first: bool = False
) -> tuple[JoinedStore, MeetingPoint]:
    """Open the store, and find the world that is forming there.

    A store that rank 0 runs may belong to its previous group, and end with that: then it is opened
    again. `base` is the beginning of the keys of all worlds. If the world `is_first` among those,
    the store need not be asked.

    Raises:
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError: rank 0 did not join.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        place = open_place()
        try:
            _take_rank(place, base, is_taken=is_first)
            if is_first:
                return place, _first_world(place, base)
            return place, find_world(place, base, deadline)
        except StoreConnectionError:
            place.store.close()
            if not place.is_rank_0s or time.monotonic() + _PAUSE_S > deadline:
                raise
            time.sleep(_PAUSE_S)
        except BaseException:
            place.store.close()
            raise


def _take_rank(place: JoinedStore, base: str, *, is_taken: bool) -> None:
    """Leave word that this process has its rank; say so if another one has it.

    It may join all the same: children of all ranks can form a group of their own. If the rank
    `is_taken`, by this process, nobody else has it.
    """
    if not isinstance(place.store, TCPStore) or not shows_deaths(place.store):
        return
    key, me = f"{base}/process/{place.rank}", f"{os.getpid()} on {os.uname().nodename}"
    until = time.monotonic() + _ENDING_S
    while (
        not is_taken
        and (holder := place.store.compare_set(key, me, me).decode(errors="replace")) != me
    ):
        if time.monotonic() > until:
            to_stderr(
                f"rank {place.rank} of this job is process {holder}, which is in its group, and"
                " this one waits for a group of others; if it has only inherited RANK, unset that,"
                " or give it a rank of its own"
            )
            return
        time.sleep(_PAUSE_S)
    place.store.set_ephemeral(key, me)


def find_world(place: JoinedStore, base: str, deadline: float) -> MeetingPoint:
    """The world at an open store; raises as `meet`."""
    store = place.store
    latest = f"{base}/latest"
    last = number = before = 0
    if store.check([latest]):
        number, before = map(int, store.get(latest).split())
        last = number
    if place.rank == 0:
        return _open_world(store, base, last)
    is_over = number == 0 or store.check([f"{base}/{number}/all"])
    if is_over or not store.check([f"{base}/{number}/0"]):
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"{base}/{number}/next"], timedelta(seconds=left_s))
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"rank {place.rank} waited {left_s:.0f} s for rank 0 to join; look for its first "
                "error",
                endpoint=error.endpoint,
                operation="init_process_group",
                key=base,
            ) from None
        before, number = number, int(store.get(f"{base}/{number}/next"))
    return _world(base, number, before)


def _first_world(place: JoinedStore, base: str) -> MeetingPoint:
    return _open_world(place.store, base, 0) if place.rank == 0 else _world(base, 1, 0)


def _open_world(store: Store, base: str, last: int) -> MeetingPoint:
    """On rank 0, after the world with the number `last`."""
    # This process's worlds of one base differ at any store.
    number = _opened[base] = max(last, _opened.get(base, 0)) + 1
    say_here(store, f"{base}/{number}/0")
    store.multi_set([f"{base}/{last}/next", f"{base}/latest"], [str(number), f"{number} {last}"])
    return _world(base, number, last)


def _world(base: str, number: int, before: int) -> MeetingPoint:
    return MeetingPoint(f"{base}/{number}", f"{base}/{before}/next")


def closing(place: JoinedStore, world: MeetingPoint) -> Callable[[], None]:
    """What closes the store of a world that has formed; rank 0's serves the others until then."""

    def close() -> None:
        if place.is_rank_0s and place.rank == 0 and os.getpid() == process:
            _await_formed(place.store, formed_key(place, world))
        place.store.close()

    process = os.getpid()
    return close


def formed_key(place: JoinedStore, world: MeetingPoint) -> str:
    """The key to set once all have formed a world; empty if nobody waits for it."""
    return f"{world.prefix}/formed/all" if place.is_rank_0s else ""


def _await_formed(store: Store, key: str) -> None:
    try:
        store.wait([key], timedelta(seconds=_MOST_S))
    except (StoreTimeoutError, StoreConnectionError):
        return  # some rank has died, and the others know
