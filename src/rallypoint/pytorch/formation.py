"""Forms the engine's group behind a torch process group, at the store that torch passes.

A store may outlive a group: torchrun keeps one across restarts, and init_process_group after
destroy_process_group uses it again. So the members first agree on keys that no earlier group has
used (store/init_method.py).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any

import torch.distributed as dist

from rallypoint.base.errors import StoreConnectionError, StoreTimeoutError
from rallypoint.engine.interruption import beside_handlers, may_run_handlers
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.formation.connecting import GroupRequest, form_communicator
from rallypoint.process_group.formation.joining import GroupServices
from rallypoint.process_group.groups.group import ProcessGroup, World
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms
from rallypoint.store.init_method import fresh_round
from rallypoint.store.store import Store, empty_queue


class TorchStore(Store):
    """One of torch.distributed's stores.

    Errors become those of base/errors.py; PyTorch distinguishes them by their text only.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        innermost = store
        while hasattr(innermost, "underlying_store"):
            innermost = innermost.underlying_store
        self.host: str | None = getattr(innermost, "host", None)  # the server's, of a TCPStore
        port = getattr(innermost, "port", None)
        self._endpoint = f"{self.host}:{port}" if self.host else type(innermost).__name__
        super().__init__(getattr(store, "timeout", timedelta(seconds=300)))

    def set_timeout(self, timeout: timedelta) -> None:
        """See Store; the timeout is that of all handles to torch's store."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call("wait", list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        return list(self._call("list_keys"))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See Store; one key at a time if torch's store has nothing better."""
        if not hasattr(self._store, "has_extended_api") or not self._store.has_extended_api():
            return [self.get(key) for key in keys]
        return list(map(bytes, self._call("multi_get", list(keys))))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call("queue_push", key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not block and self.queue_len(key) == 0:
            raise empty_queue(key, self._endpoint)
        return bytes(self._call("queue_pop", key, block))

    def queue_len(self, key: str) -> int:
        return int(self._call("queue_len", key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if self.add(f"{key}/count", 1) >= world_size:
            self.set(f"{key}/all", "")
        self.wait([f"{key}/all"], timeout)

    def clone(self) -> TorchStore:
        """See Store; this handle itself, if torch's store has no others."""
        try:
            return TorchStore(self._store.clone())
        except (AttributeError, RuntimeError):  # of a store in Python
            return self

    def close(self) -> None:
        """The store is torch's to close."""

    def _call(self, operation: str, *given: Any) -> Any:  # noqa: ANN401 - of torch
        """Call a method of torch's store, whose first argument is a key, or a list of keys."""
        try:
            return getattr(self._store, operation)(*given)
        except RuntimeError as error:  # the base class of torch's DistError
            words = str(error).partition("\n")[0]
            is_late = "timeout" in words.lower() or "timed out" in words.lower()
            kind = StoreTimeoutError if is_late else StoreConnectionError
            first = given[0] if given else ""
            key = first if isinstance(first, str) else next(iter(first), "")
            raise kind(
                f"{operation} of {key!r} at torch's store {self._endpoint} failed: {words}",
                endpoint=self._endpoint,
                operation=operation,
                key=key or None,
            ) from error


_MOST_S = 2.0  # without any thread that returns: they may be in calls of another backend, too
_CHECK_EVERY_S = 0.001
_CALLS = "torch.distributed."


def _await_other_threads() -> None:
    """At exit, wait for the threads that are in calls.

    A daemon thread that waits in a call has an error as soon as its group is left, which happens at
    exit, and passes PyTorch's C++ code on its way back. If it asks for the GIL there when the
    interpreter ends, Python before 3.14 unwinds it, which aborts the process; our own code survives
    that (native/python/gil.h).
    """
    left, until = _threads_in_calls(), time.monotonic() + _MOST_S
    while left and time.monotonic() < until:
        time.sleep(_CHECK_EVERY_S)
        before, left = left, _threads_in_calls()
        if left < before:
            until = time.monotonic() + _MOST_S


def _threads_in_calls() -> int:
    own = threading.get_ident()
    frames = sys._current_frames().items()
    return sum(_is_in_a_call(frame) for thread, frame in frames if thread != own)


def _is_in_a_call(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_CALLS):
            return True
        frame = frame.f_back
    return False


@cache
def _await_other_threads_at_exit() -> None:
    """Register it once, before the first group, and not while a template imports this module.

    Exit handlers run in reverse order: groups, which are formed later, have been left by then.
    """
    atexit.register(_await_other_threads)


def form(
    store: dist.Store,
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
    """
    _await_other_threads_at_exit()
    shared = TorchStore(store)
    members = global_ranks or list(range(size))
    is_beside = not global_ranks and dist.is_initialized()  # made by PyTorch's own helper
    title = f"group {name}" if global_ranks or is_beside else DEFAULT_GROUP
    request = GroupRequest(
        store=shared,
        prefix="",
        rank=rank,
        members=members,
        timeout=timeout,
        options=_options(),
        name=title,
        is_across_jobs=is_beside,
    )
    is_cloned = may_run_handlers()

    def meet() -> GroupServices:
        # Each wait blocks the client that makes it, so signal handlers have another one.
        own = shared.clone() if is_cloned else shared
        prefix = fresh_round(own, "rallypoint", rank=rank, names=members, timeout=timeout)
        found = request.__replace__(store=own, prefix=prefix)
        return GroupServices(found, *form_communicator(found))

    services = beside_handlers(meet)
    prefix, options = services.request.prefix, services.algorithms.options
    world = World(shared, prefix, options, title=title, is_across_jobs=is_beside)
    group = services.new_group(world, name=name, description="")
    if not global_ranks:
        world.group = group
    return group


def without_members(
    store: dist.Store, *, rank: int, size: int, timeout: timedelta, name: str
) -> ProcessGroup:
    """A group that serves no call until it has been reconfigured, of this rank and size so far."""
    options = _options()
    world = World(TorchStore(store), "", options, is_across_jobs=True)
    request = GroupRequest(
        store=world.store,
        prefix="",
        rank=rank,
        members=range(size),
        timeout=timeout,
        options=options,
    )
    services = GroupServices(request, None, Algorithms(options))
    world.group = group = services.new_group(world, name=name, description="")
    group.forms_again = True
    group.withdraw(
        "the process group was made with enable_reconfigure=True and has no members yet; call its "
        "reconfigure"
    )
    return group


def _options() -> AlgorithmOptions:
    return AlgorithmOptions(os.environ.get("RALLYPOINT_ALGORITHM", ""))
