"""Situations beside the main ones: several causes, threads, queues, what is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import MOST_CHARACTERS, MOST_EVIDENCE, Cause, Verdict
from rallypoint.diagnosis.facts import Facts, Node, Thread
from rallypoint.diagnosis.findings import is_usual
from tests.unit.diagnosis.jobs import (
    TORCH,
    call,
    done,
    ended,
    group,
    job,
    killed,
    looked,
    ns,
    process,
    sleeping,
    stack,
    transfer,
    waiting,
    worker,
)

_IN_17 = group(done(16, for_s=12.1), call(17))
_BEFORE_17 = group(done(16, for_s=12.1))
_GLOO: dict[str, Any] = {"backend": "gloo", "is_complete": False}


def test_the_dead_are_told_of_before_who_is_elsewhere() -> None:
    found = looked(job(waiting(0, _IN_17), sleeping(1, _BEFORE_17), killed(2, _BEFORE_17)))
    assert [root.cause for root in found.roots] == [Cause.KILLED, Cause.ELSEWHERE]
    assert found.sentence.startswith("rank 2 is dead")
    assert any(line.startswith("also: rank 1 never entered") for line in found.evidence)


def test_who_waits_behind_others_is_told_of_too() -> None:
    """Rank 3 sleeps, 2 waits for it in one group, 0 and 1 wait for 2 in another."""
    pair: dict[str, Any] = {"name": "pair", "key": "p", "members": "2-3"}
    facts = job(
        waiting(0, _IN_17),
        waiting(1, _IN_17),
        waiting(2, _BEFORE_17, group(call(4), **pair)),
        sleeping(3, _IN_17, group(done(3), **pair)),
    )
    found = looked(facts)
    assert found.sentence == (
        "rank 3 never entered all_reduce #4 of pair: it is in time.sleep at train.py:31; rank 2 "
        "waits for it at train.py:40 (12.0 s); ranks 0-1 wait for those."
    )
    assert found.roots[0].waited_for_by == (0, 1, 2)


def test_ranks_that_do_the_same_are_told_together() -> None:
    facts = job(
        waiting(0, _IN_17), *(sleeping(rank, _BEFORE_17) for rank in (1, 2)), waiting(3, _IN_17)
    )
    assert looked(facts).sentence == (
        "ranks 1-2 never entered all_reduce #17 of default group: they are in time.sleep at "
        "train.py:31; ranks 0, 3 wait for them at train.py:40 (12.0 s)."
    )


def test_many_scattered_ranks_fit_into_the_line() -> None:
    path = "/home/u/" + "a_rather_long_directory/" * 9 + "and_a_file_with_a_long_name.py"
    wide: dict[str, Any] = {"members": "0-511"}
    facts = job(
        *(
            worker(
                rank,
                group(call(17, site=f"{path}:{rank % 7}"), **wide),
            )
            if rank % 3
            else killed(rank, group(done(16), **wide))
            for rank in range(512)
        )
    )
    found = looked(facts)
    assert len(found.sentence) <= MOST_CHARACTERS
    assert len(found.evidence) <= MOST_EVIDENCE
    assert found.sentence.startswith("171 ranks (0, 3, 6, ...) are dead (SIGKILL, not by")
    assert "341 ranks (1, 2, 4, ...) wait for them" in found.sentence


def test_a_call_queued_behind_one_that_waits_for_another() -> None:
    """Rank 1 has queued #6 behind a broadcast from rank 2, which sleeps."""
    broadcast = call(5, "broadcast", root=2)
    members: dict[str, Any] = {"members": "0-2"}
    facts = job(
        waiting(0, group(done(5, "broadcast", root=2), call(6), **members)),
        worker(1, group(broadcast, queued=2, **members), stacks=[stack("/home/u/train.py:3")]),
        sleeping(2, group(done(4), **members)),
    )
    found = looked(facts)
    assert {rank for root in found.roots for rank in root.ranks} == {2}


def test_what_goes_on_in_the_background_does_not_block() -> None:
    """Rank 1 has begun a call on one group, and sleeps; rank 0 waits for it in the other."""
    pair: dict[str, Any] = {"name": "pair", "key": "p", "members": "0-1"}
    facts = job(
        waiting(0, group(call(3), **pair), group(members="0-2")),
        sleeping(1, group(done(2), **pair), group(call(8), members="0-2", **_GLOO)),
        sleeping(2, group(done(7), members="0-2")),
    )
    found = looked(facts)
    assert {root.ranks for root in found.roots} == {(1,)}


def test_a_thread_that_the_main_one_waits_for() -> None:
    """The main thread joins one that is in a collective: it is not elsewhere."""
    main = stack("/usr/lib/python3.11/threading.py:1119 join", "/home/u/train.py:9")
    other = stack(
        f"{TORCH}/distributed/distributed_c10d.py:3252 all_reduce",
        "/home/u/train.py:77",
        is_main=False,
        thread="0x2",
    )
    facts = job(worker(0, _IN_17, stacks=[other, main]), sleeping(1, _BEFORE_17))
    found = looked(facts)
    assert found.roots[0].ranks == (1,)
    assert "rank 0 waits for it at train.py:77" in found.sentence


def test_a_works_wait_is_no_lock() -> None:
    """``work.wait()`` is C code below a line of the user's, as an acquired lock is."""
    other = stack("/home/u/log.py:7", is_main=False, thread="0x2")
    line = stack("/home/u/train.py:48")
    waits = worker(
        0, group(call(17), **_GLOO), stacks=[other, line], at=process(0, syscall="futex")
    )
    found = looked(job(waits, sleeping(1, group(done(16), **_GLOO))))
    assert found.roots[0].ranks == (1,)
    assert "rank 0 waits for it at train.py:48" in found.sentence


def test_who_waits_for_its_gpu_uses_its_core() -> None:
    nccl: dict[str, Any] = {"backend": "nccl", "is_complete": False}
    spins = worker(
        0,
        group(call(17), **nccl),
        stacks=[stack("/home/u/train.py:48")],
        at=process(0, state="R", cpu=1.0),
    )
    found = looked(job(spins, sleeping(1, group(done(16), **nccl))))
    assert found.roots[0].ranks == (1,)


def test_another_thread_holds_the_gil() -> None:
    main = stack(f"{TORCH}/distributed/distributed_c10d.py:3252 all_reduce", "/home/u/train.py:40")
    other = stack("/home/u/ext.py:12", is_main=False, thread="0x2")
    facts = job(
        worker(0, group(done(15), call(16)), stacks=[other, main], gil="0x2"),
        waiting(1, group(done(16), call(17))),
    )
    found = looked(facts)
    assert "rank 0 holds the GIL in C code called at ext.py:12" in found.sentence
    assert "its all_reduce #16 cannot return" in found.sentence


@pytest.mark.parametrize(
    ("library", "cpu", "holds"),
    [("spin.so", 1.0, True), ("python3.11", 1.0, False), ("libpython3.11.so.1.0", 1.0, False),
     ("", 1.0, False), ("", 0.0, True)],
)  # fmt: skip
def test_python_that_runs_hands_the_gil_on(library: str, cpu: float, holds: bool) -> None:
    culprit = worker(
        0,
        group(done(16)),
        stacks=[stack("/home/u/train.py:31")],
        at=process(0, state="R" if cpu else "S", cpu=cpu),
        gil="0x1",
        library=library,
    )
    found = looked(job(culprit, waiting(1, group(done(16), call(17)))))
    assert ("holds the GIL in C code called at train.py:31" in found.sentence) is holds
    assert ("probably" in found.sentence) is (holds and cpu > 0)
    assert (f"(100 % CPU in {library})" in found.sentence) is bool(library)


def test_who_let_go_of_the_gil_between_the_looks_does_not_hold_it() -> None:
    facts = [
        job(
            worker(0, group(done(16)), stacks=[stack(f"/home/u/train.py:{line}")], gil="0x1"),
            waiting(1, group(done(16), call(17))),
        )
        for line in (31, 32)
    ]
    assert "GIL" not in explanation_of(*facts).sentence


def test_a_circle_is_none_if_another_thread_may_open_it() -> None:
    """Rank 0's main thread waits, another one computes, and may call what rank 1 waits for."""
    pair: dict[str, Any] = {"name": "pair", "key": "p", "members": "0-1"}
    all_two: dict[str, Any] = {"members": "0-1"}

    def facts(cpu: float) -> Facts:
        at = process(0, syscall="futex")
        beside = Thread(id=9, name="python", state="R", cpu=cpu)
        stacks = [
            stack("/home/u/side.py:7", is_main=False, thread="0x2"),
            stack(f"{TORCH}/distributed/distributed_c10d.py:1 all_reduce", "/home/u/train.py:40"),
        ]
        busy = worker(
            0,
            group(call(17), **all_two),
            group(done(1), **pair),
            stacks=stacks,
            at=replace(at, threads=(*at.threads, beside)),
        )
        return job(busy, waiting(1, group(call(2), **pair), group(done(16), **all_two)))

    assert looked(facts(0.0)).knot == (0, 1)
    assert looked(facts(1.0)).kind is Verdict.NO_HANG


def test_at_its_end_a_jobs_ranks_leave_one_after_the_other() -> None:
    brief = group(done(16), call(17, "barrier", for_s=0.3))
    assert looked(job(waiting(0, brief), ended(1, _IN_17))).kind is Verdict.NO_HANG
    facts = job(waiting(0, _IN_17), ended(1, _BEFORE_17))
    assert looked(facts).sentence.startswith("rank 1 has ended (code 0)")


def test_a_round_that_has_just_begun_has_not_moved_and_not_stood_still() -> None:
    facts = job(waiting(0, group(call(0, for_s=0.4))), sleeping(1, group()))
    assert explanation_of(replace(facts, round=0), facts).kind is Verdict.NO_HANG


def test_all_have_ended() -> None:
    found = looked(job(*(ended(rank) for rank in range(3))))
    assert found.sentence == "no hang: all ranks have ended (code 0)."


def test_what_a_rank_ended_for_is_the_call_that_failed() -> None:
    """Its backend had not said yet that the call before was done, nor all that it was given."""
    receive = transfer("recv", 1, tag=7, state="failed", for_s=0.1)
    held = group(call(0, for_s=0.2), transfers=(receive,), members="0-1", queued=2, **_GLOO)
    other = group(call(0, for_s=0.2), members="0-1", **_GLOO)
    found = looked(job(ended(0, held, code=1, error="RuntimeError: closed"), ended(1, other)))
    assert "rank 1 has ended (code 0); rank 0 waits for it in recv, tag 7" in found.sentence


def test_one_failed_and_nobody_waits() -> None:
    found = looked(job(ended(0, code=1, error="ValueError: no"), sleeping(1)))
    assert found.sentence == "rank 0 has ended (code 1: ValueError: no)."
    assert found.exit_status == 3


def test_one_rank_alone_is_told_where_it_is() -> None:
    found = looked(job(sleeping(0)))
    assert found.sentence == (
        "no hang: no rank waits for another; rank 0 is in time.sleep at train.py:31."
    )


def test_nothing_was_kept() -> None:
    found = looked(Facts(run_id="r", round=1, world_size=2, nodes=()))
    assert found.exit_status == 4
    assert found.sentence == (
        "cannot determine why the job makes no progress, because no data of the job was kept."
    )


def test_before_the_first_round() -> None:
    found = looked(Facts(run_id="r", round=-1, world_size=0, nodes=()))
    assert found.exit_status == 4
    assert found.sentence.endswith(", because its first round has not begun.")


def test_of_a_silent_node_nothing_can_be_said_if_nobody_waits_for_it() -> None:
    seen = job(sleeping(0, group(done(3), members="0-1")))
    lost = Node(node_rank=1, host="box2", ranks=(1,), silent_s=3.0)
    found = looked(replace(seen, world_size=2, nodes=(*seen.nodes, lost)))
    assert found.exit_status == 4
    assert "cannot determine" in found.sentence
    assert "node 1 (box2) has not answered" in found.sentence


def test_a_rank_that_keeps_no_record_has_probably_not_entered() -> None:
    found = looked(job(waiting(0, _IN_17), replace(sleeping(1), has_record=False)))
    assert "rank 1 probably never entered all_reduce #17" in found.sentence
    assert "rank 1: operation numbers unknown, because no calls are recorded" in found.evidence


def test_a_member_that_never_joined() -> None:
    found = looked(job(waiting(0, _IN_17), sleeping(1)))
    assert "rank 1 never joined the group default group: it is in time.sleep" in found.sentence


def test_a_member_that_has_left() -> None:
    left = group(done(16), has_left=True)
    found = looked(job(waiting(0, _IN_17), sleeping(1, left)))
    assert "(it has left the group): it is in time.sleep" in found.sentence


def test_receives_that_no_record_tells_of() -> None:
    """PyTorch records no sends and receives of gloo: all that is known is the stack's recv."""
    at = [f"{TORCH}/distributed/distributed_c10d.py:2799 recv", "/home/u/p.py:7"]
    facts = job(
        *(worker(rank, group(members="0-1", **_GLOO), stacks=[stack(*at)]) for rank in (0, 1))
    )
    found = looked(facts)
    assert found.knot == (0, 1)
    assert found.sentence.startswith("probably a deadlock: rank 0 waits in recv for rank 1")


def test_a_transfer_under_way_is_no_hang() -> None:
    two: dict[str, Any] = {"members": "0-1"}
    facts = job(
        worker(0, group(transfers=(transfer("send", 1),), **two), at=process(0, cpu=0.6)),
        worker(1, group(transfers=(transfer("recv", 0),), **two), at=process(1, cpu=0.6)),
    )
    assert looked(facts).kind is Verdict.NO_HANG


def test_all_are_in_one_call_and_nothing_moves() -> None:
    found = looked(job(*(waiting(rank, _IN_17) for rank in range(4))))
    assert found.exit_status == 4
    assert found.sentence.startswith(
        "ranks 0-3 all entered all_reduce #17, and it makes no progress"
    )
    busy = [replace(waiting(rank, _IN_17), process=process(rank, cpu=0.3)) for rank in range(4)]
    assert looked(job(*busy)).kind is Verdict.NO_HANG


def test_all_form_their_group_for_long() -> None:
    at = [f"{TORCH}/distributed/distributed_c10d.py:1892 init_process_group", "/home/u/train.py:12"]
    forming = [worker(r, stacks=[stack(*at)], at=process(r, age_s=90.0)) for r in range(2)]
    found = looked(job(*forming))
    assert found.exit_status == 4
    assert "ranks 0-1 wait in init_process_group at train.py:12: cannot determine" in found.sentence
    young = [replace(each, process=process(each.rank, age_s=9.0)) for each in forming]
    started = looked(job(*young))
    assert (started.exit_status, started.roots) == (4, ())  # nothing acts on it without a root
    assert started.sentence == (
        "all ranks are in init_process_group at train.py:12: cannot determine whether they will "
        "meet; they do not if their backends or world sizes differ."
    )


def test_all_are_in_collectives_without_numbers_but_not_in_the_same() -> None:
    blind = [replace(waiting(rank), has_record=False) for rank in (0, 2)]
    other = replace(waiting(1, line=43, function="broadcast"), has_record=False)
    found = looked(job(*blind, other))
    assert found.exit_status == 3
    assert found.sentence == (
        "probably ranks called different operations: rank 1 in broadcast at train.py:43, ranks 0, "
        "2 in all_reduce at train.py:40."
    )
    same = replace(waiting(1), has_record=False)
    assert looked(job(*blind, same)).kind is Verdict.NO_HANG
    runs = replace(other, process=process(1, cpu=0.5))
    assert looked(job(*blind, runs)).kind is Verdict.NO_HANG
    earlier = replace(waiting(1, line=42, function="broadcast"), has_record=False)
    assert explanation_of(job(*blind, earlier), job(*blind, other)).kind is Verdict.NO_HANG


def test_who_joins_late_is_given_time() -> None:
    at = [f"{TORCH}/distributed/distributed_c10d.py:1892 init_process_group", "/home/u/train.py:12"]
    late = worker(1, stacks=[stack("/home/u/train.py:8")], at=process(1, age_s=3.0))
    facts = job(worker(0, stacks=[stack(*at)], at=process(0, age_s=3.0)), late)
    assert looked(facts).kind is Verdict.NO_HANG


def test_without_numbers_who_computes_is_not_called_stuck() -> None:
    busy = replace(
        worker(1, stacks=[stack("/home/u/train.py:8")], at=process(1, state="R", cpu=1.0)),
        has_record=False,
    )
    facts = job(replace(waiting(0), has_record=False), busy)
    assert looked(facts).kind is Verdict.NO_HANG


def test_a_wait_is_measured_by_the_clock_of_its_machine() -> None:
    """The other machine was started an hour later."""
    late = call(17, since_ns=ns(88.0), for_s=0)
    there = Node(
        node_rank=1,
        host="box2",
        now_ns=ns(100.0),
        ranks=(1,),
        workers=(waiting(1, group(late, members="0-1")),),
    )
    here = job(sleeping(0, group(done(16), members="0-1")))
    found = looked(replace(here, world_size=2, nodes=(*here.nodes, there)))
    assert "rank 1 waits for it at train.py:40 (12.0 s)" in found.sentence


def test_nothing_known_is_not_no_hang() -> None:
    blind = [worker(rank, at=process(rank, syscall="futex")) for rank in range(3)]
    found = looked(job(*blind))
    assert found.kind is Verdict.UNEXPLAINED
    assert found.sentence.startswith("cannot determine whether the job hangs, because")
    assert len(found.sentence) <= MOST_CHARACTERS


def test_a_rank_does_not_wait_for_itself() -> None:
    """Its call has failed, and another rank has queued that call behind one of which it was the
    only other member.
    """
    facts = job(
        ended(0, group(call(17, state="failed"), members="0-1"), code=1),
        waiting(1, group(call(16), members="0-1", queued=2)),
    )
    found = looked(facts)
    assert not found.knot
    assert all(edge.ranks != edge.waits_for for edge in found.edges)
    assert found.sentence.startswith("rank 0 has ended (code 1)")


def test_what_is_usual() -> None:
    slow = [done(n, for_s=30.0 - n, took_s=10.0) for n in range(3)]
    assert is_usual(group(*slow), 12.0)
    assert not is_usual(group(*slow), 16.0)
    assert not is_usual(group(*slow[:2]), 12.0)
