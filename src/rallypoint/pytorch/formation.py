"""Forms the engine's group behind a torch process group, at the store that torch passes.

A store may outlive a group: torchrun keeps one across restarts, and init_process_group after
destroy_process_group uses it again. So the members first agree on keys that no earlier group has
used (store/fresh_round.py).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rallypoint.engine.communicator import Communicator
from rallypoint.engine.interruption import beside_handlers, may_run_handlers
from rallypoint.process_group.formation.connecting import form_communicator
from rallypoint.process_group.formation.leaving import leave_at_exit
from rallypoint.process_group.groups.group import DEFAULT_GROUP, ProcessGroup, World
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms
from rallypoint.pytorch import at_exit as _at_exit  # noqa: F401 - what it does, it does by itself
from rallypoint.pytorch.store import TorchStore
from rallypoint.store.fresh_round import fresh_round


def form(
    store: Any,  # noqa: ANN401 - of torch
    *,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    global_ranks: list[int],
) -> ProcessGroup:
    """Form the group in which this process is `rank`; all members call it.

    Args:
        global_ranks: the members' ranks in the default group; empty for that group itself.

    Raises as process_group.formation.communicator.form_communicator.
    """
    shared = TorchStore(store)
    members = global_ranks or list(range(size))
    is_beside = not global_ranks and dist.is_initialized()  # made by PyTorch's own helper
    title = f"group {name}" if global_ranks or is_beside else DEFAULT_GROUP
    is_cloned = may_run_handlers()

    def meet() -> tuple[str, Communicator, Algorithms]:
        # Each of its waits keeps a client of torch's to itself; handlers have the other.
        own = shared.clone() if is_cloned else shared
        prefix = fresh_round(own, "rallypoint", rank=rank, names=members, timeout=timeout)
        communicator, algorithms = form_communicator(
            own,
            prefix,
            rank=rank,
            members=members,
            timeout=timeout,
            options=AlgorithmOptions(os.environ.get("RALLYPOINT_ALGORITHM", "")),
            name=title,
            is_across_jobs=is_beside,
        )
        return prefix, communicator, algorithms

    prefix, communicator, algorithms = beside_handlers(meet)
    world = World(
        shared, prefix, algorithms.options, _nothing, title=title, is_across_jobs=is_beside
    )
    group = ProcessGroup(
        communicator,
        algorithms,
        rank=rank,
        world=world,
        prefix=prefix,
        ranks=members,
        group_name=name,
        group_desc="",
        backend="rallypoint",
        timeout=timeout,
    )
    if not global_ranks:
        world.group = group
    leave_at_exit(group)
    return group


def without_members(
    store: Any,  # noqa: ANN401 - of torch
    *,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
) -> ProcessGroup:
    """A group that serves no call until it has been reconfigured, of this rank and size so far."""
    options = AlgorithmOptions(os.environ.get("RALLYPOINT_ALGORITHM", ""))
    world = World(TorchStore(store), "", options, _nothing, is_across_jobs=True)
    group = ProcessGroup(
        None,
        Algorithms(options),
        rank=rank,
        world=world,
        prefix="",
        ranks=range(size),
        group_name=name,
        group_desc="",
        backend="rallypoint",
        timeout=timeout,
    )
    world.group = group
    group.forms_again = True
    group.withdraw(
        "the process group was made with enable_reconfigure=True and has no members yet; call its "
        "reconfigure"
    )
    leave_at_exit(group)
    return group


def _nothing() -> None:
    """The store is torch's to close."""
