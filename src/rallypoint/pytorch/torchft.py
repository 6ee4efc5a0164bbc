"""A process group for torchft, whose Manager reconfigures it each time replicas come or go.

    from rallypoint.pytorch.torchft import ProcessGroupRallypoint
    manager = torchft.Manager(pg=ProcessGroupRallypoint(timeout=timedelta(seconds=30)), ...)

Each replica may have its own launcher, which may restart it. No other module imports torchft.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torchft.process_group import ProcessGroupWrapper

from rallypoint.pytorch.backend import create


class ProcessGroupRallypoint(ProcessGroupWrapper):
    """Groups of Rallypoint's engine, one at a time; `timeout` is that of forming and of calls."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name under which torchft registers it."""
        return "torchft-rallypoint"

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long calls that begin from now on may wait for a peer."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group; the other replicas are notified."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = _DistributedBackendOptions()
        options.store = store
        options.group_rank, options.group_size = rank, world_size
        options.timeout = self._timeout
        # torchft-nightly's name for it, and that of torchft 0.2
        quorum = self._uuid if hasattr(self, "_uuid") else self._quorum_id
        options.group_id = f"torchft:{quorum}:{self._group_rank}"
        options.global_ranks_in_group = []
        return create(options, None)
