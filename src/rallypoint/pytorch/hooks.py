"""Communication hooks for DistributedDataParallel, which cannot read annotations in strings."""

from typing import Any

import torch
import torch.distributed as dist


def ddp_comm_hook(
    state: Any,  # noqa: ANN401
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients, in fewer bits if `state` says so, and without DDP's own pass over them.

    Otherwise, the ranks of a host read them where they lie (docs/decisions/061-buckets.md).

        model.register_comm_hook(torch.bfloat16, rallypoint.pytorch.ddp_comm_hook)

    Args:
        state: None, or the dtype in which gradients travel: torch.bfloat16 or torch.float16. They
            are rounded, averaged as float32, and rounded again, so that float16 does not overflow
            where the average does not. If the model's group is not the default one, a pair of the
            group and that.
        bucket: gradients, side by side.
    """
    group, dtype = state if isinstance(state, tuple) else (None, state)
    gradients = bucket.buffer()
    sent = gradients if dtype in (None, gradients.dtype) else gradients.to(dtype)
    ours = dist.group.WORLD if group is None else group
    if sent is gradients and hasattr(ours, "share_bucket"):
        ours.share_bucket(gradients)
    work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=group, async_op=True)

    def received(future: Any) -> Any:  # noqa: ANN401
        result = future.value()[0]  # raises what went wrong
        return result if result is gradients else gradients.copy_(result)

    return work.get_future().then(received)
