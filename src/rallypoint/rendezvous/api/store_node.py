"""One node's part in a rendezvous that is kept in a store, in a thread of its own.

    beat and read --> lead.looked, if this node leads --> write --> wait until somebody rings
          ^                                                               |
          +---------------------------------------------------------------+

The thread beats while the program works. Who changes something rings, and all look; otherwise they
look once a beat. Each key has one writer, which writes only over what it wrote itself, so whoever
was taken for dead, or lost the lead, finds out and changes nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count

from rallypoint.base.errors import StoreError, StoreTimeoutError
from rallypoint.rendezvous.api.node_thread import NodeThread
from rallypoint.rendezvous.api.store_leader import StoreLeader
from rallypoint.rendezvous.api.store_state import GIVEN_UP, Place, RendezvousKeys, RendezvousState
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.timeouts import Timeouts
from rallypoint.rendezvous.transport.codec import decode_record, encode
from rallypoint.store.client import TCPStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import Store

_RINGS_KEPT = 64
_SHORTEST_WAIT_S = 0.001
_numbers = count()

StoreSeat = tuple[RendezvousState, int]  # a round that runs, and this node's rank in it


class StoreNode(NodeThread[StoreSeat]):
    """See NodeThread.

    Args:
        store: for this thread alone; closed at its end.
        bell: the same store, for the program's threads to ring in.
        member: this node; its key is made anew each time that it enters.

    Attributes:
        state: the newest.
        key: of the member that this node is; empty: of none, as it was taken for dead.
    """

    def __init__(
        self,
        store: Store,
        bell: Store,
        keys: RendezvousKeys,
        member: Member,
        limits: Limits,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(member.host)
        self.state = RendezvousState()
        self.key = ""
        self._store = store
        self._bell = bell
        self._keys = keys
        self._member = member
        self._limits = limits
        self._timeouts = timeouts
        self._is_ending = False
        self._place = Place(member=member)
        self._place_raw = b""  # as it stands in the store
        self._slot = -1
        self._beat_at = 0.0
        self._written = b""  # what this node leads with
        self._lead: StoreLeader | None = None
        self._leader: tuple[int, bytes, float] = (-1, b"", 0.0)  # its place, and since when

    @property
    def waiting(self) -> int:
        """See NodeThread. A node that was taken for dead has no part in any round."""
        state = self.state
        is_in = self.key and state.goes_on and state.round == self.round
        return 0 if is_in else max(1, state.waiting)

    @property
    def is_spare(self) -> bool:
        """See NodeThread."""
        return self.state.goes_on and self.state.rank_of(self.key) is None

    def take_seat(self) -> StoreSeat | None:
        """See NodeThread."""
        state, rank = self.state, self.state.rank_of(self.key)
        if rank is None or not state.goes_on or state.round <= self._place.ended:
            return None
        self._wants = False
        self.round = state.round
        return state, rank

    def want_round(self) -> None:
        """See NodeThread."""
        with self.changed:
            self._wants = True
            self._ended(self.round)
        ring(self._bell, self._keys)

    def withdraw(self) -> None:
        """See NodeThread."""
        self.end()
        with suppress(StoreError):
            ring(self._bell, self._keys)

    def end(self) -> None:
        """See NodeThread. It takes a beat, unless somebody rings."""
        self._is_ending = True

    def _ended(self, number: int) -> None:
        if self.key and number > self._place.ended:
            self._place = self._place.__replace__(ended=number)
            self._beat_at = 0.0

    # The thread.

    def _live(self) -> None:
        try:
            while not self._is_ending and not self.closed:
                if not self.key and self._wants:
                    self._enter()
                rings = int(self._store.get(self._keys.rings))
                left_s = max(self._look() - time.monotonic(), _SHORTEST_WAIT_S)
                with suppress(StoreTimeoutError):
                    self._store.wait([self._keys.ring(rings + 1)], timedelta(seconds=left_s))
            if self.key:
                self._store.compare_set(self._keys.node(self._slot), self._place_raw, GIVEN_UP)
                ring(self._store, self._keys)
        finally:
            self._store.close()

    def _enter(self) -> None:
        """Take a place, the first that nobody ever had."""
        self._store.add(self._keys.rings, 0)
        start = encode(RendezvousState())
        raw = self._store.compare_set(self._keys.state, b"", start)
        state = decode_record(RendezvousState, raw)
        # Nodes of one host get their ranks in the order in which they were made.
        key = f"{os.getpid():08x}{next(_numbers):08x}{os.urandom(8).hex()}"
        is_tied = _tie(self._store, self._keys.alive(key))
        self._place = Place(member=self._member.__replace__(key=key), is_tied=is_tied)
        self._place_raw = encode(self._place)
        self._slot = state.first
        while True:
            name = self._keys.node(self._slot)
            if self._store.compare_set(name, b"", self._place_raw) == self._place_raw:
                break
            self._slot += 1
        with self.changed:
            self.key = key
        self._beat_at = time.monotonic() + self._timeouts.beat_s
        ring(self._store, self._keys)

    def _look(self) -> float:
        """Beat, read, and lead if it is ours to lead; when to look again."""
        now = time.monotonic()
        self._beat(now)
        raw = self._store.get(self._keys.state)
        state = decode_record(RendezvousState, raw)
        if self._lead is not None and raw != self._written:
            self._lead = None  # somebody took us for dead
        if self._lead is None and self.key and self._is_lead_lost(state, now):
            state = self._take_lead(raw, state, now)
        if self._lead is not None:
            state = self._decide(self._lead, now)
        self._publish(state, why_closed(self._store, self._keys))
        alarm = None if self._lead is None else self._lead.wake_at
        beat_at = self._beat_at if self.key else now + self._timeouts.beat_s
        return beat_at if alarm is None else min(alarm, beat_at)

    def _beat(self, now: float) -> None:
        if not self.key or now < self._beat_at:
            return
        with self.changed:
            self._place = self._place.__replace__(beat=self._place.beat + 1)
            self._beat_at = now + self._timeouts.beat_s
        raw = encode(self._place)
        name = self._keys.node(self._slot)
        if self._store.compare_set(name, self._place_raw, raw) == raw:
            self._place_raw = raw
            return
        # Taken for dead: whoever returns is a newcomer, once it wants to be one.
        with self.changed:
            self.key = ""
            self._lead = None
            self.changed.notify_all()
        if self._wants:
            self._enter()

    def _publish(self, state: RendezvousState, closed: str) -> None:
        with self.changed:
            if (state, closed) != (self.state, self.closed):
                self.state, self.closed, self.missing = state, closed, state.text
                self.changed.notify_all()
            has_part = state.rank_of(self.key) is not None
            if self._wants and state.stopped and has_part:
                # It was over before this node began it.
                self._ended(state.round)

    # The lead.

    def _is_lead_lost(self, state: RendezvousState, now: float) -> bool:
        if state.slot < 0:
            return True
        raw = self._store.get(self._keys.node(state.slot))
        if not self._is_alive(raw):
            return True
        slot, before, since = self._leader
        if (slot, before) != (state.slot, raw):
            self._leader = (state.slot, raw, now)
            since = now
        return now - since >= self._timeouts.silence_s

    def _is_alive(self, raw: bytes) -> bool:
        """Whether the node of that place may be; if its place says nothing else, it may."""
        if raw == GIVEN_UP:
            return False
        place = decode_record(Place, raw)
        return not place.is_tied or self._store.check([self._keys.alive(place.member.key)])

    def _take_lead(self, raw: bytes, state: RendezvousState, now: float) -> RendezvousState:
        mine = state.__replace__(term=state.term + 1, lead=self.key, slot=self._slot)
        wanted = encode(mine)
        held = self._store.compare_set(self._keys.state, raw, wanted)
        if held == wanted:
            if state.slot >= 0:
                self._store.set(self._keys.node(state.slot), GIVEN_UP)
            self._written = wanted
            self._lead = StoreLeader(self._limits, mine, self._timeouts.silence_s, now)
        return decode_record(RendezvousState, held)

    def _decide(self, lead: StoreLeader, now: float) -> RendezvousState:
        slots, new = lead.slots, lead.next_slot
        while self._store.check([self._keys.node(new)]):
            slots.append(new)
            new += 1
        raws = self._store.multi_get([self._keys.node(slot) for slot in slots])
        places = {
            slot: decode_record(Place, raw) if self._is_alive(raw) else None
            for slot, raw in zip(slots, raws, strict=True)
        }
        state, silent = lead.looked(places, now)
        wanted = encode(state)
        if wanted != self._written:
            held = self._store.compare_set(self._keys.state, self._written, wanted)
            if held != wanted:
                self._lead = None
                return decode_record(RendezvousState, held)
            self._written = wanted
            ring(self._store, self._keys)
        for slot, raw in zip(slots, raws, strict=True):
            if slot in silent or (places[slot] is None and raw != GIVEN_UP):
                self._store.set(self._keys.node(slot), GIVEN_UP)
        return state


def why_closed(store: Store, keys: RendezvousKeys) -> str:
    """Why there is no further round, and what to do; empty: there may be one."""
    if not store.check([keys.closed]):
        return ""
    return f"{store.get(keys.closed).decode()}; give a new job a new run id."


def ring(store: Store, keys: RendezvousKeys) -> None:
    """Let all look now."""
    number = store.add(keys.rings, 1)
    store.set(keys.ring(number), b"")
    if number > _RINGS_KEPT:
        store.delete_key(keys.ring(number - _RINGS_KEPT))


def _tie(store: Store, key: str) -> bool:
    """Set a key that vanishes with the store's connection, if the store has one that can."""
    while isinstance(store, PrefixStore):
        key = f"{store.prefix}/{key}"
        store = store.underlying_store
    if not isinstance(store, TCPStore) or not store.is_ours:
        return False
    store.set_ephemeral(key, b"")
    return True
