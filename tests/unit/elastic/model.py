"""A model of ranks that take steps, are lost and join, of which every order of events is tried.

    gather     the parameters: the ranks of a replica (only if there are shards)
    reduce     the gradient: the ranks that hold the same shard
    agree      all ranks; the idle ones do nothing else
    settle     all ranks of a new round tell each other where they stand
    transfer   the ranks with the same shard, if one of them is to get the state

A collective can complete at a rank once all its members have entered it; in a round that is broken
it may fail instead. A loss begins a new round, to which all go at once. Newcomers begin one as
well, but to that all go when an agreement says so, unless they are on their way to one. The last
agreement is the one after which all leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rallypoint.elastic.agreement import (
    NO_SHARD,
    Arrangement,
    Holding,
    RankReport,
    Settlement,
    arrange,
    settle,
)

IDLE = -1
SETTLE, TRANSFER, GATHER, REDUCE, AGREE = range(1, 6)  # in a round, in this order
OF_A_STEP = 3


class Rank(NamedTuple):
    """One process.

    Attributes:
        is_member: it has the state.
        history: of each update, the round in which its gradient was reduced.
        gradient: the round of the newest one.
        at: the collective of its round that it has entered; a step later, OF_A_STEP more.
        has_news: as it entered its last agreement, it knew of a newer round.
        is_over: it has left.
        has_failed: it knows that the state is lost, and so will the others.
    """

    shard: int
    replica: int
    is_alive: bool = True
    is_member: bool = True
    committed: int = 0
    prepared: int = 0
    history: tuple[int, ...] = ()
    gradient: int = -1
    round: int = 0
    at: int = SETTLE
    has_news: bool = False
    is_over: bool = False
    has_failed: bool = False

    @property
    def report(self) -> RankReport:
        return RankReport(self.is_member, self.committed, self.prepared, prepared_in=self.gradient)

    @property
    def phase(self) -> int:
        return self.at if self.at < GATHER else GATHER + (self.at - GATHER) % OF_A_STEP


class Told(NamedTuple):
    """What a rank tells the others: where it stands, its shard, and its gradient's round."""

    report: RankReport
    shard: int
    gradient: int


NOTHING = Told(RankReport(False, 0, 0), NO_SHARD, -1)


class Round(NamedTuple):
    """One round.

    Attributes:
        members: by their rank.
        told: by each of them, as they settle.
        reached: what each had entered when it left for another round.
        is_urgent: somebody was lost.
    """

    members: tuple[int, ...]
    told: tuple[Told | None, ...]
    reached: tuple[int, ...]
    is_urgent: bool


class World(NamedTuple):
    """The state of all; how many may still be lost, and may still join without a loss."""

    ranks: tuple[Rank, ...]
    rounds: tuple[Round, ...]
    kills: int
    joins: int


Rule = Callable[[Sequence[Told]], Settlement]


def settled(told: Sequence[Told]) -> Settlement:
    """The product's rule."""
    return settle([each.report for each in told])


class Model:
    """A training.

    Attributes:
        shards: how many ranks hold the state together.
        steps: of the training.
        has_spares: one takes the place of each rank that is lost.
        rule: by which they settle.
        ways: what happened in some order: "lost" (a shard), "end" (the same, after ranks have left
            at the end), "idle" (a rank), "join" (at an update), "due" (an update that a rank makes
            because another one may have made it).
    """

    def __init__(self, *, shards: int, steps: int, has_spares: bool, rule: Rule = settled) -> None:
        self.shards, self.steps, self.has_spares, self.rule = shards, steps, has_spares, rule
        self.ways: set[str] = set()
        self._concluded: dict[tuple[Told, ...], tuple[Settlement, Arrangement]] = {}

    def explore(self, ranks: int, *, kills: int, joins: int) -> int:
        """Try everything; returns the number of states."""
        first = Round(tuple(range(ranks)), (NOTHING,) * ranks, (0,) * ranks, is_urgent=True)
        _, arrangement = self._told(first)
        begun = tuple(
            self._begun(placed(Rank(shard, IDLE), number, arrangement))
            for number, shard in enumerate(arrangement.shards)
        )
        start = World(begun, (first,), kills, joins)
        seen, todo = {start}, [start]
        while todo:
            world = todo.pop()
            check(world)
            if any(each.has_failed for each in world.ranks):
                continue
            following = list(self._after(world))
            running = [each for each in world.ranks if each.is_alive and not each.is_over]
            assert following or not running, f"stuck: {world}"
            for each in following:
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
        return len(seen)

    def _after(self, world: World) -> Iterator[World]:
        running = [n for n, rank in enumerate(world.ranks) if rank.is_alive and not rank.is_over]
        if world.joins and running:
            joined = world._replace(joins=world.joins - 1)
            yield begun_round(joined, [*running, None], is_urgent=False)
        for number in running:
            if world.kills and len(running) > 1:
                yield self._killed(world, number, running)
            if may_leave(world, world.ranks[number]):
                yield meeting(world, number)
            if all(has_entered(world, each, number) for each in self._peers(world, number)):
                yield from self._completed(world, number)

    def _killed(self, world: World, number: int, running: list[int]) -> World:
        dead = world.ranks[number]._replace(is_alive=False)
        left = put(world, number, dead)._replace(kills=world.kills - 1)
        places = [None if each == number else each for each in running]
        if not self.has_spares:
            places.remove(None)
        return begun_round(left, places, is_urgent=True)

    def _peers(self, world: World, number: int) -> Sequence[int]:
        """The members of the collective in which it is."""
        rank = world.ranks[number]
        its = world.rounds[rank.round]
        if rank.phase in (SETTLE, AGREE):
            return its.members
        if rank.replica == IDLE:
            return ()
        _, arrangement = self._told(its)
        if rank.phase == GATHER:
            return [its.members[each] for each in arrangement.replicas[rank.replica]]
        return [its.members[replica[rank.shard]] for replica in arrangement.replicas]

    def _told(self, of: Round) -> tuple[Settlement, Arrangement]:
        """What its members conclude when all have told."""
        told = tuple(each for each in of.told if each is not None)
        assert len(told) == len(of.members)
        if told not in self._concluded:
            holdings = [Holding(each.shard, each.report.is_member) for each in told]
            conclusion = self.rule(told), arrange(holdings, self.shards)
            self._concluded[told] = conclusion
        return self._concluded[told]

    def _completed(self, world: World, number: int) -> Iterator[World]:
        rank = world.ranks[number]
        knows = rank.round < len(world.rounds) - 1
        match rank.phase:
            case 1:  # SETTLE
                yield self._settled(world, number)
            case 2:  # TRANSFER
                yield self._begins(world, number, self._received(world, rank))
            case 3:  # GATHER
                yield put(world, number, rank._replace(at=rank.at + 1))
            case 4:  # REDUCE; or, of an idle rank, nothing
                done = rank._replace(at=rank.at + 1, gradient=rank.round)
                done = done._replace(prepared=rank.committed + 1, has_news=False)
                yield put(world, number, done)
                if knows:
                    yield put(world, number, done._replace(has_news=True))
            case _:
                yield self._agreed(world, number)

    def _agreed(self, world: World, number: int) -> World:
        rank = world.ranks[number]
        is_joining = any(world.ranks[each].has_news for each in self._peers(world, number))
        if rank.replica == IDLE:
            made = rank._replace(committed=rank.committed + 1)
        else:
            made = updated(rank)
        if is_joining:
            self.ways.add("join")
            return meeting(put(world, number, made), number)
        return self._begins(world, number, made)

    def _settled(self, world: World, number: int) -> World:
        rank = world.ranks[number]
        told, arrangement = self._told(world.rounds[rank.round])
        if arrangement.lost or not arrangement.replicas:
            is_at_the_end = any(each.committed == self.steps for each in world.ranks)
            self.ways.add("end" if is_at_the_end else "lost")
            return put(world, number, rank._replace(has_failed=True))
        own = world.rounds[rank.round].members.index(number)
        if rank.is_member and told.committed > rank.committed:
            self.ways.add("due")
            rank = updated(rank)
        rank = rank._replace(committed=told.committed, prepared=told.committed)
        rank = placed(rank._replace(shard=arrangement.shards[own]), own, arrangement)
        if rank.replica == IDLE:
            self.ways.add("idle")
            return self._begins(world, number, rank)
        own_peers = [replica[rank.shard] for replica in arrangement.replicas]
        if told.among(own_peers).newcomers:
            return put(world, number, rank._replace(at=TRANSFER))
        return self._begins(world, number, rank)

    def _received(self, world: World, rank: Rank) -> Rank:
        if rank.is_member:
            return rank
        told, arrangement = self._told(world.rounds[rank.round])
        among = told.among([replica[rank.shard] for replica in arrangement.replicas])
        source = world.ranks[world.rounds[rank.round].members[among.sources[0]]]
        assert source.shard == rank.shard
        history = source.history[: told.committed]
        assert len(history) == told.committed, "the source sends an older state"
        return rank._replace(is_member=True, history=history)

    def _begins(self, world: World, number: int, rank: Rank) -> World:
        begun = self._begun(rank)
        # The launcher lets nobody go who has a place in a newer round.
        if begun.is_over and rank.round < len(world.rounds) - 1:
            return meeting(put(world, number, rank), number)
        return put(world, number, begun)

    def _begun(self, rank: Rank) -> Rank:
        """At the beginning of a step, or at the end of the training."""
        if rank.committed == self.steps:
            return rank._replace(at=rank.at + OF_A_STEP, is_over=True)
        first = GATHER if self.shards > 1 and rank.replica != IDLE else REDUCE
        step = (rank.at - GATHER) // OF_A_STEP + 1 if rank.at >= GATHER else 0
        return rank._replace(at=first + step * OF_A_STEP, has_news=False)


def check(world: World) -> None:
    """No two ranks have different histories."""
    members = [each for each in world.ranks if each.is_alive and each.is_member]
    for each in members:
        assert len(each.history) == each.committed
    for one, other in itertools.combinations(members, 2):
        assert abs(one.committed - other.committed) <= 1, world
        shared = min(one.committed, other.committed)
        assert one.history[:shared] == other.history[:shared], world


def has_entered(world: World, other: int, number: int) -> bool:
    """Whether the other one was, also if it has died or left, in this collective or a later one."""
    rank, it = world.ranks[number], world.ranks[other]
    its = world.rounds[rank.round]
    reached = it.at if it.round == rank.round else its.reached[its.members.index(other)]
    return reached >= rank.at


def may_leave(world: World, rank: Rank) -> bool:
    """Whether it goes to the newest round, of which it hears, or because its call has failed."""
    newer = world.rounds[rank.round + 1 :]
    members = world.rounds[rank.round].members
    return bool(newer) and (
        rank.phase == SETTLE
        or any(each.is_urgent for each in newer)
        or any(world.ranks[each].round > rank.round for each in members)
    )


def put(world: World, number: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))


def placed(rank: Rank, number: int, arrangement: Arrangement) -> Rank:
    """With its place in a replica; an idle rank does not keep the state up to date."""
    replicas = [n for n, replica in enumerate(arrangement.replicas) if number in replica]
    if not replicas:
        return rank._replace(replica=IDLE, is_member=False)
    return rank._replace(replica=replicas[0])


def meeting(world: World, number: int) -> World:
    """It goes to the newest round, and tells where it stands."""
    newest = len(world.rounds) - 1
    rank, rounds = world.ranks[number], list(world.rounds)
    left, meets = rounds[rank.round], rounds[newest]
    reached, told = list(left.reached), list(meets.told)
    reached[left.members.index(number)] = rank.at
    told[meets.members.index(number)] = Told(rank.report, rank.shard, rank.gradient)
    rounds[rank.round] = left._replace(reached=tuple(reached))
    rounds[newest] = meets._replace(told=tuple(told))
    there = rank._replace(round=newest, at=SETTLE, has_news=False)
    return put(world._replace(rounds=tuple(rounds)), number, there)


def begun_round(world: World, places: Sequence[int | None], *, is_urgent: bool) -> World:
    """A round of these ranks, and of a newcomer where there is None."""
    ranks = list(world.ranks)
    members: list[int] = []
    told: list[Told | None] = []
    new = Rank(NO_SHARD, IDLE, is_member=False, round=len(world.rounds))
    for place in places:
        members.append(len(ranks) if place is None else place)
        told.append(NOTHING if place is None else None)
        if place is None:
            ranks.append(new)
    newest = Round(tuple(members), tuple(told), (0,) * len(members), is_urgent)
    return world._replace(ranks=tuple(ranks), rounds=(*world.rounds, newest))


def updated(rank: Rank) -> Rank:
    number = rank.committed + 1
    return rank._replace(committed=number, prepared=number, history=(*rank.history, rank.gradient))
