"""The sentences for which this room was made, each with the culprit as the first and the last rank.

`c` is the culprit, `w` the ranks that wait; {c} and {w} in expectations stand for them in words.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.base.recorded_call import GroupCounts, RecordedGroup
from rallypoint.base.wording import name_ranks
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import (
    MOST_CHARACTERS,
    MOST_EVIDENCE,
    Cause,
    Explanation,
    Verdict,
)
from rallypoint.diagnosis.facts import (
    Facts,
    Node,
    Process,
    Stack,
    StalledConnection,
    Thread,
    WorkerFacts,
)
from tests.unit.diagnosis.jobs import (
    NOW_S,
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

ORDERS = [pytest.param(3, id="culprit last"), pytest.param(0, id="culprit first")]
pytestmark = pytest.mark.parametrize("c", ORDERS)

IN_17 = group(done(16, for_s=12.1), call(17))
BEFORE_17 = group(done(16, for_s=12.1))


def others(c: int, world: int = 4) -> list[int]:
    return [rank for rank in range(world) if rank != c]


def those(c: int) -> str:
    return name_ranks(others(c))


def hang(culprit: WorkerFacts, *groups: RecordedGroup, **node: Any) -> Facts:
    """All others wait in all_reduce #17."""
    c = culprit.rank
    return job(culprit, *(waiting(rank, *(groups or (IN_17,))) for rank in others(c)), **node)


def told(facts: Facts, *parts: str, kind: Verdict = Verdict.EXPLAINED) -> Explanation:
    """The explanation, which must say all of these."""
    found = looked(facts)
    for part in parts:
        assert part in found.sentence
    assert found.kind is kind, found.sentence
    assert len(found.sentence) <= MOST_CHARACTERS
    assert len(found.evidence) <= MOST_EVIDENCE
    return found


def test_a_rank_sleeps(c: int) -> None:
    found = told(
        hang(sleeping(c, BEFORE_17)),
        f"rank {c} never entered all_reduce #17 of default group: it is in time.sleep at",
        "sleep at train.py:31; ",
        f"{those(c)} wait for it at train.py:40 (12.0 s).",
    )
    assert found.roots[0].ranks == (c,)
    assert found.roots[0].waited_for_by == tuple(others(c))
    assert found.roots[0].cause is Cause.ELSEWHERE


def test_a_rank_was_killed_for_want_of_memory(c: int) -> None:
    told(
        hang(killed(c, BEFORE_17), oom_kills=1),
        f"rank {c} is dead (SIGKILL, not by the launcher; the kernel's out-of-memory killer struck "
        "once); its last done was all_reduce #16; ",
        f"{those(c)} wait for it in all_reduce #17 at train.py:40",
    )


def test_of_calls_that_ended_at_one_tick_of_the_clock_the_last_is_told(c: int) -> None:
    before = group(*(done(number, took_s=0.0) for number in range(17)))
    told(hang(killed(c, before)), "its last done was all_reduce #16; ")


def test_a_call_of_which_only_the_number_is_known(c: int) -> None:
    before = group(done(16, "", ended_ns=0))
    found = told(hang(killed(c, before), group(call(17))), "its last done was operation #16; ")
    (line,) = [line for line in found.evidence if "has done" in line]
    assert line == f"rank {c} has done operation #16 of default group, begun 12.0 s ago"


def test_a_rank_was_killed_by_somebody(c: int) -> None:
    told(
        hang(killed(c, BEFORE_17), oom_kills=0),
        f"rank {c} is dead (SIGKILL, not by the launcher; ",
        "out-of-memory killer did not strike",
    )


def test_the_dead_are_told_of_also_if_those_who_waited_were_ended(c: int) -> None:
    """Post mortem: the launcher has ended the others."""
    facts = job(
        killed(c, BEFORE_17),
        *(killed(rank, IN_17, signal="SIGTERM", by_launcher=True) for rank in others(c)),
    )
    told(facts, f"rank {c} is dead (SIGKILL, not by the launcher)", f"{those(c)} wait for it in")


def test_a_rank_is_stopped(c: int) -> None:
    told(
        hang(worker(c, BEFORE_17, at=process(c, state="T"))),
        f"rank {c} is stopped (SIGSTOP); ",
        f"{those(c)} wait for it in all_reduce #17",
        f"kill -CONT {4000 + c}",
    )


def test_a_rank_is_paused_by_the_launcher(c: int) -> None:
    """With all that run on a node which does not hear the others."""
    facts = hang(worker(c, BEFORE_17, at=process(c, state="T")))
    (node,) = facts.nodes
    here = tuple(each for each in node.workers if each.rank != c)
    there = tuple(each for each in node.workers if each.rank == c)
    cut_off = replace(
        node, node_rank=1, host="box2", ranks=(c,), workers=there, is_paused=True, flows=()
    )
    found = told(
        replace(facts, nodes=(replace(node, ranks=tuple(others(c)), workers=here), cut_off)),
        f"rank {c} is paused by the launcher until the job continues; ",
        f"{those(c)} wait for it in all_reduce #17",
        "check the connections of box2 to the other nodes",
    )
    assert "kill -CONT" not in found.sentence


def test_a_rank_is_stopped_within_the_call(c: int) -> None:
    told(
        hang(worker(c, IN_17, at=process(c, state="T"))),
        f"rank {c} is stopped (SIGSTOP)",
        f"{those(c)} wait for it in all_reduce #17",
    )


def test_ranks_called_different_operations(c: int) -> None:
    odd = group(call(5, "broadcast", site="b.py:9"))
    facts = job(
        worker(c, odd), *(worker(rank, group(call(5, site="a.py:14"))) for rank in others(c))
    )
    found = told(
        facts,
        f"ranks called different operations as #5 of default group: rank {c} "
        f"broadcast(float32[8], src 0) at b.py:9; {those(c)} all_reduce(float32[8], SUM) "
        "at a.py:14",
    )
    assert "for them" not in found.sentence  # all of them have been named
    assert found.roots[0].ranks == (c,)


def test_a_call_without_a_name_yet_has_that_of_the_others(c: int) -> None:
    """Of the ranks that wait in gloo for rank c, only a counter tells one of them."""
    gloo: dict[str, Any] = {"backend": "gloo", "is_complete": False}
    unnamed, *named = others(c)
    facts = job(
        sleeping(c, group(done(2), **gloo)),
        worker(unnamed, group(call(3, "", count=0, dtype="", operator=""), **gloo)),
        *(worker(rank, group(call(3), **gloo)) for rank in named),
    )
    found = told(facts, f"rank {c} never entered all_reduce #3")
    assert "different" not in found.sentence
    assert "other calls" not in found.sentence
    assert {edge.operation for edge in found.edges} == {"all_reduce"}


def test_calls_that_differ_give_no_name_to_one_without(c: int) -> None:
    gloo: dict[str, Any] = {"backend": "gloo", "is_complete": False}
    unnamed, one, *rest = others(c)
    facts = job(
        worker(c, group(call(3, "broadcast"), **gloo)),
        worker(unnamed, group(call(3, "", count=0, dtype="", operator=""), **gloo)),
        *(worker(rank, group(call(3), **gloo)) for rank in (one, *rest)),
    )
    told(facts, "different operations", f"rank {c} broadcast")


def test_two_receive_from_each_other(c: int) -> None:
    here, there = (0, 1) if c else (1, 0)
    facts = job(
        worker(here, group(transfers=(transfer("recv", there, site="p.py:7"),), members="0-1")),
        worker(there, group(transfers=(transfer("recv", here, site="p.py:11"),), members="0-1")),
    )
    lines = {here: 7, there: 11}
    found = told(
        facts,
        f"deadlock: rank 0 waits for rank 1 in recv (tag 0, p.py:{lines[0]}), "
        f"rank 1 for rank 0 in recv (tag 0, p.py:{lines[1]}).",
    )
    assert found.knot == (0, 1)


def test_two_groups_crossed(c: int) -> None:
    """The culprit is in the one, and a rank of that one waits in the other."""
    a, b = (1, 3) if c == 3 else (3, 1)
    data: dict[str, Any] = {"name": "dp0", "key": "d", "members": "1,3"}
    tensor: dict[str, Any] = {"name": "tp1", "key": "t", "members": "1,3"}
    facts = job(
        worker(a, group(call(3, site="g.py:20"), **data), group(done(7), **tensor)),
        worker(b, group(call(8, "broadcast", site="g.py:26"), **tensor), group(done(2), **data)),
        *(worker(rank) for rank in (0, 2)),
    )
    first, second = ("all_reduce #3 of dp0", "broadcast #8 of tp1")
    sites = "g.py:20, g.py:26"
    if a == 3:
        first, second, sites = second, first, "g.py:26, g.py:20"
    told(
        facts,
        f"deadlock across groups: rank 1 waits in {first} for rank 3, which waits in {second} "
        f"for rank 1 ({sites})",
    )


def test_a_data_loader_reads_what_does_not_come(c: int) -> None:
    child = Process(
        pid=4720,
        command="pt_data_worker",
        state="D",
        threads=(
            Thread(
                id=4720, name="p", state="D", wait="nfs_wait", syscall="read", path="/data/x.tar"
            ),
        ),
    )
    facts = hang(in_loader(c, at=process(c, syscall="poll", children=(child,))))
    told(
        facts,
        f"rank {c}'s data loader is what all wait for: its worker 4720 is in read of /data/x.tar "
        "(state D, nfs_wait)",
        f"{those(c)} wait in all_reduce #17 at train.py:40",
    )


def in_loader(rank: int, at: Process) -> WorkerFacts:
    loader = f"{TORCH}/utils/data/dataloader.py"
    places = [
        "/usr/lib/python3.11/selectors.py:415 select",
        "/usr/lib/python3.11/multiprocessing/connection.py:947 wait",
        "/usr/lib/python3.11/multiprocessing/queues.py:113 get",
        f"{loader}:1291 _try_get_data",
        f"{loader}:725 __next__",
        "/home/u/train.py:25",
    ]
    return worker(rank, BEFORE_17, stacks=[stack(*places)], at=at)


def test_our_errors_say_why_and_a_full_disk_is_named(c: int) -> None:
    ours = "raised rallypoint.base.errors.MismatchError: ranks called different operations: " * 2
    told(hang(ended(c, BEFORE_17, code=1, error=ours)), "(code 1: MismatchError: ranks called")
    full = f"{'x' * 200} (No space left on device: /ckpt is full)"
    said = f"rank {c} has ended (code 1: No space left on device: /ckpt is full)"
    told(hang(ended(c, BEFORE_17, code=1, error=full)), said)
    loader = "RuntimeError: DataLoader worker (pid(s) 4720) exited unexpectedly"
    said = f"rank {c}'s data loader worker 4720 has ended unexpectedly"
    told(hang(ended(c, BEFORE_17, code=1, error=loader)), said)


def test_a_rank_raised_and_was_then_ended(c: int) -> None:
    error = "raised ValueError: bad sample"
    found = told(
        hang(ended(c, BEFORE_17, code=None, signal="SIGTERM", error=error)),
        f"rank {c} raised ValueError: bad sample, and was then ended by SIGTERM",
    )
    assert found.roots[0].cause is Cause.ENDED


def test_a_data_loaders_process_was_killed_and_torch_raised(c: int) -> None:
    error = "RuntimeError: DataLoader worker (pid 4720) is killed by signal: Killed. "
    told(
        hang(ended(c, BEFORE_17, code=1, error=error)),
        f"rank {c}'s data loader worker 4720 was killed by SIGKILL",
    )


def test_c_code_holds_the_gil(c: int) -> None:
    at = process(c, state="R", cpu=1.0)
    running = group(done(15), call(16), queued=1)
    places = [stack("/home/u/ext.py:12 spin", "/home/u/train.py:9")]
    told(
        hang(worker(c, running, stacks=places, at=at, gil="0x1", library="ext.so")),
        f"rank {c} probably holds the GIL in C code called at ext.py:12 (100 % CPU in ext.so); "
        "its all_reduce #16 "
        "cannot return",
        f"{those(c)} wait for it in all_reduce #17",
    )


def test_a_rank_waits_for_a_lock_of_its_own(c: int) -> None:
    main = stack("/home/u/cache.py:33 get", "/home/u/train.py:9")
    saver = stack("/home/u/cache.py:70 save", thread="0x2", name="saver", is_main=False)
    barrier = group(done(3), call(4, "barrier", count=0))
    held = worker(c, group(done(3)), stacks=[saver, main], at=process(c, syscall="futex"))
    told(
        hang(held, barrier),
        f"rank {c} never entered barrier #4",
        "it waits for a lock in its own process at cache.py:33 (probably held by thread "
        '"saver" at cache.py:70)',
        f"{those(c)} wait for it at train.py:40",
    )


@pytest.mark.parametrize("needs_core", [False, True])
def test_a_rank_that_gets_no_core(c: int, needs_core: bool) -> None:
    asleep = process(c, syscall="clock_nanosleep", starved=0.52)
    ready = process(c, state="R", cpu=0.3, starved=0.52)
    culprit = replace(sleeping(c, BEFORE_17), process=ready if needs_core else asleep)
    sentence = told(hang(culprit), " at train.py:31").sentence
    assert ("; it gets no core for 52 % of the time" in sentence) == needs_core


def test_a_node_is_silent(c: int) -> None:
    facts = hang(sleeping(c, BEFORE_17))
    lost = Node(node_rank=1, host="box2", ranks=(c,), silent_s=3.0)
    left = replace(
        facts.nodes[0],
        ranks=tuple(others(c)),
        workers=tuple(each for each in facts.nodes[0].workers if each.rank != c),
    )
    told(
        replace(facts, nodes=(left, lost)),
        f"node 1 (box2) has not answered for 3.0 s: rank {c}; ",
        f"{those(c)} wait for it in all_reduce #17",
    )


def slow_job(c: int, at_s: float, late_s: float, calls: int = 0) -> Facts:
    """At that time: for each of so many calls, the others have waited for the culprit."""

    def counted(rank: int) -> RecordedGroup:
        waits = calls if rank != c else 0
        return group(
            done(8960 + calls, for_s=0.2 - at_s),
            counts=GroupCounts(
                calls=8961 + calls,
                transfers=0,
                bytes=0,
                waited_ns=ns(waits * late_s),
                waited_squared_ns2=round(waits * late_s**2 * 1e18),
            ),
        )

    facts = job(sleeping(c, counted(c)), *(worker(rank, counted(rank)) for rank in others(c)))
    (node,) = facts.nodes
    return replace(facts, nodes=(replace(node, now_ns=ns(NOW_S + at_s)),))


def test_a_slow_rank_is_no_hang(c: int) -> None:
    samples = [slow_job(c, at_s, 0.4, calls) for at_s, calls in ((0, 0), (11, 11), (20, 20))]
    found = explanation_of(*samples)
    assert found.sentence == (
        f"no hang: slow rank {c}: others wait for it 40 % of the time; it is in time.sleep at "
        "train.py:31 in 3 of 3 samples; all ranks left all_reduce #8980 200 ms ago."
    )
    assert (found.kind, [each.rank for each in found.slow]) == (Verdict.NO_HANG, [c])
    (told_slow,) = json.loads(json.dumps(found.to_json()))["slow"]
    assert told_slow == {"rank": c, "share": 0.4, "late_s": 0.4, "step_s": None}
    assert explanation_of(samples[0], replace(samples[-1], round=2)).slow == ()  # other processes


def test_a_step_longer_than_the_look_is_judged_by_the_whole_job(c: int) -> None:
    """The processes are a minute old."""
    first, second = slow_job(c, 0.0, 0.9, 40), slow_job(c, 0.5, 0.9, 40)
    (found,) = explanation_of(first, second).slow
    assert found.rank == c
    assert found.share == pytest.approx(0.6, abs=0.01)
    rare = slow_job(c, 0.0, 12.0, 3), slow_job(c, 0.5, 12.0, 3)
    assert explanation_of(*rare).slow == ()


def raised(
    rank: int, *groups: RecordedGroup, other: Stack | None = None, ago_s: float = 5.0
) -> WorkerFacts:
    """Its main thread has raised an exception, and waits for another one."""
    main = stack("/usr/lib/python3.11/threading.py:1590 _shutdown")
    return worker(
        rank,
        *groups,
        stacks=[*([other] if other else []), main],
        at=process(rank, syscall="futex"),
        error="ValueError: bad sample 17",
        raised_ns=ns(NOW_S - ago_s),
    )


@pytest.mark.parametrize(
    ("place", "name", "keeps"),
    [
        (
            "/home/u/train.py:5 background",
            "",
            "a thread of its own waits in barrier #17 at train.py:5",
        ),
        (
            "/home/u/train.py:5 background",
            "checkpoint",
            "thread 'checkpoint' waits in barrier #17 at train.py:5",
        ),
    ],
)
def test_a_rank_that_raised_cannot_end_for_a_thread(
    c: int, place: str, name: str, keeps: str
) -> None:
    other = stack(place, thread="0x2", is_main=False, name=name)
    in_barrier = group(done(16, for_s=12.1), call(17, "barrier"))
    facts = job(
        raised(c, in_barrier, other=other), *(sleeping(rank, BEFORE_17) for rank in others(c))
    )
    found = told(facts, f"rank {c} raised ValueError: bad sample 17 and cannot end: {keeps}.")
    assert [(root.ranks, root.cause) for root in found.roots] == [((c,), Cause.RAISED)]


def test_others_wait_for_a_rank_that_raised(c: int) -> None:
    queue = ["/usr/lib/python3.11/queue.py:171 get", "/usr/lib/python3.11/threading.py:1045 run"]
    other = stack(*queue, thread="0x2", is_main=False)
    told(
        hang(raised(c, BEFORE_17, other=other)),
        f"rank {c} raised ValueError: bad sample 17 and cannot end: a thread of its own waits for"
        " a queue in its own process; ",
        f"; {those(c)} wait for it in all_reduce #17 at train.py:40 (12.0 s).",
    )


def test_a_rank_that_has_just_raised_ends_by_itself(c: int) -> None:
    facts = job(raised(c, BEFORE_17, ago_s=0.5), *(sleeping(rank) for rank in others(c)))
    assert looked(facts).kind is Verdict.NO_HANG


def test_a_rank_at_a_debuggers_prompt(c: int) -> None:
    places = [
        "/usr/lib/python3.11/cmd.py:126 cmdloop",
        "/usr/lib/python3.11/pdb.py:450 interaction",
        "/usr/lib/python3.11/bdb.py:94 dispatch_line",
        "/home/u/train.py:31",
    ]
    at_prompt = worker(c, BEFORE_17, stacks=[stack(*places)], at=process(c, syscall="pselect6"))
    told(hang(at_prompt), "it is at a debugger's prompt at train.py:31; ")
    typing = worker(
        c,
        BEFORE_17,
        stacks=[stack("/home/u/train.py:31")],
        at=process(c, syscall="read", path="/dev/pts/3"),
    )
    told(hang(typing), "it waits for input from a terminal at train.py:31; ")


def test_no_sentence_is_cut_within_a_word(c: int) -> None:
    """Of a job that does not hang: what is said last is left out."""
    path = "/home/u/" + "x" * 90 + ".py"
    workers = [
        worker(
            rank,
            stacks=[stack(f"{path}:{rank} f")],
            at=process(rank, syscall="clock_nanosleep"),
        )
        for rank in range(4)
    ]
    found = told(
        job(*workers), "no hang: no rank waits for another; rank 0 is in", kind=Verdict.NO_HANG
    )
    assert "..." not in found.sentence
    assert found.sentence.endswith(f"at {'x' * 90}.py:0.") or c


def test_a_rank_is_still_importing(c: int) -> None:
    places = [
        "/venv/lib/python3.11/site-packages/tokenizers/x.py:3 <module>",
        "<frozen importlib._bootstrap>:241 _call_with_frames_removed",
        "<frozen importlib._bootstrap>:1176 _find_and_load",
        "/venv/lib/python3.11/site-packages/transformers/__init__.py:27 <module>",
        "<frozen importlib._bootstrap_external>:940 exec_module",
        "<frozen importlib._bootstrap>:1176 _find_and_load",
        "/home/u/train.py:3 <module>",
    ]
    forming = [
        f"{TORCH}/distributed/rendezvous.py:199 _create_c10d_store",
        f"{TORCH}/distributed/distributed_c10d.py:1892 init_process_group",
        "/home/u/train.py:12 main",
    ]
    facts = job(
        worker(c, stacks=[stack(*places)], at=process(c, age_s=28.0)),
        *(worker(rank, stacks=[stack(*forming)]) for rank in others(c)),
    )
    told(
        facts,
        f"rank {c} never joined the group: it is still importing transformers at train.py:3 (28 s)",
        f"{those(c)} wait for it in init_process_group at train.py:12",
    )


def test_a_module_of_the_users_own_sleeps(c: int) -> None:
    places = [
        "/home/u/slowmod.py:2 <module>",
        "<frozen importlib._bootstrap>:241 _call_with_frames_removed",
        "<frozen importlib._bootstrap>:1176 _find_and_load",
        "/home/u/train.py:3 <module>",
    ]
    at = process(c, age_s=9.0, syscall="clock_nanosleep")
    facts = job(
        worker(c, stacks=[stack(*places)], at=at),
        *(
            worker(
                rank,
                stacks=[
                    stack(
                        f"{TORCH}/distributed/distributed_c10d.py:1892 init_process_group",
                        "/home/u/train.py:12 main",
                    )
                ],
            )
            for rank in others(c)
        ),
    )
    told(facts, f"rank {c} never joined the group: it is still importing slowmod")


def test_a_rank_has_left_the_loop(c: int) -> None:
    """Uneven batches in DistributedDataParallel."""
    backward = [
        f"{TORCH}/autograd/graph.py:979 _engine_run_backward",
        f"{TORCH}/_tensor.py:623 backward",
        "/home/u/train.py:52",
    ]
    gloo: dict[str, Any] = {"backend": "gloo", "is_complete": False}
    facts = job(
        ended(c, group(done(16), **gloo)),
        *(
            worker(rank, group(done(16), call(17), **gloo), stacks=[stack(*backward)])
            for rank in others(c)
        ),
    )
    told(
        facts,
        f"rank {c} has ended (code 0); its last done was all_reduce #16; ",
        f"{those(c)} wait in all_reduce #17 (backward, train.py:52)",
    )


def test_a_rank_is_in_destroy(c: int) -> None:
    leaving = [
        f"{TORCH}/distributed/distributed_c10d.py:2333 destroy_process_group",
        "/home/u/train.py:60",
    ]
    told(
        hang(worker(c, BEFORE_17, stacks=[stack(*leaving)])),
        f"rank {c} never entered all_reduce #17 of default group: it is in destroy_process_group "
        "at train.py:60",
    )


def test_one_called_a_barrier_more(c: int) -> None:
    gloo: dict[str, Any] = {"backend": "gloo", "is_complete": False}
    facts = job(
        waiting(c, group(call(6, "barrier", count=0, operator=""), **gloo), function="barrier"),
        *(waiting(rank, group(call(6, operator=""), **gloo)) for rank in others(c)),
    )
    told(facts, f"rank {c} in barrier #6 at train.py:40, {those(c)} in all_reduce #6")


def test_sizes_differ(c: int) -> None:
    for backend, certainty in (("rallypoint", "ranks called"), ("gloo", "probably ranks called")):
        facts = job(
            worker(c, group(call(6, shape=(9,), count=9), backend=backend)),
            *(worker(rank, group(call(6, shape=(8,)), backend=backend)) for rank in others(c)),
        )
        found = told(facts, "called different operations", "float32[8]", "float32[9]")
        assert found.sentence.startswith(certainty)


def test_a_ring_of_sends(c: int) -> None:
    """In either direction."""
    way = 1 if c else -1
    facts = job(
        *(
            worker(r, group(transfers=(transfer("send", (r + way) % 4, site="r.py:9"),)))
            for r in range(4)
        )
    )
    ring = "rank 1, rank 1 for rank 2, rank 2 for rank 3, rank 3 for rank 0"
    if way < 0:
        ring = "rank 3, rank 3 for rank 2, rank 2 for rank 1, rank 1 for rank 0"
    first, _, rest = ring.partition(",")
    told(facts, f"deadlock: rank 0 waits for {first} in send (tag 0, r.py:9),{rest}.")


def test_the_sender_has_ended(c: int) -> None:
    other = 0 if c else 1
    facts = job(
        ended(c, group(members="0-3")),
        worker(other, group(transfers=(transfer("recv", c, tag=7, site="p.py:9"),))),
        *(ended(rank, group()) for rank in others(c) if rank != other),
    )
    told(
        facts,
        f"rank {c} has ended (code 0); rank {other} waits for it in recv, tag 7 at p.py:9",
    )


def test_a_wrong_tag(c: int) -> None:
    sender, receiver = (1, 0) if c else (0, 1)
    facts = job(
        worker(sender, group(transfers=(transfer("send", receiver, tag=1),), members="0-1")),
        worker(receiver, group(transfers=(transfer("recv", sender, tag=0),), members="0-1")),
    )
    told(facts, f"rank {sender} sent tag 1 to rank {receiver}, which waits for tag 0")


def test_another_tag_came(c: int) -> None:
    """A small message of ours leaves its sender at once; only who receives knows of it."""
    sender, receiver = (0, 1) if c else (1, 0)
    wait = transfer("recv", sender, tag=0, site="/home/u/p.py:7", came_tag=5)
    both: dict[str, Any] = {"members": "0-1"}
    waits = worker(receiver, group(transfers=(wait,), **both))
    came = f"rank {sender} sent tag 5 to rank {receiver}, which waits for tag 0 (p.py:7)"
    told(job(waits, sleeping(sender, group(**both))), f"{came}; rank {sender} is in time.sleep at")
    in_call = worker(sender, group(call(4), **both))
    waits = worker(receiver, group(done(3), transfers=(wait,), **both))
    told(job(waits, in_call), f"{came}: neither can continue")


def test_a_receive_from_any_makes_no_false_circle(c: int) -> None:
    """One that receives from anybody, all others but one wait for it; that one is free."""
    receiver = 1
    free = c
    rest = [rank for rank in range(4) if rank not in (receiver, free)]
    facts = job(
        worker(receiver, group(transfers=(transfer("recv", -1, site="p.py:3"),))),
        *(worker(rank, group(transfers=(transfer("recv", receiver),))) for rank in rest),
        sleeping(free, group()),
    )
    found = told(
        facts, f"rank {free} is in time.sleep at train.py:31", "rank 1 waits for it in recv"
    )
    assert not found.knot
    assert found.roots[0].ranks == (free,)


def test_python_runs_for_ever(c: int) -> None:
    at = process(c, state="R", cpu=1.0)
    told(
        hang(worker(c, BEFORE_17, stacks=[stack("/home/u/train.py:8 spin")], at=at)),
        f"rank {c} never entered all_reduce #17",
        "it runs at train.py:8 (100 % CPU)",
    )


def test_a_rank_is_in_the_kernel(c: int) -> None:
    at = process(c, state="D", wait="wait_for_vfork_done", syscall="vfork")
    told(
        hang(worker(c, BEFORE_17, stacks=[stack("/home/u/train.py:8 run")], at=at)),
        f"rank {c} never entered all_reduce #17",
        "it has been in the kernel (D) since the first look, in wait_for_vfork_done",
    )


def test_no_space_is_left(c: int) -> None:
    error = "OSError: [Errno 28] No space left on device: '/ckpt/a.pt'"
    told(hang(ended(c, BEFORE_17, code=1, error=error)), f"rank {c} has ended (code 1: {error})")


def test_nothing_arrives_from_another_host(c: int) -> None:
    flow = StalledConnection(rank=c, peer="B", unacknowledged_bytes=9, retransmits=7, stalled_s=4.0)
    told(
        job(*(waiting(rank, IN_17) for rank in range(4)), flows=(flow,)),
        "all entered #17 (all_reduce of default group); nothing arrives from host B for 4.0 s "
        "(7 retransmits)",
        "ranks 0-3 wait in it at train.py:40",
    )


def test_all_compute(c: int) -> None:
    computing = [
        worker(
            rank,
            group(*(done(n, for_s=9 + 20 * (9 - n)) for n in range(10))),
            stacks=[stack("/home/u/train.py:8 step")],
            at=process(rank, state="R", cpu=1.0),
        )
        for rank in range(4)
    ]
    told(
        job(*computing),
        "no hang: all ranks left all_reduce #9 9.0 s ago",
        kind=Verdict.NO_HANG,
    )


def test_nobody_waits(c: int) -> None:
    computing = [worker(rank, group(done(n := 3 + (rank == c), for_s=9))) for rank in range(4)]
    assert n
    told(job(*computing), "no hang", "no rank waits for another", kind=Verdict.NO_HANG)


def test_what_cannot_be_told_is_not(c: int) -> None:
    blind = worker(c, BEFORE_17, no_stacks_because="it does not answer to signal 35")
    told(
        hang(blind),
        f"rank {c} never entered all_reduce #17",
        "cannot determine the line, because it does not answer to signal 35",
        kind=Verdict.UNEXPLAINED,
    )
    in_c = worker(c, BEFORE_17, stacks=[stack("/home/u/ext.py:8")], at=process(c, syscall="futex"))
    found = told(hang(in_c), "at ext.py:8", "cannot determine", kind=Verdict.UNEXPLAINED)
    assert found.exit_status == 4


def test_what_moves_does_not_hang(c: int) -> None:
    """Whether the one that is waited for moves, or another one."""
    second = hang(sleeping(c, BEFORE_17))
    assert looked(second).exit_status == 3
    for moves in range(4):
        (node,) = second.nodes
        earlier = [
            replace(each, groups=(group(done(14), call(15)),)) if each.rank == moves else each
            for each in node.workers
        ]
        first = replace(second, nodes=(replace(node, workers=tuple(earlier)),))
        assert explanation_of(first, second).kind is Verdict.NO_HANG


def test_what_is_waited_for_as_long_in_each_step_is_no_hang(c: int) -> None:
    calls = [done(n, for_s=12 + 14 * (16 - n), took_s=11.0) for n in range(8, 17)]
    facts = job(
        sleeping(c, group(*calls)),
        *(waiting(rank, group(*calls, call(17))) for rank in others(c)),
    )
    words = f"{those(c)} have waited for 12.0 s in all_reduce #17 for rank {c}, which is in time.sl"
    told(facts, "no hang", words, kind=Verdict.NO_HANG)


def test_short_waits_are_no_hang(c: int) -> None:
    brief = group(done(16, for_s=0.9), call(17, for_s=0.8))
    told(hang(sleeping(c, BEFORE_17), brief), "no hang", kind=Verdict.NO_HANG)


def test_without_numbers_stacks_tell(c: int) -> None:
    facts = job(
        replace(sleeping(c), has_record=False),
        *(replace(waiting(rank), has_record=False) for rank in others(c)),
    )
    told(
        facts,
        f"rank {c} is in time.sleep at train.py:31; operation numbers unknown; {those(c)} probably "
        "wait for it in all_reduce at train.py:40",
    )


def test_the_answer_for_programs(c: int) -> None:
    found = json.loads(json.dumps(looked(hang(sleeping(c, BEFORE_17))).to_json()))
    assert (found["verdict"], found["exit_status"]) == ("hang explained", 3)
    (edge,) = found["edges"]
    assert (edge["ranks"], edge["waits_for"], edge["number"]) == (others(c), [c], 17)
    assert found["roots"][0]["pids"] == [4000 + c]


def test_processes_of_a_machine_cannot_reach_each_other(c: int) -> None:
    """Whether or not all ranks are there yet: those that are wait in vain."""
    at = [f"{TORCH}/distributed/distributed_c10d.py:1892 init_process_group", "/home/u/train.py:12"]
    culprit = sleeping(c) if c else worker(c, stacks=[stack(*at)])
    facts = job(
        culprit,
        *(worker(rank, stacks=[stack(*at)]) for rank in others(c)),
        loopback_trouble="the loopback interface is down; run `ip link set lo up` as root",
    )
    found = told(facts)
    assert found.sentence == (
        "on node 0 (box1), the loopback interface is down; run `ip link set lo up` as root."
    )
