"""What is to be done in a call, from what its ranks say of their parts: the same on all of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.pytorch.device_memory.mappings import LOCATION, Location


class Header(NamedTuple):
    """What must be equal on all ranks; `op`, `dtype` and `device` as numbers or bytes."""

    device: bytes
    collective: int
    op: int
    dtype: int
    root: int


_HEADER = struct.Struct("<16sBBIi?dII")


class Request(NamedTuple):
    """What a rank says of its part in a call.

    Attributes:
        can_share: others may use its memory.
        factor: for PREMUL_SUM.
        inputs, outputs: its blocks: none, one for each, or all in one.
    """

    header: Header
    can_share: bool
    factor: float
    inputs: list[Location]
    outputs: list[Location]

    def packed(self, ranks: int) -> np.ndarray[Any, Any]:
        """As many bytes as the request of any of so many ranks for this collective."""
        counts = len(self.inputs), len(self.outputs)
        data = _HEADER.pack(*self.header, self.can_share, self.factor, *counts)
        data += b"".join(LOCATION.pack(*each) for each in (*self.inputs, *self.outputs))
        most = 2 * Collective(self.header.collective).most_blocks(ranks)
        return np.frombuffer(data.ljust(_HEADER.size + most * LOCATION.size, b"\0"), np.uint8)

    @classmethod
    def unpacked(cls, data: bytes) -> Request:
        """What `packed` has packed."""
        *header, can_share, factor, inputs, outputs = _HEADER.unpack_from(data)
        end = _HEADER.size + (inputs + outputs) * LOCATION.size
        found = [Location(*each) for each in LOCATION.iter_unpack(data[_HEADER.size : end])]
        return cls(Header(*header), can_share, factor, found[:inputs], found[inputs:])


class Step(NamedTuple):
    """One block of a call's result: whose it is, and what is combined for it, by rank."""

    rank: int
    target: Location
    sources: list[tuple[int, Location]]


def planned(requests: Sequence[Request], worker: int) -> list[Step] | None:
    """What the worker does, its own blocks first; None: the call must go by the host."""
    header, ranks = requests[0].header, len(requests)
    if any(not each.can_share or each.header != header for each in requests):
        return None
    collective = Collective(header.collective)
    blocks = [blocks_of(each, rank, ranks) for rank, each in enumerate(requests)]
    if any(inputs is None or outputs is None for inputs, outputs in blocks):
        return None
    steps = []
    for rank in sorted(range(ranks), key=lambda rank: rank != worker):
        for index, target in enumerate(blocks[rank][1] or ()):
            wanted = collective.sources(rank=rank, block=index, ranks=ranks, root=header.root)
            sources = [(peer, (blocks[peer][0] or [])[block]) for peer, block in wanted]
            if any(each.nbytes != target.nbytes for _, each in sources):
                return None
            steps.append(Step(rank, target, sources))
    return steps


def blocks_of(
    request: Request, rank: int, ranks: int
) -> tuple[list[Location] | None, list[Location] | None]:
    """A rank's input and output blocks; None where there are not as many as there should be."""
    collective, is_root = Collective(request.header.collective), rank == request.header.root
    return (
        _cut(request.inputs, collective.input_blocks(ranks, is_root=is_root)),
        _cut(request.outputs, collective.output_blocks(ranks, is_root=is_root)),
    )


def _cut(locations: list[Location], count: int) -> list[Location] | None:
    if len(locations) == 1 < count and locations[0].nbytes % count == 0:
        whole, nbytes = locations[0], locations[0].nbytes // count
        return [
            whole._replace(offset=whole.offset + index * nbytes, nbytes=nbytes)
            for index in range(count)
        ]
    return locations if len(locations) == count else None


def is_apart(request: Request, rank: int, ranks: int) -> bool:
    """Whether no input is where an output is, except the block that is both in place."""
    inputs, outputs = blocks_of(request, rank, ranks)
    collective = Collective(request.header.collective)
    alias = collective.alias(rank, is_root=rank == request.header.root)
    return not any(
        source.meets(target) and not ((i, o) == alias and source == target)
        for i, source in enumerate(inputs or ())
        for o, target in enumerate(outputs or ())
    )
