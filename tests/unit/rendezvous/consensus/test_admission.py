"""What a node that was started with other options than the rest has to change."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.consensus.peers import refusal_reason
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import Join, NodeReport
from rallypoint.rendezvous.job.round import Endpoint, Member

ME = Member(key="a", host="a", local_world_size=1)
JOIN = Join(run_id="job", report=NodeReport(), min_nodes=2, max_nodes=4, member=ME)


def setup(*, is_fixed: bool) -> Setup:
    limits = Limits(min_nodes=4 if is_fixed else 2, max_nodes=4, is_fixed=is_fixed)
    return Setup(
        me=ME, run_id="job", limits=limits, endpoints=(Endpoint(host="a", port=1),), attempt=3
    )


@pytest.mark.parametrize(
    ("is_fixed", "changes", "told"),
    [
        (False, {}, ""),
        (False, {"run_id": "other"}, "the job is 'job', not 'other'; pass the same --rdzv-id"),
        (
            False,
            {"attempt": 2},
            "this node was started for attempt 2 of the job, which is now in attempt 3; end the "
            "processes left from the older attempt",
        ),
        (
            False,
            {"min_nodes": 1},
            "--nnodes is 2:4 in the job but 1:4 on this node; pass the same value",
        ),
        (True, {"min_nodes": 4}, ""),
        (True, {"max_nodes": 3}, "--nnodes is 3 here and 4 on node 0; pass the same value"),
        (
            True,
            {"run_id": "other"},
            "the job at a:1 is 'job', not 'other'; pass the same --rdzv-id on all nodes, and each "
            "job its own --master-port",
        ),
    ],
)
def test_options_that_differ(is_fixed: bool, changes: dict[str, Any], told: str) -> None:
    join = JOIN.__replace__(**{"attempt": 3, **changes})
    assert refusal_reason(setup(is_fixed=is_fixed), join) == told
