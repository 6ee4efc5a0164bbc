"""Events for torch's profiler, one per call: `rallypoint:all_reduce`, with sizes and group.

The names of the details are those of torch's own `record_param_comms`, which trace readers know.
Nothing here runs unless a profiler is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rallypoint.process_group.groups.group import ProcessGroup

_is_profiled = torch._C._autograd._profiler_enabled
_Event = torch._C._profiler._RecordFunctionFast
_NAMES = {  # names of functions that differ from those of the methods
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
}


def recorded(group: ProcessGroup, name: str, given: Sequence[Any], call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Call `call` and return its result, recorded as an event if a profiler runs.

    Args:
        name: the name of the method that was called.
        given: its arguments: outputs and inputs, or the tensors that are both.
    """
    if not _is_profiled():
        return call()
    name = _NAMES.get(name, name)
    outputs = list(_tensors(given[:1]))
    inputs = list(_tensors(given[1:2])) or outputs
    details = {
        "Collective name": name,
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "In msg size": sum(tensor.numel() * tensor.element_size() for tensor in inputs),
        "Out msg size": sum(tensor.numel() * tensor.element_size() for tensor in outputs),
        "Group size": group.size(),
        "Process Group Name": group.group_name,
        "Process Group Ranks": str(list(group.ranks)),
    }
    with _Event(f"rallypoint:{name}", [*inputs, *outputs], details):
        return call()


def _tensors(given: Iterable[Any]) -> Iterator[Any]:
    for each in given:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)
