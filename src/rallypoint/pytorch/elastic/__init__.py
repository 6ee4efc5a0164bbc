"""PyTorch's parallel training for `rallypoint.elastic`: it continues when ranks are lost or join.

DistributedDataParallel    every rank has the whole model
shard_mesh, HybridShard    ranks share it under fully_shard; replicas of these come and go
"""

from rallypoint.pytorch.elastic.data_parallel import DistributedDataParallel
from rallypoint.pytorch.elastic.hybrid_shard import HybridShard, shard_mesh

__all__ = ["DistributedDataParallel", "HybridShard", "shard_mesh"]
