"""What a rank cannot ask for: an error of its own, at once, and the group is as good as before."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from rallypoint.base.errors import (  # noqa: E402
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
)
from tests.unit.pytorch.ranks import run_ranks  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.needs_torch


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    """For its peers it is as if nothing had been called."""
    one, three, whole = torch.ones(1), torch.ones(3), torch.ones(4)
    small = torch.ones(3).to(torch.float8_e5m2)
    sparse = torch.eye(2).to_sparse()
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    expanded = torch.ones(1).expand(2)
    in_background = c10d.AllreduceOptions()
    in_background.asyncOp = True
    no_time = c10d.AllreduceOptions()
    no_time.asyncOp, no_time.timeout = True, timedelta(0)

    def main(group: Any) -> None:
        own = group.rank()
        lists = [torch.ones(2), torch.ones(2)]
        longer = list(lists)
        longer[own] = three
        away = c10d.BroadcastOptions()
        away.rootRank = 2
        at_own = c10d.GatherOptions()
        at_own.rootRank = own
        nowhere = c10d.ReduceOptions()
        nowhere.rootRank = -1
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("needed", lambda: group.all_gather_single(torch.ones(5), torch.ones(2))),
            ("needed", lambda: group.gather_single(three, one, at_own)),
            ("split_sizes", lambda: group.all_to_all_single(whole, whole, [1, 1], [2, 2])),
            ("one tensor", lambda: group.allreduce([one, one])),
            ("one tensor", lambda: group.allreduce([], c10d.AllreduceOptions())),
            ("float8", lambda: group.allreduce([small])),
            ("dense", lambda: group.allgather([[sparse, sparse]], [sparse])),
            ("no memory of its own", lambda: group.allreduce([freed])),
            ("no memory of its own", lambda: group.allreduce([freed], in_background)),
            ("no memory of its own", lambda: group.recv([freed], 1 - own, 0)),
            ("is expanded", lambda: group.recv([expanded], 1 - own, 0)),
            ("is expanded", lambda: group.allgather([[expanded, expanded]], [torch.ones(2)])),
            ("is expanded", lambda: group.reduce_scatter_single(expanded, whole)),
            ("is sent to this rank", lambda: group.allgather([longer], [torch.ones(2)])),
            ("is sent to this rank", lambda: group.alltoall(longer, lists)),
            ("is sent to this rank", lambda: group.reduce_scatter([one], [longer])),
            ("2 is not a rank", lambda: group.broadcast([one], away)),
            ("-1 is not a rank", lambda: group.reduce([one], nowhere)),
            ("2 is not a rank", lambda: group.send([one], 2, 0)),
            ("this rank itself", lambda: group.recv([one], own, 0)),
            ("must be positive", lambda: group.allreduce([one], no_time)),
            ("must be positive", lambda: group.set_timeout(timedelta(seconds=-1))),
            ("must be positive", lambda: group.monitored_barrier(timedelta(-1))),
            ("2 is not a rank", lambda: group.split_group([0, 1, 2])),
            ("each once", lambda: group.split_group([0, 1, 0])),
            ("1 output .* for 2", lambda: group.allgather_coalesced([[one]] * 2, lists)),
            ("1 output .* for 2", lambda: group.all_gather_single_coalesced([whole], lists)),
            ("1 output .* for 2", lambda: group.reduce_scatter_single_coalesced([one], lists)),
        ]
        for words, call in calls:
            with pytest.raises((InvalidArgumentError, InvalidTypeError), match=words):
                call()
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()  # the group is as good as before
        assert tensor.tolist() == [2, 2]

    run_ranks(2, main)


@pytest.mark.parametrize("other", [torch.int32, torch.float16])
@pytest.mark.parametrize("name", ["allgather", "gather", "scatter", "reduce_scatter", "alltoall"])
def test_tensors_of_a_call_have_one_dtype(name: str, other: Any) -> None:
    """Also those of equally many bytes: nothing is converted, and no bits pass for others."""

    def main(group: Any) -> None:
        one, many = torch.ones(2), [torch.ones(2).to(other), torch.ones(2).to(other)]
        calls = {
            "scatter": lambda: group.scatter([one], [many], c10d.ScatterOptions()),
            "gather": lambda: group.gather([many], [one], c10d.GatherOptions()),
            "allgather": lambda: group.allgather([many], [one]),
            "alltoall": lambda: group.alltoall(many, [one, one]),
            "reduce_scatter": lambda: group.reduce_scatter([one], [many]),
        }
        if group.rank() == 0 or name not in ("gather", "scatter"):
            with pytest.raises(InvalidArgumentError, match="dtypes must be equal"):
                calls[name]()
        for call in (group.all_gather_single, group.reduce_scatter_single):
            whole = torch.ones(4).to(other)
            pair = (whole, one) if call == group.all_gather_single else (one, whole)
            with pytest.raises(InvalidArgumentError, match="dtypes must be equal"):
                call(*pair)
        with pytest.raises(InvalidArgumentError, match="dtypes must be equal"):
            group.all_to_all_single(one, many[0], [], [])
        with pytest.raises(
            InvalidArgumentError, match="dtypes must be equal"
        ):  # that are sent as bytes
            group.all_gather_single(torch.ones(4, dtype=torch.uint8), one.to(torch.float8_e5m2))
        group.barrier().wait()

    run_ranks(2, main)


def test_expanded_tensors_are_reduced_and_read() -> None:
    def main(group: Any) -> None:
        tensor = torch.ones(1).expand(4)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [2, 2, 2, 2]
        target = torch.zeros(4) if group.rank() else tensor
        group.broadcast([target], c10d.BroadcastOptions()).wait()
        assert target.tolist() == [2, 2, 2, 2]

    run_ranks(2, main)


def test_sparse_tensors_of_different_shapes() -> None:
    """Else entries would lie outside of the sum, where to_dense() writes them."""

    def main(group: Any) -> None:
        with pytest.raises(MismatchError, match=r"rank 1 has the shape \[5\], .* 0 \[3\]"):
            group.allreduce([torch.ones(3 + 2 * group.rank()).to_sparse()])
        tensor = torch.ones(2).to_sparse()
        group.allreduce([tensor])  # all ranks know, and go on
        assert tensor.to_dense().tolist() == [2, 2]

    run_ranks(2, main)
