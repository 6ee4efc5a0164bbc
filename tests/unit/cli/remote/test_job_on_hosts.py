"""What the starter does when hosts answer, end or are lost, as stories without any host."""

from __future__ import annotations

import pytest

from rallypoint.cli.remote.job_on_hosts import (
    AT_ONCE_S,
    CONNECT_S,
    FLUSH_S,
    LAST_CALL_S,
    LEAVE_S,
    MARGIN_S,
    OTHERS_S,
    Action,
    Drop,
    JobOnHosts,
    LetGo,
    Say,
    SendSignal,
    StartLauncher,
)
from rallypoint.launch.agent.node import SIGINT, SIGTERM

NAMES = ("a", "b", "c", "d")
SHUTDOWN_S = 30.0
POINTS = ("a:1", "b:2", "c:3")


def begun(count: int, fewest: int | None = None) -> JobOnHosts:
    """A job that runs on all its hosts, at 1 s."""
    job = connecting(count, fewest)
    for host in range(count):
        job.greeted(host, host + 1, 1.0)
    return job


def connecting(count: int, fewest: int | None = None) -> JobOnHosts:
    names = NAMES[:count]
    least = count if fewest is None else fewest
    return JobOnHosts(names, fewest=least, shutdown_timeout_s=SHUTDOWN_S, now=0.0)


def without_words(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Say)]


def words(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Say)]


def test_it_begins_when_all_are_there_and_meets_at_the_first_three() -> None:
    job = connecting(4)
    for host in (3, 1, 0):
        assert job.greeted(host, host + 1, 1.0) == []
    actions = job.greeted(2, 3, 2.0)
    assert without_words(actions) == [StartLauncher(host, POINTS) for host in range(4)]
    assert words(actions) == ["starting on 4 hosts, rendezvous at a:1, b:2, c:3"]


@pytest.mark.parametrize("count", [1, 3])
def test_all_succeed(count: int) -> None:
    job = begun(count)
    for host in range(count):
        assert not job.is_over
        assert job.ended(host, 0, 2.0) == []
    assert (job.is_over, job.status) == (True, 0)


def test_a_host_that_cannot_be_reached_ends_it_before_anything_ran() -> None:
    job = connecting(3)
    job.greeted(0, 1, 1.0)
    actions = job.failed(1, "no such host", 2.0)
    assert actions == [Say("cannot start on b: no such host"), Drop((0, 2))]
    assert job.ended(0, None, 2.0) == []
    assert job.failed(2, "it was dropped", 2.0) == []
    assert (job.is_over, job.status) == (True, 1)


def test_silence_is_a_failure_too() -> None:
    job = connecting(2)
    job.greeted(1, 2, 1.0)
    assert job.wake_at == CONNECT_S
    actions = job.tick(CONNECT_S)
    assert actions[0] == Drop((0,))
    assert words(actions) == [f"cannot start on a: it did not answer within {CONNECT_S:g} s"]


def test_with_a_fewest_it_begins_without_those_that_fail_or_tarry() -> None:
    job = connecting(4, fewest=2)
    job.greeted(1, 2, 1.0)
    assert words(job.failed(0, "no such host", 1.5)) == ["continuing without a: no such host"]
    assert job.greeted(3, 4, 2.0) == []
    assert job.wake_at == 2.0 + LAST_CALL_S
    points = ("b:2", "d:4")
    assert without_words(job.tick(2.0 + LAST_CALL_S)) == [
        StartLauncher(1, points),
        StartLauncher(3, points),
    ]
    assert job.greeted(2, 3, 9.0) == [StartLauncher(2, points)]  # late, but welcome


def test_nobody_is_waited_for_once_the_job_has_ended() -> None:
    job = connecting(3, fewest=2)
    job.greeted(0, 1, 1.0)
    job.greeted(1, 2, 1.0)
    job.tick(1.0 + LAST_CALL_S)
    job.ended(0, 0, 8.0)
    assert job.ended(1, 0, 8.0) == [Drop((2,))]
    assert job.failed(2, "it was dropped", 8.0) == []
    assert (job.is_over, job.status) == (True, 0)


def test_one_that_failed_leaves_the_others_time_to_tell_why() -> None:
    job = begun(3)
    assert job.ended(1, 1, 2.0) == []
    assert job.wake_at == 2.0 + OTHERS_S
    job.ended(0, 1, 2.1)
    job.ended(2, 1, 2.2)
    assert (job.is_over, job.status) == (True, 1)


def test_those_that_do_not_end_by_themselves_are_asked_to() -> None:
    job = begun(3)
    job.ended(1, 1, 2.0)
    actions = job.tick(2.0 + OTHERS_S)
    assert words(actions) == ["ending the job, because only 2 of the 3 required hosts are left"]
    assert without_words(actions) == [SendSignal((0, 2), SIGTERM)]
    let_go_at = 2.0 + OTHERS_S + SHUTDOWN_S + MARGIN_S
    assert job.wake_at == let_go_at
    assert job.tick(let_go_at) == [LetGo((0, 2))]
    assert job.tick(let_go_at + LEAVE_S) == [Drop((0, 2))]
    job.ended(0, None, 60.0)
    job.ended(2, 143, 60.0)
    assert (job.is_over, job.status) == (True, 1)


@pytest.mark.parametrize(
    ("status", "told", "expected"),
    [
        (None, "lost the connection to b", 1),
        (2, "the launcher on b ended with status 2", 2),
        (137, "the launcher on b ended with status 137", 1),
    ],
)
def test_without_a_host_that_it_needs_it_ends_at_once(
    status: int | None, told: str, expected: int
) -> None:
    job = begun(3)
    actions = job.ended(1, status, 2.0)
    assert words(actions)[0] == told
    assert without_words(actions) == [SendSignal((0, 2), SIGTERM)]
    assert job.ended(0, 143, 3.0) == []
    assert job.ended(2, 143, 3.0) == []
    assert (job.is_over, job.status) == (True, expected)


def test_one_that_was_stopped_has_told_why_and_the_others_end_by_themselves() -> None:
    """`rallypoint stop` stops the launcher that it asks, which ends the job."""
    job = begun(3)
    assert job.ended(1, 143, 2.0) == []
    assert job.wake_at == 2.0 + OTHERS_S
    job.ended(0, 1, 2.1)
    job.ended(2, 1, 2.2)
    assert (job.is_over, job.status) == (True, 1)


@pytest.mark.parametrize("status", [None, 143])
def test_with_enough_others_it_goes_on(status: int | None) -> None:
    job = begun(3, fewest=2)
    assert len(words(job.ended(0, status, 2.0))) == (status is None)
    job.ended(1, 0, 9.0)
    job.ended(2, 3, 9.0)  # a spare: nothing ran there
    assert (job.is_over, job.status) == (True, 0)


def test_a_failure_of_one_is_the_failure_of_all() -> None:
    job = begun(3, fewest=2)
    job.ended(0, 1, 2.0)
    job.ended(1, 0, 2.0)
    job.ended(2, 0, 2.0)
    assert job.status == 1


def test_a_success_that_somebody_reads_slowly_has_its_time() -> None:
    job = begun(2)
    job.ended(0, 0, 2.0)
    assert job.wake_at == CONNECT_S  # nothing to do then
    assert job.tick(CONNECT_S) == []
    assert job.wake_at == 2.0 + SHUTDOWN_S + FLUSH_S
    assert job.tick(2.0 + SHUTDOWN_S + FLUSH_S) == [LetGo((1,))]


def test_a_signal_goes_to_all_and_its_number_is_the_status() -> None:
    job = begun(2)
    assert job.signalled(SIGINT, 2.0, stops=True) == [SendSignal((0, 1), SIGINT)]
    assert job.wake_at == 2.0 + SHUTDOWN_S + MARGIN_S
    assert job.ended(0, 130, 3.0) == []
    assert job.signalled(SIGINT, 4.0, stops=True) == [SendSignal((1,), SIGINT)]
    assert job.wake_at == 4.0 + AT_ONCE_S
    assert job.ended(1, 130, 4.1) == []
    assert (job.is_over, job.status) == (True, 130)


def test_a_signal_that_stops_nothing_is_passed_on() -> None:
    job = begun(2)
    assert job.signalled(10, 2.0, stops=False) == [SendSignal((0, 1), 10)]
    assert connecting(2).signalled(10, 2.0, stops=False) == []
    for host in (0, 1):
        job.ended(host, 0, 3.0)
    assert job.status == 0


def test_a_signal_before_anything_runs() -> None:
    job = connecting(2)
    job.greeted(0, 1, 1.0)
    assert job.signalled(SIGTERM, 2.0, stops=True) == [Drop((0, 1))]
    assert job.greeted(1, 2, 2.0) == []
    for host in (0, 1):
        job.failed(host, "it was dropped", 2.0)
    assert (job.is_over, job.status) == (True, 143)


def growing(fewest: int = 2) -> JobOnHosts:
    return JobOnHosts((), fewest=fewest, shutdown_timeout_s=SHUTDOWN_S, now=0.0, may_grow=True)


def grown(count: int = 3, fewest: int = 2) -> JobOnHosts:
    """A job whose hosts came one by one, and that runs on all of them."""
    job = growing(fewest)
    for name in NAMES[:count]:
        job.added(name)
    for host in range(count):
        job.greeted(host, host + 1, 1.0)
    return job


def test_hosts_may_be_added_before_it_begins() -> None:
    job = growing()
    assert not job.is_over
    assert job.wake_at is None
    assert [job.added(name) for name in "ab"] == [0, 1]
    assert job.greeted(0, 1, 100.0) == []
    assert without_words(job.greeted(1, 2, 100.0)) == [
        StartLauncher(0, ("a:1", "b:2")),
        StartLauncher(1, ("a:1", "b:2")),
    ]


def test_a_host_that_is_added_later_meets_those_that_run() -> None:
    job = grown()
    assert words(job.ended(0, None, 2.0)) == ["lost the connection to a"]
    assert job.added("d") == 3
    actions = job.greeted(3, 4, 3.0)
    assert without_words(actions) == [StartLauncher(3, ("b:2", "c:3"))]
    assert words(actions) == ["starting on d, too"]


def test_too_few_wait_for_others_if_hosts_may_be_added() -> None:
    job = grown(count=2)
    assert without_words(job.ended(0, None, 2.0)) == []
    assert without_words(job.tick(1e6)) == []
    assert job.takes_more
    job.added("c")
    assert words(job.failed(2, "no such directory", 3.0)) == [
        "continuing without c: no such directory"
    ]
    assert not job.is_over
    assert without_words(job.ended(1, None, 4.0)) == []
    assert (job.is_over, job.status) == (True, 1)


def test_a_failure_ends_too_few_though_hosts_may_be_added() -> None:
    job = grown(count=2)
    assert job.ended(0, 1, 2.0) == []
    assert not job.takes_more
    assert without_words(job.tick(2.0 + OTHERS_S)) == [SendSignal((1,), SIGTERM)]


def test_a_host_that_cannot_start_ends_a_job_that_has_not_begun() -> None:
    job = growing()
    for name in "ab":
        job.added(name)
    job.greeted(1, 2, 1.0)
    actions = job.failed(0, "install Rallypoint there", 1.0)
    assert without_words(actions) == [Drop((1,))]
    assert words(actions) == ["cannot start on a: install Rallypoint there"]


def test_a_host_that_is_lost_before_it_begins_is_waited_for() -> None:
    job = growing()
    job.added("a")
    assert without_words(job.ended(0, None, 1.0)) == []
    assert not job.is_over
    job.signalled(SIGTERM, 2.0, stops=True)
    assert (job.is_over, job.status) == (True, 143)


def test_what_a_host_says_again_changes_nothing() -> None:
    """As when it was dropped, and its answer was under way."""
    job = begun(2)
    assert job.greeted(0, 9, 2.0) == []
    job.ended(0, 0, 3.0)
    assert job.ended(0, 1, 4.0) == []
    assert job.failed(0, "the connection ended", 4.0) == []
