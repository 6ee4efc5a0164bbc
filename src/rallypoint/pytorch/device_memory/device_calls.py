"""The calls of one group whose ranks share a device; the room's __init__ shows their course."""

from __future__ import annotations

import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError, PeerError
from rallypoint.base.memory_file import memory_file
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.objects import all_gather_object
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.device_memory.call_page import CallPage
from rallypoint.pytorch.device_memory.device_messages import EAGER_BYTES, DeviceMessages
from rallypoint.pytorch.device_memory.device_plans import Request, planned
from rallypoint.pytorch.device_memory.mappings import DeviceMemory, Location, Mappings
from rallypoint.pytorch.device_memory.queued_work import CallQueue, QueuedWork
from rallypoint.pytorch.device_memory.rank_order import combine, supports
from rallypoint.pytorch.formation import form
from rallypoint.pytorch.memory import arrived, as_bytes, check_tensor, warn_staged
from rallypoint.pytorch.tools import tensors_in
from rallypoint.pytorch.torch_calls import (
    Options,
    Tensor,
    Tensors,
    Work,
    check_sizes,
    collective_of_arrays,
    message_of_array,
)
from rallypoint.pytorch.torch_work import UNSET, DoneWork
from rallypoint.pytorch.versions import factor_of
from rallypoint.store.store import seconds_of

_DONE, _BY_HOST, _FAILED = range(1, 4)  # how the work went
_WORD_BYTES = 8

_said: set[str] = set()  # the line of the first group of this process whose memory is shared


class _Call(NamedTuple):
    """A collective, and this rank's part in it."""

    collective: Collective
    details: CallDetails
    dtype: torch.dtype
    timeout_s: float  # negative: the group's
    by_host: Callable[[], object]  # makes it in the host's memory
    ready: Any  # see DeviceMemory.mark
    request: Request | None  # None: no memory is shared
    blocks: list[Tensor]  # inputs and outputs of `request`, as bytes
    copies: list[tuple[Tensor, Tensor]]  # outputs among them, and where their contents belong


class DeviceCalls:
    """The calls of one rank.

    Collectives have a communicator of their own, which forms at the first one, and are made in
    the order of calls: by the caller, or by a thread if they are to continue in the background or
    others still do. Messages pass the group's own communicator.

    Args:
        group: whose calls these are.
        store: at which its members can form another one.
        memory_of: the memory of a device.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: dist.Store,
        memory_of: Callable[[torch.device], DeviceMemory],
    ) -> None:
        self._group, self._store, self._memory_of = group, store, memory_of
        self._turn = threading.RLock()  # of the rank's collectives
        self._maker = 0  # the thread that makes one
        self._mapped: Mappings | None = None
        self._inner: ProcessGroup | None = None
        self._has_formed = False
        self._page: CallPage | None = None  # None: no trial has shown that memory is shared
        self._queue = CallQueue()
        self._messages = DeviceMessages(group)

    def collective(
        self,
        collective: Collective,
        operation: str,
        source: Tensors,
        target: Tensors,
        opts: Options,
        results: Sequence[Any],
        *,
        root: int,
        in_place: bool,
    ) -> Work:
        """Make a collective call; arguments as Operations._call."""
        if self._maker == threading.get_ident() and not opts.asyncOp:
            raise InvalidArgumentError(
                f"{operation}: a signal handler cannot make a call in a GPU's memory amid another "
                "one; have it set a flag, and make the call afterwards"
            )
        is_root = root == self._group.own_rank
        inputs = [arrived(each) for each in tensors_in([source])]
        outputs = inputs if in_place else [arrived(each) for each in tensors_in([target])]
        first = (inputs or outputs)[0]
        if collective is Collective.BROADCAST and not is_root:
            inputs = []
        if collective is Collective.REDUCE and not is_root:
            outputs = []
        for each in inputs:
            check_tensor(operation, each, first)
        for each in outputs:
            check_tensor(operation, each, first, is_written=True)
        if not in_place:
            check_sizes(self._group.size(), collective, operation, source, target)
        self._group.check_member()
        op = opts.reduceOp if collective.reduces else None
        what, code = target if source is None else source, 0 if op is None else int(op.op)
        site = Site.of_caller() if opts.asyncOp else None
        details = CallDetails(operation, what, code, root, site=site)
        mappings = self._mappings(first.device)
        if not self._has_formed:  # afterwards, nothing here waits for calls that are under way
            with self._turn:
                self._form(first.device)
        flat = {id(each): as_bytes(each) for each in (*inputs, *outputs)}
        blocks = [[flat[id(each)] for each in side] for side in (inputs, outputs)]
        request = self._request(mappings, collective, details, first.dtype, op, blocks)
        options = SimpleNamespace(reduceOp=op, timeout=opts.timeout, asyncOp=False)
        given = collective, operation, source, target, options, ()
        by_host = partial(collective_of_arrays, self._members, *given, root=root, in_place=in_place)
        pairs = zip(blocks[1], outputs, strict=True)
        copies = [(each, to) for each, to in pairs if each.data_ptr() != to.data_ptr()]
        timeout_s = -1.0 if opts.timeout == UNSET else seconds_of(opts.timeout)
        ready, own = mappings.memory.mark(first.device), blocks[0] + blocks[1]
        call = _Call(
            collective, details, first.dtype, timeout_s, by_host, ready, request, own, copies
        )
        if not opts.asyncOp and self._queue.is_empty:
            self._make(call)
            return DoneWork(results)
        work = QueuedWork(partial(self._make, call), operation, results)
        self._queue.put(work)
        if opts.asyncOp:
            return work
        work.wait()
        return DoneWork(results)

    def message(self, operation: str, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin an "isend" or "irecv"; arguments as Operations._post."""
        tensor, sends = arrived(tensor), operation == "isend"
        check_tensor(operation.removeprefix("i"), tensor, tensor, is_written=not sends)
        if tensor.nbytes <= EAGER_BYTES:
            return message_of_array(self._group, operation, tensor, peer, tag)
        begin = self._messages.send if sends else self._messages.receive
        return begin(self._mappings(tensor.device), tensor, peer, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations that begin from now on may wait for a peer."""
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def abort(self) -> None:
        """End the waits of all ranks with an error, and leave."""
        self._end(ProcessGroup.abort)

    def shutdown(self) -> None:
        """Leave; peers that wait for this rank get an error."""
        self._end(ProcessGroup.destroy)

    def _end(self, leave: Callable[[ProcessGroup], None]) -> None:
        if self._inner is not None:
            leave(self._inner)
        self._queue.close()
        if self._mapped is not None:
            self._mapped.close()
        self._page = None

    def _request(
        self,
        mappings: Mappings,
        collective: Collective,
        details: CallDetails,
        dtype: torch.dtype,
        op: Any,  # noqa: ANN401 - torch's
        blocks: list[list[Tensor]],
    ) -> Request | None:
        """What this rank says of its part. An input that overlaps an output becomes a copy."""
        if self._page is None:
            return None
        reduce_op = ReduceOp(details.op)
        factor = factor_of(op) if op is not None and reduce_op is ReduceOp.PREMUL_SUM else 1.0
        call = collective, details.op, zlib.crc32(str(dtype).encode()), details.root
        while True:
            inputs, outputs = ([mappings.location(each) for each in side] for side in blocks)
            can_share = op is None or supports(dtype, reduce_op)
            can_share = can_share and all(each.is_shared for each in (*inputs, *outputs))
            request = Request(*call, can_share, factor, inputs, outputs)
            if not can_share or request.is_apart(self._group.own_rank, self._group.size()):
                return request
            blocks[0] = [each.clone() for each in blocks[0]]

    def _make(self, call: _Call) -> None:
        mappings = self._mappings()
        with self._turn, mappings.memory.stream():
            self._maker = threading.get_ident()
            try:
                call.ready.synchronize()
                if call.request is None or not self._make_in_memory(call, call.request):
                    call.by_host()
                    mappings.memory.synchronize()  # which the caller's stream does not
                    return
                for result, tensor in call.copies:
                    tensor.detach().copy_(result.view(call.dtype).view(tensor.shape))
                if call.copies:
                    mappings.memory.synchronize()
            except BaseException:
                mappings.close()  # a rank may be lost, whose memory would stay taken
                raise
            finally:
                self._maker = 0
        mappings.close_unused()

    def _make_in_memory(self, call: _Call, request: Request) -> bool:
        """Make a call in the ranks' memory; False, and nothing is done, if they cannot."""
        members, page, details = self._members, self._page, call.details
        members.check_member()
        assert page is not None, "there is a request"
        went = np.zeros(1, np.int64)  # how the work went, and whose it is; 0 on all but the worker
        error: Exception | None = None
        try:
            requests = page.arrive(request.packed())
            if requests is not None:
                outcome, error = self._work(call, [Request.unpacked(each) for each in requests])
                page.end()
                went[0] = outcome * members.size() + members.own_rank
            given = Collective.ALL_REDUCE, ReduceOp.MAX, 0, went, went
            if call.timeout_s < 0:
                code = members.run(*given)
            else:
                submitted = members.communicator.submit(
                    *given, timeout_s=call.timeout_s, in_place=True, waits=True
                )
                code = submitted if isinstance(submitted, int) else submitted.wait(-1.0)
            if code:
                raise details.error(members, code)
        except BaseException:
            members.interrupt()  # if it was not the engine, the others wait for this rank
            page.leave()
            raise
        outcome, worker = divmod(int(went[0]), members.size())
        if outcome == _FAILED:
            rank = self._group.ranks[worker]
            raise error or PeerError(
                f"{details.operation}: rank {rank} failed in its work for all ranks; its own error "
                "says why",
                rank=rank,
                operation=details.operation,
            )
        return outcome == _DONE

    def _work(self, call: _Call, requests: Sequence[Request]) -> tuple[int, Exception | None]:
        """Do the work of all ranks; returns how it went."""
        mappings, own_rank, done = self._mappings(), self._group.own_rank, 0
        own, steps = requests[own_rank], planned(requests)
        if steps is None:
            return _BY_HOST, None

        def view(rank: int, where: Location) -> Tensor:
            if rank != own_rank:
                return mappings.view(rank, where).view(call.dtype)
            for whole, flat in zip((*own.inputs, *own.outputs), call.blocks, strict=True):
                start = where.offset - whole.offset
                if whole.number == where.number and 0 <= start <= whole.nbytes - where.nbytes:
                    return flat[start : start + where.nbytes].view(call.dtype)
            raise AssertionError("blocks are in what this rank has told")

        try:
            with mappings.lock:
                viewed = [
                    (view(step.rank, step.target), [view(*each) for each in step.sources])
                    for step in steps
                    if step.target.nbytes
                ]
                for target, sources in viewed:
                    if not call.collective.reduces:
                        target.copy_(sources[0])
                    elif done and call.collective is Collective.ALL_REDUCE:
                        target.copy_(viewed[0][0])  # all have the same result
                    else:
                        factors = [each.factor for each in requests]
                        combine(sources, target, ReduceOp(call.details.op), factors)
                    done += 1
                mappings.memory.synchronize()
        except BaseException as error:
            with suppress(RuntimeError):  # what has begun must be over when this rank says so
                mappings.memory.synchronize()
            if isinstance(error, OSError | RuntimeError):
                return (_FAILED, error) if done else (_BY_HOST, None)
            raise
        return _DONE, None

    # The beginning, and what is open.

    @property
    def _members(self) -> ProcessGroup:
        """The group with the communicator of collectives."""
        assert self._inner is not None, "it has formed"
        return self._inner

    def _mappings(self, device: torch.device | None = None) -> Mappings:
        """The peers' memory, on the device of the first call."""
        if self._mapped is None:
            with self._turn:
                assert device is not None, "no call comes before the first one"
                self._mapped = self._mapped or Mappings(self._memory_of(device))
        return self._mapped

    def _form(self, device: torch.device) -> None:
        """Form the communicator, and try whether all ranks can use each other's memory."""
        if self._has_formed:
            return
        group = self._group
        self._inner = form(
            self._store,
            rank=group.own_rank,
            size=group.size(),
            timeout=group.timeout,
            name=f"{group.group_name}:{device.type}",
            global_ranks=[] if group.is_world else list(group.ranks),
        )
        reason = self._try(device)
        self._has_formed = True
        if group.own_rank == 0 and reason:
            warn_staged(device.type, group.group_name, reason)
        elif group.own_rank == 0 and not _said:
            _said.add(
                f"rallypoint: {group.size()} ranks share a GPU: calls with {device.type} tensors "
                "are made in its memory (RALLYPOINT_DEVICE_MEMORY=1)\n"
            )
            sys.stderr.writelines(_said)

    def _try(self, device: torch.device) -> str:
        """Why not; empty: they can."""
        mappings, members, own = self._mappings(device), self._members, self._members.own_rank
        word = torch.full((_WORD_BYTES,), own, dtype=torch.uint8, device=device)
        mappings.memory.mark(device).synchronize()
        most, page, file = Request.most_bytes(members.size()), None, -1
        if own == 0:
            file = memory_file("rallypoint-device", CallPage.size(members.size(), most))
        trials: list[Any] = [None] * members.size()
        trial = os.getpid(), file, mappings.memory.identity, mappings.location(word)
        all_gather_object(trials, trial, members)
        reasons = [""] * members.size()
        try:
            descriptor = os.open("/proc/{}/fd/{}".format(*trials[0]), os.O_RDWR)
            page = CallPage(descriptor, own, [pid for pid, *_ in trials], most)
            self._look_at_words(trials, mappings)
        except (OSError, RuntimeError) as error:
            reasons[own] = f"rank {members.ranks[own]} cannot use the other ranks' memory: {error}"
        all_gather_object(reasons, reasons[own], members)
        if file >= 0:
            os.close(file)
        reason = next(filter(None, reasons), "")
        self._page = None if reason else page
        return reason

    def _look_at_words(self, trials: Sequence[Any], mappings: Mappings) -> None:
        """Raise an error unless the other ranks' words are there, and have their numbers."""
        with mappings.lock:
            for peer, (_, _, identity, where) in enumerate(trials):
                rank = self._group.ranks[peer]
                if not where.is_shared:
                    raise OSError(f"that of rank {rank} cannot be shared")
                if identity != mappings.memory.identity:
                    raise OSError("they use several GPUs")
                is_own = peer == self._members.own_rank
                if not is_own and mappings.view(peer, where).tolist() != [peer] * _WORD_BYTES:
                    raise OSError(f"that of rank {rank} has other contents here")
