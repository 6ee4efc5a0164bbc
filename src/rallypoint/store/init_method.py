"""From an `init_method` to a store and a place in the world, and the wait until all are there.

The three methods are torch.distributed's: ``env://``, ``tcp://host:port`` and ``file:///path``.
Forming a group from what comes out is the process group's affair.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from rallypoint.base.errors import InvalidArgumentError, StoreTimeoutError
from rallypoint.base.worker_env import WorkerEnv
from rallypoint.store.client import TCPStore
from rallypoint.store.store import DEFAULT_TIMEOUT, Store

_REPORT_EVERY = timedelta(seconds=10)
_NAMED = 16  # how many missing ranks a line names


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """A store, and who we are among those who share it."""

    store: Store
    rank: int
    world_size: int


def open_store(
    init_method: str | None = None,
    *,
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta = DEFAULT_TIMEOUT,
    environ: Mapping[str, str],
) -> OpenStore:
    """Open the store that `init_method` names; None is ``env://``.

    `rank` and `world_size` go before those in the method's query (``?rank=0&world_size=2``), and
    these before the environment's. Over TCP, rank 0 runs the server unless the launcher does.

    Raises:
        InvalidArgumentError: the method, or a number it needs, is missing or wrong.
        StoreConnectionError: the server does not answer within `timeout`.
        StoreError: the file is another run's.
    """
    url = urlsplit(init_method or "env://")
    query = parse_qs(url.query)
    rank = rank if rank >= 0 else _queried(query, "rank", url)
    world_size = world_size if world_size >= 0 else _queried(query, "world_size", url)
    match url.scheme:
        case "env":
            return _open_env(rank, world_size, timeout, environ)
        case "tcp":
            _check_place(rank, world_size, url)
            return _open_tcp(url, rank, world_size, timeout)
        case "file":
            _check_place(rank, world_size, url)
            from rallypoint.store.file import FileStore  # hardly any rank meets in a file

            store = FileStore(_path(url), world_size, timeout=timeout, run_id=_run_id(environ))
            return OpenStore(store=store, rank=rank, world_size=world_size)
    raise InvalidArgumentError(
        f"init_method={init_method!r} is unknown; use env://, tcp://HOST:PORT or file:///PATH"
    )


def await_ranks(
    store: Store,
    name: str,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    report: Callable[[str], None] | None = None,
    report_every: timedelta = _REPORT_EVERY,
    global_ranks: Sequence[int] | None = None,
) -> None:
    """Wait until all ranks have called this with the same `name`, which serves once.

    While it waits, the lowest rank that is there says every 10 s whom it waits for; `report` gets
    the line, by default standard error does. It names rank `r` as ``global_ranks[r]``.

    Raises:
        StoreTimeoutError: some ranks did not come; the message names them.
    """
    done = f"{name}/all"
    store.set(f"{name}/{rank}", "")
    if store.add(f"{name}/count", 1) >= world_size:
        store.set(done, "")
    started = time.monotonic()
    while True:
        left = timeout - timedelta(seconds=time.monotonic() - started)
        try:
            store.wait([done], max(min(left, report_every), timedelta(milliseconds=1)))
        except StoreTimeoutError as error:
            there = [r for r in range(world_size) if store.check([f"{name}/{r}"])]
            names = range(world_size) if global_ranks is None else global_ranks
            line = _waiting_line(there, names, time.monotonic() - started)
            if left <= report_every:
                raise StoreTimeoutError(
                    f"{line}; look for their first error",
                    endpoint=error.endpoint,
                    operation="await_ranks",
                    key=name,
                ) from None
            if there[0] == rank:
                (report or _to_stderr)(line)
        else:
            return


def _waiting_line(there: list[int], names: Sequence[int], waited_s: float) -> str:
    missing = [name for rank, name in enumerate(names) if rank not in there]
    listed = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return (
        f"waited {waited_s:.0f} s for {len(missing)} of {len(names)} ranks; "
        f"missing: {listed or 'none, the last one has just come'}"
    )


def _to_stderr(line: str) -> None:
    print(f"rallypoint: {line}", file=sys.stderr, flush=True)


def _open_env(
    rank: int, world_size: int, timeout: timedelta, environ: Mapping[str, str]
) -> OpenStore:
    given = dict(environ)
    if rank >= 0:
        given["RANK"] = str(rank)
    if world_size >= 0:
        given["WORLD_SIZE"] = str(world_size)
    me = WorkerEnv.from_environ(given)
    store = TCPStore(
        me.master_addr,
        me.master_port,
        is_master=me.rank == 0 and not me.use_agent_store,
        timeout=timeout,
        wait_for_workers=False,
    )
    return OpenStore(store=store, rank=me.rank, world_size=me.world_size)


def _open_tcp(url: SplitResult, rank: int, world_size: int, timeout: timedelta) -> OpenStore:
    if not url.hostname or url.port is None:
        raise InvalidArgumentError(f"init_method={url.geturl()!r} lacks a host or a port")
    store = TCPStore(
        url.hostname, url.port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    return OpenStore(store=store, rank=rank, world_size=world_size)


def _path(url: SplitResult) -> str:
    path = unquote(url.netloc + url.path)
    if not path:
        raise InvalidArgumentError(f"init_method={url.geturl()!r} lacks a path")
    return path


def _run_id(environ: Mapping[str, str]) -> str:
    """Tell apart the runs and restarts of a launcher; without one nothing tells them apart."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    return f"{run}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else ""


def _queried(query: dict[str, list[str]], name: str, url: SplitResult) -> int:
    values = query.get(name)
    if not values:
        return -1
    if not values[-1].isdecimal():
        raise InvalidArgumentError(f"{name} in init_method={url.geturl()!r} is no whole number")
    return int(values[-1])


def _check_place(rank: int, world_size: int, url: SplitResult) -> None:
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"init_method={url.geturl()!r} needs rank and world_size, with rank below world_size; "
            f"they are {rank} and {world_size}"
        )
