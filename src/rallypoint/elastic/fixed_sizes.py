"""What PyTorch has that keeps the number of ranks with which it began, and cannot be in a State.

It would go on with wrong ranks after a loss, without an error. PyTorch is not imported here.
"""

from __future__ import annotations

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.elastic.update_participant import UpdateParticipant

_OURS = "use rallypoint.pytorch.elastic"
_FIXED = {  # by the name of the class
    "DistributedDataParallel": f"{_OURS}.DistributedDataParallel",
    "FullyShardedDataParallel": f"{_OURS}.HybridShard, with fully_shard",
    "FSDPModule": f"{_OURS}.HybridShard",
    "ZeroRedundancyOptimizer": "use the optimizer in it by itself",
    "DistributedSampler": "use elastic.Sampler",
    "PowerSGDState": "elastic DistributedDataParallel takes no hooks",
}


def refuse_fixed_size(name: str, value: object) -> None:
    """Refuse a value that keeps the number of ranks.

    Raises:
        InvalidArgumentError: it does; the message says what to use.
    """
    if isinstance(value, UpdateParticipant):
        return
    for kind in type(value).__mro__:
        instead = _FIXED.get(kind.__qualname__)
        if instead is not None and kind.__module__.startswith("torch."):
            raise InvalidArgumentError(
                f"{name} is a {kind.__name__}, which keeps the number of ranks with which it "
                f"began, so elastic.State cannot hold it; {instead}"
            )
