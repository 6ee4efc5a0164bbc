"""Tensors that are not on the CPU, without a GPU: stand-ins, in whose memory nobody can look."""

from __future__ import annotations

import threading
import types
import warnings
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from rallypoint.base.errors import InvalidArgumentError, StoreConnectionError  # noqa: E402
from rallypoint.pytorch import device_groups  # noqa: E402
from rallypoint.pytorch import torch_work as works  # noqa: E402
from rallypoint.pytorch.device_groups import RankDevices, why_staged  # noqa: E402
from rallypoint.pytorch.memory import Memory  # noqa: E402
from rallypoint.pytorch.torch_work import DoneWork  # noqa: E402
from rallypoint.pytorch.versions import HAS_BACKENDS  # noqa: E402
from rallypoint.store.client import TCPStore  # noqa: E402
from rallypoint.store.server import StoreServer  # noqa: E402
from tests.unit.pytorch.ranks import run_ranks  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.needs_torch


class FarTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on a device of another kind, which has no address here; `held` has its items."""

    held: Any

    @staticmethod
    def __new__(cls: Any, held: Any) -> Any:
        far = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device="meta"
        )
        far.held = held
        return far

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = dict(named or {})
        goes_home = function is torch.ops.aten._to_copy.default and named.get("device")
        if goes_home:
            assert torch.device(named["device"]).type == "cpu"
        near = pytree.tree_map_only(cls, lambda far: far.held, (arguments, named))
        result = function(*near[0], **near[1])
        if goes_home:
            return result
        if function is torch.ops.aten.copy_.default:
            return arguments[0]
        return pytree.tree_map_only(torch.Tensor, cls, result)


def far(*items: float) -> Any:
    tensor = FarTensor(torch.tensor(items, dtype=torch.float32))
    assert not tensor.is_cpu and tensor.device.type == "meta"
    return tensor


@pytest.mark.parametrize("is_async", [False, True])
def test_without_another_group_they_are_copied_to_the_host_and_back(is_async: bool) -> None:
    def asked(kind: Any) -> Any:
        options = kind()
        options.asyncOp = is_async
        return options

    def main(group: Any) -> None:
        rank = group.rank()
        tensor = far(1.0 + rank, 10.0)
        group.allreduce([tensor], asked(c10d.AllreduceOptions)).wait()
        assert tensor.held.tolist() == [3, 20]
        tensor = far(rank)
        group.broadcast([tensor], asked(c10d.BroadcastOptions)).wait()
        assert tensor.held.tolist() == [0]
        outputs = [far(-1.0), far(-1.0)]
        group.allgather([outputs], [far(rank)], asked(c10d.AllgatherOptions)).wait()
        assert [each.held.item() for each in outputs] == [0, 1]
        part = far(-1.0)
        whole = far(1.0, 2.0)
        group.reduce_scatter_single(part, whole, asked(c10d.ReduceScatterOptions)).wait()
        assert part.held.item() == 2 * (rank + 1)
        assert whole.held.tolist() == [1, 2]
        if rank == 0:
            group.send([far(7.0)], 1, 0).wait()
        else:
            value = far(0.0)
            group.recv([value], 0, 0).wait()
            assert value.held.item() == 7

    run_ranks(2, main)


class LostTensor(FarTensor):
    """One on a device that fails when results are copied to it."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            raise RuntimeError("the device is gone")
        return super().__torch_dispatch__(function, types, arguments, named)


def test_what_fails_on_the_way_back_is_told_to_all_who_wait() -> None:
    def main(group: Any) -> None:
        options = c10d.AllreduceOptions()
        options.asyncOp = True
        tensors = [LostTensor(torch.ones(2)), LostTensor(torch.ones(2))]
        together = c10d.AllreduceCoalescedOptions()
        together.asyncOp = True
        for work in (
            group.allreduce(tensors[:1], options),
            group.allreduce_coalesced(tensors, together),
        ):
            future = work.get_future()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="gone"):
                    work.wait()
            with pytest.raises(RuntimeError, match="gone"):
                future.wait()
            assert work.is_completed() and not work.is_success()
            assert "gone" in str(work.exception())
        group.barrier().wait()

    run_ranks(2, main)


def test_what_no_copy_can_be_put_into_is_refused_before_anything_is_sent() -> None:
    """On the CPU its items, which become equal, may share their place."""

    def main(group: Any) -> None:
        expanded = FarTensor(torch.ones(1).expand(2))
        with pytest.raises(InvalidArgumentError, match="is expanded"):
            group.allreduce([expanded])
        group.barrier().wait()

    run_ranks(2, main)


class Stream:
    """A stand-in for CUDA's current stream, which has work to do until it is let go."""

    def __init__(self) -> None:
        self.is_idle = threading.Event()
        self.devices: list[Any] = []

    def current(self, device: Any = None) -> Stream:
        self.devices.append(device)
        return self

    def synchronize(self) -> None:
        assert self.is_idle.wait(60)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", stream.current)
    return stream


@pytest.mark.parametrize("is_named", [False, True])
def test_whoever_passes_a_barrier_finds_what_streams_were_given_done(
    stream: Stream, is_named: bool
) -> None:
    passed: list[int] = []

    def finish() -> None:
        passed.append(-1)
        stream.is_idle.set()

    def main(group: Any) -> None:
        options = c10d.BarrierOptions()
        if group.rank() == 0:
            if is_named:
                options.device = torch.device("cuda:1")
            else:
                group.devices.add("cuda", None)  # as after a call on its tensors
        if group.rank() == 1:
            threading.Timer(0.2, finish).start()
        group.barrier(options).wait()
        passed.append(group.rank())

    run_ranks(2, main)
    assert passed[0] == -1
    assert stream.devices == [torch.device("cuda:1") if is_named else None]


def test_a_group_of_cpu_tensors_does_not_wait_for_kernels(stream: Stream) -> None:
    """They may wait for what this process does after the barrier."""
    run_ranks(2, lambda group: group.barrier().wait())
    assert stream.devices == []


class GpuTensor(torch.Tensor):  # type: ignore[misc]
    is_cuda = True
    device = torch.device("cuda:1")


@pytest.mark.parametrize("is_strided", [False, True])
def test_results_of_strided_tensors_are_waited_for(stream: Stream, is_strided: bool) -> None:
    """PyTorch copies these once more on the device, which a blocking copy does not wait for."""
    stream.is_idle.set()
    items = torch.zeros(4)[::2] if is_strided else torch.zeros(2)
    memory = Memory("all_reduce")
    memory._back.append((items.as_subclass(GpuTensor), torch.ones(2)))
    memory.finish()
    assert items.tolist() == [1, 1]
    assert stream.devices == [torch.device("cuda:1")] * is_strided


def test_futures_know_the_gpus_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what follows them runs on streams that nobody waits for."""
    made: list[Any] = []

    def make(*, devices: Any = None) -> Any:
        made.append(devices)
        return torch.futures.Future()

    monkeypatch.setattr(works, "Future", make)
    on_gpu = torch.ones(2).as_subclass(GpuTensor)
    assert DoneWork([[on_gpu, on_gpu]]).get_future().wait()[0][0] is on_gpu
    DoneWork([torch.ones(1)]).get_future()
    assert made == [[torch.device("cuda:1")], None]

    def main(group: Any) -> None:
        options = c10d.AllreduceOptions()
        options.asyncOp = True
        begun = group.allreduce([torch.ones(1)], options)
        begun._outputs = [on_gpu]
        begun.get_future().wait()

    made.clear()
    run_ranks(1, main)
    assert made == [[torch.device("cuda:1")]]


class Recorder:
    """A group that takes every call, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return DoneWork([])

        return call


def every_call(tensor: Any) -> dict[str, Any]:
    """Each method that takes tensors, with arguments as on ranks that are not the root."""
    one, lists = [tensor], [[tensor, tensor]]
    return {
        "allreduce": (one, c10d.AllreduceOptions()),
        "allreduce_coalesced": (one, c10d.AllreduceCoalescedOptions()),
        "broadcast": (one, c10d.BroadcastOptions()),
        "reduce": (one, c10d.ReduceOptions()),
        "allgather": (lists, one, c10d.AllgatherOptions()),
        "allgather_coalesced": (lists, one, c10d.AllgatherOptions()),
        "all_gather_single": (tensor, tensor, c10d.AllgatherOptions()),
        "all_gather_single_coalesced": (one, one, c10d.AllgatherOptions()),
        "gather": ([], one, c10d.GatherOptions()),
        "scatter": (one, [], c10d.ScatterOptions()),
        "reduce_scatter": (one, lists, c10d.ReduceScatterOptions()),
        "reduce_scatter_single": (tensor, tensor, c10d.ReduceScatterOptions()),
        "reduce_scatter_single_coalesced": (one, one, c10d.ReduceScatterOptions()),
        "all_to_all_single": (tensor, tensor, [], [], c10d.AllToAllOptions()),
        "alltoall": (one, one, c10d.AllToAllOptions()),
        "send": (one, 1, 0),
        "recv": (one, 1, 0),
        "recv_anysource": (one, 0),
    }


def test_every_call_goes_to_the_group_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_groups.MAKERS, "meta", lambda *_: Recorder())
    monkeypatch.setattr(RankDevices, "own", lambda: RankDevices("here", True, ("0", "1")))

    def main(group: Any) -> None:
        ours = group._get_backend(torch.device("cpu"))
        assert group._get_backend(torch.device("meta")) is ours  # asking alone makes none
        calls = every_call(far(1.0))
        for name, arguments in calls.items():
            getattr(group, name)(*arguments)
        group._start_coalescing(torch.device("meta"))
        group._end_coalescing(torch.device("meta"))
        (recorder,) = group.devices.made()
        kept = [*calls.items(), *(("_" + s + "_coalescing", None) for s in ("start", "end"))]
        assert [name for name, _ in recorder.calls] == [name for name, _ in kept]
        for (_, given), (_, taken) in zip(kept[:-2], recorder.calls[:-2], strict=True):
            assert all(a is b for a, b in zip(given, taken, strict=True))
        near = torch.ones(1)  # these stay with the engine, between the others
        group.allreduce([near]).wait()
        assert float(near) == 2
        assert group._get_backend(torch.device("cpu")) is ours

    run_ranks(2, main)


def test_a_batch_of_messages_begins_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is the first call on its device."""
    monkeypatch.setitem(device_groups.MAKERS, "meta", lambda *_: Recorder())
    monkeypatch.setattr(RankDevices, "own", lambda: RankDevices("here", True, ("0", "1")))

    def operation(kind: Any, tensor: Any, group: Any) -> Any:
        one = object.__new__(dist.P2POp)  # its constructor asks for groups that torch has made
        one.op, one.tensor, one.group, one.tag = kind, tensor, group, 0
        one.group_peer = one.peer = 1 - group.rank()
        return one

    def main(group: Any) -> None:
        batch = [operation(kind, far(1.0), group) for kind in (dist.isend, dist.irecv)]
        assert len(dist.batch_isend_irecv(batch)) == 1
        (recorder,) = group.devices.made()
        names = [name for name, _ in recorder.calls]
        assert names == ["_start_coalescing", "send", "recv", "_end_coalescing"]
        near, got = torch.full((3,), float(group.rank())), torch.zeros(3)
        batch = [operation(dist.isend, near, group), operation(dist.irecv, got, group)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert got.tolist() == [1 - group.rank()] * 3
        assert len(recorder.calls) == 4

    run_ranks(2, main)


def test_our_own_batches_on_nccl_begin_together() -> None:
    from rallypoint.pytorch.torch_library import TorchDelegate

    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    class Inner(Recorder):
        work = Work()

        def __getattr__(self, name: str) -> Any:
            record = super().__getattr__(name)
            return lambda *given: record(*given) and (
                self.work if name == "_end_coalescing" else None
            )

    delegate = object.__new__(TorchDelegate)
    delegate.name, delegate.device, delegate._device = "nccl", "cuda", torch.device("cuda", 0)
    inner = delegate._group = Inner()
    delegate._batch = None
    delegate.open_batch()
    block = torch.ones(2)
    sent = delegate.transfer(sends=True, peer=1, tag=0, block=block)
    received = delegate.transfer(sends=False, peer=1, tag=0, block=block)
    delegate.close_batch()
    names = [name for name, _ in inner.calls]
    assert names == ["_start_coalescing", "send", "recv", "_end_coalescing"]
    for each in (sent, received):
        each.wait(1.0)
    assert inner.work.waits == 2


def test_lists_of_tensors_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes where it belongs; who waits for the whole waits for the other group's too."""
    waited = []

    class Inner(Recorder):
        def __getattr__(self, name: str) -> Any:
            return lambda *_: types.SimpleNamespace(wait=lambda: waited.append(name))

    monkeypatch.setitem(device_groups.MAKERS, "meta", lambda *_: Inner())
    monkeypatch.setattr(RankDevices, "own", lambda: RankDevices("here", True, ("0", "1")))

    def main(group: Any) -> None:
        near = torch.ones(1)
        group.allreduce_coalesced([near, far(1.0)]).wait()
        assert float(near) == 2

    run_ranks(2, main)
    assert waited == ["allreduce", "allreduce"]


def test_ranks_that_share_a_gpu_are_told_once_why_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(device_groups.MAKERS, "meta", lambda *_: pytest.fail("not to be made"))
    monkeypatch.setattr(RankDevices, "own", lambda: RankDevices("here", True, ("0",)))

    def main(group: Any) -> None:
        for _ in range(2):
            tensor = far(1.0)
            group.allreduce([tensor]).wait()
            assert tensor.held.item() == 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, main)
    (told,) = [str(each.message) for each in caught if "rallypoint" in str(each.message)]
    assert "because the 2 ranks on the host of rank 0 share 1 GPU(s)" in told


@pytest.mark.parametrize(
    ("seats", "reason"),
    [
        ([RankDevices("a", True, ("0", "1")), RankDevices("a", True, ("0", "1"))], None),
        ([RankDevices("a", True, ("0",)), RankDevices("a", True, ("1",))], None),
        ([RankDevices("a", True, ("0",)), RankDevices("b", True, ("0",))], None),
        (
            [RankDevices("a", True, ("0",)), RankDevices("a", False, ("1",))],
            "rank 1 has a PyTorch without NCCL",
        ),
        (
            [RankDevices("b", True, ("0",)), *[RankDevices("a", True, ("3",))] * 2],
            "the 2 ranks on the host of rank 1 share 1 GPU",
        ),
        ([RankDevices("a", True, ())], "share 0 GPU"),
    ],
)
def test_nccl_wants_a_gpu_for_each_rank(seats: list[RankDevices], reason: str | None) -> None:
    found = why_staged(seats)
    assert found is None if reason is None else reason in str(found)


def test_a_store_that_is_lost_costs_cpu_tensors_nothing() -> None:
    """The rank at whose store all have met may be lost as soon as they have."""
    server = StoreServer("127.0.0.1")

    def main(group: Any) -> None:
        engine = group.engine_group
        store = TCPStore("127.0.0.1", server.port)
        engine.world.store = store
        group.barrier().wait()  # both have connected
        if engine.own_rank == 0:
            server.close()
        with pytest.raises(StoreConnectionError):
            while True:
                store.check(["here"])
        again = device_groups.DeviceGroups(engine, None, group.adopt)
        ones = torch.ones(3)
        group.allreduce([ones]).wait()
        assert ones.tolist() == [2.0] * 3
        with pytest.raises(StoreConnectionError):
            again.group_for("cuda")

    run_ranks(2, main)


def test_another_backend_is_adopted_below_the_group() -> None:
    """gloo here, in the place of NCCL: the group that calls are handed to works."""

    def main(group: Any) -> None:
        store = dist.PrefixStore("inner", group.get_group_store())
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size())
        inner = group.adopt("cuda", dist.ProcessGroup.BackendType.GLOO, gloo)
        assert inner._get_backend(torch.device("cuda")).name() == "gloo"
        if HAS_BACKENDS:
            assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        group.devices.add("cuda", inner)
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        group.barrier().wait()

    run_ranks(2, main)
