"""What is to be seen of a job that is followed."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from rallypoint.base.recorded_call import GroupCounts
from rallypoint.diagnosis.explanation import Cause, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.job_view import (
    Inspection,
    JobHistory,
    JobView,
    RankState,
    view_of,
)
from rallypoint.diagnosis.node_update import GroupUpdate, from_line, to_line
from tests.unit.diagnosis.followed_job import FollowedJob


def view(job: FollowedJob, now_s: float, count: int = 11) -> JobView:
    found = view_of(job.history(now_s, count))
    assert found is not None
    return found


def test_a_line_is_read_back_and_short() -> None:
    job = FollowedJob(ranks=8, late_s={5: 0.03}, steps=True, values={"loss": "2.31"})
    update = job.update(0, 86400.0)  # a day
    line = to_line(update)
    assert from_line(json.loads(line)) == update
    assert len(line) < 200 + 8 * 155, line
    assert line.isascii()


def test_counters_of_a_year_are_read_back() -> None:
    """Also those that JSON's readers elsewhere, and this one, would not take as they are."""
    year_ns = 365 * 86400 * 10**9
    counts = GroupCounts(
        calls=10**11,
        transfers=5,
        bytes=10**18,
        waited_ns=year_ns // 2,
        waited_squared_ns2=(3600 * 10**9) ** 2,
        running_since_ns=year_ns - 10**9,
        peers=(1, -1),
    )
    update = FollowedJob().update(0, 5.0)
    now_ms = year_ns // 10**6
    rank = update.ranks[0].__replace__(counts=(GroupUpdate.of(0, counts, year_ns),))
    line = to_line(update.__replace__(ranks=(rank,), now_ms=now_ms))
    read = from_line(json.loads(line))
    assert read is not None
    (found,) = read.reading(read.ranks[0]).groups
    assert found.counts == counts.__replace__(bytes=10**18 >> 10 << 10)
    unknown = GroupUpdate.of(0, None, year_ns)
    assert unknown.counts(now_ms) is None


def test_what_is_no_update_is_none(seed: int) -> None:
    chance = random.Random(seed)
    told = json.loads(to_line(FollowedJob().update(0, 5.0)))
    assert from_line({"nodes": []}) is None
    assert from_line({"update": None}) is None
    for _ in range(300):
        broken = json.loads(json.dumps(told))
        row = broken["update"]
        for _ in range(chance.randrange(3)):
            row = chance.choice([each for each in row if isinstance(each, list) and each] or [row])
        row[chance.randrange(len(row))] = chance.choice([None, [], "x", -7, 10**30, 1.5, {}])
        read = from_line(broken)
        if read is not None:  # it was changed into another valid one, of any numbers
            node = FollowedJob().history(4.0).nodes[0]
            node = replace(node, updates=(*node.updates, read), ranks=(0, 1, 2, 3))
            assert view_of(JobHistory(nodes=(node,))) is not None


def test_rates_are_those_of_the_program() -> None:
    found = view(FollowedJob(step_s=0.1, calls=4, steps=True), 60.0)
    assert found.steps_per_s == pytest.approx(10, rel=0.02)
    assert found.calls_per_s == pytest.approx(40, rel=0.02)
    assert found.bytes_per_s == pytest.approx(40 * 2**22, rel=0.02)
    assert found.speed == pytest.approx(10, rel=0.11)
    assert (found.step, found.total) == (600, 50_000)
    assert found.ranks[1].cpu == pytest.approx(0.62, rel=0.01)
    assert found.ranks[1].no_core == pytest.approx(0.01, rel=0.2)


def test_a_call_without_a_name_has_that_of_the_other_members() -> None:
    """If they agree; and neither of another call nor of a send of that number."""
    history = FollowedJob().history(5.0)

    def shown(**names: str) -> str:
        (node,) = history.nodes
        update = node.updates[-1]
        ranks = [
            rank.__replace__(operation=names.get(f"of{rank.rank}", ""), number=8 + (rank.rank == 3))
            for rank in update.ranks
        ]
        node = replace(node, updates=(*node.updates[:-1], update.__replace__(ranks=tuple(ranks))))
        found = view_of(JobHistory(nodes=(node,)))
        assert found is not None
        return found.ranks[0].operation

    assert shown(of1="all_reduce", of3="broadcast") == "all_reduce"
    assert shown(of1="all_reduce", of2="broadcast") == ""
    assert shown(of1="send", of3="broadcast") == ""


def test_the_share_of_the_total_that_is_done() -> None:
    found = view(FollowedJob(steps=True), 60.0)
    assert found.percent == 600 * 100 // 50_000
    assert replace(found, step=0).percent == 0
    assert replace(found, step=60_000).percent == 100  # a total may be too low
    assert replace(found, total=None).percent is None


def test_nothing_is_known_before_two_updates() -> None:
    found = view(FollowedJob(), 1.0, count=1)
    assert found.calls_per_s is None
    assert found.ranks[0].waited is None
    assert found.ranks[0].late_s is None
    assert view_of(JobHistory(nodes=())) is None
    assert view_of(FollowedJob(silent={0: 0.0}).history(5.0)) is None


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (64, 8)])
def test_the_one_that_comes_late_is_named(ranks: int, nodes: int, has_steps: bool) -> None:
    job = FollowedJob(ranks=ranks, nodes=nodes, late_s={3: 0.03}, steps=has_steps)
    found = view(job, 60.0)
    assert [each.rank for each in found.ranks if each.is_slow] == [3]
    per = 1 if has_steps else job.calls
    assert found.ranks[3].late_s == pytest.approx(0.03 / per, rel=0.05)
    when = "30 ms of each 100 ms step" if has_steps else "30 % of the time"
    assert found.headline == (
        f"no hang: slow rank 3: others wait for it {when}; it gets no core for 24 % of the time"
    )
    assert found.ranks[0].waited == pytest.approx(0.305, rel=0.03)
    assert found.ranks[3].waited == pytest.approx(0.005, rel=0.2)


def test_nobody_is_named_in_a_healthy_job(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        late_s = {rank: chance.uniform(0, 0.001) for rank in range(8)}
        found = view(FollowedJob(ranks=8, late_s=late_s, steps=chance.random() < 0.5), 60.0)
        assert not any(each.is_slow for each in found.ranks)
        assert found.headline == "no hang: calls continue"


def explained(job: FollowedJob) -> Inspection:
    root = Root(ranks=(1,), cause=Cause.ELSEWHERE, text="", strength=Strength.CERTAIN)
    sentence = "rank 1 never entered all_reduce #17"
    return Inspection(
        Explanation(kind=Verdict.EXPLAINED, sentence=sentence, roots=(root,)), {1: "load.py:8"}
    )


def test_a_job_that_makes_no_progress_has_the_sentence_of_explain() -> None:
    job = FollowedJob(stuck=(1, 20.0))
    assert not view(job, 22.5).is_stalled
    stalled = view(job, 24.0)
    assert stalled.is_stalled
    assert stalled.headline == "no rank has begun or left a call for 4.0 s"
    assert stalled.ranks[0].state is RankState.WAITS
    assert stalled.ranks[0].at == "/home/me/train.py:40"
    found = view_of(job.history(24.0), explained(job))
    assert found is not None
    assert found.headline == "rank 1 never entered all_reduce #17"
    assert [each.rank for each in found.ranks if each.is_at_fault] == [1]
    assert found.ranks[1].at == "load.py:8"
    # It moves again: what was found then does not count.
    found = view_of(FollowedJob().history(24.0), explained(job))
    assert found is not None
    assert found.headline == "no hang: calls continue"
    assert not any(each.is_at_fault for each in found.ranks)


def test_two_updates_are_enough_to_see_that_it_is_stuck() -> None:
    assert view(FollowedJob(stuck=(1, 20.0)), 60.0, count=2).is_stalled


def test_silent_nodes_are_marked_and_others_go_on() -> None:
    job = FollowedJob(ranks=6, nodes=3, silent={1: 50.0})
    assert "silent" not in view(job, 53.0).headline
    found = view(job, 60.0)
    assert [each.silent_s for each in found.nodes] == [None, 10.0, None]
    assert found.headline == "no hang: calls continue; node 1 (host1) has told nothing for 10.0 s"
    states = [each.state is RankState.SILENT for each in found.ranks]
    assert states == [False, False, True, True, False, False]
    assert found.age_s == 0


def test_a_node_that_has_never_told_anything_is_silent() -> None:
    found = view(FollowedJob(ranks=4, nodes=2, silent={1: 0.0}), 5.0)
    assert [each.state.value for each in found.ranks] == ["runs", "runs", "silent", "silent"]
    assert found.nodes[1].silent_s == 5.0


def test_states_of_processes() -> None:
    job = FollowedJob(ranks=6, states={1: "T", 2: "D", 3: "Z", 4: "R"}, dead=(5,))
    history = job.history(10.0)
    ranks = history.nodes[0].updates[-1].ranks
    assert [each.state.value for each in view(job, 10.0).ranks] == [
        "runs", "stopped", "runs", "ended", "runs", "ended",
    ]  # fmt: skip
    still = tuple(replace_cpu(each) for each in ranks)
    nodes = tuple(
        replace(node, updates=tuple(each.__replace__(ranks=still) for each in node.updates))
        for node in history.nodes
    )
    found = view_of(JobHistory(nodes=nodes))
    assert found is not None
    assert found.ranks[2].state is RankState.KERNEL
    assert found.ranks[5].end == "killed by SIGKILL"


def replace_cpu(rank: object) -> object:
    return rank.__replace__(cpu_ms=5)  # type: ignore[attr-defined]


def test_a_new_round_begins_with_nothing() -> None:
    old, new = FollowedJob(late_s={2: 0.05}), FollowedJob(round=1)
    nodes = tuple(
        replace(before, updates=(*before.updates[-8:], *after.updates[-2:]))
        for before, after in zip(old.history(60.0).nodes, new.history(63.0).nodes, strict=True)
    )
    found = view_of(JobHistory(nodes=nodes))
    assert found is not None
    assert found.round == 1
    assert not any(each.is_slow for each in found.ranks)
    assert found.calls_per_s == pytest.approx(40, rel=0.1)
