"""How the text of PyTorch's Flight Recorder is read: as json reads it, whatever comes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint._native import read_trace

_NAMES = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), max_size=40)
_NUMBERS = st.integers(0, 2**62)
_ENTRIES = st.fixed_dictionaries(
    {
        "pg_id": st.integers(0, 100),
        "process_group": st.tuples(_NAMES, _NAMES),
        "collective_seq_id": _NUMBERS,
        "op_id": _NUMBERS,
        "profiling_name": st.builds("{}:{}".format, st.sampled_from(["gloo", "nccl"]), _NAMES),
        "input_sizes": st.lists(st.lists(_NUMBERS, max_size=8), max_size=3),
        "input_dtypes": st.lists(_NAMES, max_size=3),
        "time_created_ns": _NUMBERS,
        "time_discovered_completed_ns": st.none() | _NUMBERS,
        "is_p2p": st.booleans(),
        "retired": st.booleans(),
        "state": st.sampled_from(["scheduled", "started", "completed"]),
    },
    optional={
        "duration_ms": st.floats(allow_nan=False, allow_infinity=False),
        "frames": st.recursive(st.none() | st.text(max_size=9), st.lists, max_leaves=9),
    },
)
_STATUS = st.fixed_dictionaries(
    {"last_enqueued_collective": _NUMBERS.map(str), "last_completed_collective": _NUMBERS.map(str)},
    optional={"last_started_collective": st.just("-1")},
)
_TRACES = st.fixed_dictionaries(
    {
        "version": st.just("2.10"),
        "pg_config": st.dictionaries(_NAMES, st.dictionaries(_NAMES, _NAMES), max_size=2),
        "pg_status": st.dictionaries(st.integers(0, 99).map(str), _STATUS, max_size=4),
        "entries": st.lists(_ENTRIES, max_size=5),
    }
)


def expected(trace: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The same by way of the json module."""
    statuses = [
        (int(key), int(one["last_enqueued_collective"]), int(one["last_completed_collective"]))
        for key, one in trace["pg_status"].items()
    ]
    entries = []
    for one in trace["entries"]:
        backend, _, operation = one["profiling_name"].partition(":")
        is_done = one["retired"] or one["state"] == "completed"
        entries.append(
            (
                one["pg_id"],
                *one["process_group"],
                one["collective_seq_id"],
                one["op_id"],
                backend,
                operation,
                *(one["input_dtypes"][:1] or [""]),
                (one["input_sizes"] or [[]])[0],
                one["time_created_ns"],
                one["is_p2p"],
                is_done,
            )
        )
    return statuses, entries


@given(_TRACES, st.sampled_from([None, 2]))
def test_a_trace(trace: dict[str, Any], indent: int | None) -> None:
    assert read_trace(json.dumps(trace, indent=indent).encode(), False) == expected(trace)


def test_what_hooks_have_recorded() -> None:
    """As PyTorch 2.15 has it of four calls, of which the second one was not recorded."""
    kinds = [  # collectives and messages before it, count, and whether it is a message
        (1, 0, 0, False, "completed", True),
        (1, 1, 2, True, "scheduled", False),
        (2, 1, 3, False, "scheduled", True),  # given up
    ]
    keys = ("collective_seq_id", "p2p_seq_id", "op_id", "is_p2p", "state", "retired")
    status = {"last_enqueued_collective": "3", "last_completed_collective": "-1"}
    trace = {
        "version": "2.10",
        "pg_status": {"0": status},
        "entries": [dict(zip(keys, kind, strict=True)) for kind in kinds],
    }
    read = read_trace(json.dumps(trace).encode(), True)
    assert read is not None
    assert read[0] == [(0, 4, 0)]
    assert [(entry[3], entry[4], *entry[-2:]) for entry in read[1]] == [
        (1, 1, False, True),
        (1, 2, True, False),
        (2, 3, False, False),
    ]


@given(_TRACES, st.integers(0, 2**32))
def test_what_was_cut_or_changed(trace: dict[str, Any], seed: int) -> None:
    """It is refused, or still JSON to the json module as well; and never read beyond its end."""
    chance = random.Random(seed)
    text = bytearray(json.dumps(trace).encode())
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text))
        match chance.randrange(3):
            case 0:
                del text[at:]
                text += b"}"
            case 1:
                text[at] = chance.choice(b'{}[]",:0-e\\tn \xff')
            case _:
                text[at:at] = text[chance.randrange(len(text)) :][:20]
    read = read_trace(bytes(text), False)
    if read is not None:
        json.loads(text.decode("latin-1"), parse_constant=lambda _: 1 / 0)


def test_bytes_that_are_no_text() -> None:
    text = b'{"version": "2.10", "entries": [{"profiling_name": "gloo:\xff"}]}'
    read = read_trace(text, False)
    assert read is not None
    assert [entry[6] for entry in read[1]] == ["\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b'{"version": "1.0"}',
        b'{"version": "2.10"',
        b'{"version": "2.10"} x',
        b'{"version": "2.10", "entries": {}}',
        b'{"version": "2.10", "entries": [{"pg_id": 99999999999999999999}]}',
        b'{"version": "2.10", "x": ' + b"[" * 100_000,
        b'{"version": "2.10", "x": "' + b"y" * 100_000,
        b'{"version": "2.10", "pg_status": {"0": 7}}',
    ],
)
def test_what_is_no_trace(text: bytes) -> None:
    assert read_trace(text, False) is None


def test_what_is_long_is_cut() -> None:
    entry = {"profiling_name": "gloo:" + "x" * 1000, "input_sizes": [list(range(9)), [1]]}
    read = read_trace(json.dumps({"version": "2.9", "entries": [entry]}).encode(), False)
    assert read is not None
    assert read[1][0][6] == "x" * (256 - len("gloo:"))
    assert read[1][0][8] == []  # more dimensions than there is room for
