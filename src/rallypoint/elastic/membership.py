"""This process's membership in a job whose ranks change: how it gets from round to round, and which
shard of the state it holds there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from rallypoint.base.control_link import ControlLink, control_link
from rallypoint.base.control_message import CallTimedOut, Place
from rallypoint.base.errors import (
    AlreadyInitializedError,
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
from rallypoint.elastic.agreement import (
    NO_SHARD,
    Holding,
    Position,
    RankReport,
    Settlement,
    arrange,
    settle,
)
from rallypoint.process_group.calls.exchanges import all_gather_into_tensor
from rallypoint.process_group.formation.joining import reform_world
from rallypoint.process_group.formation.opening import open_round
from rallypoint.process_group.formation.own_place import CONNECT, ROUND, next_place
from rallypoint.process_group.formation.subgroups import reform_group, unformed_group
from rallypoint.process_group.groups.default import GroupMember, pytorchs_group_note
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.client import TCPStore
from rallypoint.store.store import Store

# Errors of a program's call that mean a lost rank; a mistake of the program is no loss.
LOSSES = (PeerLostError, RevokedError, StoreError, CollectiveTimeoutError)
_NOT_FORMED = (PeerError, HostError)  # the same, while a group forms
_SHOWS_WITHIN_S, _CHECK_EVERY_S = 2.0, 0.05
FROM_CHECKPOINT = "so no rank can continue from memory; restart from a checkpoint"


class View(NamedTuple):
    """A round's ranks, as the program sees them."""

    ranks: tuple[int, ...]
    own_rank: int
    position: Position | None


class Membership:
    """What this process knows of its rounds.

    Attributes:
        round: the one whose group it has formed.
        settled: what the ranks concluded when this one made its `Replicas`, until it is used.
        begins_again: a step that was running when others were lost is retried.
    """

    def __init__(self) -> None:
        self.round = -1
        self._replicas: Replicas | None = None
        self.settled: Settlement | None = None
        self.begins_again = False
        self._calls = self._calls_of_all = 0  # of functions under elastic.run: begun here; the most
        self._has_state = False
        self._link: ControlLink | None = None
        self._is_meeting = False  # a round forms, or its ranks exchange reports
        self._forming: Store | None = None  # where the round's groups form

    def enroll(self) -> None:
        """Listen to the launcher. A newcomer outlives other ranks from now on.

        The job's first processes do so only once they have a common state. Before, they have
        nothing to continue with, and a failure would leave fewer ranks than were requested.
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

    def report_state(self) -> None:
        """Tell the launcher that all have the state: this process outlives others from now on."""
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
                pytorchs_group_note()
                or "elastic.run needs a default process group; call init_process_group first"
            )
        return group

    @property
    def replicas(self) -> Replicas | None:
        """This process's replicas, if the state of the present default group is in shards."""
        replicas, group = self._replicas, GroupMember.WORLD
        return replicas if replicas is not None and replicas.is_of(group) else None

    @replicas.setter
    def replicas(self, replicas: Replicas | None) -> None:
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
        """Wait until there is one; returns whether there is."""
        return self._link is not None and self._link.wait(self.round, timeout_s) is not None

    def go_on(self, report: RankReport, loss: RallypointError | None) -> Settlement:
        """Form the group again in the newest round, and settle the state with its ranks."""
        tried = self.round
        self._report_timeout(loss)
        self._is_meeting = True  # from before the newest place is read
        while True:
            place = next_place(tried, loss, had_formed=self.round == tried)
            if place is None:
                raise loss or PeerError("the launcher starts no further round")
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
        """Whether this process continues after an error; after a timeout, without the late rank."""
        if not isinstance(error, CollectiveTimeoutError):
            return True
        return error.rank is not None and self._link is not None and self._link.is_elastic

    def has_lost(self, error: RallypointError) -> bool:
        """Whether an error means that a rank of the job was lost.

        A store's error may be about a store of the program's own. After a loss, the default group
        or the launcher shows it, too.
        """
        link = self._link
        if link is None or not isinstance(error, StoreError):
            return True
        until = time.monotonic() + _SHOWS_WITHIN_S
        while not self.has_news() and not link.is_kept(self.round):
            try:
                communicator = self.group.communicator
            except RallypointError:  # it has none to ask
                return True
            if communicator.has_trouble():
                return True
            if time.monotonic() >= until:
                return False
            link.wait(self.round, _CHECK_EVERY_S)
        return True

    def _report_timeout(self, error: RallypointError | None) -> None:
        """Have the launcher end the rank for which a call has timed out."""
        if isinstance(error, CollectiveTimeoutError) and self.outlives(error):
            assert self._link is not None and error.rank is not None
            members = () if len(error.members) == self.group.size() else error.members
            self._link.send(CallTimedOut(self.round, error.rank, members))

    def exchange(self, report: RankReport) -> Settlement:
        """Exchange the reports of all ranks; each concludes the same from them."""
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
        """The present round, as the program sees it."""
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
        """The round of this number forms at this store; interrupt it if there is a newer one."""
        self._forming = store
        if self._link is not None and self._link.wait(number, 0.0) is not None:
            self._interrupt()

    def _withdraw(self, place: Place) -> None:
        """In the link's thread: end what waits in the old round, or for its store.

        If no rank was lost, a running round continues until an update says that all leave it.
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
    """This process's membership."""
    global _membership  # noqa: PLW0603 - a process has one
    if _membership is None:
        _membership = Membership()
    return _membership


_IDLE = "this rank is idle until enough others join to complete its replica"


class Replicas:
    """Replicas of a state in shards: hybrid sharding, whose replicas are elastic.

        dist.init_process_group()
        replicas = elastic.Replicas(shards=2)       # of 4 ranks: two replicas of two ranks

    A rank keeps its shard as long as it lives. When a rank is lost, a spare or a new process takes
    over the shard, and copies it from the same shard of another replica. Without a spare or new
    process, the other ranks of that replica are idle until one joins. Meanwhile, their training
    function is not called; it returns None if the training ends.

    All ranks create it after `init_process_group` and before `elastic.State`; newcomers as well. At
    the start, ranks with the same shard get the state of the first of them.

    Args:
        shards: how many ranks hold the state together.

    Attributes:
        shard: the number of the shard that this rank holds.
        shard_group: the ranks of this replica, in the order of their shards.
        replicate_group: the ranks with the same shard, in the order of their replicas.
        group: all ranks that train, in the order of `rank`.
        position: this rank's number and its replica's, and how many there are of both.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: there are fewer ranks than shards, or other ranks have other numbers
            of shards.
        AlreadyInitializedError: there is one in this process.
        StateLostError: all ranks that held one of the shards were lost.
        PeerLostError, RevokedError, StoreError: ranks were lost, and the launcher starts no further
            round.
    """

    shard_group: ProcessGroup
    replicate_group: ProcessGroup

    def __init__(self, shards: int) -> None:
        part = membership()
        part.begin()
        if shards < 1:
            raise InvalidArgumentError(f"shards={shards} must be positive")
        if part.replicas is not None:
            raise AlreadyInitializedError("this process has its elastic.Replicas already")
        self.shards, self.shard = shards, NO_SHARD
        self.position = Position(-1, 0, -1, 0)
        self.group = self._whole = part.group
        part.enroll()
        part.replicas = self
        newcomer = RankReport(is_member=False, committed=0, prepared=int(part.is_newcomer))
        try:
            try:
                part.settled = part.exchange(newcomer)
            except LOSSES as error:
                error.__traceback__ = None
                part.settled = part.go_on(newcomer, error)
        except BaseException:
            part.replicas = None
            raise

    @property
    def rank(self) -> int:
        """This rank's number among those that train, as `Sampler` takes it; -1 if it is idle."""
        return self.position.rank

    @property
    def size(self) -> int:
        """How many ranks train."""
        return self.position.size

    @property
    def is_idle(self) -> bool:
        """Whether this rank waits for others, with which it would be a whole replica."""
        return self.position.rank < 0

    def is_of(self, group: ProcessGroup | None) -> bool:
        """For `Membership`: whether it is that default group's."""
        return self._whole is group

    def form(
        self, settlement: Settlement, reports: Sequence[RankReport], held: Sequence[int]
    ) -> Settlement:
        """For `Membership`: take this rank's place in a new round, all of whose ranks call it.

        Args:
            held: the shard that each rank holds.

        Returns:
            The settlement of the ranks with this one's shard; an empty one, if it is idle.
        """
        holdings = [
            Holding(shard, each.is_member) for shard, each in zip(held, reports, strict=True)
        ]
        arrangement = arrange(holdings, self.shards)
        if arrangement.lost:
            raise StateLostError(
                f"all ranks that held shard {arrangement.lost[0]} of the state were lost, "
                f"{FROM_CHECKPOINT}"
            )
        replicas = arrangement.replicas
        if not replicas:
            raise InvalidArgumentError(
                f"{len(held)} ranks cannot hold {self.shards} shards; start at least as many"
            )
        whole = self._whole
        training = [rank for replica in replicas for rank in replica]
        if self.shard == NO_SHARD:
            self._take(arrangement.shards[whole.own_rank], whole)
        self.group = whole
        if whole.own_rank not in training:
            self.position = Position(-1, len(training), -1, len(replicas))
            for group in (self.shard_group, self.replicate_group, self._training):
                group.withdraw(_IDLE)
            return Settlement(settlement.committed, (), (), settlement.saves)
        rank = training.index(whole.own_rank)
        number = rank // self.shards
        self.position = Position(rank, len(training), number, len(replicas))
        peers = [replica[self.shard] for replica in replicas]
        reform_group(self.shard_group, whole.world, replicas[number])
        reform_group(self.replicate_group, whole.world, peers)
        if training != list(range(whole.size())):
            reform_group(self._training, whole.world, training)
            self.group = self._training
        return settlement.among(peers)

    def _take(self, shard: int, whole: ProcessGroup) -> None:
        """For life: what is made of the groups may know the shard and their number."""
        self.shard = shard
        ranks = range(self.shards)
        self.shard_group = unformed_group(whole.world, ranks, shard, "of a replica")
        self.replicate_group = unformed_group(whole.world, [whole.own_rank], 0, "of a shard")
        self._training = unformed_group(whole.world, [whole.own_rank], 0, "of ranks that train")
