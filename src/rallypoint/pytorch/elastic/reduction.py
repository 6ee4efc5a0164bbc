"""The gradients of one backward pass, reduced in the background.

Those of a GPU are copied to pinned memory on a stream of their own, while the pass goes on:

    backward's stream   ... gradients ready ............................ | copied back -> optimizer
    copying stream           copied to the host
    engine                                   reduced with the other ranks'
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.autograd import Variable
from torch.futures import Future

from rallypoint.base.errors import RallypointError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.collectives import all_reduce
from rallypoint.pytorch.staging import host_memory


class Reduction:
    """The reductions of one backward pass, all of which end with it.

    They begin one after the other, in the order of the buckets, which is that of all ranks; each as
    soon as its gradients are in the host's memory.
    """

    def __init__(self, op: ReduceOp) -> None:
        self.op = op
        self._pass = -1
        self._coming: deque[_Reduced] = deque()  # to the host
        self._under_way: list[_Reduced] = []
        self._fetched: list[_Reduced] = []  # by their device, perhaps still
        self._failure: RallypointError | None = None

    def begin(self, tensor: torch.Tensor, op: ReduceOp, future: Any = None) -> None:  # noqa: ANN401
        """Reduce a tensor in the background; the future gets it at the end of the pass."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:  # the first of its pass, before DDP's own callback
            self._pass = current
            Variable._execution_engine.queue_callback(self._end)
            self._release()
        if self._failure is None:
            self._coming.append(_Reduced(tensor, op, future))
            self._begin_those_here(waits=False)

    def _begin_those_here(self, *, waits: bool) -> None:
        while self._coming and (waits or self._coming[0].is_here()):
            one = self._coming.popleft()
            try:
                one.begin()
            except RallypointError as error:  # C++, which calls us, would make it a RuntimeError
                self._failure = error
                return
            self._under_way.append(one)

    def _end(self) -> None:
        """In Python and before DDP waits in C++, so that errors are raised as what they are."""
        if self._failure is None:
            self._begin_those_here(waits=True)
        under_way, failure = self._taken()
        for one in under_way:
            try:
                one.end()
            except RallypointError as error:
                failure = failure or error
        self._fetched = under_way
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Forget a pass that did not come to its end; nothing uses its buckets afterwards."""
        for one in self._taken()[0]:
            with suppress(RallypointError):
                one.wait()

    def _taken(self) -> tuple[list[_Reduced], RallypointError | None]:
        under_way, self._under_way = self._under_way, []
        failure, self._failure = self._failure, None
        while self._coming:
            self._coming.popleft().arrive()
        return under_way, failure

    def _release(self) -> None:
        """Give memory of the host back, which the devices have left long ago."""
        while self._fetched:
            self._fetched.pop().leave()


class _Reduced:
    """A tensor, its items in the host's memory, and whom to tell."""

    def __init__(self, tensor: torch.Tensor, op: ReduceOp, future: Any) -> None:  # noqa: ANN401
        self._tensor, self._op, self._future = tensor, op, future
        self._here, self._arrival = _on_host(tensor)
        self._departure: Any = None
        self._work: Any = None

    def is_here(self) -> bool:
        return self._arrival is None or self._arrival.query()

    def arrive(self) -> None:
        """Wait until the items are here."""
        if self._arrival is not None:
            self._arrival.synchronize()

    def begin(self) -> None:
        """Start the reduction, once the items are here."""
        self.arrive()
        self._work = all_reduce(self._here, self._op, async_op=True)

    def wait(self) -> None:
        self._work.wait()

    def end(self) -> None:
        """Have the result in the tensor, for what its device does from now on."""
        self._work.wait()
        if self._arrival is not None:
            self._tensor.copy_(self._here, non_blocking=True)
            self._departure = torch.cuda.current_stream(self._tensor.device).record_event()
        if self._future is not None:
            self._future.set_result(self._tensor)

    def leave(self) -> None:
        """Wait until the result has left the host's memory."""
        if self._departure is not None:
            self._departure.synchronize()


def future_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - of torch
    """A future for a tensor; whoever waits for it waits for the tensor's device, too."""
    return Future(devices=[tensor.device]) if tensor.is_cuda else Future()


def _on_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Where a tensor's present items are on the host, and the event after which they are there."""
    if not tensor.is_cuda:
        return tensor, None
    here = host_memory(tensor)
    stream = _copying_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        here.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return here, stream.record_event()


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
