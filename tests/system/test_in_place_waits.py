"""In-place recovery, where someone keeps the others waiting: rightly, or not."""

from __future__ import annotations

from tests.system.conftest import Launch
from tests.system.test_in_place import end, ends_of

SLOW_SPARE = """
import os, signal, time
import numpy
import rallypoint as dist
from rallypoint import elastic

is_spare = os.environ.get("RALLYPOINT_STANDBY") == "1"
dist.init_process_group()
time.sleep(12.0 * is_spare)  # it shards a model, say
state = elastic.State(step=0, total=numpy.zeros(4))

@elastic.run
def train(state):
    while state.step < 60:
        gradient = numpy.ones(4)
        dist.all_reduce(gradient)
        if state.step == 20 and dist.get_rank() == 1 and not is_spare:
            os.kill(os.getpid(), signal.SIGKILL)
        with state.update():
            state.total += gradient
            state.step += 1

train(state)
assert state.total[0] == 60 * dist.get_world_size(), state.total
os.write(1, f"end {os.getpid()} {dist.get_rank()} {dist.get_world_size()}\\n".encode())
"""


def test_a_spare_may_take_its_time_to_build_its_state(launch: Launch) -> None:
    """It knows its place, so it is not taken for one that is stopped."""
    launch.start("--nproc-per-node", "3", "--spares", "1", launch.script(SLOW_SPARE))
    end(launch)
    assert sorted(ends_of(launch).values()) == [(0, 3), (1, 3), (2, 3)]
    assert "does not answer" not in launch.err
