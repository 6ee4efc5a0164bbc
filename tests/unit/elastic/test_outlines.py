"""What travels ahead of the arrays' bytes, and where these are received."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.elastic.transfer import _check, _pack, _room, _unpack
from rallypoint.elastic.values import (
    Outline,
    Spec,
    UpdateParticipant,
    fill,
    leaf_of,
    outline,
    spec_of,
    write,
)


def drawn_of(values: dict[str, Any]) -> tuple[dict[str, Outline], list[Any], list[Spec]]:
    arrays: list[Any] = []
    drawn = {name: outline(value, arrays) for name, value in values.items()}
    return drawn, arrays, [spec_of(each) for each in arrays]


def test_an_outline_arrives_as_it_was_sent() -> None:
    kinds: list[Any] = [np.ones(3), np.ones(3), np.ones(3, np.float32), np.ones((3, 1)), np.ones(3)]
    drawn, _, specs = drawn_of({"a": kinds, "step": 7, "b": {"c": (kinds[0], [kinds[2]])}})
    assert _unpack(_pack(drawn, specs)) == (drawn, specs)


def test_many_arrays_of_one_kind_need_few_bytes() -> None:
    drawn, _, specs = drawn_of({"many": [np.ones(3)] * 4000})
    assert len(_pack(drawn, specs)) < 4000 * 6
    assert _unpack(_pack(drawn, specs)) == (drawn, specs)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(6),
        np.zeros(()),
        np.zeros((0, 2)),
        np.zeros((4, 6))[::2, ::3],
        np.zeros((3, 2), order="F"),
        np.zeros(2, [("a", np.int8), ("b", np.int64)]),
    ],
    ids=["plain", "0-d", "empty", "strided", "Fortran", "record"],
)
def test_bytes_that_are_received_become_the_contents(array: Any) -> None:
    wanted = np.frombuffer(bytes(range(1, 1 + array.nbytes)), array.dtype).reshape(array.shape)
    leaf = leaf_of(array)
    leaf.data[:] = np.frombuffer(wanted.tobytes(), np.uint8)
    leaf.store()
    np.testing.assert_array_equal(array, wanted)


def test_arrays_that_are_alike_keep_their_memory_and_others_are_made() -> None:
    theirs, _, their_specs = drawn_of({"same": [np.ones(3)], "longer": [np.ones(2), np.ones(5)]})
    own = {"longer": [np.zeros(2)], "same": [np.zeros(3)]}  # in an order of its own
    mine, arrays, specs = drawn_of(own)
    room = _room(mine, arrays, specs, theirs, their_specs)
    assert [spec_of(each) for each in room] == their_specs
    every = iter(room)
    got = {name: fill(each.tree, every) for name, each in theirs.items()}
    assert next(every, None) is None
    assert got["same"][0] is own["same"][0]
    assert [each.shape for each in got["longer"]] == [(2,), (5,)]
    for leaf in map(leaf_of, room):
        leaf.data[:] = 0
        leaf.store()
    assert all((each == 0).all() for each in (*got["same"], *got["longer"]))


class Model(UpdateParticipant):
    """As a model in PyTorch: the names of its arrays do not change."""


def test_a_model_of_other_shapes_is_refused_before_its_bytes_travel() -> None:
    def check(value: object, here: dict[str, Any], there: dict[str, Any]) -> None:
        mine, _, specs = drawn_of({"it": here})
        theirs, _, their_specs = drawn_of({"it": there})
        _check({"it": value}, mine, specs, theirs, their_specs)

    wide, narrow = {"weight": np.ones((2, 3)), "epoch": 1}, {"weight": np.ones((2, 2)), "epoch": 2}
    check(Model(), wide, {**wide, "epoch": 7})
    check(object(), wide, narrow)  # an optimizer's may differ
    with pytest.raises(InvalidArgumentError, match=r"it\['weight'\] .* shape \(2, 3\), but"):
        check(Model(), wide, narrow)
    extra = {"extra": {"x": np.ones(1)}, "weight": np.ones((2, 3))}
    check(Model(), extra, {**extra, "extra": {}})
    with pytest.raises(InvalidArgumentError, match=r"it\['weight'\] .* shape \(2, 3\), but"):
        check(Model(), extra, {"extra": 7, "weight": np.ones((2, 2))})
    with pytest.raises(InvalidArgumentError, match=r"it\['bias'\] .* is no array, but"):
        check(Model(), wide, {**wide, "bias": np.ones(2)})


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (1e9, np.array(2.5, np.float32)),
        (np.array(1.0), 2.5),
        (np.array(1, np.int64), np.array(2.5)),
        (None, np.array(2.5)),
    ],
    ids=["number", "array", "other dtype", "none"],
)
def test_a_number_may_be_an_array_on_the_other_ranks(here: object, there: object) -> None:
    """The best loss, say, that was a number at the start."""
    mine, own, specs = drawn_of({"best": here})
    theirs, arrays, their_specs = drawn_of({"best": there})
    _check({"best": here}, mine, specs, theirs, their_specs)
    room = _room(mine, own, specs, theirs, their_specs)
    for leaf, source in zip(map(leaf_of, room), arrays, strict=True):
        leaf.data[:] = leaf_of(source).data
        leaf.store()
    got = write(here, fill(theirs["best"].tree, iter(room)))
    assert got == 2.5
    assert type(got) is type(there)
