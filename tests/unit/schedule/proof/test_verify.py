"""verify: proves every built-in program, and refuses broken ones with the place at fault."""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.schedule.catalogue import ALGORITHMS, build
from rallypoint.schedule.execution import execute
from rallypoint.schedule.program import (
    SLOTS,
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Lane,
    Operation,
    Program,
    ProgramError,
    Reduce,
    Send,
    copy,
    receive,
    widen,
)
from rallypoint.schedule.proof.interpret import interpret
from rallypoint.schedule.proof.races import Clocks
from rallypoint.schedule.proof.symmetry import find_rotation
from rallypoint.schedule.proof.verify import MOST_OPERATIONS, verify

pytestmark = pytest.mark.slow

CASES = [(c, name) for c in Collective if c is not Collective.SEND for name in ALGORITHMS[c]]
NODES_ONLY = ("node_ring", "two_level")
KNOW_NODES = ("binomial_tree", "binary_tree", "double_tree", "node_ring", "two_level")


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Millions of small tuples, none of them in a cycle: looking for cycles is half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(range(1, 14), id="1-13"),
        pytest.param(range(14, 65), id="14-64", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_every_algorithm_for_1_to_64_ranks(collective: Collective, name: str, sizes: range) -> None:
    """With a single slot for each lane; three where an algorithm says so."""
    for ranks in sizes:
        every = range(ranks) if ranks <= 9 else (0, ranks // 3, ranks - 1)
        per_node = max(d for d in (1, 2, 3, 4) if ranks % d == 0) if name in NODES_ONLY else 1
        for root in every if collective.has_root else (0,):
            program = build(collective, name, ranks=ranks, root=root, per_node=per_node)
            slots = SLOTS if name == "direct_two_shot" else 1
            report = verify(program, slots=slots)
            assert report.scratch_chunks <= program.scratch_chunks
            if name.startswith("direct"):
                assert report.in_rank_order


@pytest.mark.parametrize("name", KNOW_NODES)
def test_algorithms_that_know_nodes(name: str) -> None:
    for ranks in range(2, 26):
        for per_node in (1, 2, 3, 4, 6, 8):
            if name == "two_level" and ranks % per_node:
                with pytest.raises(ProgramError, match="do not fill nodes"):
                    build(Collective.ALL_REDUCE, name, ranks=ranks, per_node=per_node)
            else:
                verify(build(Collective.ALL_REDUCE, name, ranks=ranks, per_node=per_node))


@pytest.mark.parametrize("collective", [c for c in Collective if "two_level" in ALGORITHMS[c]])
def test_two_levels_everywhere(collective: Collective) -> None:
    """Nodes of every size, the last one fuller or less full where it may be; with a single slot."""
    for ranks, per_node in itertools.product((1, 2, 3, 4, 5, 6, 8, 9, 12), (1, 2, 3, 4, 6)):
        for root in range(ranks) if collective.has_root else (0,):
            try:
                program = build(collective, "two_level", ranks=ranks, root=root, per_node=per_node)
            except ProgramError:
                assert ranks % per_node
                assert not collective.has_root
                continue
            verify(program, slots=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["double_tree", "binomial_tree"])
def test_thousands_of_ranks(name: str) -> None:
    """Everything for all ranks, but races, which are looked for on a sample; and it says so."""
    report = verify(build(Collective.ALL_REDUCE, name, ranks=3_000))
    assert report.races_of == "16 ranks"
    assert verify(build(Collective.ALL_REDUCE, name, ranks=64)).races_of == "all ranks"


TURNING = {
    (Collective.ALL_REDUCE, "ring"),
    (Collective.ALL_REDUCE, "node_ring"),
    (Collective.ALL_GATHER, "ring"),
    (Collective.ALL_GATHER, "direct"),
    (Collective.REDUCE_SCATTER, "ring"),
    (Collective.ALL_TO_ALL, "direct"),
    (Collective.ALL_TO_ALL, "bruck"),
}


def test_some_ranks_stand_for_all_as_if_all_were_looked_at() -> None:
    """Every program whose ranks turn, by both ways: the reports must be the same."""
    found = set()
    for collective, algorithms in ALGORITHMS.items():
        for name in algorithms:
            for ranks, per_node in itertools.product(range(2, 13), (1, 2, 3)):
                try:
                    program = build(collective, name, ranks=ranks, per_node=per_node)
                except ProgramError:
                    continue
                if find_rotation(program) is None:
                    continue
                found.add((collective, name))
                whole, turned = verify(program, slots=SLOTS), verify(program, slots=SLOTS, most=0)
                assert turned.proof.endswith(f"{ranks - program.period} were compared with them")
                assert turned == replace(whole, proof=turned.proof, restartable=False)
    assert found == TURNING


def test_ring_of_thousands_of_ranks() -> None:
    """Four million operations, proved on those of one rank; and it says so."""
    report = verify(build(Collective.ALL_REDUCE, "ring", ranks=1_000))
    assert report.operations == 1_000 * (4 * 999)
    assert re.fullmatch(r"rank 0 for all, of which 2\d were compared with them", report.proof)
    assert report.races_of == "all ranks"


def turning(lanes: Callable[[int], list[Operation]], ranks: int = 6) -> Program:
    """A program that calls its ranks alike."""
    ring = build(Collective.ALL_REDUCE, "ring", ranks=ranks)
    return replace(ring, lanes=lambda rank: (tuple(lanes(rank)),))


def ring_lane(rank: int) -> list[Operation]:
    return list(build(Collective.ALL_REDUCE, "ring", ranks=6).lanes(rank)[0])


def unread(send: Any) -> Any:
    return replace(send, source=Chunks(Buffer.OUTPUT, send.source.index))


def less(reduce: Any) -> Any:
    return replace(reduce, operands=reduce.operands[:1])


def twice(reduce: Any) -> Any:
    return replace(reduce, operands=(*reduce.operands, reduce.operands[1]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda lane: lane[:-1], "rank 1 never takes this message"),
        (lambda lane: [lane[1], lane[0], *lane[2:]], "these wait for each other"),
        (lambda lane: [unread(lane[0]), *lane[1:]], "output 0 holds nothing yet"),
        (lambda lane: [lane[0], less(lane[1]), *lane[2:]], "holds input . of ranks .*, not input"),
        (lambda lane: [lane[0], twice(lane[1]), *lane[2:]], "would be counted twice"),
    ],
)
def test_what_is_wrong_on_all_ranks_is_found_on_one(
    spoil: Callable[[list[Any]], list[Operation]], words: str
) -> None:
    """Both ways refuse it, and for the same reason."""
    wrong = turning(lambda rank: spoil(ring_lane(rank)))
    with pytest.raises(ProgramError, match=words) as whole:
        verify(wrong, slots=SLOTS)
    assert find_rotation(wrong) is not None
    with pytest.raises(ProgramError, match=words) as turned:
        verify(wrong, slots=SLOTS, most=0)
    assert (whole.value.lane, whole.value.step) == (turned.value.lane, turned.value.step)


def test_races_are_found_on_one_rank_too() -> None:
    """The receiver may still be reading what the next piece of the same lane overwrites."""

    ring = build(Collective.ALL_GATHER, "ring", ranks=3)

    def racing(rank: int) -> tuple[Lane, ...]:
        own, left, right = Chunks(Buffer.OUTPUT, rank), (rank - 1) % 3, (rank + 1) % 3
        after = Chunks(Buffer.OUTPUT, left)
        source = Chunks(Buffer.INPUT, 0)
        return (
            (
                copy(source, own),
                Send(own, (right,)),
                copy(source, own),
                receive(left, after),
                Send(after, (right,)),
                receive(left, Chunks(Buffer.OUTPUT, (rank - 2) % 3)),
            ),
        )

    wrong = replace(ring, lanes=racing)
    assert find_rotation(wrong) is not None
    for most in (MOST_OPERATIONS, 0):
        with pytest.raises(ProgramError, match=r"step 2 .* overwrites output 0, which lane 0"):
            verify(wrong, slots=SLOTS, most=most)


def test_a_rank_that_differs_is_noticed() -> None:
    """Then all are looked at, and what is wrong there is found there."""

    def lanes(rank: int) -> list[Operation]:
        return ring_lane(rank)[:-1] if rank == 4 else ring_lane(rank)

    wrong = turning(lanes)
    assert find_rotation(wrong) is None
    with pytest.raises(ProgramError, match="rank 4 never takes this message"):
        verify(wrong, slots=SLOTS, most=0)


def test_causes_are_the_same_followed_as_tabled(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = execute(build(Collective.ALL_REDUCE, "double_tree", ranks=13), slots=1, pieces=2)
    table = Clocks(trace)
    monkeypatch.setattr("rallypoint.schedule.proof.races._TABLE", 0)
    followed = Clocks(trace)
    for event in range(len(trace.events)):
        assert list(table.row(event)) == list(followed.row(event))


def test_properties_of_algorithms() -> None:
    """What the documentation says of them."""

    def report(name: str, collective: Collective = Collective.ALL_REDUCE) -> Any:
        return verify(build(collective, name, ranks=12), slots=SLOTS)

    in_order = {name for name in ALGORITHMS[Collective.ALL_REDUCE] if report(name).in_rank_order}
    trees = {"binomial_tree", "binary_tree", "double_tree"}  # the last for even n
    direct = {"direct_one_shot", "direct_two_shot", "direct_two_phase"}
    assert in_order == {*direct, "recursive_doubling", *trees}
    assert report("binomial_tree").restartable
    assert report("binary_tree").restartable
    assert not report("ring").restartable
    assert report("direct_one_shot").copies_in_place
    assert not report("ring").copies_in_place
    assert report("direct", Collective.ALL_TO_ALL).uneven
    assert not report("bruck", Collective.ALL_TO_ALL).uneven
    assert report("bruck", Collective.ALL_GATHER).uneven


@pytest.mark.parametrize("name", ["ring", "binary_tree", "direct_one_shot", "halving_doubling"])
def test_widened_programs(name: str) -> None:
    for ranks in (1, 2, 3, 7):
        for ways in (1, 2):
            program = widen(build(Collective.ALL_REDUCE, name, ranks=ranks), ways)
            assert verify(program).operations > 0
            values = [[(rank, c) for c in range(program.chunks)] for rank in range(ranks)]
            wanted = [[(sum(range(ranks)), c * ranks) for c in range(program.chunks)]] * ranks
            assert interpret(program, values, lambda a, b: (a[0] + b[0], a[1] + b[1])) == wanted


# Broken programs. Two ranks, one chunk, unless said otherwise.

IN, OUT, TEMPORARY = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0), Chunks(Buffer.SCRATCH, 0)


def program(*ranks: tuple[Lane, ...], **changes: Any) -> Program:
    made = Program(
        "broken",
        Collective.ALL_REDUCE,
        len(ranks),
        chunks=1,
        sends=4,
        scratch_chunks=1,
        copies=True,
        lanes=lambda rank: ranks[rank],
    )
    return replace(made, **changes)


def one_shot(rank: int) -> list[Operation]:
    """A good one, to be spoiled."""
    operands = (IN, Incoming(1)) if rank == 0 else (Incoming(0), IN)
    return [Send(IN, (1 - rank,)), Reduce(operands, (OUT,))]


def refused(broken: Program, *, slots: int = 1) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        verify(broken, slots=slots)
    return caught.value


def test_the_program_to_be_spoiled_is_good() -> None:
    verify(program((tuple(one_shot(0)),), (tuple(one_shot(1)),)))


def test_wrong_chunk() -> None:
    """Ring with one wrong index: rank 2 reduces another chunk at step 3."""
    good = build(Collective.ALL_REDUCE, "ring", ranks=4)

    def lanes(rank: int) -> tuple[Lane, ...]:
        (lane,) = good.lanes(rank)
        if rank != 2:
            return (lane,)
        changed = list(lane)
        first = changed[3]
        assert isinstance(first, Reduce)
        changed[3] = Reduce((first.operands[0], Chunks(Buffer.INPUT, 1)), first.targets)
        return (tuple(changed),)

    error = refused(replace(good, lanes=lanes))
    assert (error.rank, error.lane, error.step, error.chunk) == (2, 0, 3, 0)
    assert "chunk 1 is combined with chunk 0" in str(error)


def test_result_in_the_wrong_place() -> None:
    first: Lane = (Send(IN, (1,)), copy(IN, OUT))
    second: Lane = (receive(0, TEMPORARY),)
    error = refused(program((first,), (second,), collective=Collective.BROADCAST))
    assert "rank 1: output 0 is never written" in str(error)


def test_missing_receive() -> None:
    error = refused(program((tuple(one_shot(0)),), ((Send(IN, (0,)), copy(IN, OUT)),)))
    assert (error.rank, error.lane, error.step, error.chunk) == (0, 0, 0, 0)
    assert "rank 1 never takes this message" in str(error)


def test_missing_send() -> None:
    error = refused(program((tuple(one_shot(0)),), (tuple(one_shot(1)[1:]),)))
    assert (error.rank, error.step) == (0, 1)
    assert "rank 1, lane 0 never sends what is taken here" in str(error)


def test_cyclic_wait() -> None:
    error = refused(program((tuple(one_shot(0)[::-1]),), (tuple(one_shot(1)[::-1]),)))
    assert (error.rank, error.lane, error.step) == (0, 0, 0)
    assert "these wait for each other: rank 0, lane 0, step 0" in str(error)
    assert "rank 1, lane 0, step 0" in str(error)


def test_too_few_slots() -> None:
    """Both send twice before they take: two slots do, one does not."""

    def lane(rank: int, send: Operation) -> Lane:
        return (send, send, receive(1 - rank, TEMPORARY), one_shot(rank)[1])

    broken = program((lane(0, Send(IN, (1,))),), (lane(1, Send(IN, (0,))),))
    error = refused(broken, slots=1)
    assert error.step == 1
    assert "wait for each other" in str(error)
    verify(broken, slots=2)


def test_double_count() -> None:
    lanes = [[*one_shot(rank), Reduce((OUT, IN), (OUT,))] for rank in range(2)]
    error = refused(program(*((tuple(lane),) for lane in lanes)))
    assert "chunk 0 of rank 1 would be counted twice" in str(error)
    assert (error.rank, error.step) == (1, 2)


def test_missing_contribution() -> None:
    lanes = [[*one_shot(0)[:1], receive(1, TEMPORARY), copy(IN, OUT)], one_shot(1)]
    error = refused(program(*((tuple(lane),) for lane in lanes)))
    assert "output 0 holds input 0 of rank 0, not input 0 of ranks 0, 1" in str(error)
    assert (error.rank, error.step, error.chunk) == (0, 2, 0)


def test_other_order_on_another_rank() -> None:
    lanes = [one_shot(0), [one_shot(1)[0], Reduce((IN, Incoming(0)), (OUT,))]]
    error = refused(program(*((tuple(lane),) for lane in lanes)))
    assert "combined in another order than on rank 0" in str(error)


def test_overwritten_while_it_is_read() -> None:
    """Zero copy: rank 0 changes what it sent, though rank 1 may still be reading it."""
    first = (copy(IN, TEMPORARY), Send(TEMPORARY, (1,)), copy(IN, TEMPORARY), one_shot(0)[1])
    error = refused(program((first,), (tuple(one_shot(1)),)))
    assert (error.rank, error.step) == (0, 2)
    assert "its receivers may still be reading" in str(error)


def test_lanes_that_race() -> None:
    """Lanes 0 and 1 of rank 0 write the same chunk, in no order."""
    lanes = ((*one_shot(0), copy(IN, TEMPORARY)), (copy(IN, TEMPORARY),))
    error = refused(program(lanes, (tuple(one_shot(1)),)))
    assert (error.rank, error.chunk) == (0, 0)
    assert "nothing says which comes first" in str(error)


def test_input_read_late() -> None:
    """Fine with two buffers, wrong in place: the input is the output, which was written before."""
    lanes = [[*one_shot(rank), copy(IN, TEMPORARY)] for rank in range(2)]
    error = refused(program(*((tuple(lane),) for lane in lanes)))
    assert "in place overwrites output 0, which lane 0, step 2" in str(error)


def test_message_of_two_lanes() -> None:
    broken = program(
        ((Send(IN, (1,)), Send(IN, (1,)), receive(1, TEMPORARY)),),
        ((receive(0, TEMPORARY),), (receive(0, OUT), Send(IN, (0,)))),
    )
    assert "one lane must take them all" in str(refused(broken))


def test_barrier_that_does_not_wait() -> None:
    nothing = Reduce((Incoming(0),), ())
    broken = program(((Send(IN, (1,)),),), ((nothing,),), collective=Collective.BARRIER)
    assert "rank 0 does not wait for rank 1" in str(refused(broken))


def test_false_claim_to_need_no_copies() -> None:
    one_shot = build(Collective.ALL_REDUCE, "direct_one_shot", ranks=3)
    assert "copies=True" in str(refused(replace(one_shot, copies=False)))


def test_false_claim_to_reduce_all_inputs_at_once() -> None:
    tree = replace(build(Collective.ALL_REDUCE, "binomial_tree", ranks=4), reduces_at_once=True)
    assert "each reduction has the inputs of all ranks" in str(refused(tree))
    assert {
        (collective, name)
        for collective, programs in ALGORITHMS.items()
        for name in programs
        if collective.reduces and build(collective, name, ranks=8, per_node=4).reduces_at_once
    } == {
        (Collective.ALL_REDUCE, "direct_one_shot"),
        (Collective.ALL_REDUCE, "direct_two_shot"),
        (Collective.ALL_REDUCE, "direct_two_phase"),
        (Collective.REDUCE, "direct"),
        (Collective.REDUCE_SCATTER, "direct"),
    }


def test_prefix_out_of_order() -> None:
    def lanes(rank: int) -> tuple[Lane, ...]:
        own, result = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)
        if rank == 0:
            return ((Send(own, (1,)), Reduce((own,), (result,))),)
        return ((Reduce((own, Incoming(0)), (result,)),),)

    swapped = Program("swapped", Collective.SCAN, 2, chunks=1, sends=1, lanes=lanes, copies=True)
    assert "in the order of ranks" in str(refused(swapped))
    whole = replace(build(Collective.SCAN, "direct", ranks=3), collective=Collective.ALL_REDUCE)
    assert "not input 0 of ranks 0-2" in str(refused(whole))


def test_false_claim_to_be_restartable() -> None:
    ring = replace(build(Collective.ALL_REDUCE, "ring", ranks=3), restartable=True)
    assert "restartable" in str(refused(ring))


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Send(Chunks(Buffer.INPUT, 1), (1,)), "this rank has 1 chunks of input"),
        (Send(Chunks(Buffer.SCRATCH, 0, 2), (1,)), "this rank has 1 chunks of scratch"),
        (Send(IN, (0,)), "rank 0 is not another rank"),
        (Send(IN, (7,)), "rank 7 is not another rank"),
        (Send(IN, ()), "a send needs receivers"),
        (Reduce((), (OUT,)), "nothing to reduce"),
        (Reduce((IN,), (IN,)), "inputs are not written"),
        (receive(1, OUT, lane=3), "rank 1 has no lane 3"),
    ],
)
def test_bad_form(operation: Operation, text: str) -> None:
    error = refused(program(((operation, *one_shot(0)),), (tuple(one_shot(1)),)))
    assert text in str(error)
    assert (error.rank, error.lane, error.step) == (0, 0, 0)


def test_more_sends_or_lanes_than_declared() -> None:
    ranks = [(tuple(one_shot(rank)),) for rank in range(2)]
    assert "sends 1 times, not 0" in str(refused(program(*ranks, sends=0)))
    assert "5 lanes" in str(refused(program((*ranks[0], (), (), (), ()), ranks[1])))


@pytest.mark.parametrize("part", range(12))
def test_what_is_accepted_is_right(part: int, seed: int) -> None:
    """Spoil one operation of a good program: verify refuses it, or the interpreter agrees."""
    chance = random.Random(f"{seed} {part}")
    refusals = 0
    for _ in range(40):
        collective, name = chance.choice([case for case in CASES if case[0].reduces])
        ranks = chance.randint(2, 6)
        good = build(collective, name, ranks=ranks, root=0)
        spoiled = spoil(good, chance)
        try:
            verify(spoiled, slots=8)
        except ProgramError:
            refusals += 1
            continue
        values = [
            [
                (1 << 8 * rank) * (index + 1)
                for index in range(good.input_blocks(rank) * good.chunks)
            ]
            for rank in range(ranks)
        ]
        wanted = interpret(good, values, lambda a, b: a + b)
        assert interpret(spoiled, values, lambda a, b: a + b) == wanted
    assert refusals > 10


def spoil(good: Program, chance: random.Random) -> Program:
    """Drop, double, swap or change one operation of one rank."""
    victim = chance.randrange(good.ranks)
    lanes = [list(lane) for lane in good.lanes(victim)]
    lane = chance.choice([lane for lane in lanes if lane])
    place = chance.randrange(len(lane))
    match chance.choice(["drop", "double", "swap", "chunk", "order"]):
        case "drop":
            del lane[place]
        case "double":
            lane.insert(place, lane[place])
        case "swap":
            other = chance.randrange(len(lane))
            lane[place], lane[other] = lane[other], lane[place]
        case "chunk":
            shift = chance.choice([-1, 1])
            operation = lane[place]
            if isinstance(operation, Send):
                source = operation.source
                lane[place] = Send(replace(source, index=source.index + shift), operation.to)
            else:
                targets = tuple(replace(t, index=t.index + shift) for t in operation.targets)
                lane[place] = Reduce(operation.operands, targets)
        case _:
            operation = lane[place]
            if not isinstance(operation, Send):
                lane[place] = Reduce(operation.operands[::-1], operation.targets)
    changed = tuple(tuple(lane) for lane in lanes)
    return replace(good, lanes=lambda rank: changed if rank == victim else good.lanes(rank))
