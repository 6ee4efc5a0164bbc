"""Forms and dissolves the default process group.

It meets the others at a store, shares memory with them, and agrees on what must be the same
everywhere: rank 0's wishes count. Each group of a process has its own number, so that nothing of an
earlier one can be taken for its own. Finding the store and waiting there is `store.init_method`.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

from rallypoint._native import region_bytes
from rallypoint.base.errors import AlreadyInitializedError, InvalidArgumentError
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.segment import Offer, SegmentOwner, join_segment
from rallypoint.process_group.group import ProcessGroup, is_initialized, resolve, set_world
from rallypoint.process_group.planning import COLLECTIVE_NAMES, planner
from rallypoint.schedule.choose import check_override
from rallypoint.schedule.custom import load
from rallypoint.schedule.links import parse_model, read_model_text
from rallypoint.store.init_method import OpenStore, await_ranks, open_store
from rallypoint.store.store import Store

DEFAULT_TIMEOUT = timedelta(minutes=30)
BACKENDS = ("rallypoint", "shm")

# docs/decisions/003-waiting.md: with a core for each rank, a peer answers
# within a short spin; without, the core must be given away at once.
SPINS_WITH_CORES = 50
YIELDS = 1000

_groups_formed = 0


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
) -> None:
    """Form the default process group; every rank of the job must call it.

    While it waits, the lowest rank that is there says every 10 s which ranks are missing.

    Args:
        backend: "rallypoint" (the default) or "shm": shared memory, one machine.
        init_method: ``env://`` (the default): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
            `rallypoint run` and torchrun set them; or ``tcp://host:port``; or ``file:///path``.
        timeout: how long an operation may wait for a peer; 30 minutes unless given.
        world_size, rank: instead of the environment's; needed for ``tcp://``, ``file://``, `store`.
        store: an open store that all ranks share, instead of an `init_method`.
        group_name: kept apart from groups of other names at the same store.

    Raises:
        AlreadyInitializedError: there is a default group already.
        InvalidArgumentError: an impossible argument or environment variable.
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError, CollectiveTimeoutError: some ranks did not come; the message names them.
        HostError: ranks are not on one machine.
    """
    if is_initialized():
        raise AlreadyInitializedError(
            "the default process group is already initialized; call destroy_process_group first"
        )
    if (backend or "rallypoint").lower() not in BACKENDS:
        raise InvalidArgumentError(
            f"backend={backend!r} is not available; use one of {', '.join(BACKENDS)}"
        )
    wait = DEFAULT_TIMEOUT if timeout is None else timeout
    if wait <= timedelta(0):
        raise InvalidArgumentError(f"timeout={wait} must be positive")
    if store is not None:
        _check_own_store(init_method, rank, world_size)
        place = OpenStore(store=store, rank=rank, world_size=world_size)
    else:
        place = open_store(
            init_method, rank=rank, world_size=world_size, timeout=wait, environ=os.environ
        )
    try:
        group = _form(place, wait, group_name)
    except BaseException:
        if store is None:
            place.store.close()
        raise
    set_world(group if store is not None else _closing(group, place.store))


def _check_own_store(init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise InvalidArgumentError("give init_method or store, not both")
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"store= needs rank and world_size, with rank below world_size; they are {rank} and "
            f"{world_size}"
        )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Leave the group and give its memory back; peers that still wait for this rank are told.

    Raises:
        NotInitializedError: there is no default group.
    """
    chosen = resolve(group)
    chosen.on_destroy()
    set_world(None)


def _form(place: OpenStore, timeout: timedelta, group_name: str) -> ProcessGroup:
    global _groups_formed  # noqa: PLW0603 - counts this process's groups; see the module's rule
    rank, ranks = place.rank, place.world_size
    deadline = time.monotonic() + timeout.total_seconds()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"rallypoint/{attempt}/{_groups_formed}/{group_name}"
    _groups_formed += 1

    owner: SegmentOwner | None = None
    if rank == 0:
        override = os.environ.get("RALLYPOINT_ALGORITHM", "")
        check_override(override)
        links = os.environ.get("RALLYPOINT_LINKS", "")
        model_text = read_model_text(links) if links else ""
        owner = SegmentOwner(region_bytes(ranks))
        offer = owner.offer
        place.store.set(
            f"{prefix}/segment",
            json.dumps([offer.address, offer.secret.hex(), override, model_text]),
        )
    try:
        await_ranks(place.store, prefix, rank=rank, world_size=ranks, timeout=timeout)
        address, secret, override, model_text = json.loads(place.store.get(f"{prefix}/segment"))
        attach = _attacher(rank, ranks, timeout, override, model_text)
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

    def leave() -> None:
        atexit.unregister(communicator.leave)
        communicator.leave()

    atexit.register(communicator.leave)  # a rank that just ends must not look like one that died
    return ProcessGroup(communicator, leave)


def _attacher(
    rank: int, ranks: int, timeout: timedelta, override: str, model_text: str
) -> Callable[[int], Communicator]:
    """How this rank turns the shared region's descriptor into its communicator."""
    plan = planner(
        rank=rank,
        ranks=ranks,
        override=override,
        custom=load(override) if ".py" in override else None,
        model=parse_model(model_text) if model_text else None,
    )
    has_cores = ranks <= len(os.sched_getaffinity(0))
    return lambda fd: Communicator(
        fd,
        rank=rank,
        ranks=ranks,
        plan=plan,
        timeout_s=timeout.total_seconds(),
        spins=SPINS_WITH_CORES if has_cores else 0,
        yields=YIELDS,
        names=COLLECTIVE_NAMES,
        synchronous_send=os.environ.get("RALLYPOINT_SYNCHRONOUS_SEND", "0") == "1",
    )


def _closing(group: ProcessGroup, store: Store) -> ProcessGroup:
    """A group whose end closes the store that was opened for it."""

    def destroy() -> None:
        group.on_destroy()
        store.close()

    return ProcessGroup(group.communicator, destroy)
