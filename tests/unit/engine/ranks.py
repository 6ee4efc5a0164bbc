"""Ranks as threads of one process, each with its own end of a communicator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rallypoint._native import region_bytes
from rallypoint.engine.communicator import Communicator
from rallypoint.process_group.planning import Algorithms, Planner, Wishes
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective, Program

NAMES = tuple(collective.name.lower() for collective in Collective)


def planner(
    rank: int, ranks: int, override: str | Mapping[Collective, str], custom: Program | None
) -> Planner:
    def plan(number: int, root: int, nbytes: int, uneven: bool) -> tuple[bytes, bool]:
        collective = Collective(number)
        if custom is not None and collective is custom.collective:
            return encode(custom, rank), False
        name = override if isinstance(override, str) else override.get(collective, "")
        plan = Algorithms(Wishes(name)).planner(rank, ranks)
        return plan(number, root, nbytes, uneven)

    return plan


def move(communicator: Communicator, source: int, target: int, tag: int, array: Any) -> int:
    """Send or receive, whichever this rank is to do: 0, or a code that is not."""
    if communicator.rank == source:
        return communicator.send(target, tag, array)
    return communicator.receive(source, tag, array) - source


def run_ranks(
    ranks: int,
    main: Callable[[Communicator], Any],
    *,
    override: str | Mapping[Collective, str] = "",
    custom: Program | None = None,
    timeout_s: float = 30,
    synchronous_send: bool = False,
) -> Sequence[Any]:
    """Run `main` on each rank; return the results, or raise the error of the lowest rank."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, region_bytes(ranks))
    communicators = [
        Communicator(
            fd,
            rank=rank,
            ranks=ranks,
            plan=planner(rank, ranks, override, custom),
            timeout_s=timeout_s,
            spins=0,
            yields=100,
            names=NAMES,
            is_alone=lambda: True,
            synchronous_send=synchronous_send,
        )
        for rank in range(ranks)
    ]
    os.close(fd)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = main(communicators[rank])
        except BaseException as error:
            errors[rank] = error
            communicators[rank].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results
