"""The contest with contenders whose times are given: who is measured when, and what is reported."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rallypoint.lab.bench import BenchmarkOptions, BenchmarkRequest, request_of
from rallypoint.lab.bench.contest import Contest, Row
from rallypoint.lab.bench.crew import CrewError
from rallypoint.lab.bench.results import Table, plot, write_json

FEW = {"--sizes": "4K,8K", "--rounds": "3", "--iterations": "10", "--warmup": "0"}


class Team:
    """Two ranks, the second of which takes that many seconds for a call."""

    def __init__(self, name: str, call_s: float, orders: list[tuple[str, dict[str, Any]]]) -> None:
        self.name = name
        self.version = "1.0"
        self.wrong = 0
        self.fails_at = 0
        self.ends = 0
        self._call_s = call_s
        self._orders = orders

    def ask(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._orders.append((self.name, dict(order)))
        if order["count"] == self.fails_at:
            raise CrewError(f"{self.name}: out of memory")
        if order["order"] == "check":
            return [{"wrong": 0}, {"wrong": self.wrong}]
        return [{"seconds": 0.0}, {"seconds": self._call_s * order["calls"]}]

    def end(self) -> None:
        self.ends += 1


class Place:
    """Where such teams are; those without a time cannot be started."""

    def __init__(self, call_s: Mapping[str, float]) -> None:
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.teams = {name: Team(name, each, self.orders) for name, each in call_s.items()}
        self.begins: list[Mapping[str, Any]] = []
        self.is_closed = False

    def start(self, name: str, begin: Mapping[str, Any]) -> Team:
        self.begins.append(begin)
        if name not in self.teams:
            raise CrewError(f"{name}: it did not start")
        return self.teams[name]

    def close(self) -> None:
        self.is_closed = True


def request(operation: str = "all_reduce", **flags: str) -> BenchmarkRequest:
    named = {f"--{name.replace('_', '-')}": text for name, text in flags.items()}
    return request_of(operation, BenchmarkOptions({**FEW, **named}))


def test_each_is_measured_for_a_moment_in_a_changing_order() -> None:
    place = Place({"rallypoint": 2e-6, "gloo": 4e-6, "mpich": 8e-6})
    with Contest(request(vs="gloo,mpich"), place) as contest:
        assert contest.versions == {"rallypoint": "1.0", "gloo": "1.0", "mpich": "1.0"}
        rows = list(contest.rows())
    assert place.is_closed
    assert [(row.count, row.nbytes) for row in rows] == [(1024, 4096), (2048, 8192)]
    for row in rows:
        times = [row.time_us(name) for name in ("rallypoint", "gloo", "mpich")]
        assert times == pytest.approx([2, 4, 8])
        assert row.time_us("openmpi") is None
    timed = [name for name, order in place.orders if order["order"] == "time"]
    assert [name[0] for name in timed[:9]] == list("rgmgmrmrg")
    assert place.orders[3][1] == {"order": "time", "count": 1024, "calls": 10, "warmup": 0}


def test_calls_fill_a_fiftieth_of_a_second() -> None:
    """A call of 1/8192 s: 2 and 16 calls are too short to tell, 128 take 1/64 s."""
    place = Place({"rallypoint": 1 / 8192})
    flags = {"--sizes": "4K", "--rounds": "1"}
    with Contest(request_of("all_reduce", BenchmarkOptions(flags)), place) as contest:
        (row,) = contest.rows()
    orders = [order for _, order in place.orders if order["order"] == "time"]
    assert [(order["calls"], order["warmup"]) for order in orders] == [
        (2, 1), (16, 1), (128, 12), (163, 16),
    ]  # fmt: skip
    assert row.time_us("rallypoint") == 1e6 / 8192


def test_a_message_is_half_of_a_round_trip() -> None:
    with Contest(request("send"), Place({"rallypoint": 6e-6})) as contest:
        assert next(contest.rows()).time_us("rallypoint") == pytest.approx(3)


def test_a_peer_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    place = Place({"rallypoint": 1e-6, "gloo": 2e-6, "mpich": 3e-6})
    place.teams["gloo"].fails_at = 2048
    with Contest(request(vs="gloo,mpich", sizes="4K,8K,16K"), place) as contest:
        first, second, third = contest.rows()
        assert contest.versions == {"rallypoint": "1.0", "mpich": "1.0"}
    assert capsys.readouterr().err.splitlines() == [
        "starting rallypoint",
        "starting gloo",
        "starting mpich",
        "left out from now on: gloo: out of memory",
    ]
    assert place.teams["gloo"].ends == 1
    assert [row.time_us("gloo") for row in (first, second, third)] == [2.0, None, None]
    assert third.time_us("mpich") == pytest.approx(3)


def test_our_own_failure_ends_it() -> None:
    place = Place({"rallypoint": 1e-6, "gloo": 2e-6})
    place.teams["rallypoint"].fails_at = 1024
    with (
        pytest.raises(CrewError, match="rallypoint: out of memory"),
        Contest(request(vs="gloo"), place) as contest,
    ):
        list(contest.rows())
    assert place.is_closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_peer_that_does_not_start_ends_the_others() -> None:
    place = Place({"rallypoint": 1e-6})
    with (
        pytest.raises(CrewError, match="gloo: it did not start"),
        Contest(request(vs="gloo"), place),
    ):
        pytest.fail("it began")
    assert place.is_closed


def test_a_file_with_an_algorithm_is_named_for_all_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Place({"rallypoint": 1e-6})
    for algorithm in ("mine.py", "ring"):
        with Contest(request(algorithm=algorithm, dtype="int8"), place):
            pass
    mine, ring = place.begins
    assert (mine["algorithm"], ring["algorithm"]) == (str(tmp_path / "mine.py"), "ring")
    assert (mine["most_items"], mine["dtype"]) == (8192, "int8")


TABLE = """\
# all_reduce, 4 ranks on 2 hosts, ring, tcp, default placement, medians of 3 rounds; \
rallypoint (1.0), gloo (2.13), mpich (5.0)
# two hosts
      bytes     count    type      op      time   algbw   busbw #wrong       gloo      mpich      ahead
                                             us    GB/s    GB/s                us         us      times
       4096      1024 float32     sum      2.00    2.05    3.07      0       4.00      3.00!       1.50
       8192      2048 float32     sum    200000    0.00    0.00      0          -          -          -
! mpich: 7 wrong items at 4096 bytes
# ahead: the time of the fastest peer over Rallypoint's
# load average 0.5, this benchmark included; whatever else runs distorts the times
"""  # noqa: E501


def rows() -> list[Row]:
    return [
        Row(
            1024,
            4096,
            {"rallypoint": [1.0, 2.0, 9.0], "gloo": [5.0, 4.0, 4.0], "mpich": [3.0]},
            {"rallypoint": 0, "gloo": 0, "mpich": 7},
        ),
        Row(2048, 8192, {"rallypoint": [200000.0]}, {"rallypoint": 0}),
    ]


VERSIONS = {"rallypoint": "1.0", "gloo": "2.13", "mpich": "5.0"}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four ranks, all_reduce's bandwidth on the bus is 2 x 3/4 of the algorithm's."""
    asked = request(hosts="a,b", nproc_per_node="2", algorithm="ring", backend="tcp")
    table = Table(asked, VERSIONS, "two hosts")
    for row in rows():
        table.add(row)
    table.end("load average 0.5")
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown == [line.split() for line in TABLE.splitlines()]


def test_the_table_without_peers(capsys: pytest.CaptureFixture[str]) -> None:
    asked = replace(request("broadcast"), pin=True)
    table = Table(asked, {"rallypoint": "1.0"}, "here")
    table.add(Row(1024, 4096, {"rallypoint": [2.0]}, {"rallypoint": 0}))
    table.end("")
    first, *_, row = capsys.readouterr().out.splitlines()
    assert "broadcast, 2 ranks, each rank pinned to a core, medians of 3 rounds;" in first
    assert row.split() == ["4096", "1024", "float32", "-", "2.00", "2.05", "2.05", "0"]


def test_json_has_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["/bin/rallypoint", "bench", "send"])
    write_json(str(path), request(), VERSIONS, "here", rows())
    found = json.loads(path.read_text())
    assert (found["place"], found["contenders"]["mpich"]) == ("here", "5.0")
    assert found["command"] == "rallypoint bench send"
    assert datetime.fromisoformat(found["date"]) <= datetime.now(UTC).replace(tzinfo=None)
    assert found["request"]["counts"] == [1024, 2048]
    small, large = (row["results"] for row in found["rows"])
    assert small["rallypoint"]["times_us"] == [1.0, 2.0, 9.0]
    assert small["gloo"] == {
        "time_us": 4.0, "algbw_gb_s": 1.024, "busbw_gb_s": 1.024, "wrong": 0,
        "times_us": [5.0, 4.0, 4.0],
    }  # fmt: skip
    assert large["gloo"] == {
        "time_us": None, "algbw_gb_s": None, "busbw_gb_s": None, "wrong": None, "times_us": [],
    }  # fmt: skip


def test_the_plot_has_a_line_for_each_that_took_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    path = tmp_path / "found.html"
    versions = {**VERSIONS, "openmpi": "5.0"}  # which failed at once
    plot(str(path), request(), versions, rows())
    page = path.read_text()
    labels = [text for text in re.findall(r"<!-- (\S+) -->", page) if text in versions]
    assert labels == ["rallypoint", "gloo", "mpich"]
    assert "<h1>all_reduce, 2 ranks, default placement, medians of 3 rounds</h1>" in page
