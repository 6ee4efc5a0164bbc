"""The debug level, as torch.distributed has it, and what it prints: RALLYPOINT_DEBUG=1."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, StoreError
from rallypoint.base.wording import table
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.store.store import Store

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(Enum):
    """How much torch.distributed would check and report.

    It changes nothing here: ranks' agreement on their calls is always checked, and errors always
    name what a job waits for.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None  # as the environment says


def get_debug_level() -> DebugLevel:
    """The level that was set, or else TORCH_DISTRIBUTED_DEBUG's value at the first query.

    Raises:
        InvalidArgumentError: the variable does not name a level.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level for this process.

    Raises:
        InvalidTypeError: the argument is not a DebugLevel.
    """
    global _level  # noqa: PLW0603 - torch's is process-wide, too
    if not isinstance(level, DebugLevel):
        raise InvalidTypeError(f"set_debug_level takes a DebugLevel, not {level!r}")
    _level = level


def set_debug_level_from_env() -> None:
    """Set the level to that of TORCH_DISTRIBUTED_DEBUG: OFF, INFO or DETAIL; OFF if it is not set.

    Raises:
        InvalidArgumentError: the variable has another value.
    """
    text = os.environ.get(_VARIABLE, "") or "OFF"
    if text.upper() not in DebugLevel.__members__:
        names = ", ".join(DebugLevel.__members__)
        raise InvalidArgumentError(f"{_VARIABLE}={text} is not one of {names}")
    set_debug_level(DebugLevel[text.upper()])


_COLUMNS = ("rank", "local rank", "host", "address", "interface", "devices", "backend")
_DEVICES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_WAIT = timedelta(seconds=5)


def print_debug_table(
    store: Store, prefix: str, *, rank: int, size: int, network: NetworkChoice | None, backend: str
) -> None:
    """For RALLYPOINT_DEBUG=1: rank 0 prints a table of what each rank was given to standard error.

    Each rank that has the variable writes its line to the store, so a rank without it delays no
    other.
    """
    environ = os.environ
    devices = next((environ[name] for name in _DEVICES if environ.get(name)), "")
    address, interface = (network.address, network.name) if network else ("", "shared memory")
    host = f"{os.uname().nodename} (pid {os.getpid()})"
    row = [str(rank), environ.get("LOCAL_RANK", ""), host, address, interface, devices, backend]
    keys = [f"{prefix}/roster/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps(row))
    if rank == 0:
        rows = _collect(store, keys)
        for line in _table([rows.get(each, [str(each)]) for each in range(size)]):
            print(f"rallypoint: {line}", file=sys.stderr)


def _collect(store: Store, keys: Sequence[str]) -> dict[int, list[str]]:
    """The lines by rank, of ranks that also have the variable."""
    with suppress(StoreError):
        store.wait(keys, _WAIT)
    found = {each: key for each, key in enumerate(keys) if store.check([key])}
    rows = {each: json.loads(store.get(key)) for each, key in found.items()}
    store.delete_keys(list(found.values()))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A dash stands for what is not known."""
    full = [[cell or "-" for cell in [*row, *[""] * (len(_COLUMNS) - len(row))]] for row in rows]
    return table(_COLUMNS, full)
