"""RALLYPOINT_DEBUG=1: rank 0 prints a table of what each rank of the default group was given.

Ranks that have the variable write a line to the store, so a rank without it delays nobody.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from rallypoint.base.errors import StoreError
from rallypoint.base.printable import printable
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.store.store import Store

VARIABLE = "RALLYPOINT_DEBUG"
_COLUMNS = ("rank", "local rank", "host", "address", "interface", "devices", "backend")
_DEVICES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_WAIT = timedelta(seconds=5)


def tell_roster(
    store: Store, prefix: str, *, rank: int, size: int, network: NetworkChoice | None, backend: str
) -> None:
    """Print the table to rank 0's standard error, if the variable is set.

    Args:
        network: where ranks of other hosts reach this one; None if there are none.
    """
    if os.environ.get(VARIABLE) != "1":
        return
    row = _row(os.environ, rank=rank, network=network, backend=backend)
    keys = [f"{prefix}/roster/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps(row))
    if rank == 0:
        told = _collect(store, keys)
        table = _table([told.get(each, [str(each)]) for each in range(size)])
        print(printable(table), file=sys.stderr)


def _row(
    environ: Mapping[str, str], *, rank: int, network: NetworkChoice | None, backend: str
) -> list[str]:
    devices = next((environ[name] for name in _DEVICES if environ.get(name)), "")
    address, interface = (network.address, network.name) if network else ("", "shared memory")
    local_rank = environ.get("LOCAL_RANK", "")
    host = f"{os.uname().nodename} (pid {os.getpid()})"
    return [str(rank), local_rank, host, address, interface, devices, backend]


def _collect(store: Store, keys: Sequence[str]) -> dict[int, list[str]]:
    """The lines by rank, of ranks that also have the variable."""
    with suppress(StoreError):
        store.wait(keys, _WAIT)
    there = [each for each, key in enumerate(keys) if store.check([key])]
    found = {each: json.loads(store.get(keys[each])) for each in there}
    store.delete_keys([keys[each] for each in there])
    return found


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned; a dash for what is not known."""
    full = [[cell or "-" for cell in [*row, *[""] * (len(_COLUMNS) - len(row))]] for row in rows]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *full, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_COLUMNS, *full)
    ]
    return "\n".join(f"rallypoint: {line}" for line in lines)
