"""What is told of a loss that others outlive."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.control_message import Stage, WorkerError, WorkerReport
from rallypoint.launch.agent import in_place_recovery as recovery_module
from rallypoint.launch.agent.in_place_recovery import InPlaceRecovery, Recoveries, Recovery
from rallypoint.launch.agent.local_workers import COME_S, AgentParts
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup
from rallypoint.rendezvous.job.reports import Start
from rallypoint.rendezvous.job.round import Endpoint, Seat

SEAT = Seat(
    number=5,
    store=Endpoint(host="h", port=1),
    node_rank=0,
    nodes=1,
    local_world_size=2,
    first_rank=0,
    world_size=2,
    first_role_rank=0,
    role_world_size=2,
)


CLOCK_S = 1000.0  # of the time of day, when the monotonic clock began


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    both = SimpleNamespace(time=lambda: CLOCK_S + 3.0, monotonic=lambda: 3.0)
    monkeypatch.setattr(recovery_module, "time", both)


def group(*lost_at: float) -> WorkerGroup:
    """A group of which these were lost, at times of the monotonic clock."""
    workers = WorkerGroup(range(4))
    workers.started()
    for rank, at in enumerate(lost_at):
        workers.exited(
            WorkerExit(rank=rank, local_rank=rank, pid=100 + rank, time_s=at + CLOCK_S, signal=9)
        )
    return workers


def recovery(
    over: WorkerGroup,
    *,
    known_at: float,
    now: float,
    elsewhere: str = "",
    is_urgent: bool = True,
    size_before: int = 2,
    newcomers: int = 0,
    before: Recovery | None = None,
) -> Recovery:
    start = Start(seat=SEAT, because="a worker joined", is_urgent=is_urgent)
    return Recovery(
        over,
        elsewhere,
        start,
        size_before=size_before,
        newcomers=newcomers,
        known_at=known_at,
        now=now,
        before=before,
    )


def times(recovery: Recovery, now: float) -> list[object]:
    return [
        each if each is None else pytest.approx(each, abs=1e-3)
        for each in [*recovery.times(now).values()]
    ]


def test_each_part_by_itself() -> None:
    went = recovery(group(10.0), known_at=10.1, now=10.3)
    went.formed(10.6)
    went.formed(10.65)
    assert list(went.times(11.0)) == ["detect_s", "agree_s", "form_s", "sync_s"]
    assert times(went, 11.0) == [0.1, 0.2, 0.3, 0.4]
    text, event = went.report([1, 0], 11.0)
    assert text == "rank 0 (pid 100) was killed by SIGKILL; ranks 0-1 of 2 continue after 1000 ms"
    assert event["lost_pids"] == [100]


def test_a_node_without_losses_counts_from_when_it_knew() -> None:
    went = recovery(group(), known_at=10.1, now=10.3, elsewhere="rank 7 was killed")
    went.formed(10.6)
    assert times(went, 11.0) == [None, 0.2, 0.3, 0.4]
    assert went.report([0], 11.0)[0] == "rank 7 was killed; rank 0 of 2 continues after 900 ms"


def test_a_loss_on_the_way() -> None:
    first = recovery(group(10.0), known_at=10.1, now=10.3)
    second = recovery(group(10.0, 10.5), known_at=10.6, now=10.8, is_urgent=False, before=first)
    second.formed(11.0)
    assert times(second, 11.0) == [0.1, 0.7, 0.2, 0.0]
    assert second.lost_s(11.0) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("size_before", "newcomers", "told"),
    [
        (2, 1, "a spare took over; ranks 0-1 of 2"),
        (2, 2, "2 spares took over; ranks 0-1 of 2"),
        (3, 0, "2 of 3 ranks are left; ranks 0-1 of 2"),
        (3, 1, "a spare took over; 2 of 3 ranks are left; ranks 0-1 of 2"),
    ],
)
def test_who_is_left(size_before: int, newcomers: int, told: str) -> None:
    over = group(10.0)
    went = recovery(over, known_at=10.1, now=10.3, size_before=size_before, newcomers=newcomers)
    text = f"rank 0 (pid 100) was killed by SIGKILL; {told} continue after 1000 ms"
    assert went.report([0, 1], 11.0)[0] == text
    again = recovery(over, known_at=10.1, now=10.3, before=went)
    assert again.report([0, 1], 11.0)[0].endswith(f"; {told} continue after 1000 ms")


def test_newcomers_cost_the_transfer_of_the_state() -> None:
    went = recovery(group(), known_at=10.0, now=10.1, is_urgent=False)
    went.formed(15.0)
    assert went.lost_s(15.5) == pytest.approx(0.5)
    assert went.report([0, 1], 15.5)[0] == "a worker joined: the job continues with 2 ranks"


def test_the_summary() -> None:
    recoveries = Recoveries()
    assert recoveries.summary(9.0) is None
    recoveries.add(0.04, is_loss=True, begins_again=True)
    text, event = recoveries.summary(20.0) or ("", {})
    assert text == "recovered in place after 1 loss; 40 ms of 20.0 s lost to it; 1 step retried"
    recoveries.add(0.06, is_loss=False, begins_again=False)
    recoveries.add(4.0, is_loss=False, begins_again=False)
    text, event = recoveries.summary(120.0) or ("", {})
    says = (
        "recovered in place after 1 loss and 2 joins; 4.1 s of 120.0 s lost to it; 1 step retried"
    )
    assert text == says
    assert event == {"went_on": 3, "lost_s": 4.1, "uptime_s": 120.0, "begun_again": 1}


class Standbys:
    """One node's recovery, with workers on standby that do nothing."""

    def __init__(self, *workers: SimpleNamespace) -> None:
        self.told: list[str] = []
        self.lost: list[object] = []
        state = NodeState(shutdown_timeout_s=1.0)
        nobody: Callable[..., list[object]] = lambda number, now: []  # noqa: E731
        local: Any = SimpleNamespace(
            standbys=[*workers],
            ready=[],
            wake_at=None,
            unanswered=nobody,
            lost_standby=self.lost.append,
        )
        progress: Any = SimpleNamespace(told=self.told.append)
        unused: Any = None
        job: Any = SimpleNamespace(max_restarts=1)
        rounds: Any = SimpleNamespace(keeps_survivors=True)
        parts = AgentParts(
            job=job,
            selector=unused,
            rounds=rounds,
            state=state,
            workers=local,
            progress=progress,
            perform=lambda _: None,
            inspect=unused,
            read_workers=unused,
        )
        self.recovery = InPlaceRecovery(parts, stand_by=lambda: None)


def standby(pid: int, come_by: float) -> Any:
    return SimpleNamespace(
        pid=pid, rank=-1, come_by=come_by, answer_by=None, report=WorkerReport(Stage.SPARE)
    )


def test_a_worker_on_standby_that_does_not_come_is_told_once() -> None:
    late, early = standby(41, come_by=10.0), standby(42, come_by=30.0)
    node = Standbys(late, early)
    assert node.recovery.wake_at == 10.0
    node.recovery.tick(9.9)
    assert node.told == []
    node.recovery.tick(10.0)
    node.recovery.tick(11.0)
    (told,) = node.told
    assert f"(pid 41) has not called init_process_group for {COME_S:.0f} s" in told
    assert "must not read RANK earlier" in told
    node.recovery.heard(early, WorkerReport(Stage.READY))
    assert node.recovery.wake_at is None


def test_a_worker_on_standby_whose_script_uses_pytorchs_groups() -> None:
    error = WorkerError(
        "ValueError",
        "Error initializing torch.distributed using env:// rendezvous: environment variable RANK"
        " expected, but not set",
        "",
        0.0,
    )
    end = WorkerExit(rank=-1, local_rank=2, pid=41, time_s=0.0, code=1, error=error)
    worker = standby(41, come_by=10.0)
    worker.exit = lambda report: end
    node = Standbys(worker)
    node.recovery._restarts = 0
    report: Any = None
    node.recovery.lost_standby(worker, report)
    (told,) = node.told
    assert told == (
        "a worker on standby (pid 41) has ended: the script uses PyTorch's process groups, but"
        " workers on standby (--spares) need a script that uses rallypoint.elastic"
    )
