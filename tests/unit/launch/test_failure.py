"""What the user reads when a job fails."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.decide import Exit, JobState
from rallypoint.launch.failure import name_ranks, read_error_file, signal_name, summary

WHEN = 1_800_000_000.25


def told(state: JobState) -> list[str]:
    local_ranks = {rank: rank for rank in range(8)}
    return summary(state, host="h", local_ranks=local_ranks).splitlines()


def test_a_traceback_and_who_was_stopped() -> None:
    state = JobState(4, shutdown_timeout_s=1.0)
    state.worker_reported(2, WorkerError("ValueError", "bad\nthing", "Traceback\n  x", WHEN), 0.0)
    state.worker_exited(Exit(rank=2, pid=42, time_s=WHEN + 1, code=1), 0.0)
    lines = told(state)
    assert lines[0] == "job failed: rank 2 raised ValueError: bad"
    assert lines[1].startswith("  rank 2 (local rank 2, pid 42, host h) exited with code 1, at 20")
    assert lines[1].endswith(".250")
    assert lines[2:] == [
        "  traceback of rank 2:",
        "    Traceback",
        "      x",
        "  stopped by the launcher: ranks 0-1, 3",
    ]


def test_signals_have_names() -> None:
    state = JobState(1, shutdown_timeout_s=1.0)
    state.worker_exited(Exit(rank=0, pid=42, time_s=WHEN, signal=11, core_dumped=True), 0.0)
    assert told(state)[0] == "job failed: rank 0 was killed by SIGSEGV (core dumped)"
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


def test_others_that_failed_too() -> None:
    state = JobState(2, shutdown_timeout_s=1.0)
    state.worker_reported(0, WorkerError("PeerLostError", "gone", "", WHEN, is_echo=True), 0.0)
    state.worker_exited(Exit(rank=0, pid=1, time_s=WHEN, code=1), 0.0)
    state.worker_exited(Exit(rank=1, pid=2, time_s=WHEN, signal=9), 0.0)
    lines = told(state)
    assert lines[0] == "job failed: rank 1 was killed by SIGKILL"
    assert "out-of-memory" in lines[2]
    assert lines[3:] == ["  also failed: rank 0 raised PeerLostError: gone"]


def test_a_program_that_cannot_be_run() -> None:
    state = JobState(1, shutdown_timeout_s=1.0)
    end = Exit(rank=0, pid=9, time_s=WHEN, start_error="cannot run './x': Permission denied")
    state.worker_exited(end, 0.0)
    assert told(state)[0] == (
        "job failed: rank 0 could not be started: cannot run './x': Permission denied"
    )


def test_what_cannot_be_killed_is_named() -> None:
    state = JobState(1, shutdown_timeout_s=1.0)
    state.worker_exited(Exit(rank=0, pid=9, time_s=WHEN, code=0), 0.0)
    state.everything_ended((77, 78))
    assert told(state) == [
        "cannot kill process 77, 78: stuck in the kernel or not ours to kill; left behind"
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 3, 9], "ranks 0, 2-3, 9")],
)
def test_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_what_torchs_record_writes_is_read() -> None:
    text = json.dumps(
        {
            "message": {
                "message": "RuntimeError: it broke: twice",
                "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1800000000"},
            }
        }
    )
    assert read_error_file(text, time_s=WHEN) == WorkerError(
        "RuntimeError", "it broke: twice", "Traceback ...", WHEN
    )


@given(
    st.text()
    | st.recursive(
        st.text(),
        lambda x: st.dictionaries(st.sampled_from(["message", "extraInfo", "py_callstack"]), x),
    ).map(json.dumps)
)
def test_any_other_file_is_none_or_read(text: str) -> None:
    error = read_error_file(text, time_s=WHEN)
    assert error is None or isinstance(error, WorkerError)
