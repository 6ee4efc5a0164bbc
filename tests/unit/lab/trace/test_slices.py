"""Random calls of random jobs: each is drawn once, nothing overlaps, flows join what belongs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.chrome_trace import Slice, Trace, understand

from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.lab.trace.chrome import to_events
from rallypoint.lab.trace.slices import draw
from rallypoint.launch.inspection.node_trace import JobTrace, NodeTrace, WorkerTrace

BEGAN = 1_000_000_000


def call(
    number: int, begin: int, end: int | None, *, name: str = "all_reduce", **more: int
) -> RecordedCall:
    return RecordedCall(
        number=number,
        operation=name,
        state="running" if end is None else "done",
        since_ns=begin,
        ended_ns=end or 0,
        dtype="float32",
        operator="SUM",
        root=more.get("root", 0),
        count=more.get("count", 10),
        peer=more.get("peer"),
    )


def group(
    key: str, members: str, calls: list[RecordedCall], transfers: list[RecordedCall], backend: str
) -> RecordedGroup:
    return RecordedGroup(
        name=f"group {key}",
        key=key,
        members=members,
        has_left=False,
        queued=0,
        calls=tuple(calls),
        transfers=tuple(transfers),
        backend=backend,
    )


def node(number: int, workers: list[WorkerTrace], *, clock: str = "one") -> NodeTrace:
    return NodeTrace(
        node_rank=number,
        host=f"host{number}",
        clock=clock,
        began_ns=BEGAN,
        ended_ns=BEGAN + 10**9,
        wall_ns=0,
        workers=tuple(workers),
    )


def read(trace: JobTrace) -> Trace:
    return understand(to_events(draw(trace)), {})


def random_job(chance: random.Random) -> JobTrace:
    """Collectives that follow each other, as ours, or overlap, as gloo's; sends that overlap."""
    ranks = chance.randrange(1, 6)
    by_rank: list[list[RecordedGroup]] = [[] for _ in range(ranks)]
    for number in range(chance.randrange(1, 4)):
        backend = chance.choice(["rallypoint", "gloo"])
        members = sorted(chance.sample(range(ranks), chance.randrange(1, ranks + 1)))
        numbers = range(chance.randrange(0, 30))
        for rank in members:
            now, calls = BEGAN + chance.randrange(10**6), []
            for each in numbers:
                if chance.random() < 0.1:
                    continue  # missed
                end: int | None = now + chance.randrange(1000)
                if each == numbers[-1] and chance.random() < 0.5:
                    end = None
                calls.append(call(each, now, end, name=chance.choice(["all_reduce", "barrier"])))
                now = (end or now) if backend == "rallypoint" else now + chance.randrange(500)
            transfers = [
                call(
                    each,
                    begin := BEGAN + chance.randrange(10**4),
                    None if chance.random() < 0.1 else begin + chance.randrange(3000),
                    name=chance.choice(["send", "recv"]),
                    peer=chance.randrange(-1, len(members)),
                )
                for each in range(chance.randrange(10))
            ]
            names = ",".join(map(str, members))
            by_rank[rank].append(group(str(number), names, calls, transfers, backend))
    workers = [
        WorkerTrace(rank=rank, pid=100 + rank, groups=tuple(groups), exact_ns=BEGAN)
        for rank, groups in enumerate(by_rank)
    ]
    middle = chance.randrange(ranks + 1)
    return JobTrace(
        run_id="x", round=0, nodes=(node(0, workers[:middle]), node(1, workers[middle:]))
    )


@pytest.mark.parametrize("repeat", range(200))
def test_random_jobs(repeat: int, seed: int) -> None:
    job = random_job(random.Random(f"{seed}/{repeat}"))
    trace = read(job)

    expected: Counter[tuple[object, ...]] = Counter()
    joined: dict[tuple[str, int, str], set[int]] = {}
    for part in job.nodes:
        for worker in part.workers:
            for each in worker.groups:
                for one in (*each.calls, *each.transfers):
                    is_over = one.state == "done"
                    expected[worker.rank, each.name, one.number, one.operation, is_over] += 1
                    if one.peer is None:
                        key = each.key, one.number, one.operation
                        joined.setdefault(key, set()).add(worker.rank)
    drawn = Counter(
        (
            rank_of(one),
            group_of(one),
            one.args["number"],
            one.name.removesuffix(" (not done)"),
            one.end is not None,
        )
        for one in trace.slices
    )
    assert drawn == expected
    flows = Counter(
        (
            flow[0].track.split()[1].strip(","),
            flow[0].args["number"],
            flow[0].name.removesuffix(" (not done)"),
            tuple(sorted(map(rank_of, flow))),
        )
        for flow in trace.flows
    )
    assert flows == Counter((*k, tuple(sorted(v))) for k, v in joined.items() if len(v) > 1)


def rank_of(one: Slice) -> int:
    return int(one.process.split()[1])


def group_of(one: Slice) -> str:
    return " ".join(one.track.replace(":", " ").replace(",", " ").split()[:2])


def test_what_a_call_says() -> None:
    calls = [call(7, BEGAN, BEGAN + 1500), call(8, BEGAN + 2000, None)]
    sends = [call(0, BEGAN, BEGAN + 10, name="send", peer=1, root=5)]
    one = WorkerTrace(
        rank=0, pid=11, groups=(group("g", "0,3", calls, sends, "rallypoint"),), exact_ns=BEGAN
    )
    late = [call(7, BEGAN + 1200, BEGAN + 1500)]
    other = WorkerTrace(
        rank=3, pid=12, groups=(group("g", "0,3", late, [], "rallypoint"),), exact_ns=BEGAN
    )
    trace = read(JobTrace(run_id="x", round=0, nodes=(node(0, [one, other]),)))
    first, second = trace.tracks["rank 0 (host0, 11)", "group g"]
    assert (first.begin, first.end, first.name) == (0, 1500, "all_reduce")
    assert first.args == {
        **{"number": 7, "state": "done", "items": 10, "dtype": "float32", "bytes": 40},
        **{"operator": "SUM", "entered last": "rank 3, 1.2 us after the first"},
    }
    assert (second.name, second.end) == ("all_reduce (not done)", None)
    (sent,) = trace.tracks["rank 0 (host0, 11)", "group g: sends and receives"]
    assert (sent.args["to"], sent.args["tag"]) == ("rank 3", 5)


def test_coarse_times_neither_overlap_nor_say_who_was_last() -> None:
    tick = 4_000_000
    calls = [call(i, i // 3 * tick, i // 3 * tick + (0 if i % 3 else tick)) for i in range(9)]
    workers = [
        WorkerTrace(rank=rank, pid=0, groups=(group("g", "0-1", calls, [], "rallypoint"),))
        for rank in range(2)
    ]
    trace = read(JobTrace(run_id="x", round=0, nodes=(node(0, workers, clock=""),)))
    assert trace.tracks.keys() == {("rank 0 (host0)", "group g"), ("rank 1 (host0)", "group g")}
    assert len(trace.flows) == 9
    assert all(one.args["times"] == "within some milliseconds" for one in trace.slices)
    assert not any("entered last" in one.args for one in trace.slices)


def test_a_group_that_was_formed_anew_is_another_one() -> None:
    old = group("g", "0-1", [call(0, BEGAN, BEGAN + 9)], [], "rallypoint")
    new = group("g", "0-1", [call(0, BEGAN + 20, BEGAN + 29)], [], "rallypoint")
    workers = [WorkerTrace(rank=rank, pid=rank + 1, groups=(old, new)) for rank in range(2)]
    drawing = draw(JobTrace(run_id="x", round=0, nodes=(node(0, workers),)))
    assert [[one.begin_ns for one in flow] for flow in drawing.flows] == [[0, 0], [20, 20]]


def test_nodes_are_put_on_one_clock() -> None:
    ahead = 77_000_000_000
    parts = []
    for number, shift in enumerate((0, ahead)):
        calls = [
            call(i, BEGAN + i * 1000 + shift, BEGAN + i * 1000 + 900 + shift) for i in range(9)
        ]
        one = group("g", "0-1", calls, [], "rallypoint")
        worker = WorkerTrace(rank=number, pid=1, groups=(one,), exact_ns=BEGAN + shift)
        parts.append(node(number, [worker], clock=f"clock {number}"))
    drawing = draw(JobTrace(run_id="x", round=0, nodes=tuple(parts)))
    assert drawing.clocks[1].ns == ahead
    assert all(flow[0].begin_ns == flow[1].begin_ns for flow in drawing.flows)
    labels = [event["args"] for event in to_events(drawing) if event["name"] == "process_labels"]
    assert labels == [{"labels": "clock by 9 collectives, +-0.0 us, certain within 1.8 us"}]
