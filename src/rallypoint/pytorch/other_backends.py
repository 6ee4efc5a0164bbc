"""Records the calls of other backends' groups, so that the launcher can explain a stuck job.

This happens only in workers that have a flight record, and only once such a group exists.
Collectives are taken from PyTorch's Flight Recorder, by a thread that needs no GIL
(native/scribe/). That recorder omits gloo's sends and receives, so these are recorded where Python
calls them. Failures here never reach the program. docs/decisions/081-evidence-of-other-backends.md
"""

# ruff: noqa: ANN401 - PyTorch's objects

from __future__ import annotations

import contextlib
import functools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rallypoint.base import worker_hook

_Forget = Callable[..., None]  # the type that _forgetting returns

_OURS = "rallypoint"
# They use PyTorch's Flight Recorder; both have threads anyway.
_RECORD_THEMSELVES = ("gloo", "nccl")
_DEFAULT = "default_pg"
_ANY = -1
_LEAST_WAIT_NS = 20_000  # shorter ones are not worth a call to count them
_BY_DEVICE = -1  # querying each tensor takes 0.4 us, which only groups of several backends need


class _Watched(NamedTuple):
    """A group whose calls are recorded."""

    number: int  # in the record, or _BY_DEVICE
    by_device: dict[str, int]  # such numbers by the type of device whose backend has them
    reference: weakref.ref[Any]  # removes this when the group is freed


_groups: dict[int, _Watched] = {}  # by id of a process group
# By id of a Work: its group's number, its own, and what forgets it when it is freed.
_transfers: dict[int, tuple[int, int, weakref.ref[Any]]] = {}


def install() -> None:
    """Have PyTorch's groups of other backends recorded when they are created."""
    import torch.distributed.distributed_c10d as c10d

    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return

    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        result = make(*arguments, **named)
        with contextlib.suppress(Exception):
            ranks = named.get("global_ranks_in_group", arguments[2] if len(arguments) > 2 else ())
            watch(result[0], ranks)
        return result

    c10d._new_process_group_helper = made


def watch(group: Any, ranks: Sequence[int], title: str = "") -> None:
    """Record the calls of a group, unless that is done already or they are our own.

    Args:
        ranks: the members' global ranks; empty for all.
        title: its name for people; by default, its name and description.
    """
    import torch.distributed as dist

    from rallypoint import _native
    from rallypoint.engine.recording import describe, keep_record_of_others

    if not isinstance(group, dist.ProcessGroup) or id(group) in _groups:
        return  # this rank is not a member, or the group was requested again
    backends = {each.type: group._get_backend(each).name() for each in group._device_types}
    others = sorted(set(backends.values()) - {_OURS})
    if not others:
        return
    keep_record_of_others()
    members = list(ranks) or range(group.size())
    numbers = {}
    for backend in others:  # each counts its own calls
        name, key = title or _title(group.group_name, group.group_desc), f"torch {group.group_name}"
        if len(others) > 1:
            name, key = f"{name} ({backend})", f"{key} {backend}"
        description = json.loads(describe(name, key, members))
        description |= {"backend": backend, "is_complete": True}
        number = _native.open_foreign_group(json.dumps(description))
        if number < 0:
            continue
        numbers[backend] = number
        if backend in _RECORD_THEMSELVES or _has_recording_hook(group):
            signal = worker_hook.stacks_signal
            _native.record_foreign_calls(number, backend, group.group_name, signal)
    if not numbers:
        return
    if not hasattr(dist.Work.wait, "__wrapped__"):
        _wrap_transfers(dist, min(numbers.values()))
    left = functools.partial(_leave, _native.leave_foreign_group, id(group))
    _groups[id(group)] = _Watched(
        min(numbers.values()) if len(set(backends.values())) == 1 else _BY_DEVICE,
        {kind: numbers[name] for kind, name in backends.items() if name in numbers},
        weakref.ref(group, left),
    )


def _has_recording_hook(group: Any) -> bool:
    """Whether PyTorch, from 2.15 on, reports these calls to its Flight Recorder."""
    from torch.distributed.distributed_c10d import _world

    return group in getattr(_world, "pg_flight_recorder_hooks", ())


def _leave(leave: Callable[[int], None], key: int, _: object) -> None:
    with contextlib.suppress(Exception):  # the interpreter may be shutting down
        for number in set(_groups.pop(key).by_device.values()):
            leave(number)


def _title(name: str, description: str) -> str:
    if description == _DEFAULT:
        return "default group"
    return f"group {name if description in ('', 'undefined') else description}"


def _wrap_transfers(dist: Any, number: int) -> None:
    """Observe the sends, receives and waits of all groups that Python calls."""
    forget = _forgetting()
    for name in ("send", "recv", "recv_anysource"):
        setattr(dist.ProcessGroup, name, _beginning(dist.ProcessGroup, name, forget))
    dist.Work.wait = _ending(dist.Work.wait, forget, number)


def _forgetting() -> _Forget:
    from rallypoint._native import end_foreign_transfer  # importing each time would take 2 us

    def forget(key: int, _: object = None, has_failed: bool = False) -> None:
        """Forget a Work that is done, or that no caller can wait for any more."""
        transfer = _transfers.pop(key, None)
        if transfer is not None:
            end_foreign_transfer(transfer[0], transfer[1], has_failed)

    return forget


def _beginning(kind: Any, name: str, forget: _Forget) -> Callable[..., Any]:
    from rallypoint._native import begin_foreign_transfer, withdraw_foreign_transfer

    original = getattr(kind, name)
    sends, has_peer = name == "send", name != "recv_anysource"

    @functools.wraps(vars(kind)[name])  # so that the original can be restored
    def transfer(group: Any, *arguments: Any, **named: Any) -> Any:
        watched = _groups.get(id(group))
        if watched is None or named:
            return original(group, *arguments, **named)
        number, which = watched.number, -1
        try:
            tensor, tag = arguments[0][0], arguments[-1]
            if number == _BY_DEVICE:
                number = watched.by_device[tensor.device.type]
            dtype = _dtype_name(tensor.dtype)
            peer = arguments[1] if has_peer else _ANY
            which = begin_foreign_transfer(number, sends, peer, tag, tensor.numel(), dtype)
        except Exception:  # the original raises a better error
            pass
        try:
            work = original(group, *arguments)
        except BaseException:
            if which >= 0:
                withdraw_foreign_transfer(number, which)
            raise
        if which >= 0 and work is not None:
            key = id(work)
            _transfers[key] = number, which, weakref.ref(work, functools.partial(forget, key))
        return work

    return transfer


def _ending(original: Callable[..., Any], forget: _Forget, number: int) -> Callable[..., Any]:
    """`number`: the group in which all waits are counted; a Work does not tell its own."""
    from rallypoint._native import add_foreign_wait

    now_ns = time.monotonic_ns

    @functools.wraps(original)
    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        key, began_ns = id(work), now_ns()
        try:
            done = original(work, *arguments, **named)
        except BaseException:
            if key in _transfers:
                forget(key, has_failed=True)
            raise
        waited_ns = now_ns() - began_ns
        if waited_ns > _LEAST_WAIT_NS:
            add_foreign_wait(number, waited_ns)
        if key in _transfers:
            forget(key)
        return done

    return wait


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
