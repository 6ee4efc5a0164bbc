"""A worker: states are transferred between its ranks in many ways, and compared with what they are.

    rallypoint run ... transfers.py DIRECTORY SEED

Each rank writes the ways in which it got the states into DIRECTORY/RANK.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

import rallypoint as dist
from rallypoint.elastic import transfer
from rallypoint.elastic.agreement import Settlement
from rallypoint.process_group.groups.default import resolve

LONG = transfer._PIECE // 8 + 3  # items of an array that is cut


def state(seed: int) -> dict[str, Any]:
    """Arrays of all kinds: none, one, thousands and millions of items, in and out of order."""
    draw = np.random.default_rng(seed)
    lengths = [0, 1, *draw.integers(0, 100, 200).tolist(), *draw.integers(0, 100_000, 40).tolist()]
    return {
        "step": seed,
        "many": [draw.standard_normal(length) for length in lengths],
        "long": draw.standard_normal(2 * LONG),
        "bits": draw.integers(0, 256, 1001, dtype=np.uint8).view(np.uint8),
        "turned": draw.standard_normal((300, 200)).T,
        "one": np.array(draw.standard_normal()),
    }


def blank(seed: int) -> dict[str, Any]:
    """As `state`, but with other contents."""
    full = state(seed)
    for array in (*full["many"], full["long"], full["bits"], full["turned"], full["one"]):
        array[...] = 0
    return {**full, "step": -1}


def check(values: dict[str, Any], right: dict[str, Any]) -> None:
    assert values["step"] == right["step"]
    for name in ("long", "bits", "turned", "one"):
        assert values[name].tobytes() == right[name].tobytes(), name
    for one, other in zip(values["many"], right["many"], strict=True):
        assert one.tobytes() == other.tobytes()


def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    ways: list[str] = []
    copy, receive, spread = transfer._copy, transfer._receive, transfer._broadcast

    def noted(way: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if not ways or ways[-1] != way:
                ways.append(way)
            return function(*arguments, **named)

        return call

    transfer._copy = noted("read", copy)
    transfer._receive = noted("messages", receive)
    transfer._broadcast = noted("broadcast", spread)
    ranks = range(size)
    for count in range(1, size):
        for sources in combinations(ranks, count):
            newcomers = tuple(rank for rank in ranks if rank not in sources)
            seed += 1
            values = blank(seed) if rank in newcomers else state(seed)
            transfer.synchronize(values, Settlement(1, sources, newcomers), resolve(None))
            check(values, state(seed))
    # What cannot be read comes by messages.
    transfer._copy = lambda *_: rank % 2 == 0 and copy(*_)
    newcomers = tuple(ranks[1:])
    values = blank(seed) if rank in newcomers else state(seed)
    transfer.synchronize(values, Settlement(1, (0,), newcomers), resolve(None))
    check(values, state(seed))
    bare = {"step": -1 if rank in newcomers else seed}  # without arrays
    transfer.synchronize(bare, Settlement(1, (0,), newcomers), resolve(None))
    assert bare == {"step": seed}
    (directory / str(rank)).write_text(" ".join(sorted(set(ways))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
