"""Communication hooks for DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def ddp_comm_hook(state: Any, bucket: Any) -> Any:  # noqa: ANN401 - of torch
    """Average gradients, in fewer bits if `state` says so.

        model.register_comm_hook(torch.bfloat16, rallypoint.pytorch.ddp_comm_hook)

    Args:
        state: None, or the dtype in which gradients travel: torch.bfloat16 or torch.float16. Items
            are combined as float32 and rounded once, and averaged before they are rounded, so that
            float16 does not overflow where the average does not.
    """
    gradients = bucket.buffer()
    if state is None or state == gradients.dtype:
        work = dist.all_reduce(gradients, dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
    small = gradients.to(state)
    work = dist.all_reduce(small, dist.ReduceOp.AVG, async_op=True)

    def widen(_: object) -> Any:  # noqa: ANN401
        gradients.copy_(small)
        return gradients

    return work.get_future().then(lambda future: (future.value(), widen(future))[1])
