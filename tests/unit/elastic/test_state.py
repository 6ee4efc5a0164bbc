"""What a State takes, and what it is for one rank by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import rallypoint as dist
from rallypoint import elastic
from rallypoint.elastic.agreement import Settlement
from rallypoint.elastic.values import copied, fill, outline, restore


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.counts = numpy.zeros(3)

    def state_dict(self) -> dict[str, object]:
        return {"counts": self.counts, "name": "x"}

    def load_state_dict(self, state: dict[str, numpy.ndarray]) -> None:
        self.counts = state["counts"]


def test_values_are_attributes() -> None:
    array = numpy.arange(3.0)
    state = elastic.State(step=1, array=array)
    state.step += 1
    state.array += 1
    assert (state.step, state.array is array, array.tolist()) == (2, True, [1, 2, 3])


@pytest.mark.parametrize("name", ["_step", "update", "on_reset"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="cannot be called"):
        elastic.State(**{name: 1})


def test_a_name_that_is_not_there() -> None:
    state = elastic.State(step=1)
    with pytest.raises(AttributeError, match="no value 'steps'; name all values"):
        state.steps = 2
    with pytest.raises(AttributeError, match="no value 'steps'"):
        _ = state.steps


def test_commit_and_restore(alone: None) -> None:
    array, counter, generator = numpy.arange(3.0), Counter(), numpy.random.default_rng(1)
    state = elastic.State(step=0, array=array, counter=counter, generator=generator, more=[1])
    state.sync()
    state.commit()
    drawn = generator.random(3)
    state.step, state.more = 5, [1, 2]
    array += 7
    counter.counts[:] = 9
    state.restore()
    assert (state.step, state.more, array.tolist()) == (0, [1], [0, 1, 2])
    assert state.array is array
    assert state.counter is counter
    assert counter.counts.tolist() == [0, 0, 0]
    assert generator.random(3).tolist() == drawn.tolist()
    state.more.append(3)
    state.restore()
    assert state.more == [1], "the copy is not what the program got"


def test_arrays_in_a_list_keep_their_memory(alone: None) -> None:
    arrays: list[Any] = [numpy.zeros(2), {"a": numpy.ones(3)}]
    state = elastic.State(arrays=arrays, names=numpy.array(["x", None], object))
    state.sync()
    state.commit()
    first, second = arrays[0], arrays[1]["a"]
    first += 5
    second += 5
    state.names[0] = "y"
    state.restore()
    assert state.arrays[0] is first
    assert state.arrays[1]["a"] is second
    assert (first.tolist(), second.tolist()) == ([0, 0], [1, 1, 1])
    assert state.names.tolist() == ["x", None]
    first += 1
    state.restore()
    assert first.tolist() == [0, 0], "the copy is not what the program got"


def test_an_update_within_an_update(alone: None) -> None:
    state = elastic.State(step=0)
    state.sync()
    with state.update(), pytest.raises(dist.InvalidArgumentError), state.update():
        pass


def test_an_update_does_not_communicate(alone: None) -> None:
    state = elastic.State(step=0)
    state.sync()
    array = numpy.ones(3)
    with state.update():
        for call in (
            dist.all_reduce,
            lambda each: dist.broadcast(each, 0),
            lambda _: dist.barrier(),
        ):
            with pytest.raises(dist.InvalidArgumentError, match=r"within state\.update"):
                call(array)
    dist.all_reduce(array)


def test_no_group_communicates_in_an_update(alone: None) -> None:
    state, group = elastic.State(step=0), dist.new_group([0])
    left = dist.new_group([0])
    dist.destroy_process_group(left)
    state.sync()
    array = numpy.ones(3)
    with state.update():
        with pytest.raises(dist.InvalidArgumentError), dist._coalescing_manager(group):
            dist.all_reduce(array, group=group)
        for call in (
            lambda: dist.all_reduce(array, group=group),
            lambda: dist.all_reduce(array, group=group, async_op=True),
            lambda: dist.all_reduce(array, async_op=True),
            lambda: dist.irecv(array, group=group),
            lambda: dist.recv(array, group=group),
        ):
            with pytest.raises(dist.InvalidArgumentError, match=r"within state\.update"):
                call()
    dist.all_reduce(array, group=group)
    work = dist.all_reduce(array, group=group, async_op=True)
    assert work is not None
    work.wait()
    with pytest.raises(dist.NotInitializedError, match="was destroyed"):
        dist.all_reduce(array, group=left)


def test_half_of_an_update_is_no_state(alone: None) -> None:
    state = elastic.State(step=0)
    state.sync()
    with pytest.raises(ArithmeticError), state.update():
        state.step += 1
        raise ArithmeticError
    assert not state._report.is_member
    half = "ended with ArithmeticError, so this rank's state is only half updated"
    with pytest.raises(dist.InvalidArgumentError, match=half), state.update():
        pass


def test_run_alone(alone: None) -> None:
    state = elastic.State(step=0)
    calls = []

    @elastic.run
    def train(state: elastic.State, more: int) -> int:
        calls.append(more)
        while state.step < 10:
            with state.update():
                state.step += 1
        return more

    assert train(state, 4) == 4
    assert (calls, state.step) == ([4], 10)


def test_what_the_function_raises_comes_through(alone: None) -> None:
    @elastic.run
    def train(state: elastic.State) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        train(elastic.State(step=0))


def test_a_loss_that_nobody_can_mend_comes_through(alone: None) -> None:
    @elastic.run
    def train(state: elastic.State) -> None:
        raise dist.PeerLostError("rank 3 died", rank=3)

    with pytest.raises(dist.PeerLostError, match="rank 3 died"):
        train(elastic.State(step=0))


def test_losses_that_an_update_meets_count_as_retries(alone: None) -> None:
    calls = []

    @elastic.run(retries=3)
    def train(state: elastic.State) -> None:
        calls.append(state.step)
        state._settlement = Settlement(state._committed, (0,), ())  # as after `_Update.__enter__`
        raise elastic.MembershipChangedError("lost") from dist.PeerLostError("rank 1 died", rank=1)

    with pytest.raises(dist.PeerLostError, match="rank 1 died"):
        train(elastic.State(step=0))
    assert len(calls) == 5  # the first, of which no update is known, and the retries


def test_too_few(alone: None) -> None:
    @elastic.run(min_size=2)
    def train(state: elastic.State) -> None:
        raise AssertionError

    dist.group.WORLD.set_timeout(dist.default_pg_timeout / 1e4)  # type: ignore[union-attr]
    with pytest.raises(elastic.TooFewPeersError, match="1 here, at least 2 needed"):
        train(elastic.State(step=0))


def test_without_a_group() -> None:
    @elastic.run
    def train(state: elastic.State) -> None:
        raise AssertionError

    with pytest.raises(dist.NotInitializedError, match="init_process_group first"):
        train(elastic.State(step=0))


def test_trees_and_back() -> None:
    tree: dict[str, Any] = {
        "a": [numpy.arange(2), 3],
        "b": (numpy.zeros((0, 2)), {"c": numpy.float32(1)}),
    }
    arrays: list[numpy.ndarray] = []
    again = fill(outline(tree, arrays).tree, iter(arrays))
    assert again["a"][0] is tree["a"][0]
    assert again["b"][1] == {"c": 1}
    other = copied(tree)
    other["a"][0][:] = 9
    assert tree["a"][0].tolist() == [0, 1]
    assert restore(numpy.ones(2, dtype=int), numpy.arange(2)).tolist() == [0, 1]
