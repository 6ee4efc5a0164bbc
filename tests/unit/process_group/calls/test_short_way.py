"""Calls of the usual forms run no Python code; every other form is the function's own."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint._native import ShortWay
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

RANKS = 3
SHORT: dict[str, Any] = {
    name: value for name in dir(dist) if isinstance(value := getattr(dist, name), ShortWay)
}


def _all(value: float) -> list[np.ndarray[Any, Any]]:
    return [np.full(2, float(value)) for _ in range(RANKS)]


def _usual(name: str, me: int, root: int) -> tuple[dict[str, Any], Any, Any]:
    """What a rank passes to a call, besides the group; its output, and what is then in it."""
    is_root = me == root
    own, listed, whole = np.full(2, me + 1.0), _all(0), np.zeros(2 * RANKS)
    total, each = np.full(2, 6.0), np.repeat([1.0, 2.0, 3.0], 2)
    by_rank = each.reshape(RANKS, 2)
    parts = [np.full(2, 10.0 + rank) for rank in range(RANKS)]
    here = {
        "tensor": own,
        "src": root,
        "dst": root,
        "tensor_list": listed,
        "gather_list": listed if is_root else None,
        "scatter_list": parts if is_root else None,
        "output_tensor": whole,
        "input_tensor": own,
        "input_list": _all(me),
        "output_tensor_list": listed,
        "input_tensor_list": _all(me + 1),
        "output": own,
        "input": np.full(2 * RANKS, float(me)),
    }
    whole_for_all = {"output": whole, "input": np.full(2 * RANKS, me + 1.0)}
    result, wanted = {
        "all_reduce": (own, total),
        "broadcast": (own, np.full(2, root + 1.0)),
        "reduce": (own, total if is_root else own.copy()),
        "all_gather": (listed, by_rank),
        "all_gather_into_tensor": (whole, each),
        "gather": (listed, by_rank if is_root else np.zeros((RANKS, 2))),
        "scatter": (own, parts[me]),
        "reduce_scatter": (own, np.full(2, 3.0)),
        "reduce_scatter_tensor": (own, np.full(2, 3.0)),
        "all_to_all": (listed, by_rank),
        "all_to_all_single": (whole, each),
        "barrier": (None, None),
    }[SHORT[name].__name__]
    if SHORT[name].__name__ == "all_to_all_single":
        here |= whole_for_all
    taken = inspect.signature(SHORT[name]).parameters
    return {key: value for key, value in here.items() if key in taken}, result, wanted


COLLECTIVES = sorted(set(SHORT) - {"send", "recv"})


def _python_calls(function: Callable[[], object]) -> list[str]:
    """The Python functions that are called meanwhile, on this thread."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else "?")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [name for name in seen if not name.endswith("<lambda>")]  # the test's own


@pytest.mark.parametrize("form", ["usual", "with a timeout", "roots by their ranks in the group"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_usual_forms_run_no_python_code_and_are_right(name: str, form: str) -> None:
    call, root = SHORT[name], random.Random(name).randrange(RANKS)

    def main(group: ProcessGroup) -> None:
        for _ in range(2):  # the program of a call is made at the first one
            given, result, wanted = _usual(name, group.rank(), root)
            if form == "with a timeout":
                given["timeout"] = group.timeout
            elif form != "usual":
                in_group = {"src": "group_src", "dst": "group_dst"}
                given = {in_group.get(key, key): value for key, value in given.items()}
            seen = _python_calls(partial(call, **given, group=group))
            np.testing.assert_array_equal(result, wanted)
        assert seen == []

    run_ranks(RANKS, main)


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_parts_of_any_length_run_no_python_code(shape: tuple[int, ...], seed: int) -> None:
    """Rank i sends lengths[i][j] rows to rank j."""

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        for turn in range(3):
            lengths = np.random.default_rng(seed + turn).integers(0, 4, (RANKS, RANKS))
            to, from_ = lengths[me].tolist(), lengths[:, me].tolist()
            output = np.full((sum(from_), *shape), -1.0)
            source = np.repeat(10.0 * me + np.arange(RANKS), to)
            given = np.array(
                np.broadcast_to(source.reshape(-1, *[1] * len(shape)), (sum(to), *shape))
            )
            call = partial(dist.all_to_all_single, output, given, from_, to, group)
            seen = _python_calls(call)
            assert (np.repeat(10.0 * np.arange(RANKS) + me, from_) == output.T).all()
        assert seen == []

    run_ranks(RANKS, main)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5, "1"])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises((InvalidArgumentError, InvalidTypeError)):
            dist.all_reduce(np.ones(1), group=group, timeout=timeout)

    run_ranks(2, main)


def test_a_work_says_what_was_called_and_where() -> None:
    def main(group: ProcessGroup) -> str:
        array = np.ones(2 + group.rank())
        work = dist.all_reduce(array, dist.ReduceOp.MAX, group, async_op=True)
        assert work is not None
        assert work.result()[0] is array
        with pytest.raises(MismatchError) as caught:
            work.wait()
        return str(caught.value)

    for text in run_ranks(2, main):
        assert "all_reduce(float64[2], MAX) at " in text
        assert "test_short_way.py:" in text


@pytest.mark.parametrize("name", COLLECTIVES)
def test_other_forms_are_the_functions_own(name: str) -> None:
    call, root = SHORT[name], 1

    def main(group: ProcessGroup) -> None:
        for way in ("async", "timeout", "positional", "uninterned", "function"):
            given, result, wanted = _usual(name, group.rank(), root)
            if way == "async":
                work = call(**given, group=group, async_op=True)
                work.wait()
            elif way == "timeout":
                call(**given, group=group, timeout=group.timeout)
            elif way == "positional":
                bound = inspect.signature(call).bind(**given, group=group)
                bound.apply_defaults()
                call(*bound.args, **bound.kwargs)
            elif way == "uninterned":
                call(**{"".join(list(key)): given[key] for key in given}, group=group)
            else:
                call.__wrapped__(**given, group=group)
            np.testing.assert_array_equal(result, wanted, err_msg=way)

    run_ranks(RANKS, main)


def test_messages_run_no_python_code() -> None:
    def main(group: ProcessGroup) -> None:
        me, array = group.rank(), np.zeros(3)
        if me == 0:
            array += 7
            for _ in range(2):
                seen = _python_calls(lambda: dist.send(array, 1, group, tag=5))
            assert seen == []
            dist.send(array, 1, group)
        elif me == 1:
            for _ in range(2):
                array[:] = 0
                seen = _python_calls(lambda: dist.recv(array, 0, group, 5))
                assert (array == 7).all()
            assert seen == []
            assert dist.recv(array, group=group) == 0  # from any rank

    run_ranks(RANKS, main)


def test_an_algorithm_is_looked_up_once() -> None:
    def main(group: ProcessGroup) -> None:
        array = np.ones(4)
        for _ in range(3):
            seen = _python_calls(
                lambda: dist.all_reduce(array, group=group, algorithm="direct_two_shot")
            )
        assert seen == []
        assert (array == RANKS**3).all()
        with pytest.raises(InvalidArgumentError, match="no algorithm 'slow'"):
            dist.all_reduce(array, group=group, algorithm="slow")

    run_ranks(RANKS, main)


def test_wrong_arguments_are_pythons_to_name() -> None:
    array = np.ones(2)

    def main(group: ProcessGroup) -> None:
        for arguments, named, words in (
            ((), {}, "missing 1 required positional argument: 'tensor'"),
            ((array,), {"tensor": array}, "multiple values for argument 'tensor'"),
            ((array,), {"grop": group}, "unexpected keyword argument 'grop'"),
            ((array,) * 9, {}, "takes from 1 to 4 positional arguments"),
        ):
            with pytest.raises(TypeError, match=words):
                dist.all_reduce(*arguments, **named)
        with pytest.raises(InvalidTypeError, match=r"not builtins\.bytearray"):
            dist.all_reduce(bytearray(8), group=group)  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match=r"must be a list of arrays"):
            dist.all_gather(np.ones((RANKS, 2)), array, group)  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="read-only"):
            dist.all_reduce(np.frombuffer(b"12345678"), group=group)
        with pytest.raises(InvalidArgumentError, match="src=7 is not a rank"):
            dist.broadcast(array, 7, group)
        with pytest.raises(InvalidArgumentError, match="src=True is not a rank"):
            dist.broadcast(array, True, group)
        with pytest.raises(InvalidArgumentError, match="must be given"):
            dist.broadcast(array, group=group)
        with pytest.raises(InvalidTypeError, match="group must be what new_group returned"):
            dist.all_reduce(array, group="all")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="this rank itself"):
            dist.send(array, group.rank(), group)
        dist.all_reduce(total := np.ones(1), group=group)  # none of this has hurt the group
        assert total == RANKS

    run_ranks(RANKS, main)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize(
    ("rows", "splits"),
    [
        (RANKS + 1, None),
        (RANKS, [-1, 2, 2]),
        (RANKS, [1 << 70, 0, 0]),
        (RANKS, [1, 1]),
        (RANKS, (1, 1, 2)),
    ],
)
def test_parts_that_do_not_fit_are_the_functions_to_refuse(
    rows: int, splits: Any, background: bool
) -> None:
    def main(group: ProcessGroup) -> None:
        given, out = np.ones(rows), np.zeros(rows)
        with pytest.raises((InvalidArgumentError, InvalidTypeError)):
            dist.all_to_all_single(
                out, given, input_split_sizes=splits, group=group, async_op=background
            )
        assert not out.any()
        dist.all_reduce(total := np.ones(1), group=group)  # none of this has hurt the group
        assert total == RANKS

    run_ranks(RANKS, main)


@pytest.mark.parametrize("tag", [1 << 70, 1 << 31, "5"])
def test_a_tag_that_is_none_is_the_functions_to_refuse(tag: Any) -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises((InvalidArgumentError, InvalidTypeError, TypeError, OverflowError)):
            dist.send(np.ones(1), (group.rank() + 1) % RANKS, group, tag)

    run_ranks(RANKS, main)


def test_a_short_way_is_made_of_a_role_for_each_parameter() -> None:
    with pytest.raises(TypeError):
        ShortWay(print)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="too many parameters, or not a role for each"):
        ShortWay(print, ("tensor", "group"), 2, (1,), 0, 0, None, False)
    with pytest.raises(ValueError, match="too many parameters, or not a role for each"):
        ShortWay(print, ("x",) * 100, 2, (1,) * 100, 0, 0, None, False)


def test_a_mismatch_names_the_call_and_the_line() -> None:
    def main(group: ProcessGroup) -> str:
        array = np.ones(2 + group.rank())
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(array, dist.ReduceOp.MAX, group)
        assert (array == 1).all()
        return str(caught.value)

    for text in run_ranks(2, main):
        assert (
            "all_reduce(float64[2], MAX) at " in text and "all_reduce(float64[3], MAX) at " in text
        )
        assert "test_short_way.py:" in text


def test_nothing_is_kept() -> None:
    arrays = [np.ones(2) for _ in range(4)]
    listed = [arrays[0]]

    def main(group: ProcessGroup) -> None:
        def calls() -> None:
            dist.all_reduce(arrays[0], dist.ReduceOp.MAX, group)
            dist.all_gather(listed, arrays[1], group)
            dist.scatter(arrays[1], listed, group=group)
            dist.broadcast(arrays[2], src=0, group=group)
            right: dict[str, Any] = {"src": 0, "group": group}
            for wrong in ({"src": 9}, {"group": "x"}, {"tag": 1}):
                with pytest.raises((TypeError, ValueError)):
                    dist.broadcast(arrays[3], **(right | wrong))

        def counts() -> list[int]:
            kept = (*arrays, listed, dist.ReduceOp.MAX, group, group.fast_path)
            return [sys.getrefcount(each) for each in kept]

        calls()
        before = counts()
        for _ in range(200):
            calls()
        assert counts() == before

    run_ranks(1, main)


def test_it_looks_like_the_function_that_it_is() -> None:
    assert {"all_reduce", "send", "recv", "barrier", "all_to_all"} <= set(SHORT)
    for name, call in SHORT.items():
        function = call.__wrapped__
        assert inspect.isfunction(function) and inspect.isroutine(call)
        assert call.__doc__ == function.__doc__ and call.__doc__
        assert inspect.signature(call) == inspect.signature(function)
        assert f"{call.__name__}(" in pydoc.plain(pydoc.render_doc(call))
        assert pickle.loads(pickle.dumps(call)) is call and copy.deepcopy(call) is call
        assert repr(call).startswith(f"<function {call.__name__}"), name


def test_it_is_a_method_where_a_function_would_be() -> None:
    class Bound:
        reduce: Any = dist.all_reduce

    one = Bound()
    assert Bound.reduce is dist.all_reduce
    assert (one.reduce.__self__, one.reduce.__name__) == (one, "all_reduce")
