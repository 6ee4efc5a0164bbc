"""The rounds of a single node."""

from __future__ import annotations

import selectors

import pytest

from rallypoint.launch.job import Job
from rallypoint.launch.rounds.source import LocalRounds
from rallypoint.rendezvous.job.gathering import FREE_SHORT_LIVES
from rallypoint.rendezvous.job.reports import NodeReport, RankFailure


def test_it_says_why_workers_wait_for_their_places(capsys: pytest.CaptureFixture[str]) -> None:
    """Newcomers are lost as soon as they have joined, time after time."""
    rounds = LocalRounds(
        Job(
            command=("train",),
            local_world_size=2,
            max_restarts=100,
            run_id="job",
            host="here",
            environ={},
        )
    )
    try:
        with selectors.DefaultSelector() as selector:
            rounds.open(selector)
        lost = RankFailure(rank=1, node_rank=0, text="rank 1 was killed", is_newcomer=True)
        for number in range(FREE_SHORT_LIVES + 2):
            rounds.tell(
                NodeReport(round=number, has_begun=True, survivors=1, ready=1, causes=(lost,))
            )
            rounds.settle()
        newest = rounds._coordinator.round
        rounds.tell(NodeReport(round=newest, has_begun=True, is_over=False, ready=1))
    finally:
        rounds.close()
    assert "workers that joined were lost soon after it" in capsys.readouterr().err
