"""This process's part in a job whose ranks come and go: its way from one round to the next."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy

from rallypoint.base.control_link import ControlLink, control_link
from rallypoint.base.control_message import CallTimedOut, Place
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    HostError,
    InvalidArgumentError,
    NotInitializedError,
    PeerError,
    PeerLostError,
    RallypointError,
    RevokedError,
    StateLostError,
    StoreError,
)
from rallypoint.elastic.agreement import Position, RankReport, Settlement, settle
from rallypoint.process_group.calls.exchanges import all_gather_into_tensor
from rallypoint.process_group.formation.joining import reform_world
from rallypoint.process_group.formation.opening import open_round
from rallypoint.process_group.formation.places import CONNECT, ROUND, next_place
from rallypoint.process_group.groups.default import GroupMember
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.client import TCPStore
from rallypoint.store.store import Store

# What a lost rank looks like to a call of the program; what it called wrongly is no loss.
LOSSES = (PeerLostError, RevokedError, StoreError, CollectiveTimeoutError)
_NOT_FORMED = (PeerError, HostError)  # and to those who form a group
_SHOWS_WITHIN_S, _BETWEEN_LOOKS_S = 2.0, 0.05
FROM_CHECKPOINT = "so nobody can go on from memory; start again from a checkpoint"


class _ShardedState(Protocol):
    """What `Membership` and `Sampler` need of `Replicas`."""

    shards: int
    shard: int
    position: Position
    replicate_group: ProcessGroup

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_idle(self) -> bool: ...

    def is_of(self, group: ProcessGroup | None) -> bool: ...

    def form(
        self, settlement: Settlement, reports: Sequence[RankReport], held: Sequence[int]
    ) -> Settlement: ...


class View(NamedTuple):
    """What the program sees of a round."""

    ranks: tuple[int, ...]
    own_rank: int
    position: Position | None


class Membership:
    """What this process knows of its rounds.

    Attributes:
        round: the one whose group it has formed.
        settled: what the ranks concluded when this one made its `Replicas`, until it is used.
        begins_again: a step that was under way when others were lost is done again.
    """

    def __init__(self) -> None:
        self.round = -1
        self._replicas: _ShardedState | None = None
        self.settled: Settlement | None = None
        self.begins_again = False
        self._calls = self._calls_of_all = 0  # of functions under elastic.run: begun here; the most
        self._has_state = False
        self._link: ControlLink | None = None
        self._is_meeting = False  # a round forms, or its ranks tell each other where they stand
        self._forming: Store | None = None  # where the round's groups form

    def enroll(self) -> None:
        """Listen to the launcher; a newcomer goes on when others are lost, from now on.

        The job's first processes do so once they have a common state: before, there is nothing to
        go on with, and what fails would leave a job of fewer ranks than were asked for.
        """
        self._link = control_link()
        if self._link is not None:
            self._link.withdraw = self._withdraw
            if self._link.is_newcomer:
                self._link.enroll()

    @property
    def is_newcomer(self) -> bool:
        """Whether others of this job had a state when this process got its first place."""
        return self._link is not None and self._link.is_newcomer

    @property
    def is_behind(self) -> bool:
        """Whether the others are in a later call of a function under elastic.run."""
        return self._calls < self._calls_of_all

    def begin(self) -> bool:
        """A function under elastic.run is called; init_process_group has formed the default group.

        Returns whether the others are in this very call, or in a later one, and this rank has got
        the state from them in one of those before.
        """
        _ = self.group
        self._calls += 1
        if self._has_state and self._calls <= self._calls_of_all:
            return True
        if self.round < 0:
            self.round = int(os.environ.get(ROUND, "0"))
        if self._link is not None:
            self._link.joined(self.round, is_elastic=self._link.is_newcomer or None)
        return False

    def has_state(self) -> None:
        """Tell the launcher that all have the state: from now on, this process outlives others."""
        if self._link is not None:
            self._link.synchronized(self.round, begins_again=self.begins_again)
        self.begins_again, self._has_state = False, True

    def leave(self) -> bool:
        """From now on, a loss ends this process as it ends any other.

        Returns False if there is a newer round to go to first, in which others need this process.
        """
        return self._link is None or self._link.leave()

    @property
    def group(self) -> ProcessGroup:
        """The default group."""
        group = GroupMember.WORLD
        if group is None:
            raise NotInitializedError(
                "elastic.run needs a default process group; call init_process_group first"
            )
        return group

    @property
    def replicas(self) -> _ShardedState | None:
        """The replicas that it has a place in, if the state of this default group is in shards."""
        replicas, group = self._replicas, GroupMember.WORLD
        return replicas if replicas is not None and replicas.is_of(group) else None

    @replicas.setter
    def replicas(self, replicas: _ShardedState | None) -> None:
        self._replicas = replicas

    @property
    def peers(self) -> ProcessGroup:
        """The ranks that have the same state as this one."""
        return self.group if self.replicas is None else self.replicas.replicate_group

    @property
    def is_idle(self) -> bool:
        """Whether this rank waits for others, with which it would be a whole replica."""
        return self.replicas is not None and self.replicas.is_idle

    def has_news(self) -> bool:
        """Whether there is a newer round to go to."""
        link = self._link
        newest = None if link is None else link.newest
        return newest is not None and newest.round > self.round

    def wait_for_news(self, timeout_s: float) -> bool:
        """Wait until there is."""
        return self._link is not None and self._link.wait(self.round, timeout_s) is not None

    def go_on(self, report: RankReport, loss: RallypointError | None) -> Settlement:
        """Form the group again in the newest round, and agree on where everybody stands."""
        tried = self.round
        self._report_timeout(loss)
        self._is_meeting = True  # from before the newest place is read
        while True:
            place = next_place(tried, loss, had_formed=self.round == tried)
            if place is None:
                raise loss or PeerError("the launcher offers no other round")
            tried = place.round
            try:
                self._form(place.round, place.environ)
                settlement = self.exchange(report)
            except StateLostError:
                raise
            except _NOT_FORMED as error:
                loss = error
                if self.round == place.round:
                    self._report_timeout(error)
                error.__traceback__ = None
                continue
            finally:
                self._forming = None
            if self._link is not None:
                self._link.joined(self.round, is_elastic=True)
            return settlement

    def outlives(self, error: RallypointError) -> bool:
        """Whether the launcher has this process go on; after a timeout, without the late rank."""
        if not isinstance(error, CollectiveTimeoutError):
            return True
        return error.rank is not None and self._link is not None and self._link.is_elastic

    def has_lost(self, error: RallypointError) -> bool:
        """Whether the ranks of the job are what this error is about.

        That of a store may be of one of the program's own. After a loss, the default group or the
        launcher shows it, too.
        """
        link = self._link
        if link is None or not isinstance(error, StoreError):
            return True
        until = time.monotonic() + _SHOWS_WITHIN_S
        while not self.has_news() and not link.is_kept(self.round):
            try:
                communicator = self.group.communicator
            except RallypointError:  # it is not to be asked
                return True
            if communicator.has_trouble():
                return True
            if time.monotonic() >= until:
                return False
            link.wait(self.round, _BETWEEN_LOOKS_S)
        return True

    def _report_timeout(self, error: RallypointError | None) -> None:
        """Have the launcher end the rank that a call has waited for until its timeout."""
        if isinstance(error, CollectiveTimeoutError) and self.outlives(error):
            assert self._link is not None and error.rank is not None
            members = () if len(error.members) == self.group.size() else error.members
            self._link.send(CallTimedOut(self.round, error.rank, members))

    def exchange(self, report: RankReport) -> Settlement:
        """Tell each other where everybody stands, and conclude the same from it."""
        self._is_meeting = True
        self.settled = None
        size, replicas = self.group.size(), self.replicas
        shards = (0, 0) if replicas is None else (replicas.shards, replicas.shard)
        calls = max(self._calls, self._calls_of_all)
        mine = numpy.array((*report, *shards, calls), numpy.int64)
        of_all = numpy.empty((size, mine.size), numpy.int64)
        all_gather_into_tensor(of_all, mine)
        self.group.world.has_met = True
        rows = of_all.tolist()
        self._calls_of_all = max(row[7] for row in rows)
        reports = [RankReport(bool(row[0]), row[1], row[2], bool(row[3]), row[4]) for row in rows]
        if not any(each.is_member for each in reports) and any(each.prepared for each in reports):
            raise StateLostError(f"all ranks that had the state were lost, {FROM_CHECKPOINT}")
        settlement = settle(reports)
        if not report.is_member:
            _check_shards([row[5] for row in rows], shards[0])
        if replicas is not None:
            settlement = replicas.form(settlement, reports, [row[6] for row in rows])
        self._is_meeting = False
        return settlement

    def view(self) -> View:
        """How the program sees the round."""
        position = None if self.replicas is None else self.replicas.position
        return View(self.group.ranks, self.group.own_rank, position)

    def show(self, view: View) -> None:
        """Have the program see another round's ranks."""
        self.group.ranks, self.group.own_rank = view.ranks, view.own_rank
        if self.replicas is not None and view.position is not None:
            self.replicas.position = view.position

    def _form(self, number: int, environ: dict[str, str]) -> None:
        group = self.group
        group.world.withdraw()  # others of the old round may wait for this rank, and so not come
        os.environ.update(environ)
        opened = None
        try:
            opened = open_round(group.timeout, lambda store: self._watch(store, number))
            reform_world(
                group,
                opened.place,
                opened.prefix,
                timeout=group.timeout,
                connect_timeout=CONNECT,
                on_destroy=opened.close,
            )
        except BaseException:
            if opened is not None:
                opened.place.store.close()
            raise
        self.round = number

    def _watch(self, store: Store, number: int) -> None:
        """That round forms at this store, unless there is a newer one already."""
        self._forming = store
        if self._link is not None and self._link.wait(number, 0.0) is not None:
            self._interrupt()

    def _withdraw(self, place: Place) -> None:
        """In the thread of the link: what waits in an old round, or for one, can stop waiting.

        If nobody was lost, a round that has begun goes on until an update says that all leave it.
        """
        if not place.is_urgent and not self._is_meeting:
            return
        group = GroupMember.WORLD
        if group is not None:
            for each in (*group.world.subgroups, group):
                each.interrupt()
        self._interrupt()

    def _interrupt(self) -> None:
        store = self._forming
        if isinstance(store, TCPStore):
            store.interrupt()


def _check_shards(counts: Sequence[int], own: int) -> None:
    for rank, count in enumerate(counts):
        if count != own:
            raise InvalidArgumentError(
                f"this rank keeps the state in {own or 'no'} shards, but rank {rank} in "
                f"{count or 'none'}; start all ranks with the same program"
            )


_membership: Membership | None = None


def membership() -> Membership:
    """The one of this process."""
    global _membership  # noqa: PLW0603 - a process has one place in a job
    if _membership is None:
        _membership = Membership()
    return _membership
