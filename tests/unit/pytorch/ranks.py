"""Ranks of a PyTorch process group as threads of one process, which met at a HashStore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def run_ranks(ranks: int, main: Callable[[Any], Any], *, timeout_s: float = 200) -> list[Any]:
    """Run `main(group)` on each rank; return the results, or raise the error of the lowest rank."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from rallypoint.pytorch.backend import create

    store = dist.HashStore()
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        options = _DistributedBackendOptions()
        options.store = dist.PrefixStore("test", store)
        options.group_rank, options.group_size = rank, ranks
        options.timeout = timedelta(seconds=timeout_s)
        options.group_id, options.global_ranks_in_group = "test", []
        group = None
        try:
            group = create(options, None)
            results[rank] = main(group)
        except BaseException as error:
            errors[rank] = error
            if group is not None:
                group.abort()
        else:
            group.shutdown()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results
