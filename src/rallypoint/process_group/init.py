"""Forms and dissolves the default process group.

It asks the environment who takes part, meets the others at the store, shares memory with them, and
agrees on what must be the same everywhere: rank 0's wishes count. Each group of a process has its
own number, so that nothing of an earlier one can be taken for its own.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta

from rallypoint._native import region_bytes
from rallypoint.base.errors import (
    AlreadyInitializedError,
    InvalidArgumentError,
    StoreTimeoutError,
)
from rallypoint.base.worker_env import WorkerEnv
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.segment import Offer, SegmentOwner, join_segment
from rallypoint.process_group.group import ProcessGroup, is_initialized, resolve, set_world
from rallypoint.process_group.planning import COLLECTIVE_NAMES, planner
from rallypoint.schedule.choose import check_override
from rallypoint.store.client import TCPStore

DEFAULT_TIMEOUT = timedelta(minutes=30)
BACKENDS = ("rallypoint", "shm")

# Measured (facts in docs/decisions/003-waiting.md): with a core for each rank, a peer answers
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
    group_name: str = "",
) -> None:
    """Form the default process group; every rank of the job must call it.

    Args:
        backend: "rallypoint" (the default) or "shm": shared memory, one machine.
        init_method: "env://" (the default): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
            `rallypoint run` and torchrun set them.
        timeout: how long an operation may wait for a peer; 30 minutes unless given.
        world_size, rank: instead of the environment's.
        group_name: kept apart from groups of other names at the same store.

    Raises:
        AlreadyInitializedError: there is a default group already.
        InvalidArgumentError: an impossible argument or environment variable.
        StoreConnectionError: nobody serves the store at MASTER_ADDR:MASTER_PORT.
        CollectiveTimeoutError: some ranks did not come.
    """
    if is_initialized():
        raise AlreadyInitializedError(
            "the default process group is already initialized; call destroy_process_group first"
        )
    if (backend or "rallypoint").lower() not in BACKENDS:
        raise InvalidArgumentError(
            f"backend={backend!r} is not available; use one of {', '.join(BACKENDS)}"
        )
    if (init_method or "env://") != "env://":
        raise InvalidArgumentError(f"init_method={init_method!r} is not available; use 'env://'")
    wait = DEFAULT_TIMEOUT if timeout is None else timeout
    if wait <= timedelta(0):
        raise InvalidArgumentError(f"timeout={wait} must be positive")
    environ = dict(os.environ)
    if rank >= 0:
        environ["RANK"] = str(rank)
    if world_size >= 0:
        environ["WORLD_SIZE"] = str(world_size)
    set_world(_form(WorkerEnv.from_environ(environ), environ, wait, group_name))


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Leave the group and give its memory back; peers that still wait for this rank are told.

    Raises:
        NotInitializedError: there is no default group.
    """
    chosen = resolve(group)
    chosen.on_destroy()
    set_world(None)


def _form(
    me: WorkerEnv, environ: Mapping[str, str], timeout: timedelta, group_name: str
) -> ProcessGroup:
    global _groups_formed  # noqa: PLW0603 - counts this process's groups; see the module's rule
    deadline = time.monotonic() + timeout.total_seconds()
    hosts_store = me.rank == 0 and not me.use_agent_store
    store = TCPStore(
        me.master_addr,
        me.master_port,
        is_master=hosts_store,
        timeout=timeout,
        wait_for_workers=False,
    )
    key = f"rallypoint/{me.restart_count}/{_groups_formed}/{group_name}/segment"
    _groups_formed += 1

    override = environ.get("RALLYPOINT_ALGORITHM", "")
    owner: SegmentOwner | None = None
    if me.rank == 0:
        check_override(override)
        owner = SegmentOwner(region_bytes(me.world_size))
        offer = owner.offer
        store.set(key, json.dumps([offer.address, offer.secret.hex(), override]))
    else:
        try:
            address, secret, override = json.loads(store.get(key))
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"rank {me.rank}: rank 0 did not come to {me.master_addr}:{me.master_port} within "
                f"{timeout.total_seconds():g} s; see whether it runs",
                endpoint=error.endpoint,
                operation=error.operation,
                key=error.key,
            ) from None
        offer = Offer(str(address), bytes.fromhex(secret))

    def attach(fd: int) -> Communicator:
        has_cores = (me.local_world_size or me.world_size) <= len(os.sched_getaffinity(0))
        return Communicator(
            fd,
            rank=me.rank,
            ranks=me.world_size,
            plan=planner(rank=me.rank, ranks=me.world_size, override=override),
            timeout_s=timeout.total_seconds(),
            spins=SPINS_WITH_CORES if has_cores else 0,
            yields=YIELDS,
            names=COLLECTIVE_NAMES,
        )

    if owner is None:
        communicator = join_segment(offer, me.rank, deadline, attach)
    else:
        try:
            communicator = attach(owner.fd)
            owner.hand_out(me.world_size, deadline)
        finally:
            owner.close()
    communicator.watch_peers()

    def destroy() -> None:
        atexit.unregister(communicator.leave)
        communicator.leave()
        store.close()

    atexit.register(communicator.leave)  # a rank that just ends must not look like one that died
    return ProcessGroup(communicator, destroy)
