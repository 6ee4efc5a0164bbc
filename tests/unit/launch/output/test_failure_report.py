"""What the user reads when a job fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.output.failure_report import read_error_file, reason_of_abort, summary
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup, signal_name

WHEN = 1_800_000_000.25


def group_of(world_size: int) -> WorkerGroup:
    group = WorkerGroup(range(world_size))
    group.started()
    return group


def told(group: WorkerGroup, **report: Any) -> list[str]:
    group.stopping()
    return summary(group, title="job failed", host="h", **report).splitlines()


def failed(rank: int, *, code: int | None = None, signal: int | None = None) -> WorkerExit:
    return WorkerExit(rank=rank, local_rank=rank, pid=42, time_s=WHEN + 1, code=code, signal=signal)


def test_a_traceback_and_who_was_stopped() -> None:
    group = group_of(4)
    group.reported(2, WorkerError("ValueError", "bad\nthing", "Traceback\n  x", WHEN))
    group.exited(failed(2, code=1))
    lines = told(group, because="restart 1 of 3", logs="/logs")
    assert lines[0] == "job failed: rank 2 raised ValueError: bad"
    assert lines[1].startswith("  rank 2 (local rank 2, pid 42, host h) exited with code 1, at 20")
    assert lines[1].endswith(".250")
    assert lines[2:] == [
        "  traceback of rank 2:",
        "    Traceback",
        "      x",
        "  stopped by the launcher: ranks 0-1, 3",
        "  restart 1 of 3",
        "  logs: /logs",
    ]


def test_the_same_traceback_is_told_once() -> None:
    group = group_of(10)
    for rank in (3, 0, 1, 2, 4, 5, 6, 7):
        trace = f'  File "x.py", line 3, in f\nKeyError: {rank} <f at 0x7f{rank:010x}>'
        group.reported(rank, WorkerError("KeyError", str(rank), trace, WHEN + rank * (rank != 3)))
        group.exited(failed(rank, code=1))
    group.reported(8, WorkerError("OSError", "other", "x", WHEN + 9))
    group.exited(failed(8, code=1))
    lines = told(group)
    assert lines[0] == "job failed: rank 3 raised KeyError: 3 (x8 ranks 0-7)"
    assert lines[2] == "  traceback of rank 3 (x8 ranks 0-7):"
    assert lines[5:] == [
        "  also failed: rank 8 raised OSError: other",
        "  stopped by the launcher: rank 9",
    ]


def test_who_tell_the_same_of_each_other_are_told_once() -> None:
    group = group_of(3)
    text = "rank 0 called all_reduce of 4 items, rank 1 called all_reduce of 5 items"
    for rank in range(3):
        trace = f'  File "x.py", line 3\nMismatchError: {text}'
        group.reported(rank, WorkerError("MismatchError", text, trace, WHEN + rank))
        group.exited(failed(rank, code=1))
    assert told(group)[0] == f"job failed: rank 0 raised MismatchError: {text} (x3 ranks 0-2)"


def test_an_error_is_told_once() -> None:
    """Not at the end of its traceback, nor by the calls that its message names already."""
    text = "rank 0 called all_reduce of 4 items, rank 1 called all_reduce of 5 items"
    for kind, has_calls in (("MismatchError", False), ("ValueError", True)):
        group = group_of(2)
        for rank in range(2):
            trace = f'Traceback:\n  File "x.py", line 3\n{kind}: {text}\n'
            group.reported(rank, WorkerError(kind, text, trace, WHEN + rank))
            group.exited(failed(rank, code=1))
        lines = told(group, calls=["both in all_reduce #3"])
        assert "\n".join(lines).count(text) == 1
        assert ("  both in all_reduce #3" in lines) is has_calls


def test_the_rest_of_a_message_is_told() -> None:
    group = group_of(1)
    trace = 'Traceback:\n  File "x.py", line 3\nValueError: first\nsecond'
    group.reported(0, WorkerError("ValueError", "first\nsecond", trace, WHEN))
    group.exited(failed(0, code=1))
    assert told(group)[-2:] == ["    ValueError: first", "    second"]


def test_long_messages_end_with_a_word() -> None:
    group = group_of(2)
    for rank, message in enumerate(("first", "word " * 100)):
        group.reported(rank, WorkerError("ValueError", message, "", WHEN + rank))
        group.exited(failed(rank, code=1))
    told_of_1 = told(group)[-1].partition("ValueError: ")[2]
    assert told_of_1.removesuffix(" ...") == "word " * 39 + "word"


def test_a_lost_peer_that_had_ended_with_success() -> None:
    group = group_of(3)
    group.exited(WorkerExit(rank=1, local_rank=1, pid=43, time_s=WHEN, code=0))
    error = WorkerError("RuntimeError", "Connection closed by peer", "", WHEN, is_secondary=True)
    group.reported(0, error)
    group.exited(failed(0, code=1))
    text = "job failed: rank 0 raised RuntimeError: Connection closed by peer"
    assert told(group)[0] == f"{text}; rank 1 had ended before, with code 0"

    group = group_of(3)
    group.exited(WorkerExit(rank=1, local_rank=1, pid=43, time_s=WHEN, code=0))
    group.reported(0, error)
    group.exited(failed(0, code=1))
    group.exited(failed(2, code=7))  # which is the reason
    assert told(group)[0] == "job failed: rank 2 exited with code 7"


_GLOO_ABORTS = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 4.
"""


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (_GLOO_ABORTS, "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes"),
        ("Fatal Python error: Aborted\n\nThread 1:\n  File a, line 1 in f\n", "Fatal Python error"),
        ("some words\n\n", "some words"),
    ],
)
def test_the_last_words_of_a_worker_that_aborts(stderr: str, line: str) -> None:
    found = reason_of_abort(stderr, uses_gloo=False)
    assert len(found) == 1
    assert found[0].startswith(f"its stderr ends with: {line}")


def test_a_worker_that_aborts_with_gloo() -> None:
    where, hint = reason_of_abort("", uses_gloo=True)
    assert "above" in where
    assert "--as-gloo" in hint
    group = group_of(1)
    group.exited(failed(0, signal=6))
    assert told(group, aborted=[where, hint])[2:] == [f"  {where}", f"  {hint}"]


def test_line_numbers_tell_tracebacks_apart() -> None:
    group = group_of(2)
    for rank in range(2):
        trace = f'  File "x.py", line {rank}, in f\nE'
        group.reported(rank, WorkerError("E", "", trace, WHEN))
        group.exited(failed(rank, code=1))
    assert told(group)[0] == "job failed: rank 0 raised E"


def test_signals_have_names() -> None:
    group = group_of(1)
    group.exited(WorkerExit(rank=0, local_rank=0, pid=42, time_s=WHEN, signal=11, core_dumped=True))
    assert told(group)[0] == "job failed: rank 0 was killed by SIGSEGV (core dumped)"
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


@pytest.mark.parametrize(
    ("count", "hint"),
    [
        (None, "often the kernel's out-of-memory killer does"),
        (0, "a process other than the launcher sent this signal"),
        (1, "out-of-memory killer killed processes of this control group once"),
        (2, "out-of-memory killer killed processes of this control group 2 times"),
    ],
)
def test_who_may_have_killed(count: int | None, hint: str) -> None:
    group = group_of(1)
    group.exited(failed(0, signal=9))
    assert hint in told(group, oom_kills=count)[2]


def test_the_launcher_says_so_if_it_has_killed() -> None:
    group = group_of(2)
    group.killing(0, "others could not reach it")
    group.killing(1, "others could not reach it")
    group.exited(failed(0, signal=9))
    group.exited(failed(1, signal=6))  # by itself, just before
    lines = told(group, oom_kills=0)
    says = "rank 0 was killed by the launcher, as others could not reach it"
    assert lines[0] == f"job failed: {says}"
    assert "other than" not in "".join(lines)
    assert "rank 1 was killed by SIGABRT" in "".join(lines)


@pytest.mark.parametrize("number", [15, 9])
def test_who_raised_and_was_then_ended_by_the_launcher(number: int) -> None:
    group = group_of(2)
    group.reported(0, WorkerError("ValueError", "bad sample", "", WHEN))
    group.stopping()
    group.exited(failed(0, signal=number))
    group.exited(failed(1, signal=15))
    title, details, *rest = told(group, oom_kills=0)
    assert title == "job failed: rank 0 raised ValueError: bad sample"
    assert f" was then ended by the launcher ({signal_name(number)}), at " in details
    assert "other than" not in "".join(rest)


def test_others_that_failed_too() -> None:
    group = group_of(2)
    group.reported(0, WorkerError("PeerLostError", "gone", "", WHEN, is_secondary=True))
    group.exited(failed(0, code=1))
    group.exited(failed(1, signal=9))
    lines = told(group)
    assert lines[0] == "job failed: rank 1 was killed by SIGKILL"
    assert lines[3:] == ["  also failed: rank 0 raised PeerLostError: gone"]


def test_the_cause_may_be_on_another_node() -> None:
    group = group_of(2)
    group.reported(0, WorkerError("PeerLostError", "gone", "trace", WHEN, is_secondary=True))
    group.exited(failed(0, code=1))
    assert told(group, elsewhere="node 1: rank 2 was killed by SIGKILL") == [
        "job failed: node 1: rank 2 was killed by SIGKILL",
        "  also failed: rank 0 raised PeerLostError: gone",
        "  stopped by the launcher: rank 1",
    ]


def test_a_program_that_cannot_be_run() -> None:
    group = group_of(1)
    group.exited(
        WorkerExit(
            rank=0, local_rank=0, pid=9, time_s=WHEN, start_error="cannot run './x': not allowed"
        )
    )
    assert (
        told(group)[0] == "job failed: rank 0 could not be started: cannot run './x': not allowed"
    )


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


def test_what_each_rank_called_is_told_whole_and_once() -> None:
    places = [f"{'x' * 150}.py:{i}" for i in (0, 1)]
    calls = "; ".join(f"rank {i} called barrier() at {place}" for i, place in enumerate(places))
    group = group_of(3)
    for rank, place in enumerate(("in all_reduce", "in barrier")):
        error = WorkerError("rallypoint.MismatchError", calls, place, WHEN + rank)
        group.reported(rank, error)
        group.exited(failed(rank, code=1))
    lines = told(group)
    assert lines[0] == f"job failed: rank 0 raised rallypoint.MismatchError: {calls}"
    assert "  also failed: rank 1 with the same" in lines


def test_a_programs_last_words_are_told() -> None:
    group = group_of(2)
    group.reported(1, WorkerError("SystemExit", "no data in /data\nreally", "", WHEN))
    group.exited(failed(1, code=1))
    assert told(group)[0] == "job failed: rank 1 exited with code 1: no data in /data"
