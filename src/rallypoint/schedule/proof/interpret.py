"""Runs a program on plain Python values: the reference for the native engine.

A chunk is any value, and the reduction is an argument. Queues of messages are unbounded here, so a
program that runs here may still need more slots than an engine has.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Incoming,
    Operation,
    Program,
    ProgramError,
    Send,
    incoming,
)

Memory = dict[Buffer, list[Any]]
Route = tuple[int, int, int]  # sender, its lane, receiver
Mail = defaultdict[Route, deque[list[Any]]]


def interpret(
    program: Program, inputs: Sequence[Sequence[Any]], combine: Callable[[Any, Any], Any]
) -> list[list[Any]]:
    """Run a program on all ranks.

    Args:
        program: what to run.
        inputs: the input chunks of each rank.
        combine: the operator, applied to two chunks, the left operand first.

    Returns:
        The output chunks of each rank; None where nothing was written.
    """
    memories: list[Memory] = [
        {
            Buffer.INPUT: list(values),
            Buffer.OUTPUT: [None] * (program.output_blocks(rank) * program.chunks),
            Buffer.SCRATCH: [None] * program.scratch_chunks,
        }
        for rank, values in enumerate(inputs)
    ]
    mail: Mail = defaultdict(deque)
    todo = {
        (rank, number): deque(lane)
        for rank in range(program.ranks)
        for number, lane in enumerate(program.lanes(rank))
    }
    progress = True
    while progress:
        progress = False
        for (rank, lane), operations in todo.items():
            while operations and _can_run(operations[0], rank, mail):
                _run(operations.popleft(), rank, lane, memories[rank], mail, combine)
                progress = True
    for (rank, lane), operations in todo.items():
        if operations:
            raise ProgramError(
                f"{program.name}: rank {rank}, lane {lane} waits forever at {operations[0]}"
            )
    for (sender, lane, receiver), messages in mail.items():
        if messages:
            raise ProgramError(
                f"{program.name}: rank {receiver} never takes {len(messages)} message(s) "
                f"of rank {sender}, lane {lane}"
            )
    return [memory[Buffer.OUTPUT] for memory in memories]


def _can_run(operation: Operation, rank: int, mail: Mail) -> bool:
    needed = Counter((message.peer, message.lane, rank) for message in incoming(operation))
    return all(len(mail[route]) >= count for route, count in needed.items())


def _run(
    operation: Operation,
    rank: int,
    lane: int,
    memory: Memory,
    mail: Mail,
    combine: Callable[[Any, Any], Any],
) -> None:
    def read(chunks: Chunks) -> list[Any]:
        stored = memory[chunks.buffer][chunks.index : chunks.index + chunks.count]
        values = [value for value in stored if value is not None]
        if len(values) != chunks.count:
            raise ProgramError(f"rank {rank}: {operation} reads chunks that hold nothing yet")
        return values

    if isinstance(operation, Send):
        for receiver in operation.to:
            mail[rank, lane, receiver].append(read(operation.source))
        return
    operands = [
        mail[operand.peer, operand.lane, rank].popleft()
        if isinstance(operand, Incoming)
        else read(operand)
        for operand in operation.operands
    ]
    for target in operation.targets:
        for offset in range(target.count):
            value = fold(combine, (operand[offset] for operand in operands))
            memory[target.buffer][target.index + offset] = value
