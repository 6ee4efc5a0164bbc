"""The interpreter and the encoder refuse programs that cannot work, and name the place."""

from __future__ import annotations

import pytest

from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Lane,
    Program,
    ProgramError,
    Send,
    copy,
    receive,
)
from rallypoint.schedule.proof.interpret import interpret

IN, OUT = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)


def program(*lanes: Lane, scratch_chunks: int = 0) -> Program:
    return Program(
        "broken",
        Collective.ALL_REDUCE,
        len(lanes),
        chunks=1,
        sends=2,
        lanes=lambda rank: (lanes[rank],),
        scratch_chunks=scratch_chunks,
    )


def run(broken: Program) -> list[list[int]]:
    return interpret(broken, [[rank] for rank in range(broken.ranks)], lambda a, b: a + b)


def test_cyclic_wait() -> None:
    with pytest.raises(ProgramError, match=r"rank 0, lane 0 waits forever at Reduce"):
        run(program((receive(1, OUT), Send(IN, (1,))), (receive(0, OUT), Send(IN, (0,)))))


def test_missing_receive() -> None:
    broken = program((Send(IN, (1,)), copy(IN, OUT)), (copy(IN, OUT),))
    with pytest.raises(ProgramError, match=r"rank 1 never takes 1 message"):
        run(broken)
    with pytest.raises(ProgramError, match="no rank receives Send"):
        encode(broken, 0)


def test_missing_send() -> None:
    broken = program((receive(1, OUT),), (copy(IN, OUT),))
    with pytest.raises(ProgramError, match="waits forever"):
        run(broken)
    with pytest.raises(ProgramError, match="no rank sends what"):
        encode(broken, 0)


def test_reading_what_was_never_written() -> None:
    scratch = Chunks(Buffer.SCRATCH, 0)
    with pytest.raises(ProgramError, match="hold nothing yet"):
        run(program((copy(scratch, OUT),), scratch_chunks=1))
