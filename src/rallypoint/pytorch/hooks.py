"""Communication hooks for DistributedDataParallel, which cannot evaluate annotations that are
strings.
"""

from typing import Any

import torch
import torch.distributed as dist


def ddp_comm_hook(
    state: Any,  # noqa: ANN401
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients, in fewer bits if `state` says so, without DDP's own pass over them.

    In full precision, the ranks of a host read them in place (docs/decisions/061-buckets.md).

        model.register_comm_hook(torch.bfloat16, rallypoint.pytorch.ddp_comm_hook)

    Args:
        state: None, or the dtype in which gradients travel: torch.bfloat16 or torch.float16. They
            are rounded, averaged as float32, and rounded again, so that float16 overflows only if
            the average does. If the model's group is not the default one: a pair of the group and
            one of these.
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
        result = future.value()[0]  # raises the error, if any
        return result if result is gradients else gradients.copy_(result)

    return work.get_future().then(received)
