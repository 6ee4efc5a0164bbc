"""Messages between two ranks: order, tags, sizes, any source, and what goes wrong."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from rallypoint.base.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    MismatchError,
    PeerLostError,
)
from rallypoint.engine.communicator import BAD_BUFFER, FAILED, Communicator
from rallypoint.engine.engine_work import EngineWork
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import post, run_ranks

# None, in the envelope, in its block, the largest such, in parts, and in several readings.
COUNTS = (0, 1, 8, 9, 100, 4096, 4097, 20_000, 1_000_000)


@pytest.mark.parametrize("synchronous", [False, True])
def test_every_size(synchronous: bool) -> None:
    def main(communicator: Communicator) -> None:
        for count in COUNTS:
            if communicator.rank == 0:
                assert communicator.send(1, 3, np.arange(count)) == 0
            else:
                got = np.full(count, -1)
                assert communicator.receive(0, 3, got) == 0
                np.testing.assert_array_equal(got, np.arange(count))

    run_ranks(2, main, synchronous_send=synchronous)


def test_small_sends_do_not_wait_and_their_arrays_may_change() -> None:
    def main(communicator: Communicator) -> None:
        ready = np.zeros(1)
        if communicator.rank == 0:
            for number in range(16):
                array = np.full(4000, number)
                assert communicator.send(1, number % 3, array) == 0
                array[:] = -1
            communicator.run(Collective.BARRIER, 0, 0, ready[:0], ready[:0])
        else:
            communicator.run(Collective.BARRIER, 0, 0, ready[:0], ready[:0])
            got = np.empty(4000, int)
            for tag in (2, 0, 1):
                for number in range(tag, 16, 3):
                    assert communicator.receive(0, tag, got) == 0
                    assert (got == number).all()

    run_ranks(2, main)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_random_messages_arrive_in_order(ranks: int, seed: int) -> None:
    """By source and tag, whatever the sizes, and however sends and receives are begun."""
    rng = random.Random(seed)
    plans: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    order: list[list[tuple[bool, int, int, int]]] = [[] for _ in range(ranks)]
    for _ in range(300):
        source, target = rng.sample(range(ranks), 2)
        tag, count = rng.randrange(3), rng.choice([0, 1, 7, 50, 3000, 5000, 60_000])
        plans[source, target, tag].append(count)
        order[source].append((True, target, tag, count))
        order[target].append((False, source, tag, count))

    def main(communicator: Communicator) -> None:
        own = random.Random(seed + communicator.rank)
        sent: dict[tuple[int, int], int] = defaultdict(int)
        received: dict[tuple[int, int], int] = defaultdict(int)
        works: list[tuple[EngineWork, Any, int]] = []
        for sends, peer, tag, count in order[communicator.rank]:
            if sends:
                number = sent[peer, tag]
                sent[peer, tag] += 1
                array = np.full(count, number)
                works.append((post(communicator, True, peer, tag, array), array, number))
            else:
                number = received[peer, tag]
                received[peer, tag] += 1
                array = np.full(count, -1)
                works.append((post(communicator, False, peer, tag, array), array, number))
                if own.random() < 0.2:
                    works[-1][0].wait()
        own.shuffle(works)
        for work, array, number in works:
            work.wait()
            assert (array == number).all()

    run_ranks(ranks, main)


def test_any_source() -> None:
    def main(communicator: Communicator) -> None:
        got = np.zeros(1, int)
        if communicator.rank:
            assert communicator.send(0, 4, np.array([communicator.rank])) == 0
            assert communicator.send(0, 5, np.array([10 * communicator.rank])) == 0
            return
        sources = set()
        for _ in range(3):
            source = communicator.receive(-1, 5, got)
            assert got[0] == 10 * source
            sources.add(source)
        assert sources == {1, 2, 3}
        for _ in range(3):
            work = post(communicator, False, -1, 4, got)
            work.wait()
            assert got[0] == work.peer
            sources.remove(work.peer)

    run_ranks(4, main)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", [0, 4, 100, 20_000])
def test_messages_are_received_in_any_order_however_many(ranks: int, count: int) -> None:
    """More than have room at a time: the first that is wanted is the last that is sent."""

    def main(communicator: Communicator) -> None:
        messages = 90
        if communicator.rank == 0:
            sent = [np.full(count, number) for number in range(messages)]
            works = [post(communicator, True, 1, n // 2, array) for n, array in enumerate(sent)]
            for work in works:
                work.wait()
        if communicator.rank == 1:
            got = np.empty(count, int)
            for tag in reversed(range(messages // 2)):
                for number in (2 * tag, 2 * tag + 1):
                    assert communicator.receive(-1 if tag % 3 == 0 else 0, tag, got) == 0
                    assert (got == number).all()

    run_ranks(ranks, main)


def test_wrong_size_is_told_also_of_a_message_that_was_taken_in() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            works = [post(communicator, True, 1, tag, np.zeros(3)) for tag in range(50)]
            with pytest.raises(MismatchError):
                for work in works:
                    work.wait()
                communicator.receive(1, 0, np.zeros(1))
                raise communicator.error("recv")
        else:
            assert communicator.receive(0, 49, np.zeros(3)) == 0
            assert communicator.receive(0, 2, np.zeros(4)) <= FAILED
            error = communicator.error("recv")
            assert isinstance(error, MismatchError)
            assert "send #2 (3 x float64 to rank 1, tag 2)" in str(error)

    run_ranks(2, main)


def test_rank_that_waits_for_one_makes_room_for_another() -> None:
    """0 fills its room with what 1 and 2 do not want yet; 3 waits for 0, and all for 3."""

    def main(communicator: Communicator) -> None:
        got = np.zeros(1)
        if communicator.rank == 0:
            works = [
                post(communicator, True, peer, 0, np.full(1, float(tag)))
                for tag in range(20)
                for peer in (1, 2)
            ]
            works.append(post(communicator, True, 3, 0, np.ones(1)))
            for work in works:
                work.wait()
        elif communicator.rank == 3:
            assert communicator.receive(0, 0, got) == 0
            for peer in (1, 2):
                assert communicator.send(peer, 1, got) == 0
        else:
            assert communicator.receive(3, 1, got) == 3
            for tag in range(20):
                assert communicator.receive(0, 0, got) == 0
                assert got[0] == tag

    run_ranks(4, main)


def test_one_that_is_not_received_does_not_stop_the_others() -> None:
    """A rank leaves many messages lying; those to another one go through."""

    def main(communicator: Communicator) -> None:
        rank, array = communicator.rank, np.arange(10)
        got = np.empty(10, int)
        if rank == 0:
            works = [post(communicator, True, 1, 0, array) for _ in range(40)]
            assert communicator.send(2, 0, array) == 0
            for work in works:
                work.wait()
        elif rank == 2:
            assert communicator.receive(0, 0, got) == 0
            assert communicator.send(1, 1, got) == 0
        else:
            assert communicator.receive(2, 1, got) == 2
            for _ in range(40):
                assert communicator.receive(0, 0, got) == 0

    run_ranks(3, main)


@pytest.mark.parametrize("other", [np.ones(4), np.ones(3, np.int64)])
def test_what_does_not_fit_is_a_mismatch(other: Any) -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            assert communicator.send(1, 7, np.ones(3)) == 0
            return
        assert communicator.receive(0, 7, other) <= FAILED
        error = communicator.error("recv")
        assert isinstance(error, MismatchError)
        assert "send #0 (3 x float64 to rank 1, tag 7)" in str(error)
        assert f"recv #0 ({len(other)} x {other.dtype} from rank 0, tag 7)" in str(error)

    run_ranks(2, main)


def test_sender_that_left_is_named() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            communicator.leave()
            return
        assert communicator.receive(0, 0, np.ones(3)) <= FAILED
        assert isinstance(communicator.error("recv"), PeerLostError)
        assert "rank 0" in str(communicator.error("recv"))

    run_ranks(2, main)


def test_a_receive_from_any_rank_ends_when_all_others_have_left() -> None:
    """Not before: what one of them sends still arrives."""
    ranks = 4

    def main(communicator: Communicator) -> None:
        if communicator.rank == 3:
            assert communicator.receive(0, 5, np.ones(1)) == 0  # when two have left
            assert communicator.send(0, 7, np.full(3, 7.0)) == 0
        if communicator.rank:
            communicator.leave()
            return
        while len(communicator.native.gone()) < 2:
            os.sched_yield()
        assert communicator.send(3, 5, np.ones(1)) == 0
        values = np.zeros(3)
        assert communicator.receive(-1, 7, values) >= 0
        assert (values == 7).all()
        assert communicator.receive(-1, 7, values) <= FAILED
        assert isinstance(communicator.error("recv"), PeerLostError)

    run_ranks(ranks, main)


def test_timeout() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="from any rank, tag 1"):
                post(communicator, False, -1, 1, np.ones(3), timeout_s=0.1).wait()

    run_ranks(2, main)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_receivers_that_wait_for_each_other_are_told(ranks: int) -> None:
    def main(communicator: Communicator) -> None:
        source = (communicator.rank + 1) % ranks
        assert communicator.receive(source, 0, np.ones(3)) <= FAILED
        error = communicator.error("recv")
        assert isinstance(error, DeadlockError)
        for rank in range(ranks):
            assert f"rank {rank} is in recv from rank {(rank + 1) % ranks}" in str(error)

    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("count", "synchronous"), [(3, True), (100_000, False)])
def test_senders_that_wait_for_each_other_are_told(
    count: int, synchronous: bool, ranks: int
) -> None:
    def main(communicator: Communicator) -> None:
        peer = (communicator.rank + 1) % ranks
        assert communicator.send(peer, 0, np.ones(count)) > 0
        error = communicator.error("send")
        assert isinstance(error, DeadlockError)
        assert "rank 0 is in send to rank 1" in str(error)

    run_ranks(ranks, main, synchronous_send=synchronous)


def test_those_who_wait_for_a_circle_are_told() -> None:
    """Ranks 3 to 6 wait for each other, the others for them."""

    def main(communicator: Communicator) -> None:
        source = 3 if communicator.rank == 6 else communicator.rank + 1
        assert communicator.receive(source, 0, np.ones(3)) <= FAILED
        error = communicator.error("recv")
        assert isinstance(error, DeadlockError)
        assert "rank 6 is in recv from rank 3" in str(error)

    run_ranks(7, main)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("count", [3, 20_000])
def test_a_ring_that_moves_is_no_circle(count: int) -> None:
    """One message goes round and round, now and then slowly; all others wait for it."""

    def main(communicator: Communicator) -> None:
        rank, ranks = communicator.rank, communicator.ranks
        sleeps, got = random.Random(rank), np.zeros(count)
        for lap in range(40):
            if rank > 0 or lap > 0:
                assert communicator.receive((rank - 1) % ranks, 0, got) == (rank - 1) % ranks
                assert got[-1] == lap * ranks + rank - 1
            if sleeps.random() < 0.2:
                time.sleep(0.01)
            assert (
                communicator.send((rank + 1) % ranks, 0, np.full(count, lap * ranks + rank, float))
                == 0
            )
        if rank == 0:
            assert communicator.receive(ranks - 1, 0, got) == ranks - 1

    run_ranks(5, main)


def test_waits_that_end_are_no_circle() -> None:
    """Small sends first, then both receive: each has what the other waits for."""

    def main(communicator: Communicator) -> None:
        peer, got = 1 - communicator.rank, np.empty(1, int)
        for number in range(500):
            assert communicator.send(peer, 0, np.array([number])) == 0
            assert communicator.receive(peer, 0, got) == peer
            assert got[0] == number

    run_ranks(2, main)


def test_buffer_that_cannot_be_used() -> None:
    def main(communicator: Communicator) -> None:
        assert communicator.send(1, 0, 7) == BAD_BUFFER
        assert communicator.send(5, 0, np.ones(3)) == BAD_BUFFER
        assert communicator.receive(0, 0, np.ones((4, 4))[:, 1]) == BAD_BUFFER
        assert communicator.post(False, 0, 0, b"read-only") == BAD_BUFFER

    run_ranks(2, main)
