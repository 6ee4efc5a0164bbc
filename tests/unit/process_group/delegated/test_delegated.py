"""What lies between our calls and another backend's library, with a library that is a stand-in."""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.base.collective import Collective
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.delegated import backends, library_calls, mpi_library
from rallypoint.process_group.delegated.delegate import (
    Block,
    Delegate,
    LibraryCall,
    LibraryFailure,
    Pending,
    why_not_combined,
)
from rallypoint.process_group.delegated.library_calls import DelegatedWork
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.formation.joining import check_backend
from rallypoint.process_group.operators import Operator
from rallypoint.pytorch import libraries
from rallypoint.store.local_store import HashStore

GUIDE = Path(__file__).parents[4] / "docs/guides/backends.md"
ARITHMETIC: list[Operator] = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
BITWISE: list[Operator] = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


class Never:
    """What a library has begun and will not complete."""

    def wait(self, timeout_s: float) -> None:
        raise TimeoutError

    def is_done(self) -> bool:
        return False

    def source(self) -> int:
        return -1


class Library:
    """Raises what it is told to."""

    name, device, patience_s = "slow", "cpu", 0.01

    def __init__(
        self, error: Exception | None = None, trouble: LibraryFailure = LibraryFailure.OTHER
    ) -> None:
        self._error, self._trouble = error, trouble
        self.ended: list[str] = []

    def why_not(self, collective: Collective, dtype: str, operator: Operator | None) -> str:
        return ""

    def adopt(self, array: Any) -> Block:
        return array.reshape(-1)

    def empty(self, model: Block, items: int) -> Block:
        return np.empty(items, model.dtype)

    def begin(self, request: LibraryCall) -> Pending:
        if self._error is not None:
            raise self._error
        return Never()

    def transfer(self, *, sends: bool, peer: int, tag: int, block: Block) -> Pending:
        return Never()

    def open_batch(self) -> None:
        self.ended.append("batch opened")

    def close_batch(self) -> None:
        self.ended.append("batch closed")

    def trouble(self, error: Exception) -> LibraryFailure:
        return self._trouble

    def close(self) -> None:
        self.ended.append("closed")

    def abort(self) -> None:
        self.ended.append("aborted")


REQUEST = LibraryCall(
    collective=Collective.BARRIER,
    dtype="uint8",
    inputs=[],
    outputs=[],
    operator=None,
    root=0,
    timeout_s=1.0,
)


def ends(library: Delegate, store: HashStore, *, title: str = DEFAULT_GROUP) -> list[LibraryGroup]:
    """Of three members, global ranks 0, 2 and 4."""
    for rank in range(3):
        store.set(f"group/{rank}", "")
    return [
        LibraryGroup(
            library, store, "group", rank=rank, ranks=(0, 2, 4), timeout_s=1.0, title=title
        )
        for rank in range(3)
    ]


def failure(call: Callable[[], object]) -> dist.PeerError:
    with pytest.raises(dist.PeerError) as raised:
        call()
    return raised.value


@pytest.mark.parametrize(
    ("trouble", "kind", "says"),
    [
        (
            LibraryFailure.OTHER,
            dist.PeerError,
            "barrier: slow says: the wire is cut; this process group is broken",
        ),
        (
            LibraryFailure.LENGTHS,
            dist.MismatchError,
            "barrier: a message is longer than expected (slow",
        ),
        (
            LibraryFailure.LOST,
            dist.PeerLostError,
            "barrier: a peer ended, or its connection ended (slow",
        ),
    ],
)
def test_a_librarys_error_in_our_words(
    trouble: LibraryFailure, kind: type[dist.PeerError], says: str
) -> None:
    error = RuntimeError("[/src/pair.cc:12] the wire is cut. Check the logs. Good luck!\nframe #1")
    end = ends(Library(error, trouble), HashStore())[0]
    first = failure(lambda: end.begin(REQUEST, "barrier"))
    assert type(first) is kind
    assert str(first).startswith(says)
    assert "pair.cc" not in str(first)
    assert "Good luck" not in str(first)
    assert first.__cause__ is error
    # It is broken: whatever is called next says the same, and asks the library nothing.
    assert failure(lambda: end.wait(Never(), 1, 1, "all_reduce")) is first


def test_a_programmers_error_is_none_of_a_peers() -> None:
    end = ends(Library(TypeError("no such argument")), HashStore())[0]
    with pytest.raises(TypeError, match="no such argument"):
        end.begin(REQUEST, "barrier")


def test_time_is_over() -> None:
    end = ends(Library(), HashStore(), title="group evens")[1]
    error = failure(lambda: end.wait(end.begin(REQUEST, "barrier"), 0.05, 3, "barrier"))
    assert isinstance(error, dist.CollectiveTimeoutError)
    assert str(error).startswith("in the group evens: barrier was not completed by slow within 3 s")


def test_who_left_is_named_before_the_time_is_over() -> None:
    store = HashStore()
    mine, _, other = ends(Library(), store)
    other.leave()
    error = failure(lambda: mine.wait(Never(), 60, 60, "barrier"))
    assert isinstance(error, dist.PeerLostError)
    assert error.rank == 4
    assert "rank 4 had left the group when barrier needed it" in str(error)


def test_who_gave_up_because_of_another_is_not_named() -> None:
    store = HashStore()
    mine, second, third = ends(Library(), store)
    third.leave()
    failure(lambda: second.wait(Never(), 60, 60, "barrier"))
    second.leave()
    assert failure(lambda: mine.wait(Never(), 60, 60, "barrier")).rank == 4


def test_a_broken_library_is_aborted_and_a_sound_one_closed() -> None:
    sound, broken = Library(), Library(OSError("gone"))
    for library in (sound, broken):
        end = ends(library, HashStore())[0]
        if library is broken:
            failure(lambda end=end: end.begin(REQUEST, "barrier"))  # type: ignore[misc]
        end.leave()
        end.leave()
    assert (sound.ended, broken.ended) == (["closed"], ["aborted"])


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("GLOO", "gloo"),
        ("cpu:gloo", "gloo"),
        ("cpu:rallypoint", "rallypoint"),
        ("nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_names(backend: str, name: str) -> None:
    assert check_backend(backend) == name


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("glo", "backend='glo' is not available; use one of rallypoint, shm, tcp, gloo, nccl"),
        ("cuda:gloo", "gloo takes memory of cpu, not of cuda"),
        ("cpu:gloo,cpu:mpi", "with each kind of device once"),
        ("cpu:gloo,nccl", "must be a name, or a list such as"),
    ],
)
def test_names_that_are_refused(backend: str, says: str) -> None:
    with pytest.raises(dist.InvalidArgumentError, match=says):
        check_backend(backend)


COMBINED: dict[str, tuple[list[Operator], list[str]]] = {
    "SUM, PRODUCT, MIN, MAX of float32, float64": (ARITHMETIC, ["float32", "float64"]),
    "the same of float16, bfloat16": (ARITHMETIC, ["float16", "bfloat16"]),
    "the same of int8, uint8, int32, int64": (ARITHMETIC, ["int8", "uint8", "int32", "int64"]),
    "the same of int16, uint16, uint32, uint64": (ARITHMETIC, ["int16", "uint16", "uint64"]),
    "the same of bool (or, and)": (ARITHMETIC, ["bool"]),
    "SUM of complex numbers": ([ReduceOp.SUM], ["complex64", "complex128"]),
    "PRODUCT of complex numbers": ([ReduceOp.PRODUCT], ["complex64", "complex128"]),
    "AVG of floats": ([ReduceOp.AVG], ["float32", "float64"]),
    "AVG of integers": ([ReduceOp.AVG], ["int32", "uint8"]),
    "BAND, BOR, BXOR of the integers above, and bool": (BITWISE, ["int32", "uint8", "bool"]),
    "PREMUL_SUM of floats": ([dist.premul_sum(2)], ["float32", "float64"]),
}


@pytest.mark.parametrize("row", COMBINED)
def test_what_libraries_combine_is_what_the_guide_says(row: str) -> None:
    operators, dtypes = COMBINED[row]
    cases = [(dtype, operator) for dtype in dtypes for operator in operators]
    refused = {
        name: [why_not_combined(name, combines, *case) for case in cases]
        for name, combines in {**libraries.OPERATORS, "mpi": mpi_library.OPERATORS}.items()
    }
    said = [_cell(cases, why) for why in refused.values()]
    assert f"| {row} | yes | {' | '.join(said)} |" in GUIDE.read_text()


def _cell(cases: Sequence[tuple[str, Operator]], refusals: Sequence[str]) -> str:
    if not any(refusals):
        return "yes"
    refused = {dtype for (dtype, _), why in zip(cases, refusals, strict=True) if why}
    rest = dict.fromkeys(dtype for dtype, _ in cases if dtype not in refused)
    return f"{', '.join(rest)} only" if rest else "no"


class _EntryPoint:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load(self) -> Callable[..., Any]:
        return self._function


class Alone(Library):
    """Of one rank, which needs no peers."""

    name = "alone"
    patience_s = math.inf

    def begin(self, request: LibraryCall) -> Pending:
        for source, target in zip(request.inputs, request.outputs, strict=False):
            target[:] = source
        return Done()

    def transfer(self, *, sends: bool, peer: int, tag: int, block: Block) -> Pending:
        return Done()


class Failing(Never):
    def is_done(self) -> bool:
        raise RuntimeError("the wire is cut")


def test_an_error_found_while_looking_is_the_works() -> None:
    group = type("Group", (), {"ranks": (0, 2, 4)})()
    end = ends(Library(), HashStore())[0]
    work = DelegatedWork(group, end, Failing(), "irecv", [], lambda: None, 60)
    assert work.is_completed()
    assert not work.is_success()
    assert "slow says: the wire is cut" in str(work.exception())
    assert work.source_rank() == -1
    with pytest.raises(dist.PeerError, match="the wire is cut"):
        work.wait(timedelta(seconds=1))


def test_what_went_well_stays_so_when_the_group_breaks() -> None:
    group = type("Group", (), {"ranks": (0, 2, 4)})()
    end = ends(Library(OSError("gone")), HashStore())[0]
    work = DelegatedWork(group, end, Done(), "all_reduce", [], lambda: None, 60)
    assert work.wait()
    failure(lambda: end.begin(REQUEST, "barrier"))
    assert work.is_success()
    assert work.wait(timedelta(seconds=1))


class Slow(Never):
    """It takes as long as the time that it is given, by its own clock, and is then done."""

    def __init__(self) -> None:
        self.given_s: list[float] = []

    def monotonic(self) -> float:
        return sum(self.given_s)

    def wait(self, timeout_s: float) -> None:
        self.given_s.append(timeout_s)


def test_messages_that_are_one_operation_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Slow()
    monkeypatch.setattr(library_calls, "time", part)
    library_calls._Several([part, part, part]).wait(0.5)
    assert part.given_s == [0.5, library_calls._SHORTEST_S, library_calls._SHORTEST_S]


def test_a_tag_that_collectives_use_is_refused() -> None:
    group = type("Group", (), {"ranks": (0, 2, 4)})()
    end = ends(Library(), HashStore())[0]
    for tag in (library_calls._TAG - 1, library_calls._TAG + 1):
        library_calls.post(
            group, end, "send", 1, tag, np.ones(1), timeout=None, results=[], then=None
        )
    with pytest.raises(dist.InvalidArgumentError, match=r"send: tag=21153 belongs to gather and"):
        library_calls.post(
            group,
            end,
            "send",
            1,
            library_calls._TAG,
            np.ones(1),
            timeout=None,
            results=[],
            then=None,
        )


class Communicator:
    """What an MpiDelegate does with its communicator when it is closed."""

    def __init__(self) -> None:
        self.is_free = False

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's names
        return 0

    def Get_attr(self, _: object) -> int:  # noqa: N802
        return 1 << 15

    def Free(self) -> None:  # noqa: N802
        self.is_free = True


@pytest.mark.parametrize(
    ("is_open", "is_finalized"), [(False, False), (True, False), (False, True)]
)
def test_mpi_frees_what_nobody_uses(*, is_open: bool, is_finalized: bool) -> None:
    library = SimpleNamespace(TAG_UB=0, Is_finalized=lambda: is_finalized)
    communicator = Communicator()
    delegate = mpi_library.MpiDelegate(library, communicator)
    if is_open:
        mpi_library._MpiPending(delegate, SimpleNamespace(Test=lambda _: False))
    delegate.close()
    assert communicator.is_free is not (is_open or is_finalized)
    atexit.unregister(delegate._abort_if_unfinished)


class Done(Never):
    def wait(self, timeout_s: float) -> None:
        pass

    def is_done(self) -> bool:
        return True


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Alone]]:
    """The default group of one rank, of a backend that another package adds."""
    made: list[Alone] = []

    def make(_: object) -> Alone:
        made.append(Alone())
        return made[-1]

    monkeypatch.setattr(backends, "_added", lambda: {"alone": _EntryPoint(make)})
    dist.init_process_group("alone", store=HashStore(), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def test_a_package_adds_a_backend(alone: Sequence[Alone]) -> None:
    assert dist.get_backend() == "alone"
    array = np.arange(6.0).reshape(2, 3).T
    whole = np.zeros(6)
    dist.all_gather_into_tensor(whole, array)
    assert np.array_equal(whole, array.ravel())
    dist.barrier()
    dist.destroy_process_group()
    assert alone[0].ended == ["closed"]
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)  # for the fixture to leave


def test_algorithms_are_the_engines(alone: Sequence[Alone]) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="alone chooses its algorithms itself"):
        dist.all_reduce(np.ones(3), algorithm="ring")


def test_a_batch_is_closed_even_if_it_cannot_begin(alone: Sequence[Alone]) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="is this rank itself"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, np.ones(3), 0)])
    assert alone[0].ended == ["batch opened", "batch closed"]
    alone[0].ended.clear()


def test_callbacks_and_results(alone: Sequence[Alone]) -> None:
    array, called = np.ones(3), threading.Event()
    work = dist.all_reduce(array, async_op=True)
    assert work is not None
    work.add_done_callback(lambda _: called.set())
    called.wait()
    assert work.wait(timedelta(seconds=1))
    assert work.result()[0] is array
    assert work.exception() is None
    assert work.source_rank() == -1
    assert work.get_future().wait() == [array]
