"""The one node that decides for all who meet in a store: places in, the new state out.

The rules are job/coordinator.py's, which also lead a job of agents; here is what it learns from
places that change, stop changing, or are given up. No store, clock or thread here.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.rendezvous.api.store_state import Place, RendezvousState
from rallypoint.rendezvous.job.coordinator import Coordinator, Stage
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.reports import Ended

CAME_BACK = "wants a new round"


def came_back(number: int) -> Ended:
    """What ends a round for a node without workers: it wants another one."""
    return Ended(node_rank=-1, round=number, succeeded=False, was_cut_off=True, because=CAME_BACK)


class _Seen:
    """A place, and when it last changed."""

    __slots__ = ("changed_at", "place")

    def __init__(self, place: Place, now: float) -> None:
        self.place = place
        self.changed_at = now


class StoreLeader:
    """One node's time as the one who decides.

    Args:
        state: as this node wrote it when it took the lead; what came before goes on.
        silence_s: after how long without a beat a node counts as dead.

    Attributes:
        wake_at: when to look at the latest, even if nobody rings; None: any time will do.
        next_slot: the first place that nobody was seen to have.
    """

    def __init__(
        self, limits: Limits, state: RendezvousState, silence_s: float, now: float
    ) -> None:
        self.wake_at: float | None = None
        self.next_slot = state.first
        self._state = state
        self._silence_s = silence_s
        self._seen: dict[int, _Seen] = {}
        self._has_looked = False
        self._job = Coordinator.resumed(
            limits,
            max_restarts=0,
            members=state.members,
            round_number=state.round,
            runs=state.runs,
            restarts=0,
            now=now,
        )

    @property
    def slots(self) -> list[int]:
        """The places to look at, besides those from `next_slot` on."""
        return sorted(self._seen)

    def looked(
        self, found: Mapping[int, Place | None], now: float
    ) -> tuple[RendezvousState, tuple[int, ...]]:
        """These are in those places now, and in all new ones; None: one that was given up.

        Returns how it stands now, and the places of nodes that fell silent.
        """
        self.next_slot = max(self.next_slot, max(found, default=-1) + 1)
        for slot, place in found.items():
            if place is None:
                self._lose(slot, "it left", now)
            else:
                self._read(slot, place, now)
        if not self._has_looked:
            self._has_looked = True
            here = {seen.place.member.key for seen in self._seen.values()}
            for member in self._state.members:
                if member.key not in here:
                    self._job.node_lost(member.key, "it was lost with the one that led", now)
        silent = [
            slot
            for slot, seen in self._seen.items()
            if now - seen.changed_at >= self._silence_s and slot != self._state.slot
        ]
        for slot in silent:
            self._lose(slot, f"nothing came for {self._silence_s:g} s", now)
        self._job.tick(now)
        self.wake_at = self._job.wake_at
        return self._stand(), tuple(silent)

    def _read(self, slot: int, place: Place, now: float) -> None:
        seen = self._seen.get(slot)
        if seen is None:
            seen = self._seen[slot] = _Seen(place, now)
            self._job.joined(place.member, now)
        elif seen.place != place:
            seen.place, seen.changed_at = place, now
        key, number = place.member.key, self._job.round
        if place.ended == number and self._job.expects(key):
            self._job.reported(key, came_back(number), now)

    def _lose(self, slot: int, why: str, now: float) -> None:
        seen = self._seen.pop(slot, None)
        if seen is not None:
            self._job.node_lost(seen.place.member.key, why, now)

    def _stand(self) -> RendezvousState:
        job = self._job
        is_gathering = job.stage is Stage.GATHERING
        self._state = self._state.__replace__(
            round=job.round,
            members=job.current.members,
            runs=not is_gathering,
            stopped=job.because_stopped if job.is_stopping else "",
            waiting=job.waiting,
            first=min(self._seen, default=self.next_slot),
            text=job.text if is_gathering else "",
        )
        return self._state
