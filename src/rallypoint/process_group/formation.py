"""Brings the members of one group together: they meet at a store, share memory, and agree.

The first member makes the shared region and hands it to the others. Nothing of an earlier group can
be taken for this one's, because no two groups of a job have the same prefix. Who should be in which
group is decided elsewhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rallypoint._native import region_bytes
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.segment import Offer, SegmentOwner, join_segment
from rallypoint.process_group.planning import COLLECTIVE_NAMES, Algorithms, Wishes
from rallypoint.store.init_method import await_ranks
from rallypoint.store.store import Store

# docs/decisions/003-waiting.md: with a core for each rank, a peer answers
# within a short spin; without, the core must be given away at once.
SPINS_WITH_CORES = 50
YIELDS = 1000


def form_communicator(
    store: Store,
    prefix: str,
    *,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    wishes: Wishes,
) -> tuple[Communicator, Algorithms]:
    """Form the communicator of `members` (global ranks), of whom this is the one at `rank`.

    Returns it with its algorithms, by the first member's `wishes`, which count for all.

    Raises:
        StoreTimeoutError, CollectiveTimeoutError: members did not come; the message names them.
        HostError: members are not on one machine.
    """
    ranks = len(members)
    deadline = time.monotonic() + timeout.total_seconds()
    owner: SegmentOwner | None = None
    if rank == 0:
        owner = SegmentOwner(region_bytes(ranks))
        offer = owner.offer
        told = [offer.address, offer.secret.hex(), wishes.override, wishes.model_text]
        store.set(f"{prefix}/segment", json.dumps(told))
    try:
        await_ranks(
            store, prefix, rank=rank, world_size=ranks, timeout=timeout, global_ranks=members
        )
        address, secret, *agreed = json.loads(store.get(f"{prefix}/segment"))
        algorithms = Algorithms(Wishes(*agreed))
        attach = _attacher(rank, members, timeout, algorithms)
        if owner is None:
            offer = Offer(address, bytes.fromhex(secret))
            communicator = join_segment(offer, rank, deadline, attach)
        else:
            communicator = attach(owner.fd)
            owner.hand_out(ranks, deadline)
    finally:
        if owner is not None:
            owner.close()
    communicator.watch_peers()
    return communicator, algorithms


def _attacher(
    rank: int, members: Sequence[int], timeout: timedelta, algorithms: Algorithms
) -> Callable[[int], Communicator]:
    """How this rank turns the shared region's descriptor into its communicator."""
    ranks = len(members)
    has_cores = ranks <= len(os.sched_getaffinity(0))
    return lambda fd: Communicator(
        fd,
        rank=rank,
        ranks=ranks,
        plan=algorithms.planner(rank, ranks),
        timeout_s=timeout.total_seconds(),
        spins=SPINS_WITH_CORES if has_cores else 0,
        yields=YIELDS,
        names=COLLECTIVE_NAMES,
        global_ranks=members,
        synchronous_send=os.environ.get("RALLYPOINT_SYNCHRONOUS_SEND", "0") == "1",
    )
