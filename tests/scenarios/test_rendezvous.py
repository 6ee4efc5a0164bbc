"""Stories of jobs that lose agents, cables and coordinators: see the .txt files beside this one.

A line with `>` is done to the cluster, the others are what happens, with the time in seconds.

    > nodes A B C; min 2; max 3        and: join-timeout S, endpoints N, quorum host, restarts N,
                                          etcd yes, workers go-on (when others are lost)
    > start A B | kill A | leave A | fail A | succeed A | cut A B | C D | mend | wait S
    > etcd away | etcd here

After a deliberate change, `python -m pytest tests/scenarios --write-scenarios` writes them anew;
read the difference as carefully as the change.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulation.sim_cluster import SimCluster
from tests.simulation.sim_keeper import SimEtcd

from rallypoint.rendezvous.timeouts import Timeouts

HERE = Path(__file__).parent / "rendezvous"
STORIES = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    told = tell(text)
    if request.config.getoption("--write-scenarios"):
        path.write_text(told)
    else:
        assert told == text


def tell(text: str) -> str:
    """The story again, with what happens now."""
    lines = text.splitlines()
    out = [line for line in lines if line.startswith("#")]
    cluster: SimCluster | None = None
    workers_go_on = False
    for line in lines:
        if not line.startswith("> "):
            continue
        out.append(line)
        if cluster is None:
            cluster = _cluster(line[2:])
            workers_go_on = "workers go-on" in line
            continue
        seen = len(cluster.witness.lines)
        _do(cluster, line[2:], workers_go_on=workers_go_on)
        out += [entry for entry in cluster.witness.lines[seen:] if "agent starts" not in entry]
    return "\n".join(out) + "\n"


def _cluster(text: str) -> SimCluster:
    given = dict(part.strip().split(" ", 1) for part in text.split(";"))
    names = tuple(given["nodes"].split())
    wishes = tuple([None if w == "-" else int(w) for w in given.get("wishes", "").split()])
    return SimCluster(
        seed=0,
        nodes=len(names),
        names=names,
        min_nodes=int(given["min"]),
        max_nodes=int(given["max"]),
        endpoints=int(given.get("endpoints", 1)),
        quorum=given.get("quorum", "members"),
        max_restarts=int(given.get("restarts", 3)),
        timeouts=Timeouts(
            join_timeout_s=float(given.get("join-timeout", 600)),
            most_beats=5,  # as in a large job: a heartbeat a second
        ),
        wishes=wishes,
        keeper=SimEtcd if "etcd" in given else None,
    )


def _do(cluster: SimCluster, text: str, *, workers_go_on: bool) -> None:  # noqa: PLR0912 - one case for each word
    what, _, rest = text.partition(" ")
    match what:
        case "start":
            for name in rest.split():
                cluster.start(name)
                cluster.agents[name].keeps = workers_go_on
        case "kill":
            for name in rest.split():
                cluster.kill(name)
        case "leave":
            for name in rest.split():
                cluster.agents[name].leave()
        case "fail":
            cluster.agents[rest].fail()
        case "succeed":
            for name in rest.split():
                cluster.agents[name].succeed()
        case "cut":
            cluster.cut([set(group.split()) for group in rest.split("|")])
        case "mend":
            cluster.mend()
        case "etcd":
            assert cluster.keeper is not None
            cluster.keeper.is_away = rest == "away"
        case "wait":
            cluster.run(float(rest))
        case _:
            raise AssertionError(text)
