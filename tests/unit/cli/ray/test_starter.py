"""A job on a cluster whose actors never come up: what is told, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import parse
from rallypoint.cli.ray.on_ray import RayStarter
from rallypoint.cli.ray.placement import AgentRequest, Need, RayFacts, RayNode
from rallypoint.cli.remote.plan import make_plan

NODES = [RayNode(f"id{i}", f"10.0.0.{i}", {"CPU": 1.0}) for i in (1, 2)]
FACTS = RayFacts(NODES, {0: "id1", 1: "id2"})


class NodeLostError(Exception):
    pass


class Cluster:
    """Its nodes answer what they are told to, in the order in which they are asked.

    Args:
        answers: why each actor is not there.
        facts: what it says, one after the other; then it does not answer.
    """

    def __init__(self, answers: Sequence[Exception], facts: Sequence[RayFacts]) -> None:
        self._answers = list(answers)
        self._facts = list(facts)
        self.asked: list[tuple[str, int | None]] = []
        self.group: tuple[Need, int] | None = None
        self.ended: list[object] = []

    def working_dir(self) -> str:
        return ""

    def ask_for_group(self, need: Need, count: int) -> None:
        self.group = need, count

    def facts(self) -> RayFacts | None:
        return self._facts.pop(0) if self._facts else None

    def start_actor(
        self, request: AgentRequest, _: Need, tell: Callable[[Future[str]], None]
    ) -> str:
        self.asked.append((request.node.node_id, request.bundle))
        answer: Future[str] = Future()
        answer.set_exception(self._answers.pop(0))
        tell(answer)
        return request.node.node_id

    def why_hopeless(self, error: BaseException) -> str:
        return "" if isinstance(error, NodeLostError) else str(error)

    def end_actor(self, actor: object) -> None:
        self.ended.append(actor)


def run(cluster: Any, nnodes: tuple[int, int], *flags: str) -> int:
    options, command = parse([*flags, __file__], RunOptions, program="")
    plan = make_plan(options, command, {}, hosts=(), nnodes=nnodes, workers="1")
    need = Need(workers=1, cpus=1, gpus=0)
    return RayStarter(plan, cluster, need).run()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_node_without_rallypoint_ends_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    why = RuntimeError("install Rallypoint there as well, for the Python that runs Ray")
    cluster = Cluster([why, why], [FACTS])
    assert run(cluster, (2, 2)) == 1
    assert cluster.group == (Need(workers=1, cpus=1, gpus=0), 2)
    assert cluster.asked == [("id1", 0), ("id2", 1)]
    assert set(cluster.ended) == {"id1", "id2"}
    told = capfd.readouterr().err
    assert told == f"rallypoint run: cannot start on 10.0.0.1: {why}\n"


def test_a_lost_node_is_replaced_unless_that_is_hopeless(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first actor dies with its node; Ray gives its bundle to another one, which cannot."""
    after = RayFacts(NODES[1:], {0: "id2"})
    before = RayFacts(NODES[:1], {0: "id1"})
    cluster = Cluster([NodeLostError(), RuntimeError("no way")], [before, after])
    assert run(cluster, (1, 1)) == 1
    assert cluster.asked == [("id1", 0), ("id2", 0)]
    told = capfd.readouterr().err.splitlines()
    assert told == [
        "rallypoint run: lost the connection to 10.0.0.1",
        "rallypoint run: cannot start on 10.0.0.2: no way",
    ]
