"""In-place recovery, where someone keeps the others waiting: rightly, or not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.nodes import launches
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


# In the second, ranks wait for each other in turn.
@pytest.mark.parametrize(
    ("spares", "count"), [(0, 4), pytest.param(1, 1 << 20, marks=pytest.mark.seldom)]
)
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
    assert f"killing rank {victim}, as others waited for it longer than" in launch.err
    assert "continue after" in launch.err


def test_who_comes_a_little_late_stays(launch: Launch) -> None:
    """The call has failed for all; they form a new round, in which the late one has its place."""
    begin(launch, "--nproc-per-node", "3", victim=1, signal="SIGCONT", late_s=2.5, timeout_s=2)
    end(launch)
    assert sorted(ends_of(launch).values()) == [(0, 3), (1, 3), (2, 3)], launch.err
    assert "killing" not in launch.err


def test_a_rank_of_another_node_is_killed_there(tmp_path: Path, free_port: int, seed: int) -> None:
    """The agent of the first node, which decides so, leaves its own workers alone."""
    victim = random.Random(seed).randrange(2, 6)
    ends: dict[int, tuple[int, int]] = {}
    with launches(tmp_path, 3) as nodes:
        for number, node in enumerate(nodes):
            where = ("--nnodes", "3", "--node-rank", str(number), "--nproc-per-node", "2")
            meet = ("--master-addr", "127.0.0.1", "--master-port", str(free_port))
            begin(node, *where, *meet, victim=victim, timeout_s=3)
        for node in nodes:
            end(node)
            ends |= ends_of(node)
    assert sorted(ends.values()) == [(rank, 5) for rank in range(5)]
    told = [f"killing rank {victim}, as " in node.err for node in nodes]
    assert told == [number == victim // 2 for number in range(3)]
