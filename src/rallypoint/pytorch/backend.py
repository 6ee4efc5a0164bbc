"""The process group that PyTorch gets for `init_process_group("rallypoint")`.

In 2.13 a backend in Python is a ProcessGroup, and it *is* the group: there is no backend below it.
Later versions have another base class; it is chosen here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.collectives import monitored_barrier
from rallypoint.process_group.groups import ProcessGroup
from rallypoint.process_group.point_to_point import post_message
from rallypoint.pytorch.buckets import shared_buckets
from rallypoint.pytorch.calls import only
from rallypoint.pytorch.collectives import Collectives
from rallypoint.pytorch.devices import Devices, by_device
from rallypoint.pytorch.formation import form
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.untraced import untraced
from rallypoint.pytorch.work import RunningWork, joined
from rallypoint.store.store import seconds_of

Base: Any = dist.ProcessGroup
_ANY = -1


def create(options: Any, _: object) -> RallypointGroup:  # noqa: ANN401 - of torch
    """A group by what PyTorch hands to the creator of a backend; all members call it."""
    group = form(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        name=str(options.group_id),
        global_ranks=list(options.global_ranks_in_group),
    )
    return RallypointGroup(group, options.store)


@untraced
class RallypointGroup(Collectives, Base):
    """A group of ranks, as PyTorch calls it; see Collectives for what it can do together."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, group: ProcessGroup, store: Any) -> None:  # noqa: ANN401 - of torch
        super().__init__(group.own_rank, group.size())
        self.engine_group = group
        self.devices = Devices(group, store)
        self._store = store
        self._name = group.group_name
        self._description = "undefined"
        self._coalesced: list[Any] | None = None
        self._splits = 0
        self._is_over = False
        shared_buckets.enter()

    # Who it is.

    def getBackendName(self) -> str:  # noqa: N802 - torch's names, here and below
        """The backend's name."""
        return self.engine_group.backend

    def name(self) -> str:
        """The backend's name."""
        return self.engine_group.backend

    _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """By which the members found each other."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch once."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the caller said it is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch once."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:  # noqa: ANN401
        # torch asks also where no GPU is used, and when peers may be gone: make nothing for that.
        group = self.devices.group_made(torch.device(device).type)
        return self if group is None else group._get_backend(device)

    def get_group_store(self) -> Any:  # noqa: ANN401 - of torch
        """The store at which the members met."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """The engine counts by itself."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _has_hooks(self) -> bool:
        return False

    # Messages from one rank to another.

    @by_device
    def send(self, tensors: list[Any], dst: int, tag: int = 0) -> Any:  # noqa: ANN401
        """Begin to send a tensor; it must not be changed before the work is over."""
        tensor, dst = only(tensors, "send"), self._peer(dst, "send")
        memory = Memory("send", moves=True)
        message = post_message(
            self.engine_group, "isend", dst, tag, memory.reads(tensor), timeout=self.own_timeout
        )
        return self._kept(RunningWork(message, []))

    @by_device
    def recv(self, tensors: list[Any], src: int, tag: int = 0) -> Any:  # noqa: ANN401
        """Begin to receive a tensor."""
        tensor = only(tensors, "recv")
        src = src if src == _ANY else self._peer(src, "recv")
        memory = Memory("recv", moves=True)
        message = post_message(
            self.engine_group, "irecv", src, tag, memory.writes(tensor), timeout=self.own_timeout
        )
        finish = memory.finish if memory.has_copies else None
        return self._kept(RunningWork(message, [tensor], finish))

    @by_device
    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Any:  # noqa: ANN401
        """Begin to receive a tensor from whoever sends one."""
        return self.recv(tensors, _ANY, tag)

    def _start_coalescing(self, device: Any) -> None:  # noqa: ANN401
        group = self._group_for(device)
        if group is not None:
            group._start_coalescing(device)
            return
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:  # noqa: ANN401
        group = self._group_for(device)
        if group is not None:
            return group._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return joined(works, [output for work in works for output in work.result()])

    def _group_for(self, device: Any) -> Any:  # noqa: ANN401 - of torch
        """That which takes calls on tensors of a device; None if it is this one."""
        kind = torch.device(device).type
        return None if kind == "cpu" else self.devices.group_for(kind)

    def _peer(self, rank: int, operation: str) -> int:
        if rank == self.engine_group.own_rank:
            raise InvalidArgumentError(f"{operation}: {rank} is this rank itself; name another one")
        return self._rank(rank, operation)

    def _kept(self, work: RunningWork) -> RunningWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Its life.

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have come here; after `timeout`, say who has not.

        torch.distributed.monitored_barrier knows gloo only; call this method instead.
        """
        wait = self.own_timeout if timeout is None else timeout
        monitored_barrier(self.engine_group, wait, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations that begin from now on may wait for a peer."""
        seconds_of(timeout)  # or it is refused
        self.own_timeout = timeout
        for group in self.devices.made():
            group.set_timeout(timeout)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> RallypointGroup | None:
        """A group of some ranks of this one, by their ranks here; all ranks of this one call it.

        Returns:
            The group, or None if this rank is not in it.

        Raises:
            InvalidArgumentError: they are no ranks of this group, or one is there twice.
        """
        for rank in new_ranks:
            self._rank(rank, "split_group")
        if not new_ranks or len(set(new_ranks)) < len(new_ranks):
            raise InvalidArgumentError(f"split_group: {new_ranks=} must be ranks, each once")
        self._splits += 1
        own = self.engine_group
        if own.own_rank not in new_ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}"
        parts = "_".join(map(str, new_ranks))
        store = dist.PrefixStore(f"split/{self._splits}/{parts}", self._store)
        formed = form(
            store,
            rank=list(new_ranks).index(own.own_rank),
            size=len(new_ranks),
            timeout=timeout or own.timeout,
            name=name,
            global_ranks=[own.ranks[rank] for rank in new_ranks],
        )
        group = RallypointGroup(formed, store)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def abort(self) -> None:
        """End the waits of all ranks of the group with an error, and leave it."""
        self.engine_group.abort()
        for group in self.devices.made():
            group.abort()
        self._end()

    def shutdown(self) -> None:
        """Leave the group; peers that wait for this rank are told."""
        self.engine_group.destroy()
        for group in self.devices.made():
            group.shutdown()
        self._end()

    def _end(self) -> None:
        """Once."""
        if not self._is_over:
            self._is_over = True
            shared_buckets.leave()
