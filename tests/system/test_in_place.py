"""In-place recovery: real workers are killed, and the others go on in the same processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
from tests.system import kill_points
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.nodes import launches
from tests.system.test_logs import COMMON, documented_events

from rallypoint.elastic import Sampler

PROGRAM = str(Path(__file__).with_name("in_place.py"))
BATCH = 24
FULL = ("--rdzv-conf", "last_call_timeout=60")
# So many kills, and 20 steps for each, where bits are compared; 100 in `make check-long`.
KILLS = int(os.environ.get("RALLYPOINT_TEST_IN_PLACE_KILLS", "6"))


class Step(NamedTuple):
    pid: int
    number: int
    digest: str
    rank: int
    size: int
    at_s: float  # on CLOCK_MONOTONIC, which all test hosts share
    samples: tuple[int, ...]


def steps_of(directory: Path) -> dict[int, list[Step]]:
    """What each process wrote, by step."""
    found = defaultdict(list)
    for path in directory.glob("*.log"):
        for line in path.read_text().splitlines():
            number, digest, rank, size, at_s, samples = line.split(" ")
            indices = tuple(int(each) for each in samples.split(",")) if samples else ()
            pid = int(path.stem)
            step = Step(pid, int(number), digest, int(rank), int(size), float(at_s), indices)
            found[step.number].append(step)
    return found


def check_steps(found: dict[int, list[Step]], steps: int) -> None:
    """Every step once, with the same bits everywhere, and its whole batch once."""
    sampler = Sampler(100, BATCH, seed=3)
    assert sorted(found) == list(range(1, steps + 1))
    for number, told in found.items():
        assert len({step.digest for step in told}) == 1, told
        assert len({step.pid for step in told}) == len(told), "a step was done twice"
        assert {step.size for step in told} == {told[0].size}
        by_rank = {step.rank: step.samples for step in told}
        if len(by_rank) == told[0].size:  # a rank that died in its update may have told nothing
            taken = [sample for rank in sorted(by_rank) for sample in by_rank[rank]]
            assert taken == sampler.indices(number - 1, 0, 1).tolist()


def weights_of(steps: int, ranks: int) -> Iterator[numpy.ndarray]:
    """After each step, as so many ranks have them, computed here; of two, bit for bit."""
    data = numpy.random.default_rng(7)
    inputs = data.standard_normal((100, 8))
    targets = inputs @ numpy.arange(8) + 0.1 * data.standard_normal(100)
    weights = numpy.ones(8)
    sampler = Sampler(100, BATCH, seed=3)
    for step in range(steps):
        gradient = numpy.zeros(8)
        for rank in range(ranks):
            indices = sampler.indices(step, rank, ranks)
            error = inputs[indices] @ weights - targets[indices]
            gradient += error @ inputs[indices] / BATCH
        weights -= 0.1 * gradient
        yield weights


def await_step(directory: Path, number: int, processes: int = 1) -> list[int]:
    """Until so many processes have come so far; returns their numbers."""
    came: list[int] = []

    def are_there() -> bool:
        came.clear()
        for path in directory.glob("*.log"):
            lines = path.read_text().splitlines()
            is_there = Path(f"/proc/{path.stem}").exists()
            if is_there and lines and int(lines[-1].split()[0]) >= number:
                came.append(int(path.stem))
        return len(came) >= processes

    wait_until(are_there)
    return came


def ends_of(launch: Launch) -> dict[int, tuple[int, int]]:
    """Rank and size at the end, by process."""
    words = [line.split() for line in launch.out.splitlines() if line.startswith("end ")]
    return {int(pid): (int(rank), int(size)) for _, pid, rank, size in words}


def plan_death(launch: Launch, *steps: int, turn: int = 0) -> None:
    """Have a rank die in each of these steps, as it comes to the gradient's reduction."""
    kill_points.write(
        {step: [kill_points.Death("reduce", turn)] for step in steps}, launch.directory
    )


def begin(
    launch: Launch, *flags: str, steps: int, pause_s: float = 0.005, wishes: str = ""
) -> None:
    told = [str(launch.directory), str(steps), str(pause_s), *wishes.split()]
    launch.start(*flags, PROGRAM, *told)


def end(launch: Launch, status: int = 0, *, within_s: float = 100.0) -> None:
    assert launch.process is not None
    assert launch.process.wait(within_s) == status, launch.err
    launch.expect_nothing_left()


@pytest.mark.everyday
def test_the_others_go_on(launch: Launch) -> None:
    plan_death(launch, 10, turn=1)
    flags = ("--nproc-per-node", "3", "--json-events", "events.json")
    begin(launch, *flags, steps=30, wishes="kills")
    end(launch)
    found, ends = steps_of(launch.directory), ends_of(launch)
    check_steps(found, 30)
    assert sorted(ends.values()) == [(0, 2), (1, 2)]
    (victim,) = {step.pid for step in found[1]} - set(ends)
    assert (
        f"(pid {victim}) was killed by SIGKILL; 2 of 3 ranks are left; ranks 0-1 of 2 continue"
        in launch.err
    )
    events = [
        json.loads(each) for each in (launch.directory / "events.json").read_text().splitlines()
    ]
    (went_on,) = [event for event in events if event["event"] == "went_on"]
    assert set(went_on) == COMMON | documented_events()["went_on"]
    assert (went_on["lost_pids"], went_on["world_size"]) == ([victim], 2)


@pytest.mark.everyday
def test_a_spare_takes_over_with_the_same_bits(launch: Launch) -> None:
    plan_death(launch, 10)
    begin(launch, "--nproc-per-node", "2", "--spares", "1", steps=30, wishes="kills min_size=2")
    end(launch)
    found = steps_of(launch.directory)
    check_steps(found, 30)
    assert {step.size for told in found.values() for step in told} == {2}
    assert bits_of(found) == [digest_of(weights) for weights in weights_of(30, 2)]
    first, last = ({step.pid for step in found[number]} for number in (1, 30))
    assert len(first & last) == 1, "the survivor keeps its process"


@pytest.mark.everyday
def test_tools_know_the_calls_of_a_spare_that_took_over(launch: Launch) -> None:
    plan_death(launch, 10)
    wishes = "kills until min_size=2"
    begin(launch, "--nproc-per-node", "2", "--spares", "1", steps=100_000, wishes=wishes)
    await_step(launch.directory, 20, processes=2)
    assert launch.process is not None
    job = str(launch.process.pid)
    _, _, head, *rows = tool("status", job).splitlines()
    assert head.startswith("RANK")
    assert len(rows) == 2
    assert all("all_reduce" in row for row in rows), rows
    assert "no calls are recorded" not in tool("explain", job, "--why")
    trace = str(launch.directory / "trace.json")
    tool("trace", job, "--seconds", "0.5", "--output", trace)
    calls = json.loads(Path(trace).read_text())["traceEvents"]
    assert len({each["pid"] for each in calls if each["name"].startswith("all_reduce")}) == 2
    (launch.directory / "enough").touch()
    end(launch)


def tool(*words: str) -> str:
    command = [sys.executable, "-m", "rallypoint", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def digest_of(weights: numpy.ndarray) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def bits_of(found: dict[int, list[Step]]) -> list[str]:
    """After each step."""
    return [found[number][0].digest for number in sorted(found)]


def replayed(found: dict[int, list[Step]], directory: Path, wishes: str = "") -> list[str]:
    """The bits after each step of a run that nothing disturbs, by as many ranks in each step."""
    sizes = [found[number][0].size for number in sorted(found)]
    (directory / "sizes").write_text(json.dumps(sizes))
    calm, ranks = Launch(directory), str(max(sizes))
    wishes = f"replay {wishes}"
    begin(calm, "--nproc-per-node", ranks, steps=len(sizes), pause_s=0.0, wishes=wishes)
    end(calm)
    told = steps_of(directory)
    check_steps(told, len(sizes))
    assert [told[number][0].size for number in sorted(told)] == sizes
    return bits_of(told)


@pytest.mark.timeout(300 + 3 * KILLS)
def test_a_spare_continues_with_the_same_bits(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Whatever dies, each step has the bits of a run in which nothing did."""
    draw, steps = random.Random(seed), 80 + 20 * KILLS
    flags = ("--nproc-per-node", "3", "--spares", "1", "--max-restarts", "1000")
    begin(launch, *flags, steps=steps, wishes="min_size=3")
    for at_step in sorted(draw.sample(range(2, steps - 50), KILLS)):
        os.kill(draw.choice(sorted(await_step(launch.directory, at_step, 3))), signal.SIGKILL)
        time.sleep(draw.random() * 0.05)
    end(launch, within_s=100.0 + 2 * KILLS)
    found = steps_of(launch.directory)
    check_steps(found, steps)
    assert {step.size for told in found.values() for step in told} == {3}
    assert len(ends_of(launch)) == 3

    calm = Launch(tmp_path_factory.mktemp("calm"))
    begin(calm, "--nproc-per-node", "3", steps=steps, pause_s=0.0)
    end(calm)
    undisturbed = bits_of(steps_of(calm.directory))
    assert bits_of(found) == undisturbed
    # Nor does it matter that the training could go on in place.
    assert replayed(found, tmp_path_factory.mktemp("replay")) == undisturbed


@pytest.mark.timeout(300 + 3 * KILLS)
def test_the_bits_follow_from_the_number_of_ranks(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Ranks are lost, and new ones join; as many ranks compute the same where nothing happens."""
    draw, kills = random.Random(seed), max(3, KILLS // 2)
    flags = ("--nproc-per-node", "4", "--max-restarts", str(kills - 3))
    begin(launch, *flags, steps=1_000_000, wishes="until")
    at_step, killed = 2, set[int]()
    for _ in range(kills):
        at_step += draw.randrange(20)
        while len(among := set(await_step(launch.directory, at_step, 2)) - killed) < 2:
            time.sleep(0.005)  # one that is killed still has its number for a moment
        victim = draw.choice(sorted(among))
        killed.add(victim)
        os.kill(victim, signal.SIGKILL)
        time.sleep(draw.random() * 0.3)
    await_step(launch.directory, at_step + 20)
    (launch.directory / "enough").touch()
    end(launch)
    found = steps_of(launch.directory)
    check_steps(found, len(found))
    sizes = [found[number][0].size for number in sorted(found)]
    print("ranks, one after the other:", [size for size, _ in itertools.groupby(sizes)])
    assert sizes[-1] == 1, "three are not replaced"
    assert bits_of(found) == replayed(found, tmp_path_factory.mktemp("replay"))


@pytest.mark.everyday
def test_a_new_process_joins(launch: Launch) -> None:
    plan_death(launch, 10)
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    begin(launch, *flags, steps=1_000_000, wishes="kills until")
    logs = launch.directory.glob
    wait_until(lambda: len([path for path in logs("*.log") if path.stat().st_size]) == 3)
    (launch.directory / "enough").touch()
    end(launch)
    found, ends = steps_of(launch.directory), ends_of(launch)
    check_steps(found, len(found))
    assert sorted(ends.values()) == [(0, 2), (1, 2)]
    (survivor,) = {step.pid for step in found[1]} & set(ends)  # it kept its process
    (newcomer,) = set(ends) - {survivor}
    assert {step.pid for step in found[len(found)]} == {survivor, newcomer}


@pytest.mark.exact
def test_commits_and_weights_of_one_process(launch: Launch) -> None:
    """With fewer ranks, too, as the global batch stays the same."""
    plan_death(launch, 20, 40, 80, turn=1)  # the spare, a newcomer, keeps a copy as well
    flags = ("--nproc-per-node", "3", "--spares", "1")
    begin(launch, *flags, steps=150, wishes="commit kills")
    end(launch)
    found = steps_of(launch.directory)
    assert sorted(found) == list(range(151))
    for told in found.values():  # once again by those who have returned to a commit
        assert len({step.digest for step in told}) == 1
    assert sorted(ends_of(launch).values()) == [(0, 1)]
    (path,) = launch.directory.glob("*.npy")
    *_, weights = weights_of(150, 1)
    assert numpy.load(path) == pytest.approx(weights, rel=1e-9)


def test_a_rank_dies_as_it_waits_in_a_commit(launch: Launch) -> None:
    """All who are left make it, and go on from it: what follows it in the step is not reached."""
    program = """
import os, pathlib, signal, sys, time
import rallypoint as dist
from rallypoint import elastic
from rallypoint.elastic.membership import membership

def tell(word):
    os.write(1, f"{word} {state.step} {dist.get_world_size()}\\n".encode())

state = elastic.State(step=0)

@elastic.run
def train(state):
    tell("begin")
    while state.step < 5:
        state.step += 1
        if state.step == 3 and dist.get_world_size() == 3:
            if dist.get_rank():
                pathlib.Path(f"waits-{dist.get_rank()}").write_text(str(os.getpid()))
            else:
                while len(victims := list(pathlib.Path().glob("waits-*"))) < 2:
                    time.sleep(0.01)
                time.sleep(0.3)  # until both have come to the commit, and wait
                os.kill(int(victims[0].read_text()), signal.SIGKILL)
                while not membership().has_news():
                    time.sleep(0.01)
        state.commit()
        tell("commit")

dist.init_process_group()
train(state)
"""
    launch.start("--nproc-per-node", "3", launch.script(program))
    end(launch)
    told = Counter(launch.out.splitlines())
    assert told == {
        **{"begin 0 3": 3, "commit 1 3": 3, "commit 2 3": 3},
        **{"begin 3 2": 2, "commit 4 2": 2, "commit 5 2": 2},
    }


def test_a_newcomer_with_other_arrays_is_refused(launch: Launch) -> None:
    """It ends with a clear error, and the others go on."""
    command = f"""
import os, runpy, sys
if os.path.exists("{launch.directory}/changed"): sys.argv.append("shape=9")
sys.argv[0] = "{PROGRAM}"
runpy.run_path("{PROGRAM}", run_name="__main__")
"""
    words = [str(launch.directory), "400", "0.005"]
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    launch.start(*flags, launch.script(command), *words)
    came = await_step(launch.directory, 5, 2)
    (launch.directory / "changed").touch()
    os.kill(came[0], signal.SIGKILL)
    end(launch)
    assert "weights in this rank's elastic.State is float64 of shape (9,), but on the" in launch.err
    assert [size for _, size in ends_of(launch).values()] == [1]


@pytest.mark.parametrize("restarts", [pytest.param("0", marks=pytest.mark.seldom), "5"])
def test_a_worker_that_is_stopped_does_not_keep_the_others(launch: Launch, restarts: str) -> None:
    """It is killed, as it does not answer, and what it would write later is never seen.

    Nor does it get more time because a newcomer joins meanwhile.
    """
    flags = ("--nproc-per-node", "3", "--max-restarts", restarts)
    begin(launch, *flags, steps=100_000, wishes="until")
    stopped, lost, survivor = await_step(launch.directory, 5, 3)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: f"(pid {stopped}) is stopped" in launch.err)
    if restarts != "0":
        await_step(launch.directory, max(steps_of(launch.directory)) + 5, 3)
    (launch.directory / "enough").touch()
    end(launch)
    assert survivor in ends_of(launch)
    assert len(ends_of(launch)) == (1 if restarts == "0" else 3)
    found = steps_of(launch.directory)
    check_steps(found, max(found))


def test_who_keeps_the_others_waiting_is_killed(launch: Launch) -> None:
    """With --on-hang restart, nobody else loses its process."""
    flags = ("--nproc-per-node", "3", "--on-hang", "restart", "--hang-after", "1")
    begin(launch, *flags, steps=300)
    stopped, *_ = await_step(launch.directory, 5, 3)
    os.kill(stopped, signal.SIGSTOP)
    end(launch)
    ends = ends_of(launch)
    assert sorted(ends.values()) == [(0, 2), (1, 2)]
    assert stopped not in ends
    found = steps_of(launch.directory)
    check_steps(found, 300)
    assert set(ends) < {step.pid for step in found[1]}


WRONG = """
import threading, rallypoint as dist, numpy
from rallypoint import elastic
@elastic.run
def train(state):
    dist.all_reduce(numpy.ones(3 + dist.get_rank()))
dist.init_process_group()
train(elastic.State(step={value}))
"""
MISTAKES = {
    "0": "MismatchError: ranks called different operations",
    "threading.Lock()": "step in this rank's elastic.State cannot be pickled (cannot pickle",
}


@pytest.mark.parametrize("value", MISTAKES, ids=["call", "lock"])
def test_a_mistake_ends_the_job(launch: Launch, value: str) -> None:
    """At once: nobody waits for another round, or goes on without having begun."""
    began = time.monotonic()
    assert launch.run("--nproc-per-node", "2", launch.script(WRONG.format(value=value))) == 1
    assert time.monotonic() - began < 25, "half a minute is how long a new round is waited for"
    assert MISTAKES[value] in launch.err


@pytest.mark.everyday
def test_three_nodes_lose_the_first(tmp_path: Path, free_port: int) -> None:
    """Its agent, which coordinates and has the store, and its worker die; the others continue."""
    flags = ["--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-id", "job", *FULL]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port}", "--local-addr", "127.0.0.1"]
    with launches(tmp_path, 3) as nodes:
        for node in nodes:
            node.start(*flags, PROGRAM, str(tmp_path), "1000000", "0.005", "until")
            if node is nodes[0]:  # it is there before the others
                wait_until(lambda: is_listened_at(free_port))
        await_step(tmp_path, 10, 3)
        first, *others = nodes
        assert first.process is not None
        first.process.kill()
        wait_until(lambda: all(" of 2 continues after " in node.err for node in others))
        (tmp_path / "enough").touch()
        ends: dict[int, tuple[int, int]] = {}
        for node in others:
            end(node)
            ends |= ends_of(node)
    assert sorted(ends.values()) == [(0, 2), (1, 2)]
    found = steps_of(tmp_path)
    check_steps(found, len(found))
    assert set(ends) < {step.pid for step in found[1]}, "processes were kept"


WAITS = """
import os, sys
import numpy
import rallypoint as dist
from rallypoint import elastic
from rallypoint.process_group.formation import own_place

own_place._NEWS_S, own_place._REMEDY_S = 0.1, 0.2  # for 32 s

@elastic.run
def train(state):
    while True:
        enough = numpy.array([os.path.exists(sys.argv[1])], float)
        dist.all_reduce(enough)
        if enough[0]:
            break
        with state.update():
            state.step += 1
        if state.step == 3:
            open(f"trains.{os.getpid()}", "w").close()
    return state.step

dist.init_process_group()
state = elastic.State(step=0, last=os.getpid())
train(state)
open(f"done.{state.step}.{os.getpid()}", "w").close()
"""


def test_survivors_wait_for_a_node_as_long_as_their_launcher(
    tmp_path: Path, free_port: int
) -> None:
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr"]
    flags += ["127.0.0.1", "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    with launches(tmp_path, 3) as (first, second, third):
        script = first.script(WAITS)
        for each in (first, second):
            each.start(*flags, script, str(tmp_path / "enough"))
        (trains,) = first.wait_for("trains.*")
        second.wait_for("trains.*")
        assert second.process is not None and first.process is not None
        second.process.kill()
        wait_until(lambda: "1 of 2 nodes" in first.err or "waiting" in first.err)
        time.sleep(3)  # ten times as long as it would wait without a promise
        third.start(*flags, script, str(tmp_path / "enough"))
        wait_until(lambda: " continue after " in first.err or " continues after " in first.err)
        (tmp_path / "enough").touch()
        assert first.process.wait(100) == 0, first.err
        (done,) = first.directory.glob("done.*")
    assert done.name.rpartition(".")[2] == trains.name.rpartition(".")[2], "it kept its memory"


def test_the_coordinator_is_lost_while_survivors_wait_for_a_node(
    tmp_path: Path, free_port: int
) -> None:
    flags = ["--nnodes", "5", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr"]
    flags += ["127.0.0.1", "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    with launches(tmp_path, 7) as (coordinator, *kept, last, again, more):
        script = coordinator.script(WAITS)
        for each in (coordinator, *kept, last):
            each.start(*flags, script, str(tmp_path / "enough"))
            if each is coordinator:
                wait_until(lambda: "1 of 5 nodes" in coordinator.err)
        trained = [each.wait_for("trains.*")[0].suffix for each in kept]
        assert last.process is not None and coordinator.process is not None
        last.process.kill()
        wait_until(lambda: "4 of 5 nodes" in coordinator.err)
        coordinator.process.kill()
        wait_until(lambda: any("3 of 5 nodes" in each.err for each in kept))
        for each in (again, more):
            each.start(*flags, script, str(tmp_path / "enough"))
        for each in kept:
            wait_until(lambda: " continues after " in each.err)  # noqa: B023 - at once
        (tmp_path / "enough").touch()
        for each in kept:
            assert each.process is not None
            assert each.process.wait(100) == 0, each.err
        done = [path.suffix for each in kept for path in each.directory.glob("done.*")]
    assert done == trained, "they kept their memory"


LATE = """
import os, pathlib, signal, sys, time
if os.environ.get("RALLYPOINT_STANDBY") == "1":
    number = len(list(pathlib.Path(".").glob("standby.*")))
    pathlib.Path(f"standby.{number}").touch()
    if number < int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
import numpy
import rallypoint as dist
from rallypoint import elastic

is_first = "RALLYPOINT_STANDBY" not in os.environ

@elastic.run
def train(state):
    while not os.path.exists("enough"):
        dist.all_reduce(numpy.ones(1))
        with state.update():
            state.step += 1
        if state.step == 3 and is_first and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step > 3 and dist.get_world_size() == 2:
            pathlib.Path("whole").touch()
        time.sleep(0.01)

dist.init_process_group()
train(elastic.State(step=0))
"""


def test_a_replacement_that_dies_before_it_is_ready_is_replaced(launch: Launch) -> None:
    """As often in a row as restarts are allowed, and not at once."""
    flags = ("--nproc-per-node", "2", "--max-restarts", "2")
    launch.start(*flags, launch.script(LATE), "2")
    launch.wait_for("whole")
    (launch.directory / "enough").touch()
    end(launch)
    assert len(list(launch.directory.glob("standby.*"))) == 3
    told = "was killed by SIGKILL before it called init_process_group; another one is started in"
    assert launch.err.count(told) == 2


OWN = """
from datetime import timedelta
import numpy
import rallypoint as dist
from rallypoint import elastic

tries = 0

@elastic.run
def train(state):
    global tries
    while state.step < 40:
        dist.all_reduce(numpy.ones(1))
        if state.step == 20 and dist.get_rank() == 1:
            tries += 1
            open(f"try.{tries}", "w").close()
            own.get("no such key")
        with state.update():
            state.step += 1

dist.init_process_group()
own = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.1))
train(elastic.State(step=0))
"""


def test_an_error_of_the_programs_own_store_is_no_loss(launch: Launch) -> None:
    """It ends its rank, and is shown; the others continue."""
    assert launch.run("--nproc-per-node", "2", launch.script(OWN)) == 0, launch.err
    assert "StoreTimeoutError" in launch.err.partition("continues after")[0].splitlines()[-1]
    assert [path.name for path in launch.directory.glob("try.*")] == ["try.1"]


EARLY = """
import sys
import rallypoint as dist
from rallypoint import elastic

@elastic.run
def train(state):
    is_one = dist.get_rank() == 1
    while state.step < 40:
        if is_one and state.step == 20:
            if sys.argv[1] == "exit":
                sys.exit(0)
            return
        with state.update():
            state.step += 1

dist.init_process_group()
train(elastic.State(step=0))
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("return", "rank 1 has returned from its training function after 20 updates"),
        ("exit", "exited with code 0 before the training was over"),
    ],
)
def test_a_rank_that_leaves_a_training_early_is_told(launch: Launch, how: str, told: str) -> None:
    """The others go on without it, at once."""
    assert launch.run("--nproc-per-node", "3", launch.script(EARLY), how) == 0, launch.err
    assert told in launch.err
    assert "ranks 0-1 of 2 continue after" in launch.err


EPOCHS = """
import os, sys
import numpy
import rallypoint as dist
from rallypoint import elastic

is_first = "RALLYPOINT_STANDBY" not in os.environ

@elastic.run
def train(state, epoch):
    while state.epochs[epoch] < 20 or (epoch == 3 and dist.get_world_size() == 1):
        total = numpy.full(1, epoch)
        dist.all_reduce(total)
        assert total[0] == epoch * dist.get_world_size(), "all are in the same call"
        with state.update():
            state.step += 1
            state.epochs[epoch] += 1
        if state.step == 45 and is_first and dist.get_rank() == 1:
            os._exit(7)
    return epoch

@elastic.run
def sum_up(state):
    total = state.epochs.copy()
    dist.all_reduce(total)
    return total

dist.init_process_group()
state = elastic.State(step=0, epochs=numpy.zeros(5, int))
told = [train(state, epoch) for epoch in (1, 2, 3, 4)]
assert (sum_up(state) == 2 * state.epochs).all()
sys.stdout.write(f"{told} {state.epochs[[1, 2, 4]]}\\n")
"""


def test_a_function_for_each_epoch(launch: Launch) -> None:
    """Who joins in the third call passes over the first two; then all go on together."""
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--tee", "0"]
    assert launch.run(*flags, launch.script(EPOCHS)) == 0, launch.err
    assert sorted(launch.out.splitlines()) == [
        "[1, 2, 3, 4] [20 20 20]",
        "[None, None, 3, 4] [20 20 20]",
    ]


HALF = """
import numpy
import rallypoint as dist
from rallypoint import elastic

failed = False

@elastic.run
def train(state):
    global failed
    while state.step < 40:
        gradient = numpy.ones(2)
        dist.all_reduce(gradient)
        with state.update():
            state.weights[0] += gradient[0]
            if state.step == 20 and dist.get_rank() == 1 and not failed:
                failed = True
                raise dist.RevokedError("a group of the program's own")
            state.weights[1] += gradient[1]
            state.step += 1
    return state.weights

dist.init_process_group()
weights = train(elastic.State(step=0, weights=numpy.zeros(2)))
assert weights.tolist() == [80, 80], weights
open(f"done.{dist.get_rank()}", "w").close()
"""


@pytest.mark.exact
def test_a_rank_with_half_of_an_update_gets_the_state_anew(launch: Launch) -> None:
    assert launch.run("--nproc-per-node", "2", launch.script(HALF)) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 2


RAISES = """
import os
import numpy
import rallypoint as dist
from rallypoint import elastic

@elastic.run
def train(state):
    while state.step < 40:
        dist.all_reduce(numpy.ones(1))
        if state.step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("loss is nan")
        with state.update():
            state.step += 1

dist.init_process_group()
train(elastic.State(step=0))
open(f"done.{dist.get_rank()}", "w").close()
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_exception_on_all_ranks_costs_one_restart(
    tmp_path: Path, free_port: int, nodes: int
) -> None:
    """And is told as what it was, whichever ranks were thought to go on."""
    flags = ["--nnodes", str(nodes), "--nproc-per-node", "2", "--max-restarts", "1"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    flags += ["--rdzv-id", "job", "--local-addr", "127.0.0.1"]
    with launches(tmp_path, nodes) as launched:
        for each in launched:
            each.start(*flags, each.script(RAISES))
        for each in launched:
            assert each.process is not None
            assert each.process.wait(100) == 0, each.err
            assert "raised ValueError: loss is nan" in each.err
            assert "could not be started" not in each.err
            assert len(list(each.directory.glob("done.*"))) == 2


def is_listened_at(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


SAVES = """
import os, time
import numpy
import rallypoint as dist
from rallypoint import elastic

@elastic.run(min_size=1)
def train(state):
    while state.step < 5:
        dist.all_reduce(numpy.ones(1))
        with state.update():
            state.step += 1

dist.init_process_group()
train(elastic.State(step=0))
open(f"saving.{os.getpid()}", "w")
while not os.path.exists("may_end"):
    time.sleep(0.02)
open(f"saved.{os.getpid()}", "w")
"""


def test_nobody_joins_a_training_that_is_being_saved(tmp_path: Path, free_port: int) -> None:
    """A node that comes when the last update is done would have all begin again."""
    flags = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--verbose"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port}", "--local-addr", "127.0.0.1"]
    with launches(tmp_path, 2) as (first, late):
        words = (*flags, "--nproc-per-node", "2", first.script(SAVES))
        first.start(*words)
        first.wait_for("saving.*", 2)
        late.start(*words)
        wait_until(lambda: "joined, and waits for the next round" in first.err)
        (first.directory / "may_end").touch()
        assert first.process is not None and late.process is not None
        assert first.process.wait(60) == 0, first.err
        assert late.process.wait(60) == 3, late.err
        names = sorted(each.suffix for each in first.directory.glob("saving.*"))
        assert names == sorted(each.suffix for each in first.directory.glob("saved.*"))
        assert len(names) == 2, "they were started again"


def test_without_a_launcher(launch: Launch, free_port: int) -> None:
    """One process by itself just trains."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = str(free_port)
    words = (str(launch.directory), "20", "0")
    assert launch.run(*words, environ=environ, launcher=(PROGRAM,)) == 0, launch.err
    check_steps(steps_of(launch.directory), 20)
