"""Stories of one node, alone in its job: what happens, when, and what is decided; a line per event.

    TIME EVENT -> PHASE: ACTIONS

Events: `0 exit 3` rank 0 exits with 3, `0 killed 9`, `0 raises`, `0 echoes` (an error that
reports a lost peer), `0 cannot import`, `0 unstartable`, `0 hangs`, `0 hangs for good` (the job
does, and rank 0 is to blame), `signal 2`, `tick`, `ended` (everything is dead), `stuck 77`,
`guardian lost`. What the coordinator answers is performed at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.agent.node import (
    EndEverything,
    NodeDecision,
    NodeState,
    Phase,
    SignalWorkers,
    Tell,
)
from rallypoint.launch.worker_group import WorkerExit
from rallypoint.rendezvous.job.coordinator import Coordinator, JobDecision, OpenRound
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import Finish, Notice, Outcome, Stop
from rallypoint.rendezvous.job.round import Member

STORIES = {
    "all succeed": """
        0.0 0 exit 0 -> running: nothing
        0.1 1 exit 0 -> running: nothing
        0.2 2 exit 0 -> ending: end everything
        0.3 ended -> done: finish 0
    """,
    "one fails, the rest obey": """
        0.0 1 raises -> running: nothing
        0.1 1 exit 1 -> holding: nothing
        0.15 tick -> holding: nothing
        0.2 tick -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.2 0 killed 15 -> stopping: nothing
        0.3 2 killed 15 -> ending: end everything
        0.4 ended -> done: finish 1
        root 1, stopped 0 2
    """,
    "one fails, one does not obey": """
        0.0 1 killed 9 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.2 0 exit 0 -> stopping: nothing
        0.9 tick -> stopping: nothing
        1.0 tick -> stopping: say waiting up to 9 s more for rank 2 to end
        9.9 tick -> stopping: nothing
        10.0 tick -> ending: end everything
        10.1 2 killed 9 -> ending: nothing
        10.1 ended -> done: finish 1
        root 1, stopped 0 2
    """,
    "an echo waits for its cause": """
        0.00 0 echoes -> running: nothing
        0.01 0 exit 1 -> holding: nothing
        0.02 1 exit 3 -> stopping: signal 15 to 2; signal 18 to 2
        0.03 2 killed 15 -> ending: end everything
        0.04 ended -> done: finish 1
        root 1, then 0, stopped 2
    """,
    "an exception is a cause before its process has ended": """
        0.00 0 echoes -> running: nothing
        0.01 0 exit 1 -> holding: nothing
        0.02 1 raises -> holding: nothing
        0.13 tick -> stopping: signal 15 to 1 2; signal 18 to 1 2
        0.13 1 killed 15 -> stopping: nothing
        0.14 2 killed 15 -> ending: end everything
        0.15 ended -> done: finish 1
        root 1, then 0, stopped 2
    """,
    "all raise the same, one after the other": """
        0.00 0 raises -> running: nothing
        0.01 0 exit 1 -> holding: nothing
        0.09 1 raises -> holding: nothing
        0.12 tick -> holding: nothing
        0.18 1 exit 1 -> holding: nothing
        0.27 2 raises -> holding: nothing
        0.28 2 exit 1 -> ending: end everything
        0.30 ended -> done: finish 1
        root 0, then 1, then 2, stopped
    """,
    "one exception after the other is not waited for without end": """
        0.0 0 raises -> running: nothing
        0.0 0 exit 1 -> holding: nothing
        0.95 1 raises -> holding: nothing
        1.0 tick -> stopping: signal 15 to 1 2; signal 18 to 1 2
        1.0 1 exit 1 -> stopping: nothing
        1.0 2 exit 0 -> ending: end everything
        1.0 ended -> done: finish 1
        root 0, then 1, stopped 2
    """,
    "an echo without a cause is the cause": """
        0.0 0 echoes -> running: nothing
        0.0 0 exit 1 -> holding: nothing
        0.2 tick -> holding: nothing
        0.3 tick -> stopping: signal 15 to 1 2; signal 18 to 1 2
        0.4 1 killed 15 -> stopping: nothing
        0.4 2 killed 15 -> ending: end everything
        0.5 ended -> done: finish 1
        root 0, stopped 1 2
    """,
    "all echo": """
        0.0 2 echoes -> running: nothing
        0.1 0 echoes -> running: nothing
        0.1 0 exit 1 -> holding: nothing
        0.2 2 exit 1 -> holding: nothing
        0.2 1 exit 0 -> ending: end everything
        0.5 ended -> done: finish 1
        root 2, then 0, stopped
    """,
    "the last one fails": """
        0.0 0 exit 0 -> running: nothing
        0.0 1 exit 0 -> running: nothing
        0.0 2 exit 7 -> ending: end everything
        0.1 ended -> done: finish 1
        root 2, stopped
    """,
    "an error of a worker that then succeeds is none": """
        0.0 0 raises -> running: nothing
        0.0 0 exit 0 -> running: nothing
        0.0 1 exit 0 -> running: nothing
        0.0 2 exit 0 -> ending: end everything
        0.1 ended -> done: finish 0
    """,
    "a program that does not exist": """
        0.0 0 unstartable -> stopping: signal 15 to 1 2; signal 18 to 1 2
        0.0 1 unstartable -> stopping: nothing
        0.0 2 unstartable -> ending: end everything
        0.1 ended -> done: finish 1
        root 0, stopped 1 2
    """,
    "Ctrl-C": """
        0.0 signal 2 -> stopping: signal 2 to 0 1 2; signal 18 to 0 1 2
        0.1 0 raises -> stopping: nothing
        0.1 0 exit 1 -> stopping: nothing
        0.1 1 exit 0 -> stopping: nothing
        0.1 2 killed 2 -> ending: end everything
        0.2 ended -> done: finish 130
    """,
    "two Ctrl-C": """
        0.0 signal 2 -> stopping: signal 2 to 0 1 2; signal 18 to 0 1 2
        0.1 signal 2 -> ending: end everything
        0.2 0 killed 9 -> ending: nothing
        0.2 ended -> done: finish 130
    """,
    "SIGTERM again changes nothing": """
        0.0 signal 15 -> stopping: signal 15 to 0 1 2; signal 18 to 0 1 2
        1.0 signal 15 -> stopping: nothing
        10.0 tick -> ending: end everything
        10.1 ended -> done: finish 143
    """,
    "Ctrl-C after a failure: the failure is told": """
        0.0 0 exit 1 -> stopping: signal 15 to 1 2; signal 18 to 1 2
        0.1 signal 2 -> ending: end everything
        0.2 ended -> done: finish 1
        root 0, stopped 1 2
    """,
    "Ctrl-C while an echo is held": """
        0.0 0 echoes -> running: nothing
        0.0 0 exit 1 -> holding: nothing
        0.1 signal 2 -> stopping: signal 2 to 1 2; signal 18 to 1 2
        0.2 1 exit 1 -> stopping: nothing
        0.2 2 exit 1 -> ending: end everything
        0.2 ended -> done: finish 1
        root 0, stopped 1 2
    """,
    "the guardian dies": """
        0.0 0 exit 0 -> running: nothing
        0.1 guardian lost -> done: finish 1
        0.2 guardian lost -> done: nothing
        0.2 1 killed 9 -> done: nothing
    """,
    "something cannot be killed": """
        0.0 0 killed 9 -> stopping: signal 15 to 1 2; signal 18 to 1 2
        10.0 tick -> ending: end everything
        15.0 stuck 77 -> done: finish 1
        root 0, stopped 1 2
    """,
    "Ctrl-C when all have succeeded changes nothing": """
        0.0 0 exit 0 -> running: nothing
        0.0 1 exit 0 -> running: nothing
        0.0 2 exit 0 -> ending: end everything
        0.0 signal 2 -> ending: nothing
        0.1 ended -> done: finish 0
    """,
    "a restart": """
        with 1 restarts
        0.0 1 killed 9 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.1 0 killed 15 -> stopping: nothing
        0.1 2 killed 15 -> ending: end everything
        0.2 ended -> running: start round 1
        0.3 0 exit 0 -> running: nothing
        0.3 1 exit 0 -> running: nothing
        0.3 2 exit 0 -> ending: end everything
        0.4 ended -> done: finish 0
    """,
    "no restart is left": """
        with 1 restarts
        0.0 1 killed 9 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        9.0 1 killed 9 -> stopping: nothing
        10.0 tick -> ending: end everything
        10.1 ended -> running: start round 1
        11.0 2 exit 7 -> stopping: signal 15 to 0 1; signal 18 to 0 1
        11.1 0 exit 0 -> stopping: nothing
        11.1 1 exit 0 -> ending: end everything
        11.2 ended -> done: finish 1
        root 2, stopped 0 1
    """,
    "what could not be imported will not be the next time": """
        with 3 restarts
        0.0 1 cannot import -> running: nothing
        0.0 1 exit 1 -> holding: nothing
        0.1 tick -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.1 0 killed 15 -> stopping: nothing
        0.1 2 killed 15 -> ending: end everything
        0.2 ended -> done: finish 1
        root 1, stopped 0 2
    """,
    "Ctrl-C during a restart": """
        with 3 restarts
        0.0 1 killed 9 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.1 signal 2 -> ending: end everything
        0.2 ended -> done: finish 130
    """,
    "SIGTERM during a restart": """
        with 3 restarts
        0.0 1 killed 9 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.1 signal 15 -> stopping: nothing
        10.0 tick -> ending: end everything
        10.2 ended -> done: finish 143
    """,
    "a new round does not start while something of the old one may still run": """
        with 3 restarts
        0.0 0 killed 9 -> stopping: signal 15 to 1 2; signal 18 to 1 2
        10.0 tick -> ending: end everything
        15.0 stuck 77 -> done: finish 1
        root 0, stopped 1 2
    """,
    "a job that hangs is restarted": """
        with 1 restarts
        0.0 1 hangs -> stopping: signal 15 to 0 1 2; signal 18 to 0 1 2
        0.0 2 hangs -> stopping: nothing
        0.1 0 killed 15 -> stopping: nothing
        0.1 1 raises -> stopping: nothing
        0.1 1 exit 1 -> stopping: nothing
        0.1 2 killed 15 -> ending: end everything
        0.2 ended -> running: start round 1
        0.3 0 exit 0 -> running: nothing
        0.3 1 exit 0 -> running: nothing
        0.3 2 exit 0 -> ending: end everything
        0.4 ended -> done: finish 0
    """,
    "a job that hangs fails": """
        0.0 1 hangs -> stopping: signal 15 to 0 1 2; signal 18 to 0 1 2
        10.0 tick -> ending: end everything
        10.1 ended -> done: finish 1
    """,
    "a job that hangs is stopped": """
        with 3 restarts
        0.0 1 hangs for good -> stopping: signal 15 to 0 1 2; signal 18 to 0 1 2
        10.0 tick -> ending: end everything
        10.1 ended -> done: finish 1
    """,
    "a job that hangs has failed before": """
        0.0 0 raises -> running: nothing
        0.0 0 exit 1 -> holding: nothing
        0.05 1 hangs -> holding: nothing
        0.1 tick -> stopping: signal 15 to 1 2; signal 18 to 1 2
        0.2 1 killed 15 -> stopping: nothing
        0.2 2 killed 15 -> ending: end everything
        0.3 ended -> done: finish 1
        root 0, stopped 1 2
    """,
    "the guardian hangs": """
        0.0 0 killed 9 -> stopping: signal 15 to 1 2; signal 18 to 1 2
        10.0 tick -> ending: end everything
        17.9 tick -> ending: nothing
        18.0 tick -> done: finish 1
    """,
}


class Alone:
    """A node and its coordinator, as the agent joins them."""

    def __init__(self, max_restarts: int = 0) -> None:
        self.node = NodeState(shutdown_timeout_s=10.0)
        self.job = Coordinator(Limits(is_fixed=True), max_restarts)
        self.shown: list[str] = []
        self._now = 0.0
        self.answer(self.job.joined(Member(key="0", host="h", local_world_size=3), 0.0))

    def happen(self, event: str) -> str:
        """What is done about an event."""
        self.shown = []
        was_done = self.node.phase is Phase.DONE
        self._now = float(event.split()[0])
        decision = happen(self.node, event)
        assert bool(decision.actions) <= bool(decision.reason)
        self.perform(decision)
        if self.node.phase is Phase.DONE and not was_done:
            self.shown.append(f"finish {self.node.status}")
        return "; ".join(self.shown) or "nothing"

    def perform(self, decision: NodeDecision) -> None:
        for action in decision.actions:
            match action:
                case SignalWorkers(ranks, signal):
                    self.shown.append(f"signal {signal} to {show_ranks(ranks)}")
                case EndEverything():
                    self.shown.append("end everything")
                case Notice(text):
                    self.shown.append(f"say {text.partition(';')[0]}")
                case Tell(report):
                    self.answer(self.job.reported("0", report, self._now))

    def answer(self, decision: JobDecision) -> None:
        for action in decision.actions:
            match action:
                case OpenRound(number=number):
                    self.shown.append(f"start round {number}")
                    self.perform(self.node.started(number, range(3)))
                case Stop():
                    self.perform(self.node.round_stopped(action, self._now))
                case Finish():
                    self.perform(self.node.finished(action, self._now))


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_story(story: str) -> None:
    alone = Alone()
    for line in filter(None, map(str.strip, story.splitlines())):
        if line.startswith("with"):
            alone = Alone(max_restarts=int(line.split()[1]))
            continue
        if line.startswith("root"):
            group = alone.node.group
            root, *others = [failure.rank for failure in group.failures()]
            told = f"root {root}" + "".join(f", then {rank}" for rank in others)
            assert f"{told}, stopped {show_ranks(group.stopped)}".strip() == line
            continue
        event = line.partition(" -> ")[0]
        shown = alone.happen(event)
        assert f"{event} -> {alone.node.phase.value}: {shown}" == line


def ended(rank: str, now: float, **how: Any) -> WorkerExit:
    return WorkerExit(rank=int(rank), local_rank=int(rank), pid=1, time_s=now, **how)


def happen(node: NodeState, event: str) -> NodeDecision:  # noqa: PLR0911
    time, *words = event.split()
    now = float(time)
    match words:
        case [rank, "exit", code]:
            return node.worker_exited(ended(rank, now, code=int(code)), now)
        case [rank, "killed", signal]:
            return node.worker_exited(ended(rank, now, signal=int(signal)), now)
        case [rank, "hangs", *for_good]:
            return node.hangs("the job hung", int(rank), now, ends_job=bool(for_good))
        case [rank, "unstartable"]:
            return node.worker_exited(ended(rank, now, start_error="no such file"), now)
        case [rank, "raises" | "echoes" as how]:
            error = WorkerError("E", "m", "t", now, is_secondary=how == "echoes")
            return node.worker_reported(int(rank), error, now)
        case [rank, "cannot", "import"]:
            error = WorkerError("ImportError", "m", "t", now, is_startup=True)
            return node.worker_reported(int(rank), error, now)
        case ["signal", number]:
            return node.stop_requested(int(number), f"signal {number}", now)
        case ["tick"]:
            return node.tick(now)
        case ["ended"]:
            return node.everything_ended(())
        case ["stuck", pid]:
            return node.everything_ended((int(pid),))
        case ["guardian", "lost"]:
            return node.guardian_lost()
    raise AssertionError(event)


def show_ranks(ranks: Iterable[int]) -> str:
    return " ".join(map(str, sorted(ranks)))


EVENTS = st.sampled_from(
    [f"{rank} {what}" for rank in range(3) for what in ("exit 0", "exit 3", "killed 9")]
    + [f"{rank} {what}" for rank in range(3) for what in ("raises", "echoes", "unstartable")]
    + ["signal 2", "signal 15", "tick", "tick", "ended", "guardian lost"]
)


@given(
    events=st.lists(st.tuples(st.floats(0, 8), EVENTS), max_size=30),
    max_restarts=st.integers(0, 3),
)
def test_every_order_of_events_comes_to_an_end(
    events: list[tuple[float, str]], max_restarts: int
) -> None:
    """Whatever happens: time and the guardian's answer bring the job to its end."""
    alone = Alone(max_restarts)
    now = 0.0
    for wait, event in events:
        now += wait
        alone.happen(f"{now} {event}")
    # If nobody acts any more, the workers that were asked to end do not.
    alone.happen(f"{now} signal 15")
    for _ in range(3):
        if alone.node.wake_at is not None:
            now = max(now, alone.node.wake_at)
            alone.happen(f"{now} tick")
        if alone.node.phase is Phase.ENDING:
            alone.happen(f"{now} ended")
    assert alone.node.phase is Phase.DONE
    assert alone.job.restarts == alone.job.round <= max_restarts
    if alone.node.status == 0:
        assert all(end.succeeded for end in alone.node.group.exits.values())
        assert len(alone.node.group.exits) == 3


@pytest.mark.parametrize(
    ("times", "phase"),
    [
        ([0.1], Phase.STOPPING),  # the same Ctrl-C
        ([0.1, 0.2], Phase.ENDING),
        ([1.5], Phase.ENDING),  # told by then that it kills
    ],
)
def test_a_ctrl_c_for_all_nodes_is_not_a_second_one_for_some(
    times: list[float], phase: Phase
) -> None:
    node = NodeState(shutdown_timeout_s=10.0)
    node.started(0, range(2))
    node.round_stopped(Stop(round=0, because="SIGINT stopped node 1"), 0.0)
    for now in times:
        node.stop_requested(2, "SIGINT stopped node 0", now)
    assert node.phase is phase


def test_an_illegal_move_raises() -> None:
    node = NodeState(shutdown_timeout_s=1.0)
    node.finished(Finish(outcome=Outcome.GIVEN_UP, because="x"), 0.0)
    with pytest.raises(RuntimeError, match="cannot go from done"):
        node._move(Phase.RUNNING)
