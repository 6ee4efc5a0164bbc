"""An all_reduce of your own: written once, and then proved, interpreted, simulated and run.

    rallypoint run --nproc-per-node 4 examples/algorithms/star.py

`star` is the whole algorithm, and `main` shows what can be done with it. Other programs can use it,
and the command line draws it:

    RALLYPOINT_ALGORITHM=examples/algorithms/star.py:star \\
        rallypoint run --nproc-per-node 4 examples/train_digits.py
    rallypoint simulate all_reduce --ranks 4 --algorithms examples/algorithms/star.py:star --explain

docs/guides/custom-algorithms.md explains the words.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

import rallypoint as dist
from rallypoint.schedule.catalogue import Team, build
from rallypoint.schedule.cost.links import read_model
from rallypoint.schedule.cost.simulation import Simulation
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Operation,
    Program,
    ProgramError,
    Reduce,
    Send,
    receive,
)
from rallypoint.schedule.proof.interpret import interpret
from rallypoint.schedule.proof.verify import verify

BYTES = 1 << 20


def star(team: Team) -> Program:
    """All ranks send to rank 0, which reduces and sends the result back."""
    own, result = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)
    others = tuple(range(1, team.ranks))

    def lanes(rank: int) -> tuple[tuple[Operation, ...], ...]:
        if rank != 0:
            return ((Send(own, (0,)), receive(0, result)),)
        total = Reduce((own, *(Incoming(peer) for peer in others)), (result,))
        return ((total, Send(result, others)),) if others else ((total,),)

    return Program("star", Collective.ALL_REDUCE, team.ranks, chunks=1, sends=1, lanes=lanes)


def prove() -> None:
    """Right for 1 to 16 ranks; and a version that loses a message is not."""
    for ranks in range(1, 17):
        verify(star(Team(ranks)))
    print("proved for 1 to 16 ranks", flush=True)
    right = star(Team(3))
    wrong = replace(right, lanes=lambda rank: (right.lanes(rank)[0][:1],))
    try:
        verify(wrong)
    except ProgramError as error:
        print(f"refused without its second step: {error}", flush=True)


def show_meaning() -> None:
    """What it computes and in which order, with words in place of numbers."""
    words = [["a"], ["b"], ["c"], ["d"]]
    outputs = interpret(star(Team(4)), words, lambda left, right: f"({left} + {right})")
    print(f"interpreted: rank 3 gets {outputs[3][0]}", flush=True)


def predict() -> None:
    """The time on 4 hosts that a network of 100 Gbit/s connects, beside a built-in algorithm."""
    links = read_model("ethernet_100g").links("", "star").on(1)
    for program in (star(Team(4)), build(Collective.ALL_REDUCE, "ring", ranks=4)):
        time_us = Simulation(program, links).run(BYTES).time_us
        print(f"simulated: {program.name} takes {time_us:.0f} us for {BYTES} bytes", flush=True)


def execute() -> None:
    """Run it in this job, and compare with the algorithm that is chosen without a word."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = np.random.default_rng(rank).integers(0, 1000, BYTES // 8)
    expected = numbers.copy()
    dist.all_reduce(expected)
    for _ in range(3):  # the first call also builds and proves the program
        found = numbers.copy()
        started = time.perf_counter()
        dist.all_reduce(found, algorithm=f"{__file__}:star")
        taken_us = (time.perf_counter() - started) * 1e6
    if not np.array_equal(found, expected):
        raise SystemExit(f"rank {rank}: star gives another result than the built-in algorithm")
    if rank == 0:
        print(f"run by {ranks} ranks: the right result, in {taken_us:.0f} us here", flush=True)


def main() -> None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        prove()
        show_meaning()
        predict()
    execute()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
