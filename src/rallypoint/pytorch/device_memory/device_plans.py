"""What is to be done in a call, from what its ranks say of their parts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.base.collective import Collective
from rallypoint.pytorch.device_memory.mappings import LOCATION, Location

_FIXED = struct.Struct("<BBIi?dII")
_CALL = slice(4)  # fields of a Request that must be equal on all ranks


class Request(NamedTuple):
    """What a rank says of its part in a call.

    Attributes:
        op, dtype: as numbers.
        can_share: others may use its memory.
        factor: for PREMUL_SUM.
        inputs, outputs: its blocks: none, one for each, or all in one.
    """

    collective: Collective
    op: int
    dtype: int
    root: int
    can_share: bool
    factor: float
    inputs: list[Location]
    outputs: list[Location]

    @staticmethod
    def most_bytes(ranks: int) -> int:
        """How long the packed request of one of so many ranks may be."""
        return _FIXED.size + 2 * ranks * LOCATION.size

    def packed(self) -> bytes:
        """What `unpacked` takes."""
        fixed = _FIXED.pack(*self[:6], len(self.inputs), len(self.outputs))
        return fixed + b"".join(LOCATION.pack(*each) for each in (*self.inputs, *self.outputs))

    @classmethod
    def unpacked(cls, data: bytes) -> Request:
        """A request from the beginning of `data`."""
        number, op, dtype, root, can_share, factor, inputs, outputs = _FIXED.unpack_from(data)
        end = _FIXED.size + (inputs + outputs) * LOCATION.size
        found = [Location(*each) for each in LOCATION.iter_unpack(data[_FIXED.size : end])]
        call = Collective(number), op, dtype, root
        return cls(*call, can_share, factor, found[:inputs], found[inputs:])

    def blocks(self, rank: int, ranks: int) -> tuple[list[Location], list[Location]] | None:
        """Input and output blocks; None: they are not as many as they should be."""
        is_root = rank == self.root
        inputs = _cut(self.inputs, self.collective.input_blocks(ranks, is_root=is_root))
        outputs = _cut(self.outputs, self.collective.output_blocks(ranks, is_root=is_root))
        return None if inputs is None or outputs is None else (inputs, outputs)

    def is_apart(self, rank: int, ranks: int) -> bool:
        """Whether no input is where an output is, except the block that is both in place."""
        inputs, outputs = self.blocks(rank, ranks) or ((), ())
        alias = self.collective.alias(rank, is_root=rank == self.root)
        return not any(
            source.meets(target) and not ((i, o) == alias and source == target)
            for i, source in enumerate(inputs)
            for o, target in enumerate(outputs)
        )


class Step(NamedTuple):
    """One block of a call's result: whose it is, and what is combined for it, by rank."""

    rank: int
    target: Location
    sources: list[tuple[int, Location]]


def planned(requests: Sequence[Request]) -> list[Step] | None:
    """What is to be done for all ranks; None: the call must go by the host."""
    first, ranks = requests[0], len(requests)
    if any(not each.can_share or each[_CALL] != first[_CALL] for each in requests):
        return None
    told = [each.blocks(rank, ranks) for rank, each in enumerate(requests)]
    blocks = [each for each in told if each is not None]
    if len(blocks) < ranks:
        return None
    steps = []
    for rank, (_, outputs) in enumerate(blocks):
        for index, target in enumerate(outputs):
            wanted = first.collective.sources(rank=rank, block=index, ranks=ranks, root=first.root)
            sources = [(peer, blocks[peer][0][block]) for peer, block in wanted]
            if any(each.nbytes != target.nbytes for _, each in sources):
                return None
            steps.append(Step(rank, target, sources))
    return steps


def _cut(locations: list[Location], count: int) -> list[Location] | None:
    if len(locations) == 1 < count and locations[0].nbytes % count == 0:
        whole, nbytes = locations[0], locations[0].nbytes // count
        return [
            whole._replace(offset=whole.offset + index * nbytes, nbytes=nbytes)
            for index in range(count)
        ]
    return locations if len(locations) == count else None
