"""Messages in device memory: the receiver fetches what the sender shows it.

    sender     where the tensor is -------------------> receiver
                                                        copies it, and waits for its stream
    sender    <-------------------- done, or "by host"  receiver
    sender     (the tensor, by way of the host) ------> receiver

They pass the mailbox of the group's own communicator. Small messages take the way by the host at
once, as `send` returns before they are received.
"""

from __future__ import annotations

import itertools
import struct
from functools import partial
from typing import Any

import numpy as np
import torch

from rallypoint.process_group.calls.point_to_point import post_message
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.device_memory.mappings import FIELDS, Location, Mappings
from rallypoint.pytorch.memory import as_bytes
from rallypoint.pytorch.torch_calls import message_of_array
from rallypoint.pytorch.torch_work import RunningWork

EAGER_BYTES = 32 << 10  # messages up to here are on their way when `send` returns (decision 041)

_SHOWN = struct.Struct(f"<i16s{FIELDS}")  # the tag of the answer, the device, and where it is
_DONE, _BY_HOST = range(2)
# Tags from the lowest one on are for the answer and, the next one, for the data of each message.
_FIRST_TAG, _MESSAGES = -(1 << 31), 1 << 28


class DeviceMessages:
    """The messages of one rank of a group, of more than EAGER_BYTES."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._post: Any = partial(post_message, group, timeout=None, work_type=RunningWork)
        self._numbers = itertools.count()

    def send(self, mappings: Mappings, tensor: torch.Tensor, peer: int, tag: int) -> RunningWork:
        """Begin to send a tensor."""
        memory, answers = mappings.memory, _FIRST_TAG + 2 * (next(self._numbers) % _MESSAGES)
        flat, answer = as_bytes(tensor), np.empty(1, np.uint8)
        shown = _SHOWN.pack(answers, memory.identity, *mappings.location(flat))
        memory.mark(tensor.device).synchronize()

        def answered() -> None:
            nonlocal flat
            if answer[0] == _BY_HOST:
                message_of_array(self._group, "isend", tensor, peer, answers + 1).wait()
            del flat  # which has been kept for the receiver

        self._post("isend", peer, tag, np.frombuffer(shown, np.uint8))
        work: RunningWork = self._post("irecv", peer, answers, answer, results=[], then=answered)
        work.operation = "isend"
        work.add_done_callback(lambda _: None)  # a thread takes the next step, whoever waits
        return work

    def receive(self, mappings: Mappings, tensor: torch.Tensor, peer: int, tag: int) -> RunningWork:
        """Begin to receive a tensor; from any rank, if `peer` is -1."""
        memory, shown = mappings.memory, np.empty(_SHOWN.size, np.uint8)
        ready = memory.mark(tensor.device)

        def fetch() -> None:
            ready.synchronize()
            source, communicator = work.peer, self._group.communicator
            answers, identity, *fields = _SHOWN.unpack(shown.tobytes())
            where = Location(*fields)
            is_same = identity == memory.identity and where.nbytes == tensor.nbytes
            is_fetched = (
                is_same and where.is_shared and self._fetch(mappings, source, where, tensor)
            )
            if communicator.native.trouble() is not None:
                raise communicator.error("irecv")  # the sender may have changed it meanwhile
            answer = np.array([_DONE if is_fetched else _BY_HOST], np.uint8)
            self._post("isend", source, answers, answer).wait()
            if not is_fetched:
                message_of_array(self._group, "irecv", tensor, source, answers + 1).wait()

        work: RunningWork = self._post("irecv", peer, tag, shown, results=[tensor], then=fetch)
        work.add_done_callback(lambda _: None)
        return work

    def _fetch(
        self, mappings: Mappings, source: int, where: Location, tensor: torch.Tensor
    ) -> bool:
        """Copy what a rank shows; whether that is possible."""
        with mappings.lock, mappings.memory.stream():
            try:
                view = mappings.view(source, where)
            except (OSError, RuntimeError):
                return False
            tensor.detach().copy_(view.view(tensor.dtype).view(tensor.shape))
            mappings.memory.synchronize()
        return True
