"""Stories of one job: what happens, when, and what the launcher decides; one line per event.

    TIME EVENT -> STATE: ACTIONS

Events: `0 exit 3` rank 0 exits with 3, `0 killed 9`, `0 raises`, `0 echoes` (an error that
reports a lost peer), `0 unstartable`, `signal 2`, `tick`, `ended` (everything is dead),
`stuck 77`, `guardian lost`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.decide import (
    Action,
    Decision,
    EndEverything,
    Exit,
    Finish,
    JobState,
    SignalWorkers,
    State,
)

STORIES = {
    "all succeed": """
        0.0 0 exit 0 -> running: nothing
        0.1 1 exit 0 -> running: nothing
        0.2 2 exit 0 -> ending: end everything
        0.3 ended -> done: finish 0
    """,
    "one fails, the rest obey": """
        0.0 1 raises -> running: nothing
        0.1 1 exit 1 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.2 0 killed 15 -> stopping: nothing
        0.3 2 killed 15 -> ending: end everything
        0.4 ended -> done: finish 1
        root 1, stopped 0 2
    """,
    "one fails, one does not obey": """
        0.0 1 killed 9 -> stopping: signal 15 to 0 2; signal 18 to 0 2
        0.2 0 exit 0 -> stopping: nothing
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
        0.02 1 raises -> stopping: signal 15 to 1 2; signal 18 to 1 2
        0.03 1 killed 15 -> stopping: nothing
        0.04 2 killed 15 -> ending: end everything
        0.05 ended -> done: finish 1
        root 1, then 0, stopped 2
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
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_story(story: str) -> None:
    job = JobState(3, shutdown_timeout_s=10.0)
    for line in filter(None, map(str.strip, story.splitlines())):
        if line.startswith("root"):
            root, *others = [failure.exit.rank for failure in job.failures()]
            told = f"root {root}" + "".join(f", then {rank}" for rank in others)
            assert f"{told}, stopped {show_ranks(job.stopped)}".strip() == line
            continue
        event = line.partition(" -> ")[0]
        decision = happen(job, event)
        assert bool(decision.actions) <= bool(decision.reason)
        assert f"{event} -> {job.state.value}: {show(decision)}" == line


def happen(job: JobState, event: str) -> Decision:  # noqa: PLR0911
    time, *words = event.split()
    now = float(time)
    match words:
        case [rank, "exit", code]:
            return job.worker_exited(Exit(rank=int(rank), pid=1, time_s=now, code=int(code)), now)
        case [rank, "killed", signal]:
            return job.worker_exited(
                Exit(rank=int(rank), pid=1, time_s=now, signal=int(signal)), now
            )
        case [rank, "unstartable"]:
            return job.worker_exited(
                Exit(rank=int(rank), pid=0, time_s=now, start_error="no such file"), now
            )
        case [rank, "raises" | "echoes" as how]:
            error = WorkerError("E", "m", "t", now, is_echo=how == "echoes")
            return job.worker_reported(int(rank), error, now)
        case ["signal", number]:
            return job.stop_requested(int(number), now)
        case ["tick"]:
            return job.tick(now)
        case ["ended"]:
            return job.everything_ended(())
        case ["stuck", pid]:
            return job.everything_ended((int(pid),))
        case ["guardian", "lost"]:
            return job.guardian_lost()
    raise AssertionError(event)


def show(decision: Decision) -> str:
    return "; ".join(map(show_action, decision.actions)) or "nothing"


def show_action(action: Action) -> str:
    match action:
        case SignalWorkers(ranks, signal):
            return f"signal {signal} to {show_ranks(ranks)}"
        case EndEverything():
            return "end everything"
        case Finish(status):
            return f"finish {status}"


def show_ranks(ranks: set[int] | tuple[int, ...]) -> str:
    return " ".join(map(str, sorted(ranks)))


EVENTS = st.sampled_from(
    [f"{rank} {what}" for rank in range(3) for what in ("exit 0", "exit 3", "killed 9")]
    + [f"{rank} {what}" for rank in range(3) for what in ("raises", "echoes", "unstartable")]
    + ["signal 2", "signal 15", "tick", "tick", "guardian lost"]
)


@given(events=st.lists(st.tuples(st.floats(0, 8), EVENTS), max_size=20))
def test_every_order_of_events_comes_to_an_end(events: list[tuple[float, str]]) -> None:
    """Whatever happens: time and the guardian's answer bring the job to its end, once."""
    job = JobState(3, shutdown_timeout_s=10.0)
    actions: list[Action] = []
    now = 0.0
    for wait, event in events:
        now += wait
        actions += happen(job, f"{now} {event}").actions
    # If nobody acts any more, the workers that were asked to end do not.
    if job.state is State.RUNNING:
        actions += happen(job, f"{now} signal 15").actions
    while job.wake_at is not None:
        now = max(now, job.wake_at)
        actions += happen(job, f"{now} tick").actions
    if job.state is State.ENDING:
        actions += happen(job, f"{now} ended").actions
    assert job.state is State.DONE
    assert sum(isinstance(action, Finish) for action in actions) == 1
    assert sum(isinstance(action, EndEverything) for action in actions) <= 1
    all_succeeded = len(job.exits) == 3 and all(end.succeeded for end in job.exits.values())
    if job.status == 0:
        assert all_succeeded


def test_an_illegal_move_raises() -> None:
    job = JobState(1, shutdown_timeout_s=1.0)
    job.guardian_lost()
    with pytest.raises(RuntimeError, match="cannot go from done"):
        job._move(State.RUNNING)
