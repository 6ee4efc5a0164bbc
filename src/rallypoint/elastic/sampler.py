"""Which samples a rank takes at a step: the same global batch, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.elastic.membership import membership
from rallypoint.process_group.groups.default import get_rank, get_world_size

Indices = numpy.typing.NDArray[numpy.int64]


class Sampler:
    """Shuffled samples, by step.

    Every epoch is a permutation of all samples, drawn from the seed and the epoch's number. The
    global batch of a step depends on nothing else. So no sample is lost or taken twice when ranks
    come and go, and a retried step takes the same samples. A rank takes a contiguous share of the
    batch; the last batch of an epoch ends with the first samples of the next one.

    Divide sums over the samples by `global_batch`, not by the number of ranks:

        loss = criterion(model(inputs), labels).sum() / sampler.global_batch

    Args:
        samples: how many there are.
        global_batch: how many of them all ranks take together in one step.
        seed: of the permutations.
        weights: each rank's share of the batch, in proportion; equal unless given. They must be
            as many as ranks.

    Raises:
        InvalidArgumentError: a number is not positive, or a weight is negative.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        *,
        seed: int = 0,
        weights: Sequence[float] | None = None,
    ) -> None:
        if samples < 1 or global_batch < 1:
            raise InvalidArgumentError(
                f"samples={samples} and global_batch={global_batch} must be positive"
            )
        if weights is not None and (min(weights, default=-1) < 0 or sum(weights) <= 0):
            raise InvalidArgumentError(f"weights={list(weights)} must be positive shares")
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self.weights = weights
        self._epoch = -1
        self._order: Indices = numpy.empty(0, numpy.int64)

    def indices(self, step: int, rank: int | None = None, world_size: int | None = None) -> Indices:
        """The samples of a rank at a step; by default, of this rank among those that train.

        Returns:
            An array of shape (share,) of sample numbers; empty if there are more ranks than
            samples in a batch.

        Raises:
            InvalidArgumentError: there is no such rank (an idle one of `Replicas` takes no
                samples), or there are not as many weights as ranks.
        """
        replicas = membership().replicas
        if rank is None:
            rank = get_rank() if replicas is None else replicas.rank
        if world_size is None:
            world_size = get_world_size() if replicas is None else replicas.size
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(f"rank={rank} is not one of {world_size} ranks that train")
        first, last = self._share(rank, world_size)
        begin = step * self.global_batch
        return self._take(begin + first, begin + last)

    def epoch(self, step: int) -> int:
        """The epoch of a step's first sample."""
        return step * self.global_batch // self.samples

    def _share(self, rank: int, size: int) -> tuple[int, int]:
        if self.weights is None:
            return self.global_batch * rank // size, self.global_batch * (rank + 1) // size
        if len(self.weights) != size:
            raise InvalidArgumentError(
                f"there are {len(self.weights)} weights, but {size} ranks; give new weights in "
                "on_reset"
            )
        ends = numpy.cumsum([0.0, *self.weights]) * self.global_batch / sum(self.weights)
        return round(ends[rank]), round(ends[rank + 1])

    def _take(self, begin: int, end: int) -> Indices:
        parts = []
        while begin < end:
            epoch, offset = divmod(begin, self.samples)
            count = min(end - begin, self.samples - offset)
            parts.append(self._permutation(epoch)[offset : offset + count])
            begin += count
        return numpy.concatenate(parts) if parts else numpy.empty(0, numpy.int64)

    def _permutation(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            self._order = numpy.random.default_rng((self.seed, epoch)).permutation(self.samples)
            self._epoch = epoch
        return self._order
