"""What each collective promises, in blocks: which go in, which come out, and made of what.

A block is the `count` items of a call. Ranks hold these blocks (n ranks, root r):

                     input                      output
    all_reduce       own                        sum of all
    reduce           own                        sum of all, on r only
    broadcast        own, on r only             r's
    all_gather       own                        one of each rank
    gather           own                        one of each rank, on r only
    scatter          one for each, on r only    r's for this rank
    reduce_scatter   one for each rank          sum of all ranks' for this rank
    all_to_all       one for each rank          each rank's for this rank
    send             own, on rank 0 only        rank 0's, on rank 1 only
    barrier          (blocks of no items)

"In place" means that one block of the input is a block of the output, as in torch.distributed and
MPI; `alias` says which. All else of an input is never written. A rank without input or output may
be given any buffer, or none: it is not touched.
"""

from __future__ import annotations

from enum import IntEnum


class Collective(IntEnum):
    """What a program does as a whole."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    BARRIER = 3
    SEND = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9

    def input_blocks(self, ranks: int, *, is_root: bool) -> int:
        """How many blocks a rank puts in."""
        match self:
            case Collective.BROADCAST | Collective.SEND:
                return int(is_root)
            case Collective.SCATTER:
                return ranks if is_root else 0
            case Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
                return ranks
            case _:
                return 1

    def output_blocks(self, ranks: int, *, is_root: bool) -> int:
        """How many blocks a rank gets out."""
        match self:
            case Collective.REDUCE:
                return int(is_root)
            case Collective.SEND:
                return int(not is_root)
            case Collective.GATHER:
                return ranks if is_root else 0
            case Collective.ALL_GATHER | Collective.ALL_TO_ALL:
                return ranks
            case _:
                return 1

    def alias(self, rank: int, *, is_root: bool) -> tuple[int, int] | None:
        """The block of the input and the block of the output that are one in place, if any."""
        if self in (Collective.SEND, Collective.ALL_TO_ALL) or (self.has_root and not is_root):
            return None
        match self:
            case Collective.ALL_GATHER | Collective.GATHER:
                return 0, rank
            case Collective.SCATTER | Collective.REDUCE_SCATTER:
                return rank, 0
            case _:
                return 0, 0

    @property
    def reduces(self) -> bool:
        """Whether an operator combines the blocks of all ranks."""
        return self in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)

    @property
    def has_root(self) -> bool:
        """Whether one rank differs from the others."""
        return self in (
            Collective.BROADCAST,
            Collective.SEND,
            Collective.REDUCE,
            Collective.GATHER,
            Collective.SCATTER,
        )

    def sources(self, *, rank: int, block: int, ranks: int, root: int) -> list[tuple[int, int]]:
        """Whose input blocks (rank, block) make up an output block of `rank`, each once."""
        if self is Collective.BARRIER:
            return []
        place = self.source_block(rank, ranks)
        if self.reduces:
            return [(peer, place) for peer in range(ranks)]
        if self in (Collective.BROADCAST, Collective.SEND, Collective.SCATTER):
            return [(root, place)]
        return [(block, place)]

    def source_block(self, rank: int, ranks: int) -> int:
        """Which of their input blocks ranks contribute to the output of `rank`."""
        return 0 if self.input_blocks(ranks, is_root=True) == 1 else rank
