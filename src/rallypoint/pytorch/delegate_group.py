"""Creates groups of PyTorch's backends for our own API, each for one kind of device.

They are not default groups, and appear in none of torch.distributed's lists, so that a program may
use PyTorch's groups beside ours. PyTorch's ranks meet at our store through `StoreAdapter`.
"""

# ruff: noqa: ANN401 - PyTorch's objects

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base import worker_hook
from rallypoint.base.errors import HostError, StoreError, StoreTimeoutError
from rallypoint.process_group.delegated.delegate import LibraryMember
from rallypoint.pytorch import other_backends
from rallypoint.pytorch.device_groups import RankDevices, read_devices, why_staged
from rallypoint.store.store import Store


def own_device(member: LibraryMember) -> Any:
    """The device whose memory this rank's calls use; the process is bound to it."""
    kind = _kind(member.name)
    if kind == "cpu":
        return torch.device("cpu")
    device = _bound_device(member, kind)
    if member.name == "nccl":
        _check_gpus_differ(member)
    return device


def make_group(member: LibraryMember, device: Any) -> tuple[Any, Any]:
    """Create a group, or a backend, of PyTorch's for these calls, with its store.

    PyTorch calls the store's methods only while a reference to it exists in Python.
    """
    adapter = StoreAdapter(member.store)
    store = dist.PrefixStore("torch", adapter)
    types = dist.ProcessGroup.BackendType
    if member.name == "gloo":
        backend, number = _gloo(member, store), types.GLOO
    elif member.name == "nccl":
        backend, number = _nccl(member, store), types.NCCL
    else:
        return _plugged_in(member, store), adapter
    # As torch.distributed creates them: the recorders identify calls by group names.
    whole = dist.ProcessGroup(store, member.rank, len(member.ranks))
    whole._set_default_backend(number)
    whole._register_backend(device, number, backend)
    whole._set_group_name(f"rallypoint/{member.prefix}")
    whole._set_group_desc(member.title)
    if worker_hook.flight_record:
        other_backends.watch(whole, member.ranks, title=member.title)
    return whole, adapter


def _kind(name: str) -> str:
    """The kind of device, as registered with PyTorch together with the backend."""
    if name == "gloo":
        return "cpu"
    return str(dist.Backend.backend_capability.get(name, ["cpu"])[0])


def _bound_device(member: LibraryMember, kind: str) -> Any:
    """This process's own device of that kind, which is made its current one."""
    devices = getattr(torch, kind)
    count = devices.device_count()
    text = member.environ.get("LOCAL_RANK", "0") if count > 1 else "0"
    if isinstance(member.device, int):
        text = str(member.device)
    elif member.device is not None:
        text = str(torch.device(member.device).index or 0)
    if not text.isdecimal() or int(text) >= count:
        raise HostError(
            f"rank {member.ranks[member.rank]} is to use {kind}:{text}, but this process sees "
            f"{count} of them; start as many processes on each host as it has devices "
            "(--nproc-per-node gpu)"
        )
    devices.set_device(int(text))
    return torch.device(kind, int(text))


def _check_gpus_differ(member: LibraryMember) -> None:
    """Check that no two ranks use the same GPU; all ranks come to the same result."""
    store = member.store
    store.set(f"seat/{member.rank}", json.dumps(RankDevices.own()))
    keys = [f"seat/{rank}" for rank in range(len(member.ranks))]
    store.wait(keys, member.timeout)
    if why := why_staged(read_devices(store.multi_get(keys))):
        raise HostError(f"backend='nccl' cannot serve these ranks: {why}; use backend='rallypoint'")


def _gloo(member: LibraryMember, store: Any) -> Any:
    kind: Any = c10d.ProcessGroupGloo
    options = kind._Options()
    options._timeout = member.timeout
    options._devices = [kind.create_device(hostname=member.address)]
    return kind(store, member.rank, len(member.ranks), options)


def _nccl(member: LibraryMember, store: Any) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    return c10d.ProcessGroupNCCL(store, member.rank, len(member.ranks), options)


def _plugged_in(member: LibraryMember, store: Any) -> Any:
    """A backend that another package has registered with PyTorch."""
    plugin = dist.Backend._plugins[member.name.upper()]
    rank, size = member.rank, len(member.ranks)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, member.timeout)
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = member.timeout, member.prefix
    options.global_ranks_in_group = list(member.ranks)
    return plugin.creator_fn(options, None)


class StoreAdapter(dist.Store):
    """The store that PyTorch's C++ calls; it recognises a store's errors by their text."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        try:
            self._store.wait(list(keys), timeout)
        except StoreTimeoutError as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from None
        except StoreError as error:
            raise dist.DistNetworkError(str(error)) from None

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._store.multi_set(list(keys), list(values))

    def has_extended_api(self) -> bool:
        """Whether it has append, multi_get and multi_set."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
