"""In-place recovery, where someone keeps the others waiting: rightly, or not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.test_in_place import end, ends_of

# In the first round a worker sends itself a signal, or sleeps for late_s (victim=RANK); a newcomer
# needs slow_s to begin.
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import numpy
import rallypoint as dist
from rallypoint import elastic

options = dict(each.split("=") for each in sys.argv[1:])
is_newcomer = os.environ.get("RALLYPOINT_STANDBY") == "1"
dist.init_process_group(timeout=timedelta(seconds=float(options.get("timeout_s", "60"))))
if is_newcomer:
    time.sleep(float(options.get("slow_s", "0")))  # it shards a model, say
gradient = numpy.empty(int(options.get("count", "4")))
state = elastic.State(step=0, total=numpy.zeros(4))

@elastic.run
def train(state):
    while state.step < 300:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if state.step == 20 and is_first and str(dist.get_rank()) == options["victim"]:
            time.sleep(float(options.get("late_s", "0")))
            os.kill(os.getpid(), getattr(signal, options["signal"]))
        gradient[:] = 1.0
        dist.all_reduce(gradient)
        time.sleep(0.005)
        with state.update():
            state.total += gradient[:4] / dist.get_world_size()
            state.step += 1

train(state)
assert state.total[0] == 300, state.total
os.write(1, f"end {os.getpid()} {dist.get_rank()} {dist.get_world_size()}\\n".encode())
"""


def begin(launch: Launch, *flags: str, **options: object) -> None:
    told = [f"{name}={value}" for name, value in {"signal": "SIGSTOP", **options}.items()]
    launch.start(*flags, launch.script(PROGRAM), *told)


def test_a_spare_may_take_its_time_to_build_its_state(launch: Launch) -> None:
    """It knows its place, so it is not taken for one that is stopped."""
    flags = ("--nproc-per-node", "3", "--spares", "1")
    begin(launch, *flags, victim=1, signal="SIGKILL", slow_s=12)
    end(launch)
    assert sorted(ends_of(launch).values()) == [(0, 3), (1, 3), (2, 3)]
    assert "does not answer" not in launch.err


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("count", [4, 1 << 20])  # in the second, ranks wait for each other in turn
def test_a_call_that_times_out_costs_one_rank(
    launch: Launch, seed: int, spares: int, count: int
) -> None:
    """The others go on, although hangs are only reported."""
    victim = random.Random(seed).randrange(3)
    flags = ("--nproc-per-node", "3", "--spares", str(spares))
    begin(launch, *flags, victim=victim, timeout_s=3, count=count)
    end(launch)
    size = 2 + spares
    assert sorted(ends_of(launch).values()) == [(rank, size) for rank in range(size)], launch.err
    assert f"killing rank {victim}, as others waited for it for longer than" in launch.err
    assert "go on after" in launch.err


def test_who_comes_a_little_late_stays(launch: Launch) -> None:
    """The call has failed for all; they form a new round, in which the late one has its place."""
    begin(launch, "--nproc-per-node", "3", victim=1, signal="SIGCONT", late_s=2.5, timeout_s=2)
    end(launch)
    assert sorted(ends_of(launch).values()) == [(0, 3), (1, 3), (2, 3)], launch.err
    assert "killing" not in launch.err


def nodes(tmp_path: Path, port: int, *flags: str, **options: object) -> list[Launch]:
    """Three nodes of two workers; the first one's agent coordinates."""
    launches = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        launches.append(Launch(tmp_path / str(number)))
        where = ("--nnodes", "3", "--node-rank", str(number), "--nproc-per-node", "2")
        meet = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        begin(launches[-1], *where, *meet, *flags, **options)
    return launches


@pytest.mark.parametrize(
    "wait", [("--on-hang", "restart", "--hang-after", "1"), ()], ids=["hang", "timeout"]
)
def test_a_rank_of_another_node_is_killed_there(
    tmp_path: Path, free_port: int, seed: int, wait: tuple[str, ...]
) -> None:
    """The agent that decides so leaves its own workers alone."""
    victim = random.Random(seed).randrange(2, 6)
    timeout_s = 60 if wait else 3
    launches = nodes(tmp_path, free_port, *wait, victim=victim, timeout_s=timeout_s)
    ends: dict[int, tuple[int, int]] = {}
    for launch in launches:
        end(launch)
        ends |= ends_of(launch)
    assert sorted(ends.values()) == [(rank, 5) for rank in range(5)]
    told = [f"killing rank {victim}, as " in launch.err for launch in launches]
    assert told == [number == victim // 2 for number in range(3)]
