"""PyTorch's ``env://`` in processes started by mpirun, srun or similar, which set no RANK.

PyTorch has a table of functions that find the store of ``env://``. Our function wraps its own: it
determines RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, sets them, and calls PyTorch's function.
If the variables are already set, or no launcher is recognised, it only calls that function. The
store is PyTorch's own, so this serves all backends. docs/decisions/039-processes-of-mpirun.md
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

_TABLE = "torch.distributed.rendezvous"
_TIMEOUT = timedelta(minutes=30)  # PyTorch's own, in case it passes none

_turns = itertools.count(1)

Handler = Callable[..., Iterator[Any]]


def install() -> None:
    """Install our function before PyTorch's, once; in a PyTorch without that table, do nothing."""
    table = getattr(sys.modules.get(_TABLE), "_rendezvous_handlers", None)
    if not isinstance(table, dict) or "env" not in table:
        return
    if not hasattr(table["env"], "is_rallypoints"):
        table["env"] = call_first(table["env"])


def call_first(theirs: Handler) -> Handler:
    """A function that sets the variables, then calls PyTorch's."""

    @functools.wraps(theirs)
    def handler(url: str, *args: Any, **named: Any) -> Iterator[Any]:  # noqa: ANN401 - of torch
        server = _set_variables(url, named.get("timeout") or _TIMEOUT)
        yield from theirs(url, *args, **named)
        del server

    vars(handler)["is_rallypoints"] = True
    return handler


def _set_variables(url: str, timeout: timedelta) -> object:
    """Set the variables that PyTorch's function reads; keep what this returns until it has."""
    from rallypoint.cluster.pmi.meeting import announce, meet, process_to_meet, withdraw

    # Each default group has its own store: an early rank would find the previous one's.
    withdraw(os.environ)
    process = process_to_meet(
        os.environ, rank=_number(url, "rank"), world_size=_number(url, "world_size")
    )
    if process is None:
        return None
    meeting = meet(process, timeout, os.environ)
    server, key = None, f"torch/{next(_turns)}"
    if process.rank == 0:
        import torch.distributed as dist

        # PyTorch lets several users share a port: its function joins this server.
        server = dist.TCPStore(
            meeting.address,
            0,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        meeting.store.set(key, str(server.port))
    meeting.store.wait([key], timeout)
    announce(os.environ, meeting.address, int(meeting.store.get(key)))
    return server


def _number(url: str, name: str) -> int:
    """The argument of init_process_group, which PyTorch puts into the URL; otherwise -1."""
    from urllib.parse import parse_qs, urlsplit

    values = parse_qs(urlsplit(url).query).get(name, ["-1"])
    return int(values[-1]) if values[-1].isdecimal() else -1
