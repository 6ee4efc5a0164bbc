"""Decides where calls with GPU tensors go: to NCCL, to the GPU's memory, or through the host's.

NCCL takes them if every rank has its own GPU; all ranks decide this from what each reported at
the start, so they decide the same. NCCL's backend is made at the first such call. Ranks of one host
that share a GPU use its memory, if the user asks for it: see device_memory/. All other calls are
staged: see memory.py.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base.errors import InvalidArgumentError, StoreConnectionError
from rallypoint.base.files import host_identity
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.tools import kind_elsewhere

if TYPE_CHECKING:
    from rallypoint.pytorch.device_memory.device_calls import DeviceCalls

BackendType: TypeAlias = dist.ProcessGroup.BackendType
# Makes a backend take the calls for a kind of device; returns the group that then receives them.
Adopt = Callable[[str, BackendType, c10d.Backend], dist.ProcessGroup]


class RankDevices(NamedTuple):
    """What a rank reports about its GPUs."""

    host: str  # differs between machines (host_identity)
    has_nccl: bool
    gpus: tuple[str, ...]  # the identifiers, on its host, of the GPUs that the process sees
    can_share: bool = False  # their memory with other processes

    @classmethod
    def own(cls) -> RankDevices:
        """This process's; does not touch the GPUs, so that the process may still be forked."""
        names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        count = torch.cuda.device_count()
        known = len(names) >= count and names != [""]
        gpus = names[:count] if known else list(map(str, range(count)))
        can_share = _wants_device_memory() and torch.version.cuda is not None
        return cls(host_identity(), dist.is_nccl_available(), tuple(gpus), can_share)


def read_devices(texts: Iterable[bytes]) -> list[RankDevices]:
    """What ranks have written as JSON."""
    said = map(json.loads, texts)
    return [RankDevices(host, nccl, tuple(gpus), shares) for host, nccl, gpus, shares in said]


def _wants_device_memory() -> bool:
    text = os.environ.get("RALLYPOINT_DEVICE_MEMORY", "")
    if text not in ("", "0", "1"):
        raise InvalidArgumentError(f"RALLYPOINT_DEVICE_MEMORY={text!r} must be 0 or 1")
    return text == "1"


def can_share_memory(ranks: Sequence[RankDevices]) -> bool:
    """Whether it is worth a trial: all ranks are on one host, and can share a GPU's memory."""
    return len({each.host for each in ranks}) == 1 and all(
        each.gpus and each.can_share for each in ranks
    )


def why_staged(ranks: Sequence[RankDevices]) -> str | None:
    """Why the ranks with these devices cannot use NCCL with each other; None if they can."""
    lacking = [rank for rank, each in enumerate(ranks) if not each.has_nccl]
    if lacking:
        return f"rank {lacking[0]} has a PyTorch without NCCL"
    hosts = [each.host for each in ranks]
    for host, count in Counter(hosts).items():
        gpus = {gpu for each in ranks if each.host == host for gpu in each.gpus}
        if len(gpus) < count:
            first = hosts.index(host)
            return f"the {count} ranks on the host of rank {first} share {len(gpus)} GPU(s)"
    return None


class DeviceGroups:
    """The groups that take one group's calls for other devices.

    `adopt` is a method of torch's group, which holds this object.
    """

    def __init__(self, group: ProcessGroup, store: dist.Store, adopt: Adopt) -> None:
        self._group = group
        self._adopt = weakref.WeakMethod(adopt)
        self._store = store
        self._prefix = f"{group.world.prefix}/gpus/{group.group_name}"
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._calls: dict[str, DeviceCalls] = {}  # in the memory of a kind of device
        # Without the store the group has all that CPU tensors need, and its calls name the lost
        # ranks.
        with suppress(StoreConnectionError):
            group.world.store.set(f"{self._prefix}/{group.own_rank}", json.dumps(RankDevices.own()))

    def group_for(self, kind: str) -> dist.ProcessGroup | None:
        """The group for tensors of a kind of device ("cuda"); None: the engine takes them."""
        if kind not in self._groups:
            self._groups[kind] = self._make(kind) if kind in MAKERS else None
        return self._groups[kind]

    def calls_of(self, *tensors: Any) -> DeviceCalls | None:  # noqa: ANN401 - or lists, or None
        """What makes a call with these in the memory of their device, if anything does."""
        given = [each for each in tensors if each is not None]
        kind = kind_elsewhere(given[0], given[1:]) if given else None
        if kind not in MAKERS or getattr(given[0], "layout", torch.strided) is not torch.strided:
            return None
        self.group_for(kind)  # decides it
        return self._calls.get(kind)

    def group_made(self, kind: str) -> dist.ProcessGroup | None:
        """The group for tensors of a kind of device, if there is one yet."""
        return self._groups.get(kind)

    def add(self, kind: str, group: dist.ProcessGroup) -> None:
        """Make a group take the calls for a kind of device from now on."""
        self._groups[kind] = group

    def settle(self, opts: c10d.BarrierOptions) -> None:
        """Before a barrier, wait for the work of the current stream, as NCCL's barrier does.

        Only if the group works on GPUs, or is given one: a group of CPU tensors must not wait for
        kernels, which may wait for something after the barrier.
        """
        if not torch.cuda.is_initialized():
            return
        device = getattr(opts, "device", None)
        is_named = device is not None and device.type == "cuda"
        if is_named or "cuda" in self._groups:
            torch.cuda.current_stream(device if is_named else None).synchronize()

    def made(self) -> list[dist.ProcessGroup | DeviceCalls]:
        """What takes calls for other devices."""
        groups = [group for group in self._groups.values() if group is not None]
        return [*groups, *self._calls.values()]

    def close(self) -> None:
        """The group has ended: no other takes its calls, nor is kept."""
        self._groups, self._calls = dict.fromkeys(MAKERS), {}

    def _make(self, kind: str) -> dist.ProcessGroup | None:
        keys = [f"{self._prefix}/{rank}" for rank in range(self._group.size())]
        ranks = read_devices(self._group.world.store.multi_get(keys))
        reason = why_staged(ranks)
        if reason is None:
            store = dist.PrefixStore(f"{self._prefix}/{kind}", self._store)
            adopt = self._adopt()
            assert adopt is not None, "calls come by way of it"
            return MAKERS[kind](store, self._group, adopt)
        # A group that is to be formed again has no peers whose memory it could rely on.
        if kind == "cuda" and can_share_memory(ranks) and not self._group.forms_again:
            from rallypoint.pytorch.device_memory.cuda_memory import (
                CudaMemory,
            )  # few jobs share a GPU
            from rallypoint.pytorch.device_memory.device_calls import DeviceCalls

            store = dist.PrefixStore(f"{self._prefix}/{kind}", self._store)
            self._calls[kind] = DeviceCalls(self._group, store, CudaMemory)
        elif self._group.own_rank == 0:
            from rallypoint.pytorch.memory import warn_staged

            warn_staged(kind, self._group.group_name, reason)
        return None


def nccl_group(store: dist.Store, group: ProcessGroup, adopt: Adopt) -> dist.ProcessGroup:
    """NCCL among the same ranks, for CUDA tensors."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = group.timeout
    options.global_ranks_in_group = list(group.ranks)
    options.group_name = f"{group.group_name}:nccl"
    backend = dist.ProcessGroupNCCL(store, group.own_rank, group.size(), options)
    return adopt("cuda", BackendType.NCCL, backend)


# By kind of device; what a rank needs for it is in its RankDevices.
MAKERS = {"cuda": nccl_group}
