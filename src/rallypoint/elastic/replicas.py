"""Ranks that hold the state in shards, in replicas that come and go as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.errors import (
    AlreadyInitializedError,
    InvalidArgumentError,
    StateLostError,
)
from rallypoint.elastic.agreement import (
    NO_SHARD,
    Holding,
    Position,
    RankReport,
    Settlement,
    arrange,
)
from rallypoint.elastic.membership import FROM_CHECKPOINT, LOSSES, membership
from rallypoint.process_group.formation.subgroups import reform_group, unformed_group
from rallypoint.process_group.groups.group import ProcessGroup

_IDLE = "this rank is idle: it waits for others with which it would be a whole replica"


class Replicas:
    """Replicas of a state in shards: hybrid sharding, whose replicas are elastic.

        dist.init_process_group()
        replicas = elastic.Replicas(shards=2)       # of 4 ranks: two replicas of two ranks

    Each rank holds one shard for life. When a rank is lost, a spare or a new process takes its
    shard, and gets that from a rank of another replica which holds the same one. If there is none
    to take it, the rest of its replica is idle: it agrees to the others' updates, and waits for
    ranks to join. Its function is not called meanwhile; if the training ends then, it returns None.

    All ranks create it after `init_process_group` and before `elastic.State`; newcomers as well. At
    the start, ranks with the same shard get the state of the first of them.

    Args:
        shards: how many ranks hold the state together.

    Attributes:
        shard: the number of the shard that this rank holds.
        shard_group: the ranks of this replica, in the order of their shards.
        replicate_group: the ranks with the same shard, in the order of their replicas.
        group: all ranks that train, in the order of `rank`.
        position: this rank's number and its replica's, and how many there are of both.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: there are fewer ranks than shards, or other ranks have other numbers
            of shards.
        AlreadyInitializedError: there is one in this process.
        StateLostError: all ranks that held one of the shards were lost.
        PeerLostError, RevokedError, StoreError: ranks were lost, and the launcher offers no other
            round.
    """

    shard_group: ProcessGroup
    replicate_group: ProcessGroup

    def __init__(self, shards: int) -> None:
        part = membership()
        part.begin()
        if shards < 1:
            raise InvalidArgumentError(f"shards={shards} must be positive")
        if part.replicas is not None:
            raise AlreadyInitializedError("this process has its elastic.Replicas already")
        self.shards, self.shard = shards, NO_SHARD
        self.position = Position(-1, 0, -1, 0)
        self.group = self._whole = part.group
        part.enroll()
        part.replicas = self
        newcomer = RankReport(is_member=False, committed=0, prepared=int(part.is_newcomer))
        try:
            try:
                part.settled = part.exchange(newcomer)
            except LOSSES as error:
                error.__traceback__ = None
                part.settled = part.go_on(newcomer, error)
        except BaseException:
            part.replicas = None
            raise

    @property
    def rank(self) -> int:
        """This rank's number among those that train, as `Sampler` takes it; -1 if it is idle."""
        return self.position.rank

    @property
    def size(self) -> int:
        """How many ranks train."""
        return self.position.size

    @property
    def is_idle(self) -> bool:
        """Whether this rank waits for others, with which it would be a whole replica."""
        return self.position.rank < 0

    def is_of(self, group: ProcessGroup | None) -> bool:
        """For `Membership`: whether it is that default group's."""
        return self._whole is group

    def form(
        self, settlement: Settlement, reports: Sequence[RankReport], held: Sequence[int]
    ) -> Settlement:
        """For `Membership`: take this rank's place in a new round, all of whose ranks call it.

        Args:
            held: the shard that each rank holds.

        Returns:
            The settlement of the ranks with this one's shard; of nobody, if it is idle.
        """
        holdings = [
            Holding(shard, each.is_member) for shard, each in zip(held, reports, strict=True)
        ]
        arrangement = arrange(holdings, self.shards)
        if arrangement.lost:
            raise StateLostError(
                f"all ranks that held shard {arrangement.lost[0]} of the state were lost, "
                f"{FROM_CHECKPOINT}"
            )
        replicas = arrangement.replicas
        if not replicas:
            raise InvalidArgumentError(
                f"{len(held)} ranks cannot hold {self.shards} shards; start at least as many"
            )
        whole = self._whole
        training = [rank for replica in replicas for rank in replica]
        if self.shard == NO_SHARD:
            self._take(arrangement.shards[whole.own_rank], whole)
        self.group = whole
        if whole.own_rank not in training:
            self.position = Position(-1, len(training), -1, len(replicas))
            for group in (self.shard_group, self.replicate_group, self._training):
                group.withdraw(_IDLE)
            return Settlement(settlement.committed, (), (), settlement.saves)
        rank = training.index(whole.own_rank)
        number = rank // self.shards
        self.position = Position(rank, len(training), number, len(replicas))
        peers = [replica[self.shard] for replica in replicas]
        reform_group(self.shard_group, whole.world, replicas[number])
        reform_group(self.replicate_group, whole.world, peers)
        if training != list(range(whole.size())):
            reform_group(self._training, whole.world, training)
            self.group = self._training
        return settlement.among(peers)

    def _take(self, shard: int, whole: ProcessGroup) -> None:
        """For life: what is made of the groups may know the shard and their number."""
        self.shard = shard
        ranks = range(self.shards)
        self.shard_group = unformed_group(whole.world, ranks, shard, "of a replica")
        self.replicate_group = unformed_group(whole.world, [whole.own_rank], 0, "of a shard")
        self._training = unformed_group(whole.world, [whole.own_rank], 0, "of ranks that train")
