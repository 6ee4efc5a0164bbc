"""Turns one rank's part of a program into the flat 32-bit words that the native engine runs.

The format, all int32 in host order (native/engine/program.h reads it):

    header      magic, ranks, rank, identity, chunks, input blocks, output blocks,
                scratch chunks, sends, span, whether sends must be copied, lanes,
                then for each lane the number of its operations
    send        1, buffer, index, count, receivers, then (rank, lane, operation) of each
    reduce      2, operands, targets, count, then each operand: 0, buffer, index
                or 1, peer | lane << 24, ordinal; then each target: buffer, index

A receiver's `operation` is the index of the operation that receives the message; an operand's
`ordinal` counts the sender's sends in that lane. So both ends compute the same numbers and progress
without negotiation.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from zlib import crc32

from rallypoint.schedule.program import Chunks, Lane, Program, ProgramError, Reduce, Send, incoming

MAGIC = 0x52504C31  # "RPL1"
SEND, REDUCE = 1, 2
LOCAL, REMOTE = 0, 1


def encode(program: Program, rank: int) -> bytes:
    """Encode the part of `rank`."""
    return _Encoder(program, rank).encode()


class _Encoder:
    """Pairs this rank's sends and receives with those of its peers, and writes them down."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self._lanes = program.lanes(rank)
        self._peer_lanes = {peer: program.lanes(peer) for peer in _peers(self._lanes)}
        self._takings = {peer: _takings(lanes) for peer, lanes in self._peer_lanes.items()}
        self._sendings = {peer: _sendings(lanes, rank) for peer, lanes in self._peer_lanes.items()}
        self._sent: Counter[tuple[int, int]] = Counter()  # by receiver and own lane
        self._taken: Counter[tuple[int, int]] = Counter()  # by sender and its lane

    def encode(self) -> bytes:
        words = array("i", _header(self._program, self._rank, self._lanes))
        for number, lane in enumerate(self._lanes):
            for operation in lane:
                if isinstance(operation, Send):
                    words.extend(self._send(operation, number))
                else:
                    words.extend(self._reduce(operation))
        return words.tobytes()

    def _send(self, send: Send, lane: int) -> Iterator[int]:
        yield from (SEND, send.source.buffer, send.source.index, send.source.count, len(send.to))
        for receiver in send.to:
            takings = self._takings[receiver].get((self._rank, lane), [])
            ordinal = self._sent[receiver, lane]
            self._sent[receiver, lane] += 1
            if ordinal >= len(takings):
                raise ProgramError(
                    f"{self._program.name}: no rank receives {send} of rank {self._rank}"
                )
            yield from (receiver, *takings[ordinal])

    def _reduce(self, reduce: Reduce) -> Iterator[int]:
        yield from (REDUCE, len(reduce.operands), len(reduce.targets))
        yield max((target.count for target in reduce.targets), default=0)
        for operand in reduce.operands:
            if isinstance(operand, Chunks):
                yield from (LOCAL, operand.buffer, operand.index)
                continue
            sendings = self._sendings[operand.peer].get(operand.lane, [])
            ordinal = self._taken[operand.peer, operand.lane]
            self._taken[operand.peer, operand.lane] += 1
            if ordinal >= len(sendings):
                raise ProgramError(
                    f"{self._program.name}: no rank sends what {reduce} of rank {self._rank} takes"
                )
            yield from (REMOTE, operand.peer | operand.lane << 24, sendings[ordinal])
        for target in reduce.targets:
            yield from (target.buffer, target.index)


def _header(program: Program, rank: int, lanes: tuple[Lane, ...]) -> list[int]:
    blocks_in, blocks_out = program.input_blocks(rank), program.output_blocks(rank)
    return [
        *(MAGIC, program.ranks, rank, crc32(program.name.encode()) >> 1),
        *(program.chunks, blocks_in, blocks_out, program.scratch_chunks),
        *(program.sends, program.span, int(program.copies), len(lanes)),
        *(len(lane) for lane in lanes),
    ]


def _peers(lanes: tuple[Lane, ...]) -> set[int]:
    peers: set[int] = set()
    for operation in chain(*lanes):
        if isinstance(operation, Send):
            peers.update(operation.to)
        else:
            peers.update(message.peer for message in incoming(operation))
    return peers


def _takings(lanes: tuple[Lane, ...]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(sender, its lane) -> the (lane, operation) at which each of its messages is received."""
    takings: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, lane in enumerate(lanes):
        for step, operation in enumerate(lane):
            for message in incoming(operation):
                takings.setdefault((message.peer, message.lane), []).append((number, step))
    return takings


def _sendings(lanes: tuple[Lane, ...], receiver: int) -> dict[int, list[int]]:
    """Lane -> which of its sends go to the receiver."""
    sends = [[each for each in lane if isinstance(each, Send)] for lane in lanes]
    return {
        number: [ordinal for ordinal, send in enumerate(lane) if receiver in send.to]
        for number, lane in enumerate(sends)
    }
