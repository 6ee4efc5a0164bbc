"""The table of collectives, against the one in words that PyTorch's and MPI's documents give."""

from __future__ import annotations

import pytest

from rallypoint.base.collective import (
    JOINT_OPERATIONS,
    Collective,
    collective_of,
    has_one_size,
    reduces,
    root_argument,
)

RANKS, ROOT = 4, 1

# name -> (blocks in, blocks out) on the root, on the others; root argument; whether it reduces
TABLE = {
    "all_reduce": ((1, 1), (1, 1), "", True),
    "broadcast": ((1, 1), (0, 1), "src", False),
    "all_gather": ((1, 4), (1, 4), "", False),
    "barrier": ((1, 1), (1, 1), "", False),
    "send": ((1, 0), (0, 1), "src", False),
    "reduce": ((1, 1), (1, 0), "dst", True),
    "gather": ((1, 4), (1, 0), "dst", False),
    "scatter": ((4, 1), (0, 1), "src", False),
    "reduce_scatter": ((4, 1), (4, 1), "", True),
    "all_to_all": ((4, 4), (4, 4), "", False),
    "scan": ((1, 1), (1, 1), "", True),
}


@pytest.mark.parametrize("name", TABLE)
def test_blocks_and_names(name: str) -> None:
    collective = Collective[name.upper()]
    *blocks, root, combines = TABLE[name]
    for is_root, counts in zip((True, False), blocks, strict=True):
        given = collective.input_blocks(RANKS, is_root=is_root)
        assert (given, collective.output_blocks(RANKS, is_root=is_root)) == counts
    assert collective.most_blocks(RANKS) == max(*blocks[0], *blocks[1])
    assert (collective.root_argument, collective.reduces) == (root, combines)
    assert collective.operation == name and Collective(int(collective)) is collective


def test_all_are_in_the_table() -> None:
    assert {each.operation for each in Collective} == set(TABLE)
    assert [int(each) for each in Collective] == list(range(len(Collective)))


def test_in_place() -> None:
    """Which block of the input is which of the output, as torch documents it; by rank 2 of 4."""
    on_root = {each.operation: each.alias(2, is_root=True) for each in Collective}
    elsewhere = {each.operation: each.alias(2, is_root=False) for each in Collective}
    assert on_root == {
        **dict.fromkeys(("all_reduce", "reduce", "broadcast", "barrier", "scan"), (0, 0)),
        **dict.fromkeys(("all_gather", "gather"), (0, 2)),
        **dict.fromkeys(("scatter", "reduce_scatter"), (2, 0)),
        **dict.fromkeys(("send", "all_to_all"), None),
    }
    for name in ("reduce", "broadcast", "gather", "scatter"):
        assert elsewhere[name] is None
    for name in ("all_reduce", "all_gather", "reduce_scatter", "barrier"):
        assert elsewhere[name] == on_root[name]


def test_sources() -> None:
    def of(name: str, *, rank: int, block: int = 0) -> list[tuple[int, int]]:
        return Collective[name.upper()].sources(rank=rank, block=block, ranks=RANKS, root=ROOT)

    everyone = [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert of("all_reduce", rank=3) == everyone
    assert of("reduce", rank=ROOT) == everyone
    assert of("reduce_scatter", rank=3) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert of("scan", rank=2) == [(0, 0), (1, 0), (2, 0)]
    assert of("broadcast", rank=3) == [(ROOT, 0)]
    assert of("scatter", rank=3) == [(ROOT, 3)]
    assert of("gather", rank=ROOT, block=2) == [(2, 0)]
    assert of("all_gather", rank=0, block=2) == [(2, 0)]
    assert of("all_to_all", rank=3, block=2) == [(2, 3)]
    assert of("barrier", rank=0) == []


def test_public_names() -> None:
    assert collective_of("all_gather_into_tensor") is Collective.ALL_GATHER
    assert collective_of("recv") is collective_of("send") is collective_of("") is None
    assert reduces("reduce_scatter_tensor") and not reduces("send") and not reduces("gather")
    assert (root_argument("gather"), root_argument("all_to_all_single")) == ("dst", "")
    assert has_one_size("broadcast") and has_one_size("all_gather_into_tensor")
    assert not has_one_size("all_gather") and not has_one_size("allreduce")
    assert {"barrier", "all_to_all_single"} < JOINT_OPERATIONS
    assert not JOINT_OPERATIONS & {"send", "broadcast", "gather", "scan", "all_gather_object"}
