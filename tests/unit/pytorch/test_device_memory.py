"""Calls in device memory, on the stand-in for a GPU: what is open, who waits, what goes wrong."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
from rallypoint.base.errors import InvalidArgumentError, MismatchError, PeerError  # noqa: E402
from rallypoint.engine.communicator import ReduceOp  # noqa: E402
from rallypoint.pytorch.device_groups import RankDevices, can_share_memory  # noqa: E402
from rallypoint.pytorch.device_memory import device_calls, mappings  # noqa: E402
from rallypoint.pytorch.device_memory.call_page import CallPage, has_ended  # noqa: E402
from rallypoint.pytorch.device_memory.mappings import Location, Mappings  # noqa: E402
from rallypoint.pytorch.device_memory.rank_order import combine, supports  # noqa: E402
from tests.stand_in import OnStandIn, StandIn  # noqa: E402
from tests.unit.pytorch.ranks import run_ranks  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.needs_torch
PATIENCE_S = 60.0


def all_reduce(group: Any, tensor: Any, *, is_async: bool = False) -> Any:
    options = c10d.AllreduceOptions()
    options.asyncOp = is_async
    return group.allreduce([tensor], options)


def await_true(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def memory_of(device: Any) -> Any:
    return device.calls()._mappings().memory


def told_by(main: Any, ranks: int = 2) -> str:
    """The warnings of ours while ranks run this."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(ranks, main)
    return "\n".join(str(each.message) for each in caught if "rallypoint" in str(each.message))


def test_what_a_peer_has_freed_does_not_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    arriving_in(monkeypatch, 1, 0)

    def main(group: Any) -> None:
        device = OnStandIn(group)
        tensor = torch.ones(1000)
        all_reduce(device, tensor)
        assert tensor.tolist() == [2.0] * 1000
        memory = memory_of(device)
        if group.rank() == 0:
            assert len(memory.opened) == 2  # that, and the trial's
        del tensor
        await_true(lambda: not memory.opened)  # by no call, as there may be none
        group.barrier().wait()

    run_ranks(2, main)


class Opened:
    """A device on which mappings cost nothing, of sizes that nobody has."""

    identity = bytes(16)

    def __init__(self) -> None:
        self.opened: list[Any] = []

    def open(self, handle: bytes, size: int) -> Any:
        del handle
        self.opened.append(torch.empty(size, dtype=torch.uint8, device="meta"))
        return self.opened[-1]

    def close(self, whole: Any) -> None:
        self.opened = [each for each in self.opened if each is not whole]


@pytest.mark.parametrize(("size", "most"), [(1, mappings.MOST_MAPPINGS), (1 << 30, 4)])
def test_no_more_is_open_than_a_bound(size: int, most: int) -> None:
    memory: Any = Opened()
    found = Mappings(memory)
    for number in range(1, 50):
        found.view(1, Location(number, 0, 1, size, b""))
        found.close_unused()
        assert len(memory.opened) == min(number, most)
    last = memory.opened[-1]
    found.view(1, Location(49, 0, 1, size, b""))
    assert memory.opened[-1] is last  # it was the last one used, and has not been opened again
    found.close()
    assert memory.opened == []


def pages(directory: Any, pids: list[int]) -> list[CallPage]:
    """What ranks of these processes have of a page, with requests of up to 4 bytes."""
    file = directory / "page"
    file.write_bytes(bytes(CallPage.size(len(pids), 4)))
    return [CallPage(os.open(file, os.O_RDWR), rank, pids, 4) for rank in range(len(pids))]


def test_the_last_to_arrive_has_all_requests(tmp_path: Any, seed: int) -> None:
    ranks, chance = 5, random.Random(seed)
    page = pages(tmp_path, [os.getpid()] * ranks)
    for _ in range(20):
        told = [chance.randbytes(chance.randrange(5)) for _ in range(ranks)]
        *first, last = chance.sample(range(ranks), ranks)
        assert [page[rank].arrive(told[rank]) for rank in first] == [None] * 4
        found = page[last].arrive(told[last])
        assert found is not None
        assert [each[: len(one)] for each, one in zip(found, told, strict=True)] == told
        page[last].end()


def test_ranks_that_arrive_at_once_have_one_worker(tmp_path: Any) -> None:
    ranks, calls = 4, 500
    page, together = pages(tmp_path, [os.getpid()] * ranks), threading.Barrier(ranks)
    workers: list[int] = []

    def take_part(rank: int) -> None:
        for call in range(calls):
            requests = page[rank].arrive(struct.pack("<HH", call, rank))
            if requests is not None:
                assert requests == [struct.pack("<HH", call, each) for each in range(ranks)]
                workers.append(rank)
                page[rank].end()
            together.wait(PATIENCE_S)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(take_part, range(ranks)))
    assert len(workers) == calls


def test_nobody_begins_to_work_once_a_rank_has_left(tmp_path: Any) -> None:
    one, other = pages(tmp_path, [os.getpid()] * 2)
    assert other.arrive(b"") is None
    assert one.arrive(b"") is not None
    leaver = threading.Thread(target=other.leave)
    leaver.start()
    leaver.join(0.2)
    assert leaver.is_alive()  # it waits for the work
    one.end()
    leaver.join(PATIENCE_S)
    assert not leaver.is_alive()
    assert other.arrive(b"") is None
    assert one.arrive(b"") is None


def test_a_rank_that_leaves_its_own_work_is_not_waited_for(tmp_path: Any) -> None:
    one, other = pages(tmp_path, [os.getpid()] * 2)
    assert other.arrive(b"") is None
    assert one.arrive(b"") is not None
    one.leave()
    other.leave()


def test_a_worker_that_has_died_is_not_waited_for(tmp_path: Any) -> None:
    begins, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begins, 1)
        worker = CallPage(os.open(tmp_path / "page", os.O_RDWR), 1, [0, 0], 4)
        os._exit(worker.arrive(b"") is None)
    own = pages(tmp_path, [os.getpid(), child])[0]
    assert own.arrive(b"") is None
    os.write(go, b"1")
    await_true(lambda: has_ended(child))  # though nobody has taken note of it yet
    own.leave()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # it was the worker
    assert has_ended(child)
    assert not has_ended(os.getpid())
    for end in (begins, go):
        os.close(end)


def arriving_in(monkeypatch: pytest.MonkeyPatch, *order: int) -> None:
    """Have ranks arrive at each call in this order, so that the last one of it works."""
    turn, arrive = threading.Condition(), CallPage.arrive
    arrived: list[int] = []

    def in_turn(page: Any, request: bytes) -> Any:
        with turn:
            turn.wait_for(lambda: order[len(arrived) % len(order)] == page._rank, PATIENCE_S)
            arrived.append(page._rank)
            turn.notify_all()
            return arrive(page, request)

    monkeypatch.setattr(CallPage, "arrive", in_turn)


def test_a_failed_call_returns_after_the_work_in_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 aborts while rank 0 works; what is written late lands before rank 1's error."""
    works = threading.Event()
    arriving_in(monkeypatch, 2, 1, 0)

    class Late(StandIn):
        def synchronize(self) -> None:
            works.set()
            time.sleep(0.5)
            for mapped in list(self.opened.values()):
                mapped[:] = b"\7" * len(mapped)

    monkeypatch.setattr(OnStandIn, "memory_of", Late)

    def main(group: Any) -> None:
        device, tensor = OnStandIn(group), torch.ones(1000)
        if group.rank() == 2:
            work = all_reduce(device, tensor, is_async=True)
            assert works.wait(PATIENCE_S)
            group.abort()
            with pytest.raises((PeerError, RuntimeError)):
                work.wait()
        elif group.rank() == 1:
            with pytest.raises(PeerError, match="aborted"):
                all_reduce(device, tensor)
            before = tensor.clone()
            time.sleep(1)
            assert torch.equal(before, tensor)
        else:
            with pytest.raises(PeerError):
                all_reduce(device, tensor)

    run_ranks(3, main)


def test_all_go_by_the_host_if_the_worker_cannot_open_a_peers_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Closed(StandIn):
        def open(self, handle: bytes, size: int) -> Any:
            if size > 1000:
                raise OSError("no")
            return super().open(handle, size)

    monkeypatch.setattr(OnStandIn, "memory_of", Closed)

    def main(group: Any) -> None:
        device, tensor = OnStandIn(group), torch.ones(10000)
        all_reduce(device, tensor)
        assert tensor.tolist() == [2.0] * 10000
        if group.rank() == 0:
            device.send([tensor], 1).wait()
        else:
            device.recv([tensor.zero_()], 0).wait()
            assert tensor.tolist() == [2.0] * 10000

    run_ranks(2, main)


def test_what_went_by_the_host_is_on_the_device_when_a_call_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copy back is on a stream of ours, which the caller's does not wait for."""

    class Waited(StandIn):
        def __init__(self, device: object = None) -> None:
            super().__init__(device)
            self.waits = 0

        def export(self, flat: Any) -> Any:
            return None if len(flat) > 1000 else super().export(flat)

        def synchronize(self) -> None:
            self.waits += 1

    monkeypatch.setattr(OnStandIn, "memory_of", Waited)

    def main(group: Any) -> None:
        device, tensor = OnStandIn(group), torch.ones(10000)
        all_reduce(device, tensor)
        assert tensor.tolist() == [2.0] * 10000
        assert memory_of(device).waits == 1

    run_ranks(2, main)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_fails_in_the_middle_is_named(
    monkeypatch: pytest.MonkeyPatch, worker: int
) -> None:
    arriving_in(monkeypatch, 1 - worker, worker)

    class Broken(StandIn):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal address")

    monkeypatch.setattr(OnStandIn, "memory_of", Broken)

    def main(group: Any) -> None:
        device = OnStandIn(group)
        with pytest.raises(RuntimeError) as caught:
            all_reduce(device, torch.ones(10))
        if group.rank() == worker:
            assert "illegal address" in str(caught.value)
        else:
            assert isinstance(caught.value, PeerError)
            assert caught.value.rank == worker
        group.barrier().wait()

    run_ranks(2, main)


@pytest.mark.parametrize("trouble", ["not exported", "several GPUs", "other contents"])
def test_a_trial_decides_for_the_group(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    class Odd(StandIn):
        def __init__(self, device: object = None) -> None:
            super().__init__(device)
            if trouble == "several GPUs":
                self.identity = os.urandom(16)

        def export(self, flat: Any) -> Any:
            return None if trouble == "not exported" else super().export(flat)

        def open(self, handle: bytes, size: int) -> Any:
            return super().open(handle, size) + (trouble == "other contents")

        def close(self, whole: Any) -> None:
            del whole

    monkeypatch.setattr(OnStandIn, "memory_of", Odd)

    def main(group: Any) -> None:
        device = OnStandIn(group)
        for is_async in (False, True):
            tensor = torch.ones(10)
            all_reduce(device, tensor, is_async=is_async).wait()
            assert tensor.tolist() == [2.0] * 10

    told = told_by(main)
    wanted = "cannot be shared" if trouble == "not exported" else trouble
    assert "copied to the host and back" in told
    assert wanted in told


def test_ranks_that_call_different_operations_are_told_which() -> None:
    def main(group: Any) -> None:
        device, tensor = OnStandIn(group), torch.ones(10)
        all_reduce(device, tensor)
        with pytest.raises(MismatchError, match="all_reduce") as caught:
            if group.rank() == 0:
                all_reduce(device, torch.ones(11))
            else:
                all_reduce(device, torch.ones(10, dtype=torch.int32))
        assert "float32[11]" in str(caught.value)
        assert "int32[10]" in str(caught.value)

    run_ranks(2, main)


def test_a_call_amid_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler might make it, before all have arrived at the first."""

    class Interrupted(StandIn):
        device: Any = None

        def synchronize(self) -> None:
            if self.device is not None:
                device, self.device = self.device, None
                with pytest.raises(InvalidArgumentError, match="signal handler"):
                    all_reduce(device, torch.ones(10))

    monkeypatch.setattr(OnStandIn, "memory_of", Interrupted)
    arriving_in(monkeypatch, 0, 1)

    def main(group: Any) -> None:
        device, tensor = OnStandIn(group), torch.ones(10)
        all_reduce(device, tensor)
        memory_of(device).device = device
        all_reduce(device, tensor)
        assert tensor.tolist() == [4.0] * 10
        assert (memory_of(device).device is None) == (group.rank() == 1)  # the one that works
        group.barrier().wait()

    run_ranks(2, main)


def test_calls_in_the_background_complete_futures_that_wait_for_each_other() -> None:
    def main(group: Any) -> None:
        device = OnStandIn(group)
        tensors = [torch.full((100,), float(number)) for number in range(3)]
        works = [all_reduce(device, each, is_async=True) for each in tensors]
        last = works[2].get_future()
        first = works[0].get_future().then(lambda done: last.wait()[0] + done.value()[0])
        assert first.wait().tolist() == [4.0] * 100
        late = torch.ones(5)
        all_reduce(device, late)  # after those in the background
        assert late.tolist() == [2.0] * 5
        assert all(work.is_success() and work.exception() is None for work in works)
        group.barrier().wait()

    run_ranks(2, main)


def test_sums_are_rounded_once_and_divided_exactly() -> None:
    halves = [torch.full((4,), value, dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    target = torch.empty(4, dtype=torch.float16)
    combine(halves, target, ReduceOp.SUM, [])
    assert target.tolist() == [2050.0] * 4  # 2048 + 1 is 2048 in 16 bits
    thirds = [torch.full((1,), 1.0) for _ in range(3)]
    combine(thirds, thirds[1], ReduceOp.AVG, [])
    assert thirds[1].item() == 1.0
    assert not supports(torch.float32, ReduceOp.BAND)
    assert not supports(torch.uint16, ReduceOp.MAX)  # the engine can


def test_which_ranks_may_try() -> None:
    here, elsewhere = (RankDevices(host, True, ("0",), True) for host in "ab")
    assert can_share_memory([here, here])
    assert not can_share_memory([here, elsewhere])
    assert not can_share_memory([here, here._replace(can_share=False)])
    assert not can_share_memory([here, here._replace(gpus=())])


def test_the_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not RankDevices.own().can_share
    monkeypatch.setenv("RALLYPOINT_DEVICE_MEMORY", "1")
    assert RankDevices.own().can_share
    monkeypatch.setenv("RALLYPOINT_DEVICE_MEMORY", "off")
    with pytest.raises(InvalidArgumentError, match="must be 0 or 1"):
        RankDevices.own()


def test_one_line_says_which_way_is_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_calls, "_said", set())

    def main(group: Any) -> None:
        for _ in range(2):
            all_reduce(OnStandIn(group), torch.ones(10))

    run_ranks(2, main)
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "2 ranks share a GPU: calls with cpu tensors are made in its memory" in told


@pytest.mark.parametrize("call", ["all_reduce", "in the background", "message"])
def test_what_a_stream_has_been_given_comes_before(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Tensors get their items when somebody waits for the stream, as late as that may be."""
    late = threading.local()

    class Stream(StandIn):
        def mark(self, device: object) -> Any:
            del device
            tensor = getattr(late, "tensor", None)

            class Mark:
                def synchronize(self) -> None:
                    if tensor is not None:
                        tensor.fill_(5)

            return Mark()

    monkeypatch.setattr(OnStandIn, "memory_of", Stream)

    def main(group: Any) -> None:
        device, tensor, received = OnStandIn(group), torch.zeros(20000), torch.zeros(20000)
        late.tensor = tensor
        if call == "message":
            there = device.send([tensor], 1 - group.rank())
            late.tensor = None
            device.recv([received], 1 - group.rank()).wait()
            there.wait()
            assert received.tolist() == [5.0] * 20000
        else:
            all_reduce(device, tensor, is_async=call != "all_reduce").wait()
            assert tensor.tolist() == [10.0] * 20000
        group.barrier().wait()

    run_ranks(2, main)


def test_a_call_in_the_background_waits_for_nobody() -> None:
    """Else these ranks would wait for each other."""

    def main(group: Any) -> None:
        device, word = OnStandIn(group), torch.ones(3)
        tensors = [torch.ones(20000) for _ in range(3)]
        all_reduce(device, word)
        if group.rank() == 0:
            works = [all_reduce(device, tensor, is_async=True) for tensor in tensors]
            device.send([word], 1).wait()
            for work in works:
                work.wait()
        else:
            device.recv([word], 0).wait()
            for tensor in tensors:
                all_reduce(device, tensor)
        for tensor in tensors:
            assert tensor.tolist() == [2.0] * 20000
        group.barrier().wait()

    run_ranks(2, main)
