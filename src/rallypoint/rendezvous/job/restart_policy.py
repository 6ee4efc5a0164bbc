"""Whether a failed round is restarted, or the job ends or gives up: one function, from facts.

Failures are charged, once for the job; joining and leaving is free. Pure.
"""

from __future__ import annotations

from rallypoint.base.record import Record
from rallypoint.rendezvous.job.reports import Outcome, RankFailure


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
    """What comes next, and why.

    Attributes:
        outcome: how the job ends; None: there is another round.
        is_restart: after failures of workers; `is_free`: it uses up no restart.
    """

    reason: str
    outcome: Outcome | None = None
    is_restart: bool = False
    is_free: bool = False


def judge(end: RoundEnd) -> AfterRound:  # noqa: PLR0911, PLR0912 - one line for each rule
    """What comes after this round."""
    root = end.root
    left = end.max_restarts - end.restarts_used
    if end.succeeded:
        return AfterRound("every worker succeeded", Outcome.SUCCEEDED)
    if end.unkillable:
        return AfterRound(
            "processes that cannot be killed may still hold resources that a new round needs",
            Outcome.GIVEN_UP,
        )
    # Workers that are being stopped are lost to others, which is no failure of theirs.
    has_failed = root is not None and not (root.is_secondary and end.was_whole)
    if end.stop_asked and not (has_failed and left <= 0):
        return AfterRound(end.stop_asked, Outcome.STOPPED)
    if end.nodes_lost:  # a lost node is no failure of the program, and its echoes are none either
        lost = f"{', '.join(end.nodes_lost)} lost"
        if end.nodes_left >= end.min_nodes:
            return AfterRound(f"{lost}; the others continue")
        needed = f"{lost}, {end.nodes_left} left, {end.min_nodes} needed"
        return AfterRound(needed, Outcome.GIVEN_UP if end.is_fixed else None)
    if end.interrupted:  # as if a node had been lost, but it is back
        return AfterRound(end.interrupted)
    if end.nodes_came and root is None:
        return AfterRound(f"{', '.join(end.nodes_came)} joined")
    if root is None and end.survivors:
        return AfterRound("no node was lost, and all continue")
    if root is None:
        return AfterRound("its workers ended for an unknown reason", Outcome.GIVEN_UP)
    if root.is_startup and not end.survivors:
        return AfterRound(
            "it failed before its own code ran, so a retry would fail in the same way",
            Outcome.GIVEN_UP,
        )
    is_known = root.is_charged and all(
        cause.is_charged or cause.is_secondary for cause in end.causes
    )
    if is_known and end.restarts_used:
        reason = f"restart {end.restarts_used} of {end.max_restarts}, for the same loss"
        return AfterRound(reason, is_restart=True, is_free=True)
    if left > 0:
        return AfterRound(f"restart {end.restarts_used + 1} of {end.max_restarts}", is_restart=True)
    if end.survivors:
        return AfterRound("the others continue")
    if end.max_restarts:
        return AfterRound(f"all {end.max_restarts} restarts are used up", Outcome.GIVEN_UP)
    return AfterRound("no restarts are allowed (set --max-restarts)", Outcome.GIVEN_UP)
