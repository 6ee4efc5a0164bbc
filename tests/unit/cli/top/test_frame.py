"""The screens of `rallypoint top`: as they were approved, in frames/, and with hostile text."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.unit.diagnosis.followed_job import FollowedJob

from rallypoint.base.job_so_far import Durations, JobEvent, JobSoFar
from rallypoint.base.trained_time import TrainedTime
from rallypoint.cli.top.frame import HELP, Choices, Page, cut, frame, shown_ranks, width, wrapped
from rallypoint.diagnosis.explanation import Cause, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.job_view import Inspection, JobView, view_of

FRAMES = Path(__file__).with_name("frames")
SPEEDS = (1.0, 5.0, 7.0, 7.0, 7.0, 1.0, 6.0, 7.0, 7.0)
SLOW = FollowedJob(ranks=8, late_s={5: 0.03}, steps=True, values={"loss": "2.31"})
STUCK = FollowedJob(
    ranks=512,
    nodes=64,
    host="n{}",
    group="dp",
    steps=True,
    stuck=(131, 1800.0),
    silent={40: 1810.0},
)
SENTENCE = (
    "rank 131 never entered all_reduce #72000 of dp: it is in read of /data/s7 at load.py:88;"
    " 511 ranks wait for it at train.py:40 (41.0 s)."
)
SIZES = [(80, 24), (100, 30), (200, 60)]


def slow() -> JobView:
    view = view_of(SLOW.history(1820.4))
    assert view is not None
    return view


@cache
def stuck() -> JobView:
    root = Root(ranks=(131,), cause=Cause.ELSEWHERE, text="", strength=Strength.CERTAIN)
    explanation = Explanation(kind=Verdict.EXPLAINED, sentence=SENTENCE, roots=(root,))
    view = view_of(STUCK.history(1841.0), Inspection(explanation, {131: "load.py:88"}))
    assert view is not None
    return view


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("name", ["slow", "stuck"])
def test_as_approved(name: str, columns: int, rows: int) -> None:
    """To approve another screen, remove its file and run this twice."""
    view = slow() if name == "slow" else stuck()
    choices = Choices(speeds=SPEEDS, rank=3)
    lines = frame("llama-7b", view, choices, columns, rows, has_colours=False)
    text = "".join(f"{line}\n" for line in lines)
    path = FRAMES / f"{name}-{columns}x{rows}.txt"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path} was written")
    assert text == path.read_text()


@pytest.mark.parametrize(("columns", "rows"), [*SIZES, (40, 12), (20, 5), (1, 1), (300, 100)])
def test_every_line_fits(columns: int, rows: int) -> None:
    page = Page("help", tuple(HELP.split("\n")))
    for view in (None, slow(), stuck()):
        for choices in (
            Choices(speeds=SPEEDS, note="n" * 300),
            Choices(prompt="node", typed="x" * 300),
            Choices(page=page, first=3),
            Choices(text="no such text", is_paused=True, sort="CPU", node="7"),
        ):
            lines = frame("llama-7b", view, choices, columns, rows, has_colours=False)
            assert len(lines) == rows
            assert max(map(width, lines)) <= columns


SO_FAR = JobSoFar(
    events=(
        JobEvent(at=1.8e9, kind="round", text="round 0 begins with 8 ranks"),
        JobEvent(at=1.8e9 + 60, kind="loss", text="rank 6 (pid 4243) was killed by SIGKILL"),
        JobEvent(at=1.8e9 + 61, kind="round", text="round 1 begins with 7 ranks"),
    ),
    losses={"killed": 1},
    recoveries={"all": Durations().with_one(0.41)},
    trained=TrainedTime(trained_s=1805.8),
)


@pytest.mark.parametrize(("columns", "rows"), [*SIZES, (60, 12), (200, 0)])
def test_what_has_happened(columns: int, rows: int) -> None:
    """Beside the rates if there is room; the last event that was no round, below the ranks."""
    view = view_of(replace(SLOW, so_far=SO_FAR).history(1820.4))
    assert view is not None
    lines = frame("llama-7b", view, Choices(speeds=SPEEDS), columns, rows, has_colours=False)
    (past,) = [line for line in lines if "trained 99.2 %  losses 1 (410ms)  restarts 0" in line]
    assert past.startswith("steps/s ") == (columns > 100)
    (event,) = [line for line in lines if "SIGKILL" in line]
    assert re.fullmatch(r"\d\d:\d\d:\d\d rank 6 \(pid 4243\) was killed by SIGKILL", event)
    assert lines.index(event) == len(lines) - (2 if rows else 1)
    assert not any("begins with" in line for line in lines)


@pytest.mark.parametrize("so_far", [JobSoFar(), JobSoFar(trained=TrainedTime(trained_s=1820.3))])
def test_nothing_has_happened(so_far: JobSoFar) -> None:
    view = view_of(replace(SLOW, so_far=so_far).history(1820.4))
    assert view is not None
    text = "\n".join(frame("job", view, Choices(), 100, 30, has_colours=False))
    assert ("trained 99.9 %" in text) == (so_far.trained is not None)
    assert "losses" not in text


def test_a_job_that_has_ended() -> None:
    for ended_s, ago in ((3.0, "3 s"), (720.0, "12 min"), (7300.0, "2 h"), (200_000.0, "2 d")):
        view = replace(slow(), status=1, ended_s=ended_s)
        first = frame("job", view, Choices(), 100, 0, has_colours=False)[0]
        assert f"  ended {ago} ago, exit 1, after 30:20 " in first


def test_colours_add_nothing_but_colours() -> None:
    for view in (slow(), stuck()):
        plain = frame("job", view, Choices(rank=2), 100, 30, has_colours=False)
        coloured = frame("job", view, Choices(rank=2), 100, 30, has_colours=True)
        assert any("\x1b[" in line for line in coloured)
        assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in coloured] == plain


HOSTILE = "\x1b]0;pwned\x07\x1b[2J\r\n\x9b31m\u202egnp.exe\u2066\x00\x7f\u200b\ud800"


def test_hostile_text_leaves_no_sequence(seed: int) -> None:
    """Of a job's name, hosts, groups, operations, lines, values, exceptions and logs."""
    chance = random.Random(seed)
    for _ in range(20):
        text = "".join(chance.sample(HOSTILE, len(HOSTILE)))
        job = FollowedJob(
            ranks=4,
            nodes=2,
            host=text + "{}",
            group=text,
            site=text,
            stuck=(1, 5.0),
            dead=(3,),
            silent={1: 4.0},
            steps=True,
            values={text: text},
            so_far=JobSoFar(events=(JobEvent(at=1.8e9, kind=text, text=text),)),
        )
        explanation = Explanation(kind=Verdict.UNEXPLAINED, sentence=text)
        view = view_of(job.history(20.0), Inspection(explanation, {1: text}))
        assert view is not None
        view = replace(view, phase=text, ranks=tuple(replace(r, end=text) for r in view.ranks))
        for choices in (
            Choices(),
            Choices(page=Page(text, (text, f"a{text}b")), note=text),
            Choices(prompt=text, typed=text, node=text, text=text),
        ):
            for columns in (33, 80, 200):
                for line in frame(text, view, choices, columns, 24, has_colours=False):
                    assert line.isprintable(), ascii(line)
                    assert width(line) <= columns


def test_wide_and_combining_characters_take_their_columns() -> None:
    assert width("日本") == 4
    assert width("e\u0301") == 1
    assert cut("日本語", 4) == "日…"
    assert cut("日本語", 5) == "日本…"
    assert cut("日本語", 6) == "日本語"
    assert wrapped("日本語 a", 4) == ["日本", "語 a"]
    view = view_of(FollowedJob(ranks=4, nodes=2, host="日本{}").history(60.0))
    assert view is not None
    lines = frame("job", view, Choices(), 100, 20, has_colours=False)
    table = [line for line in lines if "日本" in line]
    assert len(table) == 4
    assert len({width(line[: line.index("runs")]) for line in table}) == 1


def test_filters_and_sorts() -> None:
    view = stuck()
    assert [each.rank for each in shown_ranks(view, Choices())[:2]] == [131, 320]
    assert [each.rank for each in shown_ranks(view, Choices(sort="rank"))[:2]] == [0, 1]
    assert [each.rank for each in shown_ranks(view, Choices(node="n16"))[:2]] == [131, 128]
    assert len(shown_ranks(view, Choices(node="16"))) == 8
    assert len(shown_ranks(view, Choices(text="SILENT"))) == 8
    assert [each.rank for each in shown_ranks(view, Choices(text="load.py"))] == [131]


def test_an_old_frame_says_so() -> None:
    old = replace(slow(), age_s=4.2)
    *_, last = frame("job", old, Choices(), 80, 24, has_colours=False)
    assert last.endswith("4 s old")
    *_, last = frame("job", slow(), Choices(), 80, 24, has_colours=False)
    assert "old" not in last


def test_ranks_scroll() -> None:
    view = view_of(FollowedJob(ranks=32).history(60.0))
    assert view is not None
    for first, expected in ((0, 0), (10, 10), (99, 32 - 19)):
        lines = frame("job", view, Choices(first=first), 80, 24, has_colours=False)
        assert int(lines[4].split()[0]) == expected
