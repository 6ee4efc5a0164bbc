"""The page of a job and its data: what it says, hostile text, its size, and the saved file."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.unit.diagnosis.followed_job import FollowedJob

from rallypoint.base.job_so_far import JobEvent, JobSoFar
from rallypoint.cli.jobs import RunningJob
from rallypoint.cli.page.content import DOCUMENT, PageData, changes, policy, saved_document
from rallypoint.diagnosis.explanation import Cause, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.job_view import Inspection, JobView, view_of

HOSTILE = "</script><script>alert(1)</script><!--<img src=x>"
HOSTILE += "\x1b]0;pwned\x07\x9b31m\u202egnp\u2066\x00\u200b\ud800"


def job(name: str = "llama-7b") -> RunningJob:
    found = object.__new__(RunningJob)
    found.agents, found.run_id, found.name = (), name, name
    return found


def view(followed: FollowedJob, at_s: float, why: Inspection | None = None) -> JobView:
    found = view_of(followed.history(at_s), why)
    assert found is not None
    return found


def data_of(followed: FollowedJob, at_s: float = 60.0) -> dict[str, object]:
    data = PageData(job(), 1000.0)
    data.add(view(followed, at_s), 1001.0)
    return data.to_json()


def texts(told: object) -> list[str]:
    if isinstance(told, dict):
        return [*told, *(text for each in told.values() for text in texts(each))]
    if isinstance(told, list):
        return [text for each in told for text in texts(each)]
    return [told] if isinstance(told, str) else []


def test_the_data_is_what_top_tells() -> None:
    told = data_of(FollowedJob(ranks=8, late_s={5: 0.03}, steps=True, values={"loss": "2.3"}))
    assert str(told["headline"]).startswith("no hang: slow rank 5: others wait for it 30 ms")
    assert told["order"] == [5, 0, 1, 2, 3, 4, 6, 7]
    assert (told["step"], told["total"], told["values"]) == (600, 50_000, {"loss": "2.3"})
    assert (told["name"], told["began"], told["at"]) == ("llama-7b", 1000.0, 1001.0)
    ranks = told["ranks"]
    assert isinstance(ranks, list)
    assert [each["state"] for each in ranks] == ["runs"] * 8
    assert json.loads(json.dumps(told)) == told


def test_the_time_line_begins_with_the_job() -> None:
    events = (
        JobEvent(at=950.0, kind="round", text="round 0 begins with 4 ranks"),
        JobEvent(at=990.5, kind="loss", text=HOSTILE, lost_s=0.25),
    )
    followed = FollowedJob(steps=True, so_far=JobSoFar(events=events))
    data = PageData(job(), 1000.0)
    for now_s in (60.0, 61.0):
        data.add(view(followed, now_s), 940.0 + now_s)
    told = data.to_json()
    assert told["job_began"] == 940.0
    data.add(view(followed, 62.0), 1007.0)  # five seconds late
    assert data.to_json()["job_began"] == 940.0
    listed = told["events"]
    assert isinstance(listed, list)
    assert [(each["kind"], each["at"], each["lost_s"]) for each in listed] == [
        ("round", 950.0, 0.0),
        ("loss", 990.5, 0.25),
    ]
    assert all(text.isprintable() for text in texts(told))


def test_the_speeds_of_a_job_that_has_ended() -> None:
    """As many as a page shows, equally far apart, however the samples are."""
    steps = [(100.0 + step * (0.1 if step < 2000 else 0.2), step) for step in range(5000)]
    steps = [*steps[:2000], *((time_s - 200.0, step) for time_s, step in steps[2000:])]
    data = PageData(job(), 1000.0)
    data.add_samples(steps[::7])
    speeds = data.to_json()["speeds"]
    assert isinstance(speeds, list)
    assert len(speeds) == 300
    assert speeds[:70] == pytest.approx([10.0] * 70)
    assert speeds[80:] == pytest.approx([5.0] * 220)
    data = PageData(job(), 1000.0)
    data.add_samples([(1.0, 1)])
    assert data.to_json()["speeds"] == []


def test_before_anything_was_told() -> None:
    told = PageData(job(), 1000.0).to_json()
    assert told["name"] == "llama-7b"
    assert "ranks" not in told
    assert told["events"] == []


def test_what_has_happened() -> None:
    healthy = FollowedJob(ranks=4, nodes=2)
    dead = replace(healthy, dead=(1, 3))
    silent = replace(healthy, silent={1: 10.0})
    slow = replace(healthy, late_s={2: 0.05})
    stuck = replace(healthy, stuck=(2, 30.0))
    root = Root(ranks=(2,), cause=Cause.ELSEWHERE, text="", strength=Strength.CERTAIN)
    why = Explanation(kind=Verdict.EXPLAINED, sentence="rank 2 never came.", roots=(root,))
    before = view(healthy, 40.0)

    def seen(old: JobView | None, new: JobView) -> list[str]:
        return list(changes(old, new))

    assert seen(None, before) == ["round 0 runs: 4 ranks on 2 nodes"]
    assert seen(before, view(healthy, 41.0)) == []
    assert seen(before, view(dead, 41.0)) == ["ranks 1, 3: killed by SIGKILL"]
    assert seen(view(dead, 40.0), view(dead, 41.0)) == []
    after = view(replace(healthy, round=1, ranks=3, nodes=1), 41.0)
    assert seen(before, after) == ["round 1 begins: 3 ranks on 1 node"]
    assert seen(before, view(silent, 41.0)) == ["silent: node host1"]
    assert seen(view(silent, 40.0), before) == ["no longer silent: node host1"]
    assert seen(before, view(slow, 41.0)) == ["slow: rank 2, for which others wait again and again"]
    assert seen(view(slow, 40.0), before) == ["no longer slow: rank 2"]
    assert seen(before, view(stuck, 41.0)) == ["no rank makes progress"]
    assert seen(view(stuck, 40.0), view(stuck, 41.0, Inspection(why, {}))) == ["rank 2 never came."]
    assert seen(view(stuck, 40.0), before) == ["the job makes progress again"]


def test_it_stays_small_for_days_and_many_ranks() -> None:
    data, small = PageData(job(), 0.0), FollowedJob(ranks=2)
    views = [view(replace(small, round=number), 40.0 + number) for number in range(2)]
    for second in range(1000):
        data.add(views[second % 2], float(second))
    data.add(view(FollowedJob(ranks=512, nodes=64), 50.0), 1000.0)
    data.end(1001.0)
    told = data.to_json()
    events, speeds = told["events"], told["speeds"]
    assert isinstance(events, list)
    assert isinstance(speeds, list)
    assert (len(events), len(speeds)) == (200, 300)
    assert events[-1] == {"at": 1001.0, "text": "the job has ended"}
    assert told["has_ended"] is True
    assert len(json.dumps(told)) < 400 * 512
    assert len(DOCUMENT.encode()) <= 40_000


def hostile_data(seed: int) -> dict[str, object]:
    text = "".join(random.Random(seed).sample(HOSTILE, len(HOSTILE))) + HOSTILE
    followed = FollowedJob(
        ranks=4, nodes=2, host=text + "{}", group=text, site=text, stuck=(1, 5.0), dead=(3,),
        silent={1: 4.0}, steps=True, values={text: text},
    )  # fmt: skip
    seen = view(
        followed, 20.0, Inspection(Explanation(kind=Verdict.UNEXPLAINED, sentence=text), {1: text})
    )
    seen = replace(seen, phase=text, ranks=tuple(replace(each, end=text) for each in seen.ranks))
    data = PageData(job(text), 0.0)
    data.add(seen, 1.0)
    return data.to_json()


def test_hostile_text_is_printable(seed: int) -> None:
    """Neither escape sequences nor what reorders a line, such as U+202E, reaches the page."""
    told = texts(hostile_data(seed))
    assert len(told) > 20
    assert [text for text in told if not text.isprintable()] == []


class Blocks(HTMLParser):
    """The scripts of a page, as an independent parser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self._is_inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._is_inside = tag == "script"
        if self._is_inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def test_a_saved_page_holds_its_data_and_nothing_else(seed: int) -> None:
    data = hostile_data(seed)
    page = saved_document(data)
    found = Blocks(page)
    (attributes, text), (module, script) = found.scripts
    assert attributes == {"type": "application/json", "id": "saved"}
    assert json.loads(text) == data
    assert module == {"type": "module"}
    assert "<" not in text
    assert "img" not in found.tags
    (saved_policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert "connect-src" not in saved_policy  # hence default-src: none
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in saved_policy
    assert f"script-src 'sha256-{digest}';" in policy()
    assert "href=" not in page.replace('href="data:', "")


def test_the_page_shows_text_as_text_and_loads_nothing() -> None:
    for forbidden in (
        "innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(",
        "srcdoc", "localStorage", "sessionStorage", "cookie", "import(", "import ", "@import",
        "url(", "setAttribute(\"on", " style=", " onclick=", " src=",
    ):  # fmt: skip
        assert forbidden not in DOCUMENT, forbidden
    namespaces = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\s'\"`]+", DOCUMENT)) == namespaces
    (script,) = [text for _, text in Blocks(DOCUMENT).scripts]
    assert re.findall(r"fetch\(([^,]+)", script) == ['"data"']  # relative: it works below a prefix
