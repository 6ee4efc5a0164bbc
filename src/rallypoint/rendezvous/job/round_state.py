"""A round since it began: its members, and the state of each node.

Facts only; coordinator.py decides what follows from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rallypoint.rendezvous.job.reports import NodeReport, RankFailure
from rallypoint.rendezvous.job.round import Member


class RoundState:
    """One round.

    Attributes:
        members: by rank, including those that are gone.
        present: the keys of members that are present.
        awaited: the keys of members that still have to report their end.
        succeeded: the keys of members whose workers have all succeeded.
        left_succeeded: those of them that are gone.
        lost: the names of members that were lost.
        came: hosts that joined since it began.
        leaving: why a member leaves, by key.
        interrupted: why it ended, if no member is at fault.
        was_whole: it was not broken when the end of the job was requested.
        has_newcomers: workers joined others, which continue, with this round.
        is_finishing: workers have done their last update, or have succeeded: no worker may join
            them.
    """

    def __init__(
        self,
        members: tuple[Member, ...] = (),
        *,
        is_taken_over: bool = False,
        has_newcomers: bool = False,
    ) -> None:
        """Begin; `is_taken_over`: another coordinator began it."""
        self.has_newcomers = has_newcomers
        self.members = members
        self._by_key = {member.key: member for member in members}
        self.present = set(self._by_key)
        self.awaited = set(self._by_key)
        self.succeeded: set[str] = set()
        self.left_succeeded: tuple[str, ...] = ()
        self.lost: list[str] = []
        self.came: list[str] = []
        self.leaving: dict[str, str] = {}
        self.interrupted = ""
        self.was_whole = self.is_finishing = False
        self._is_taken_over = is_taken_over
        self._broken: dict[str, None] = {}  # members that have reported it, in that order
        self._ready: dict[str, int] = {}  # workers on standby for empty places, by key
        self._ends: dict[str, NodeReport] = {}  # of members whose part is over, by key

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def name_of(self, key: str, otherwise: str = "") -> str:
        """``"node 1 (host7)"``; without the rank if it has none."""
        member = self._by_key.get(key)
        return f"node {member.node_rank} ({member.host})" if member else otherwise

    def has_ended(self, key: str) -> bool:
        """Whether that member has reported the end of its workers."""
        return key in self._ends

    @property
    def is_broken(self) -> bool:
        """Whether a member has reported that one of its workers failed, or cannot reach others."""
        return bool(self._broken)

    def broke(self, key: str) -> None:
        """A member reports that."""
        self._broken[key] = None

    def ended(self, key: str, end: NodeReport) -> str:
        """A member reports its workers' end. Why the round is over, unless they succeeded."""
        self._ends[key] = end
        self.grown(key, end.ready)
        self.awaited.discard(key)
        if end.succeeded and self._by_key[key].size:
            self.succeeded.add(key)
            self.is_finishing = True
        if end.was_cut_off:
            self.interrupted = f"{self.name_of(key)} {end.because or 'had lost the coordinator'}"
            return self.interrupted
        if end.causes:
            return end.causes[0].text
        return f"node {self._by_key[key].node_rank} ended early"

    def left(self, key: str, name: str, *, may_return: bool) -> bool:
        """A member is gone. Returns whether it is missed: not if its workers had succeeded, or if
        it had none in this round, unless no node can ever fill its place.
        """
        self.awaited.discard(key)
        end = self._ends.get(key)
        is_needed = not (self._by_key[key].size or may_return or self.is_finishing)
        if end is not None and end.succeeded and not is_needed:  # unless there is another round
            self.left_succeeded = (*self.left_succeeded, key)
            return False
        self._ends.pop(key, None)
        self.lost.append(name)
        return True

    def forget(self, key: str) -> None:
        """A member is gone before the next round: none of its workers will be in it."""
        self._ends.pop(key, None)
        self._ready.pop(key, None)

    def grown(self, key: str, ready: int) -> bool:
        """A member has this many workers on standby; returns whether that is new."""
        before = self._ready.pop(key, 0)
        if ready:  # few have any
            self._ready[key] = ready
        return ready != before

    @property
    def joining(self) -> list[str]:
        """Workers that are ready to take places that are empty, in words."""
        described = []
        for key, ready in self._ready.items():
            member = self._by_key[key]
            count = min(ready, member.local_world_size - member.size)
            if count > 0 and key in self.present:
                workers = "a worker" if count == 1 else f"{count} workers"
                described.append(f"{workers} of {self.name_of(key)}")
        return described

    @property
    def is_complete(self) -> bool:
        """Whether a worker is ready for each empty place."""
        return all(
            each.size + self._ready.get(each.key, 0) >= each.local_world_size
            for each in self.members
            if each.key in self.present
        )

    # Once all have ended.

    @property
    def survivors(self) -> int:
        """How many workers are still running."""
        return sum(map(self._survivors, self._ends))

    def _survivors(self, key: str) -> int:
        """Those of one member: all or, where a round was to begin without them, none."""
        end = self._ends[key]
        return end.survivors if end.has_begun or self._by_key[key].taking_part > 0 else 0

    def seated(self, members: Iterable[Member], *, may_join: bool) -> tuple[Member, ...]:
        """These, each with as many workers as can continue; all, if no worker of the job does.

        `may_join`: with workers that were on standby.
        """
        if not self.survivors:
            return tuple(member.__replace__(taking_part=-1) for member in members)
        return tuple(
            member.__replace__(taking_part=self._taking_part(member, may_join=may_join))
            for member in members
        )

    def _taking_part(self, member: Member, *, may_join: bool) -> int:
        end = self._ends.get(member.key)
        if end is None or self._survivors(member.key) < end.survivors:  # which must end first
            return 0
        ready = may_join * self._ready.get(member.key, 0)
        return min(end.survivors + ready, member.local_world_size)

    @property
    def newcomers_lost(self) -> int:
        """How many workers failed that had joined with this round."""
        return sum(cause.is_newcomer for cause in self.causes)

    @property
    def others_lost(self) -> int:
        """How many other workers failed, and nodes were lost."""
        return len(self.causes) - self.newcomers_lost + len(self.lost)

    @property
    def has_succeeded(self) -> bool:
        """Whether all members have."""
        return not self.lost and all(end.succeeded for end in self._ends.values())

    @property
    def causes(self) -> tuple[RankFailure, ...]:
        """What went wrong, by node, in the order of reports: clocks of hosts may differ by
        seconds.
        """
        ends = [self._ends[key] for key in {**self._broken, **self._ends} if key in self._ends]
        return tuple(cause for end in ends for cause in end.causes)

    @property
    def unkillable(self) -> int:
        """How many processes could not be killed."""
        return sum(end.unkillable for end in self._ends.values())

    def missing(self, here: Collection[str]) -> tuple[str, ...]:
        """The names of members that are not among those."""
        return (*self.lost, *[self.name_of(key) for key in self._ends if key not in here])

    def why_interrupted(self) -> str:
        """Why it ended, if no member is at fault."""
        if self._is_taken_over and not self.causes:
            # The one before had its reasons to end the round, and took them along.
            return self.interrupted or "the coordinator changed"
        return self.interrupted
