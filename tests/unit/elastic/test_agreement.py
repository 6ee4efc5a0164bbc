"""All ranks have the same history, whenever ranks are lost: every order of events is tried."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from rallypoint.elastic.agreement import Settlement, Standing, settle

NEW = Standing(False, 0, 0)


def member(committed: int, prepared: int) -> Standing:
    return Standing(True, committed, prepared)


def test_the_first_start_takes_rank_0s_state() -> None:
    assert settle([NEW, NEW, NEW]) == Settlement(0, (0,), (1, 2))


def test_a_newcomer_has_no_say() -> None:
    told = settle([member(7, 8), NEW, member(7, 8)])
    assert told == Settlement(8, (0, 2), (1,))


def test_newcomers_keep_copies_as_the_others_do() -> None:
    assert settle([NEW, Standing(True, 3, 3, True)]).saves
    assert not settle([NEW, member(3, 3)]).saves


@pytest.mark.parametrize(
    ("standings", "committed"),
    [
        ([member(7, 7), member(6, 7)], 7),  # one has committed: the other does, too
        ([member(6, 7), member(6, 7)], 7),  # who is lost may have committed it
        ([member(6, 7), member(6, 6)], 6),  # nobody can have
        ([member(6, 6)], 6),
    ],
)
def test_rules(standings: list[Standing], committed: int) -> None:
    for order in itertools.permutations(standings):
        assert settle(order).committed == committed


# A model of ranks that take steps: reduce a gradient, agree, update. A collective can complete at a
# rank once all members of its round have entered it; in a round that is broken it may fail instead.
# Whoever fails meets those that are left, and perhaps a newcomer, in the newest round. The last
# agreement is the one after which all leave.


class Rank(NamedTuple):
    is_alive: bool = True
    is_member: bool = True
    committed: int = 0
    prepared: int = 0
    history: tuple[int, ...] = ()  # for each update, the round in which its gradient was reduced
    gradient: int = -1  # the round of the newest one
    round: int = 0
    entered: int = 1  # collectives of its round
    phase: str = "reduce"

    @property
    def standing(self) -> Standing:
        return Standing(self.is_member, self.committed, self.prepared)


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    rounds: tuple[tuple[int, ...], ...]  # the members of each
    said: tuple[tuple[Standing | None, ...], ...]  # in each round, by rank, when they met
    kills: int


def explore(ranks: int, steps: int, kills: int, *, has_newcomers: bool) -> int:
    """Try everything; returns the number of states."""
    start = World((Rank(),) * ranks, (tuple(range(ranks)),), ((),), kills)
    seen, todo = {start}, [start]
    while todo:
        world = todo.pop()
        check(world)
        following = list(after(world, steps, has_newcomers=has_newcomers))
        living = [each for each in world.ranks if each.is_alive]
        assert following or all(each.phase == "done" for each in living), f"stuck: {world}"
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return len(seen)


def check(world: World) -> None:
    members = [each for each in world.ranks if each.is_alive and each.is_member]
    for each in members:
        assert len(each.history) == each.committed
    for one, other in itertools.combinations(members, 2):
        assert abs(one.committed - other.committed) <= 1, world
        shared = min(one.committed, other.committed)
        assert one.history[:shared] == other.history[:shared], world


def after(world: World, steps: int, *, has_newcomers: bool) -> Iterator[World]:
    running = [each for each in world.ranks if each.is_alive and each.phase != "done"]
    for number, rank in enumerate(world.ranks):
        if rank not in running:
            continue
        if world.kills and len(running) > 1:
            yield killed(world, number, has_newcomer=has_newcomers)
        newest = len(world.rounds) - 1
        if rank.round < newest:
            yield meeting(world, number, newest)
        if all(has_entered(world.ranks[each], rank) for each in world.rounds[rank.round]):
            further = put(world, number, completed(world, rank, steps))
            leaves = further.ranks[number].phase == "done"
            # The launcher lets nobody go who has a place in a newer round.
            yield meeting(further, number, newest) if leaves and rank.round < newest else further


def has_entered(other: Rank, rank: Rank) -> bool:
    """Whether the other one is, or died, in this collective of the round or a later one."""
    return other.round == rank.round and other.entered >= rank.entered


def put(world: World, number: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))


def meeting(world: World, number: int, newest: int) -> World:
    rank = world.ranks[number]
    said = list(world.said[newest])
    said[number] = rank.standing
    world = world._replace(said=(*world.said[:newest], tuple(said)))
    return put(world, number, rank._replace(round=newest, entered=1, phase="settle"))


def killed(world: World, number: int, *, has_newcomer: bool) -> World:
    ranks = list(world.ranks)
    ranks[number] = ranks[number]._replace(is_alive=False)
    left = [i for i, rank in enumerate(ranks) if rank.is_alive and rank.phase != "done"]
    newest = len(world.rounds)
    said: list[Standing | None] = [None] * len(ranks)
    if has_newcomer:
        left.append(len(ranks))
        ranks.append(Rank(is_member=False, round=newest, phase="settle"))
        said.append(NEW)
    return World(
        tuple(ranks), (*world.rounds, tuple(left)), (*world.said, tuple(said)), world.kills - 1
    )


def completed(world: World, rank: Rank, steps: int) -> Rank:
    members = world.rounds[rank.round]
    entered = rank._replace(entered=rank.entered + 1)
    if rank.phase == "reduce":
        return entered._replace(phase="agree", gradient=rank.round, prepared=rank.committed + 1)
    if rank.phase == "agree":
        return begun(updated(entered), steps)
    told = settle([standing for i in members if (standing := world.said[rank.round][i])])
    if rank.phase == "settle":
        if rank.is_member and told.committed > rank.committed:
            entered = updated(entered)
        entered = entered._replace(prepared=entered.committed)
        return entered._replace(phase="sync") if told.newcomers else begun(entered, steps)
    if rank.is_member:
        return begun(entered, steps)
    history = world.ranks[members[told.sources[0]]].history[: told.committed]
    assert len(history) == told.committed, "the source sends an older state"
    copied = entered._replace(
        is_member=True, committed=told.committed, prepared=told.committed, history=history
    )
    return begun(copied, steps)


def updated(rank: Rank) -> Rank:
    number = rank.committed + 1
    return rank._replace(committed=number, prepared=number, history=(*rank.history, rank.gradient))


def begun(rank: Rank, steps: int) -> Rank:
    return rank._replace(phase="done" if rank.committed == steps else "reduce")


@pytest.mark.parametrize(
    ("ranks", "steps", "kills", "has_newcomers", "states"),
    [(3, 2, 2, False, 4_000), (2, 2, 2, True, 4_000), (3, 3, 1, True, 4_000)],
)
def test_every_order(ranks: int, steps: int, kills: int, has_newcomers: bool, states: int) -> None:
    assert explore(ranks, steps, kills, has_newcomers=has_newcomers) > states


def test_the_model_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning again whatever no survivor has committed loses what a lost rank has told others."""

    right = settle

    def wrong(standings: Sequence[Standing]) -> Settlement:
        told = right(standings)
        least = min(standings[rank].committed for rank in told.sources)
        return Settlement(least, told.sources, told.newcomers)

    monkeypatch.setitem(globals(), "settle", wrong)
    with pytest.raises(AssertionError):
        explore(3, 2, 1, has_newcomers=True)
