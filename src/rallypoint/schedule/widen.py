"""Runs a program several times side by side, each for a slice of the data, in lanes of its own.

    block of 2 chunks         0   1                  lane 0, 1
    the same, 2 ways wide     0   1 | 2   3          lanes 0, 2 for chunks 0, 1; lanes 1, 3 for 2, 3

This pays where a single lane cannot saturate a link or a core.
"""

from __future__ import annotations

from dataclasses import replace

from rallypoint.schedule.program import (
    Chunks,
    Incoming,
    Lane,
    Operation,
    Program,
    ProgramError,
    Reduce,
    Send,
)


def widen(program: Program, ways: int) -> Program:
    """The same algorithm `ways` times side by side."""
    if ways == 1:
        return program
    chunks = program.chunks
    torn = ProgramError(f"{program.name} moves several blocks at once: it cannot be widened")
    if program.span > chunks:
        raise torn

    def slice_of(place: Chunks, way: int) -> Chunks:
        block, chunk = divmod(place.index, chunks)
        if chunk + place.count > chunks:
            raise torn
        return replace(place, index=(block * ways + way) * chunks + chunk)

    def operand(value: Chunks | Incoming, way: int) -> Chunks | Incoming:
        if isinstance(value, Incoming):
            return Incoming(value.peer, value.lane * ways + way)
        return slice_of(value, way)

    def operation(value: Operation, way: int) -> Operation:
        if isinstance(value, Send):
            return Send(slice_of(value.source, way), value.to)
        return Reduce(
            tuple(operand(each, way) for each in value.operands),
            tuple(slice_of(each, way) for each in value.targets),
        )

    def lanes(rank: int) -> tuple[Lane, ...]:
        return tuple(
            tuple(operation(value, way) for value in lane)
            for lane in program.lanes(rank)
            for way in range(ways)
        )

    return replace(
        program,
        name=f"{program.name} x{ways}",
        chunks=chunks * ways,
        scratch_chunks=-(-program.scratch_chunks // chunks) * chunks * ways,
        lanes=lanes,
        restartable=False,
    )
