"""Shards a data set by rank and epoch, as torch.utils.data.DistributedSampler does."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.groups.default import get_rank, get_world_size


class DistributedSampler:
    """The indices of a data set that belong to one rank, in a new order each epoch.

    Every rank gets equally many: without `drop_last` some indices are repeated to make their number
    divisible; with it some are dropped. Ranks take turns (rank, rank + size, ...), so a global
    batch is the same set of indices for any number of ranks. Call `set_epoch` before each epoch, or
    the order repeats.

    Args:
        dataset: anything with a length, or the length.
        num_replicas, rank: the default group's unless given.
        shuffle: whether to permute; the permutation depends only on seed and epoch.

    Raises:
        InvalidArgumentError: `rank` is not one of the replicas.
        NotInitializedError: there is no default group, and num_replicas or rank is not given.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidArgumentError(
                f"rank={self.rank} is not one of num_replicas={self.num_replicas}; "
                f"it must be 0 to {self.num_replicas - 1}"
            )
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        rounding = 0 if drop_last else self.num_replicas - 1
        self.num_samples = (self._length + rounding) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self.epoch = epoch

    def indices(self) -> NDArray[np.int64]:
        """This rank's indices of the epoch, shape (num_samples,)."""
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self._length)
        else:
            order = np.arange(self._length)
        total = self.num_samples * self.num_replicas
        mine: NDArray[Any] = np.resize(order, total)[self.rank :: self.num_replicas]
        return mine.astype(np.int64)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return self.num_samples
