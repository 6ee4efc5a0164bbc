"""Whether a failed round is restarted, or the job ends or gives up: one function, from facts.

Failures are charged, once for the job; joining and leaving is free. Pure.
"""

from __future__ import annotations

from enum import Enum

from rallypoint.base.record import Record


class RankFailure(Record, kw_only=True):
    """One worker's failure, in a line.

    Attributes:
        is_charged: it belongs to the loss that ended the round before.
        is_newcomer: it had joined others, which continued, with this round.
    """

    rank: int
    node_rank: int
    text: str
    is_secondary: bool = False
    is_startup: bool = False
    is_charged: bool = False
    is_newcomer: bool = False


class Next(Enum):
    """What comes after a round."""

    SUCCEED = "succeed"
    RESTART = "restart"
    RESIZE = "resize"
    STOP = "stop"
    GIVE_UP = "give up"


class RoundEnd(Record, kw_only=True):
    """All facts that matter when a round is over on every remaining node.

    Attributes:
        causes: in the order in which they were reported.
        stop_asked: what asked to end the job; empty: no request.
        was_whole: no failure had been reported by then.
        survivors: how many workers are still running, and can continue.
    """

    succeeded: bool = False
    causes: tuple[RankFailure, ...] = ()
    restarts_used: int = 0
    max_restarts: int = 0
    stop_asked: str = ""
    was_whole: bool = False
    nodes_left: int = 1
    nodes_lost: tuple[str, ...] = ()
    nodes_came: tuple[str, ...] = ()
    interrupted: str = ""
    min_nodes: int = 1
    is_fixed: bool = True
    unkillable: int = 0
    survivors: int = 0

    @property
    def root(self) -> RankFailure | None:
        """The first failure that is not an echo, if there is one."""
        return min(self.causes, key=lambda cause: cause.is_secondary, default=None)


class AfterRound(Record):
    """What comes next, and why; `is_free`: it uses up no restart."""

    next: Next
    reason: str
    is_free: bool = False


def judge(end: RoundEnd) -> AfterRound:  # noqa: PLR0911, PLR0912 - one line for each rule
    """What comes after this round."""
    root = end.root
    left = end.max_restarts - end.restarts_used
    if end.succeeded:
        return AfterRound(Next.SUCCEED, "every worker succeeded")
    if end.unkillable:
        return AfterRound(
            Next.GIVE_UP,
            "processes that cannot be killed may still hold resources that a new round needs",
        )
    # Workers that are being stopped are lost to others, which is no failure of theirs.
    has_failed = root is not None and not (root.is_secondary and end.was_whole)
    if end.stop_asked and not (has_failed and left <= 0):
        return AfterRound(Next.STOP, end.stop_asked)
    if end.nodes_lost:  # a lost node is no failure of the program, and its echoes are none either
        lost = f"{', '.join(end.nodes_lost)} lost"
        if end.nodes_left >= end.min_nodes:
            return AfterRound(Next.RESIZE, f"{lost}; the others continue")
        needed = f"{lost}, {end.nodes_left} left, {end.min_nodes} needed"
        return AfterRound(Next.GIVE_UP if end.is_fixed else Next.RESIZE, needed)
    if end.interrupted:  # as if a node had been lost, but it is back
        return AfterRound(Next.RESIZE, end.interrupted)
    if end.nodes_came and root is None:
        return AfterRound(Next.RESIZE, f"{', '.join(end.nodes_came)} joined")
    if root is None and end.survivors:
        return AfterRound(Next.RESIZE, "no node was lost, and all continue")
    if root is None:
        return AfterRound(Next.GIVE_UP, "its workers ended for an unknown reason")
    if root.is_startup and not end.survivors:
        return AfterRound(
            Next.GIVE_UP, "it failed before its own code ran, so a retry would fail in the same way"
        )
    is_known = root.is_charged and all(
        cause.is_charged or cause.is_secondary for cause in end.causes
    )
    if is_known and end.restarts_used:
        reason = f"restart {end.restarts_used} of {end.max_restarts}, for the same loss"
        return AfterRound(Next.RESTART, reason, is_free=True)
    if left > 0:
        return AfterRound(Next.RESTART, f"restart {end.restarts_used + 1} of {end.max_restarts}")
    if end.survivors:
        return AfterRound(Next.RESIZE, "the others continue")
    if end.max_restarts:
        return AfterRound(Next.GIVE_UP, f"all {end.max_restarts} restarts are used up")
    return AfterRound(Next.GIVE_UP, "no restarts are allowed (set --max-restarts)")
