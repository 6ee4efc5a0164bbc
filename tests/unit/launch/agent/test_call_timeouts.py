"""Who is at fault when calls time out."""

from __future__ import annotations

import pytest

from rallypoint.launch.agent.call_timeouts import GRACE_S, TimedOutCalls


@pytest.mark.parametrize(
    ("reports", "at_fault"),
    [
        ([(0, 2, ()), (1, 2, ())], [2]),
        ([(0, 1, ()), (1, 2, ())], [2]),  # 0 waited for 1, which waited for 2
        ([(0, 1, ()), (1, 1, ())], [2]),  # all were told of the first timeout
        ([(0, 2, ()), (1, 0, ()), (2, 1, ())], []),  # 2 was slow, and is there by now
        ([(0, 1, (0, 1))], [1]),  # in a call of two ranks: 2 had no part in it
        ([(0, 1, (0, 1)), (1, 0, (0, 1))], []),
        ([(0, 7, ())], [1, 2]),  # no such rank
    ],
)
def test_who_reports_nothing_is_at_fault(
    reports: list[tuple[int, int, tuple[int, ...]]], at_fault: list[int]
) -> None:
    calls = TimedOutCalls(3)
    assert calls.judge_at is None
    for rank, culprit, members in reports:
        calls.report(rank, culprit, members, 5.0 + rank / 10)
    assert calls.judge_at == 5.0 + GRACE_S
    assert calls.judge() == at_fault
    calls.report(1, 2, (), 9.0)
    assert calls.judge_at is None, "a round is judged once"
