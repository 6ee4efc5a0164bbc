"""From an `init_method` to a store and a place in the world, and the wait until all are there.

The three methods are torch.distributed's: ``env://``, ``tcp://host:port`` and ``file:///path``.
Forming a group from the result is the task of process_group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.errors import (
    InvalidArgumentError,
    PeerLostError,
    StoreError,
    StoreTimeoutError,
)
from rallypoint.base.record import Record
from rallypoint.base.wording import printable
from rallypoint.base.worker_env import WorkerEnv
from rallypoint.store.store import DEFAULT_TIMEOUT, EphemeralStore, Store

if TYPE_CHECKING:
    from urllib.parse import SplitResult

REPORT_EVERY = timedelta(seconds=10)
_CHECK_EVERY = timedelta(seconds=1)  # interval of checks whether those that came are still there
_CHECK_AGAIN_S = 0.05
_MOST_S = 2.0  # to read a verdict
_ALL, _LOST = "all ", "lost "  # what rank 0 says: its answer follows, or a rank
_NAMED = 16  # how many missing ranks a line names
_LOOK_FOR_ERROR = "look for their first error"


class JoinedStore(Record, kw_only=True):
    """A store, and this process's rank among those that share it.

    Attributes:
        is_rank_0s: rank 0 runs its server, and ends it with the group.
    """

    store: Store
    rank: int
    world_size: int
    is_rank_0s: bool = False


def open_store(
    init_method: str | None = None,
    *,
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta = DEFAULT_TIMEOUT,
    environ: Mapping[str, str],
) -> JoinedStore:
    """Open the store that `init_method` names; None is ``env://``.

    `rank` and `world_size` go before those in the method's query (``?rank=0&world_size=2``), and
    these before the environment's. Over TCP, rank 0 runs the server unless the launcher does.
    """
    if init_method is None or init_method == "env://":
        return _open_env(rank, world_size, timeout, environ)
    from urllib.parse import parse_qs, urlsplit  # the usual method needs no parser

    url = urlsplit(init_method)
    query = parse_qs(url.query)
    rank = rank if rank >= 0 else _queried(query, "rank", url)
    world_size = world_size if world_size >= 0 else _queried(query, "world_size", url)
    match url.scheme:
        case "env":
            return _open_env(rank, world_size, timeout, environ)
        case "tcp":
            _check_rank(rank, world_size, url)
            return _open_tcp(url, rank, world_size, timeout)
        case "file":
            _check_rank(rank, world_size, url)
            from rallypoint.store.file import FileStore  # hardly any rank meets in a file

            store = FileStore(_path(url), world_size, timeout=timeout, run_id=_run_id(environ))
            return JoinedStore(store=store, rank=rank, world_size=world_size)
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
    global_ranks: Sequence[int] | None = None,
    says: str = "",
    answer: Callable[[list[str]], str] | None = None,
    gone: Callable[[], Collection[int]] = tuple,
) -> str:
    """Wait until all ranks have called this with the same `name`, which serves once.

    Returns what `answer` makes of what all say, by rank; it is called on rank 0.

    While it waits, the lowest rank that is there prints every 10 s which ranks it waits for. It
    names rank `r` as ``global_ranks[r]``. Rank 0 sees when all have come, or one has come and gone,
    and tells the others. `gone` returns the ranks that are known to have ended without coming.
    """
    done = f"{name}/all"
    names = range(world_size) if global_ranks is None else global_ranks
    presence = Presence(store, name, names)
    if says:
        store.set(presence.said_key(rank), says)
    say_here(store, presence.key(rank))
    awaited = [presence.key(r) for r in range(world_size)] if rank == 0 else [done]
    reported_s = 0.0
    for wait in _waits(store, awaited, timeout, _CHECK_EVERY):
        is_time = wait.is_last or wait.waited_s - reported_s >= REPORT_EVERY.total_seconds()
        lost = presence.look(range(world_size) if rank == 0 or is_time else (0,))
        came = presence.there | presence.gone
        # At the end, others may have given up a moment earlier because of the ranks that never
        # came.
        if lost is None or (wait.is_last and len(came) < world_size):
            lost = min(gone(), default=None)
        if lost is not None:
            if rank == 0:
                store.set(done, f"{_LOST}{lost}")
                presence.await_leaving(rank)
            raise lost_while_forming(names[lost])
        if not is_time:
            continue
        reported_s = wait.waited_s
        what = missing_ranks(came, names)
        if wait.is_last:
            has_all = len(came) == world_size
            advice = "give init_process_group a longer timeout" if has_all else _LOOK_FOR_ERROR
            raise wait.failed(what, advice, key=name)
        if min(presence.there) == rank:
            to_stderr(wait.line(what))
    if rank == 0:
        text = "" if answer is None else answer(presence.said())
        store.set(done, f"{_ALL}{text}")
        return text
    text = store.get(done).decode()
    if text.startswith(_LOST):
        raise lost_while_forming(names[int(text.removeprefix(_LOST))])
    return text.removeprefix(_ALL)


def fresh_round(
    store: Store, prefix: str, *, rank: int, names: Sequence[int], timeout: timedelta
) -> str:
    """A prefix below `prefix` under which nothing has been set, for `len(names)` ranks, at a store
    that may have outlived many groups (docs/decisions/064).

    All of them call it; `await_ranks` with what it returns must follow. Nothing that the ranks know
    distinguishes this rendezvous from earlier ones; a launcher's restart count does not help if
    each rank has its own launcher. So each counts its arrivals in the store. Rank 0's count becomes
    the number of the round, and rank 0 answers each arrival by its count:

        rank 0   came/0 += 1 -> n.  For each r with came/r = c > 0: answer/r/c = n
        rank r   came/r += 1 -> c.  If came/0 = n > 0: n/r = c
        rank 0   waits for n/r from each r, whose c it answers: answer/r/c = n
        rank r   waits for answer/r/c, then sets n/r to "" and continues; answers to it are deleted

    Both count before they look, so at least one of them sees the other. An answer belongs to one
    arrival of one rank, which rank 0 has seen, so keys left by dead processes are never read.

    Args:
        names: what the ranks are called in messages.
    """
    count = store.add(f"{prefix}/came/{rank}", 1)
    if rank == 0:
        _gather(store, prefix, count, names, timeout)
        return f"{prefix}/{count}"
    number = store.add(f"{prefix}/came/0", 0)
    if number:
        store.set(f"{prefix}/{number}/{rank}", str(count))
    answer = f"{prefix}/answer/{rank}/{count}"
    what = f"rank {names[0]}, which gathers {len(names)} ranks"
    for wait in _waits(store, [answer], timeout, REPORT_EVERY):
        if wait.is_last:
            raise wait.failed(what, _LOOK_FOR_ERROR, key=answer)
        if rank == 1:
            to_stderr(wait.line(what))
    answered = store.get(answer).decode()
    # If rank 0 was quicker, it has taken our previous arrival for this one.
    left = [answer, f"{prefix}/answer/{rank}/{count - 1}"]
    if number and str(number) != answered:  # we were quicker: this is its last round, which is over
        left.append(f"{prefix}/{number}/{rank}")
    with suppress(StoreError, RuntimeError):  # some of torch's stores cannot
        for key in left:
            store.delete_key(key)
    return f"{prefix}/{answered}"


def _gather(
    store: Store, prefix: str, number: int, names: Sequence[int], timeout: timedelta
) -> None:
    """Rank 0's side of `fresh_round`."""
    here = f"{prefix}/{number}"
    others = range(1, len(names))
    answered: set[tuple[int, int]] = set()

    def answer(rank: int, count: int) -> None:
        if (rank, count) not in answered:  # otherwise it would remain, as no rank reads it again
            answered.add((rank, count))
            store.set(f"{prefix}/answer/{rank}/{count}", str(number))

    store.set(f"{here}/0", "")
    for rank in others:
        if seen := store.add(f"{prefix}/came/{rank}", 0):
            answer(rank, seen)
    keys = [f"{here}/{rank}" for rank in others]
    if not keys:
        return
    for wait in _waits(store, keys, timeout, REPORT_EVERY):
        there = [rank for rank in range(len(names)) if store.check([f"{here}/{rank}"])]
        what = missing_ranks(there, names)
        if wait.is_last:
            raise wait.failed(what, _LOOK_FOR_ERROR, key=keys[0])
        to_stderr(wait.line(what))
    for rank, count in zip(others, store.multi_get(keys), strict=True):
        if count:  # otherwise it has had its answer
            answer(rank, int(count))


def say_here(store: Store, key: str) -> None:
    """Set a key that, at our own server, goes when this process does; `key`/came stays."""
    if isinstance(store, EphemeralStore) and shows_deaths(store):
        store.set_ephemeral(key, "")
        store.set(f"{key}/came", "")
    else:
        store.set(key, "")


def shows_deaths(store: Store) -> bool:
    """Whether a process's keys can go with it: at our own server, to which it is connected."""
    return isinstance(store, EphemeralStore) and store.is_ours


class Presence:
    """Which ranks have come, and whether they are still there, as far as the store knows.

    Args:
        name: the prefix of the rendezvous's keys.
        names: what the ranks are called.
    """

    def __init__(self, store: Store, name: str, names: Sequence[int]) -> None:
        self.there: set[int] = set()  # the ranks last seen by `look`
        self.gone: set[int] = set()
        self._store = store
        self._name = name
        self._names = names

    def key(self, rank: int) -> str:
        """The key that exists as long as the rank is alive."""
        return f"{self._name}/{rank}"

    def said_key(self, rank: int) -> str:
        """The key of what the rank says."""
        return f"{self.key(rank)}/said"

    def said(self) -> list[str]:
        """What the ranks say, once all have come."""
        keys = [self.said_key(rank) for rank in range(len(self._names))]
        return [text.decode() for text in self._store.multi_get(keys)]

    def look(self, ranks: Iterable[int], *, have_come: bool = False) -> int | None:
        """Look at these ranks; the first that came and is there no more, or None.

        Args:
            have_come: ranks known to have come, even one that ended while it reported its arrival.
        """
        for rank in ranks:
            key = [self.key(rank)]
            is_there = self._store.check(key)
            has_come = is_there or have_come or self._store.check([f"{self.key(rank)}/came"])
            if is_there or (has_come and self._store.check(key)):  # it may just have come
                self.there.add(rank)
            elif has_come:
                self.there.discard(rank)
                self.gone.add(rank)
        return min(self.gone, default=None)

    def await_leaving(self, rank: int) -> None:
        """Wait until the others have read the reason and gone: the store may end with this rank."""
        until = time.monotonic() + _MOST_S
        others = [self.key(r) for r in range(len(self._names)) if r != rank]
        while time.monotonic() < until and any(self._store.check([key]) for key in others):
            time.sleep(_CHECK_AGAIN_S)

    def check_all(self) -> None:
        """Once all have come."""
        if not self._store.check([self.key(rank) for rank in range(len(self._names))]):
            error = self.find_lost()
            if error is not None:
                raise error

    def find_lost(
        self, patience_s: float = 0.0, *, suspect: int | None = None, as_long_as: str | None = None
    ) -> PeerLostError | None:
        """The rank that was lost first, if any, once all have come.

        A rank that gives up because of a death has called this before, so it is never taken for
        the first. A process that is being killed loses its connections one after the other: the
        one to the store may end last.

        Args:
            suspect: the rank that all name if no death shows in time.
            as_long_as: a key; once it is gone the ranks' keys may be, too, and no rank is named.
        """
        if not shows_deaths(self._store):
            return None
        lost = f"{self._name}/lost"
        until = time.monotonic() + patience_s
        while not self._store.check([lost]):
            is_late = time.monotonic() >= until
            gone = self.look(range(len(self._names)), have_come=True)
            if as_long_as is not None and not self._store.check([as_long_as]):
                return None
            if gone is None and is_late:
                if suspect is None:
                    return None
                gone = self._names.index(suspect)
            if gone is None:
                time.sleep(_CHECK_AGAIN_S)
            else:
                self._store.compare_set(lost, "", str(gone))
        return lost_while_forming(self._names[int(self._store.get(lost))])

    def wait(self, keys: Sequence[str], deadline: float) -> None:
        """Wait until there are keys that other ranks set, once all have come."""
        timeout = timedelta(seconds=deadline - time.monotonic())
        for wait in _waits(self._store, keys, timeout, _CHECK_EVERY):
            self.check_all()
            if wait.is_last:
                raise wait.error


def lost_while_forming(rank: int) -> PeerLostError:
    """A rank has come and gone."""
    return PeerLostError(
        f"rank {rank} ended or gave up while the group was forming; look for its first error",
        rank=rank,
        operation="init_process_group",
    )


def missing_ranks(there: Collection[int], names: Sequence[int]) -> str:
    """The ranks with these names that are not there yet."""
    missing = [name for rank, name in enumerate(names) if rank not in there]
    if not missing:
        return f"the last of {len(names)} ranks, which has just joined"
    listed = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return f"{len(missing)} of {len(names)} ranks; missing: {listed}"


def to_stderr(line: str) -> None:
    """Print a line to the rank's standard error."""
    print(printable(f"rallypoint: {line}"), file=sys.stderr, flush=True)


class _Wait(NamedTuple):
    """A wait for keys that continues; after `is_last` the timeout is over."""

    error: StoreTimeoutError
    waited_s: float
    is_last: bool

    def line(self, what: str) -> str:
        return f"waited {self.waited_s:.0f} s for {what}"

    def failed(self, what: str, advice: str, *, key: str) -> StoreTimeoutError:
        """The error after the last one, which names what is missing."""
        return StoreTimeoutError(
            f"{self.line(what)}; {advice}",
            endpoint=self.error.endpoint,
            operation="await_ranks",
            key=key,
        )


def _waits(
    store: Store, keys: Sequence[str], timeout: timedelta, every: timedelta
) -> Iterator[_Wait]:
    """Wait for `keys`, with a turn for the caller each time; after the last one it must raise."""
    started = time.monotonic()
    while True:
        left = timeout - timedelta(seconds=time.monotonic() - started)
        try:
            store.wait(keys, max(min(left, every), timedelta(milliseconds=1)))
        except StoreTimeoutError as error:
            late = error
        else:
            return
        yield _Wait(late, time.monotonic() - started, left <= every)


def _open_env(
    rank: int, world_size: int, timeout: timedelta, environ: Mapping[str, str]
) -> JoinedStore:
    from rallypoint.store.client import TCPStore  # PyTorch's groups use its own store

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
    return JoinedStore(
        store=store, rank=me.rank, world_size=me.world_size, is_rank_0s=not me.use_agent_store
    )


def _open_tcp(url: SplitResult, rank: int, world_size: int, timeout: timedelta) -> JoinedStore:
    if not url.hostname or url.port is None:
        raise InvalidArgumentError(f"init_method={url.geturl()!r} needs a host and a port")
    from rallypoint.store.client import TCPStore  # as in _open_env

    store = TCPStore(
        url.hostname, url.port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    return JoinedStore(store=store, rank=rank, world_size=world_size, is_rank_0s=True)


def _path(url: SplitResult) -> str:
    from urllib.parse import unquote

    path = unquote(url.netloc + url.path)
    if not path:
        raise InvalidArgumentError(f"init_method={url.geturl()!r} needs a path")
    return path


def _run_id(environ: Mapping[str, str]) -> str:
    """Distinguish the runs and restarts of a launcher; without a launcher they look the same."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    return f"{run}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else ""


def _queried(query: dict[str, list[str]], name: str, url: SplitResult) -> int:
    values = query.get(name)
    if not values:
        return -1
    if not values[-1].isdecimal():
        raise InvalidArgumentError(f"{name} in init_method={url.geturl()!r} is not an integer")
    return int(values[-1])


def _check_rank(rank: int, world_size: int, url: SplitResult) -> None:
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"init_method={url.geturl()!r} needs rank and world_size, with rank below world_size; "
            f"they are {rank} and {world_size}"
        )
