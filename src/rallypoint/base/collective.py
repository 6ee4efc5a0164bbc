"""Each collective in one row: its input and output blocks, and its name for people.

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
    scan             own                        sum of ranks 0 to this one's, in that order

"In place" means that one block of the input is a block of the output, as in torch.distributed and
MPI; `alias` says which. The rest of an input is never written. A rank without input or output may
pass any buffer, or none: the buffer is not touched.
"""

from __future__ import annotations

from enum import IntEnum

# The number of blocks of the root, and of the others.
_FOR_EACH = -1  # one for each rank
_ONE, _EACH = (1, 1), (_FOR_EACH, _FOR_EACH)
_ROOTS_ONE, _ROOTS_EACH, _OTHERS_ONE = (1, 0), (_FOR_EACH, 0), (0, 1)


class Collective(IntEnum):
    """What a program does as a whole.

    Attributes:
        root_argument: what callers call the rank that differs from the others; empty: none does.
        reduces: whether an operator combines the blocks of several ranks.
        is_prefix: whether those are the blocks of the ranks up to this one, in their order.
    """

    #                number, input, output, root_argument, reduces, is_prefix
    ALL_REDUCE = 0, _ONE, _ONE, "", True
    BROADCAST = 1, _ROOTS_ONE, _ONE, "src"
    ALL_GATHER = 2, _ONE, _EACH
    BARRIER = 3, _ONE, _ONE
    SEND = 4, _ROOTS_ONE, _OTHERS_ONE, "src"
    REDUCE = 5, _ONE, _ROOTS_ONE, "dst", True
    GATHER = 6, _ONE, _ROOTS_EACH, "dst"
    SCATTER = 7, _ROOTS_EACH, _ONE, "src"
    REDUCE_SCATTER = 8, _EACH, _ONE, "", True
    ALL_TO_ALL = 9, _EACH, _EACH
    SCAN = 10, _ONE, _ONE, "", True, True

    root_argument: str
    reduces: bool
    is_prefix: bool
    _inputs: tuple[int, int]
    _outputs: tuple[int, int]

    def __new__(
        cls,
        number: int,
        inputs: tuple[int, int] = _ONE,
        outputs: tuple[int, int] = _ONE,
        root_argument: str = "",
        reduces: bool = False,
        is_prefix: bool = False,
    ) -> Collective:
        """One row of the table."""
        self = int.__new__(cls, number)
        self._value_ = number
        self._inputs, self._outputs = inputs, outputs
        self.root_argument = root_argument
        self.reduces = reduces
        self.is_prefix = is_prefix
        return self

    @property
    def operation(self) -> str:
        """Its name in programs, messages and records: ``"all_reduce"``."""
        return self.name.lower()

    def input_blocks(self, ranks: int, *, is_root: bool) -> int:
        """How many blocks a rank puts in."""
        count = self._inputs[not is_root]
        return ranks if count == _FOR_EACH else count

    def output_blocks(self, ranks: int, *, is_root: bool) -> int:
        """How many blocks a rank gets out."""
        count = self._outputs[not is_root]
        return ranks if count == _FOR_EACH else count

    def most_blocks(self, ranks: int) -> int:
        """How many blocks the largest buffer of any rank holds."""
        return max(self.input_blocks(ranks, is_root=True), self.output_blocks(ranks, is_root=True))

    def alias(self, rank: int, *, is_root: bool) -> tuple[int, int] | None:
        """The block of the input and the block of the output that are one in place, if any."""
        if self.has_root and not is_root:
            return None
        given, taken = self._inputs[0], self._outputs[0]
        if taken == 0 or given == taken == _FOR_EACH:
            return None
        return rank if given == _FOR_EACH else 0, rank if taken == _FOR_EACH else 0

    @property
    def has_root(self) -> bool:
        """Whether one rank differs from the others."""
        return self.root_argument != ""

    @property
    def has_one_block(self) -> bool:
        """Whether no buffer holds more than one block, as large on every rank."""
        return _FOR_EACH not in (*self._inputs, *self._outputs)

    @property
    def waits_for_all(self) -> bool:
        """Whether no rank can have all it needs before every rank has begun."""
        return not self.has_root and not self.is_prefix

    def contributors(self, rank: int, ranks: int) -> range:
        """Whose blocks are combined for `rank`, where an operator combines blocks."""
        return range(rank + 1 if self.is_prefix else ranks)

    def sources(self, *, rank: int, block: int, ranks: int, root: int) -> list[tuple[int, int]]:
        """Whose input blocks (rank, block) make up an output block of `rank`, each once."""
        if self is Collective.BARRIER:
            return []
        source = self.source_block(rank, ranks)
        if self.reduces:
            return [(peer, source) for peer in self.contributors(rank, ranks)]
        return [(root if self._inputs[1] == 0 else block, source)]

    def source_block(self, rank: int, ranks: int) -> int:
        """Which of their input blocks ranks contribute to the output of `rank`."""
        return 0 if self.input_blocks(ranks, is_root=True) == 1 else rank


# Other forms of these collectives, by the names that callers know and records keep.
_FORMS = {
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "all_gather_single": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "reduce_scatter_single": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
}
_BY_OPERATION = _FORMS | {
    each.operation: each for each in Collective if each is not Collective.SEND
}
# Operations that no rank leaves before every rank has entered.
JOINT_OPERATIONS = frozenset(name for name, each in _BY_OPERATION.items() if each.waits_for_all)


def collective_of(operation: str) -> Collective | None:
    """What a function does as a whole; None: it is no collective, or none of ours."""
    return _BY_OPERATION.get(operation)


def reduces(operation: str) -> bool:
    """Whether a function combines the blocks of several ranks."""
    collective = collective_of(operation)
    return collective is not None and collective.reduces


def root_argument(operation: str) -> str:
    """What a function calls its root: ``"src"``, ``"dst"``, or empty if it has none."""
    collective = collective_of(operation)
    return "" if collective is None else collective.root_argument


def has_one_size(operation: str) -> bool:
    """Whether a function works on as many items on every rank."""
    collective = collective_of(operation)
    return operation == "all_gather_into_tensor" or (
        collective is not None and collective.has_one_block
    )
