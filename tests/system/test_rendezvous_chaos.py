"""Nodes that come, die and freeze at random in one store: what they agree on."""

from __future__ import annotations

import os
import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from tests.system.meetings import until

from rallypoint.base.errors import StoreConnectionError
from rallypoint.rendezvous import (
    DynamicRendezvousHandler,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeout,
)
from rallypoint.store.local_store import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import Store

pytestmark = pytest.mark.system

MEETINGS = int(os.environ.get("RALLYPOINT_TEST_MEETINGS", "1"))
LEAST, MOST, BEAT_S = 2, 4, 0.05
EVENTS, ROUNDS, LONGEST_S = 20, 4, 120.0  # so many of each happen, however slow the machine is


class Fate:
    """What happens to one node, whatever it is doing in its store."""

    def __init__(self) -> None:
        self.is_dead = False
        self.frozen_until = 0.0

    def meet(self) -> None:
        while not self.is_dead and time.monotonic() < self.frozen_until:
            time.sleep(0.005)
        if self.is_dead:
            raise StoreConnectionError("this process was killed")


class MortalStore(PrefixStore):
    """A store whose every operation may be its owner's last, before it or after it."""

    def __init__(self, store: Store, fate: Fate) -> None:
        super().__init__("x", store)
        self.fate = fate

    def clone(self) -> MortalStore:
        self.fate.meet()
        return MortalStore(self.underlying_store.clone(), self.fate)

    def _full(self, key: str) -> str:
        self.fate.meet()
        return super()._full(key)


class Node:
    """A program that takes part until it dies or the rendezvous is closed, and notes its places."""

    def __init__(self, store: Store, places: list[tuple[str, int, int, int]]) -> None:
        self.fate = Fate()
        self.places = places
        self.is_in = False
        self.error: BaseException | None = None
        self._handler: Any = DynamicRendezvousHandler.from_backend(
            "r",
            MortalStore(store, self.fate),
            "chaos",
            LEAST,
            MOST,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=60), last_call=timedelta(seconds=0.05)
            ),
            keep_alive_interval=BEAT_S,
            keep_alive_max_attempt=8,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                place = self._handler.next_rendezvous()
                prefix = place.store.prefix
                self.places.append((prefix, place.rank, place.world_size, id(self)))
                self.is_in = True
                while not self._handler.num_nodes_waiting():
                    if self._handler.is_closed():
                        return
                    time.sleep(0.005)
                self.is_in = False
        except RendezvousClosedError:
            pass
        except RendezvousConnectionError as error:
            if not self.fate.is_dead:
                self.error = error
        except BaseException as error:
            self.error = error
        finally:
            self._handler.shutdown()


@pytest.mark.parametrize("meeting", range(MEETINGS))
def test_who_is_left_agrees(meeting: int, seed: int) -> None:
    chance = random.Random(f"{seed} {meeting}")
    store, places = HashStore(), list[tuple[str, int, int, int]]()
    nodes = [Node(store.clone(), places) for _ in range(3)]
    end, events = time.monotonic() + LONGEST_S, 0
    while events < EVENTS or len({prefix for prefix, *_ in list(places)}) < ROUNDS:
        assert time.monotonic() < end, f"{events} events, {places}"
        events += 1
        time.sleep(chance.uniform(0, 0.3))
        alive = [node for node in nodes if not node.fate.is_dead]
        what = chance.choice(["come", "die", "freeze", "freeze long"])
        victim = chance.choice(alive)
        if what == "come" or len(alive) <= LEAST:
            nodes.append(Node(store.clone(), places))
        elif what == "die":
            victim.fate.is_dead = True
        else:
            victim.fate.frozen_until = time.monotonic() + (0.7 if what == "freeze long" else 0.1)
    alive = [node for node in nodes if not node.fate.is_dead]
    # All is quiet now: as many as there is room for come together, and stay.
    wanted = min(MOST, len(alive))

    def are_settled() -> bool:
        newest = max((int(prefix.split("/")[-2]) for prefix, *_ in places), default=-1)
        inside = [p for p in places if int(p[0].split("/")[-2]) == newest]
        return len(inside) == wanted and sum(node.is_in for node in alive) == wanted

    until(are_settled)
    _check(places)
    closer = Node(store.clone(), places)
    closer._handler.set_closed()
    for node in [*alive, closer]:
        node.thread.join(20)
        assert not node.thread.is_alive()
        assert node.error is None, node.error
    for node in nodes:
        node.thread.join(20)


def _check(places: list[tuple[str, int, int, int]]) -> None:
    """No two nodes were ever told different things of one round, or the same rank in it."""
    rounds: dict[str, list[tuple[int, int, int]]] = {}
    for prefix, rank, size, who in places:
        rounds.setdefault(prefix, []).append((rank, size, who))
    assert len(rounds) >= ROUNDS
    for told in rounds.values():
        assert len({size for _, size, _ in told}) == 1
        assert len({rank for rank, _, _ in told}) == len(told)
        assert len({who for *_, who in told}) == len(told)
        assert all(LEAST <= size <= MOST and rank < size for rank, size, _ in told)
