"""Real jobs under `rallypoint run` that communicate, and the ways in which they fail."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.system.conftest import OURS, Launch

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

EVERYTHING = """
import numpy as np
import rallypoint as dist

assert not dist.is_initialized()
dist.init_process_group()
assert dist.is_initialized()
rank, size = dist.get_rank(), dist.get_world_size()
for dtype in (np.float32, np.float64, np.int32, np.int64):
    for shape in ((), (1,), (3, 5), (100_000,), (0, 4)):
        mine = np.full(shape, rank + 1, dtype)
        dist.all_reduce(mine)
        assert (mine == size * (size + 1) // 2).all() and mine.dtype == dtype
        mine = np.full(shape, rank + 1, dtype)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        assert (mine == size).all()
        mine = np.full(shape, rank, dtype)
        dist.broadcast(mine, src=size - 1)
        assert (mine == size - 1).all()
        out = [np.empty(shape, dtype) for _ in range(size)]
        dist.all_gather(out, np.full(shape, rank, dtype))
        assert all((values == other).all() for other, values in enumerate(out))
        dist.barrier()

# Strided views: right, and nothing beside them is touched.
big = np.zeros((8, 8))
dist.all_reduce(big[1:7:2, ::3] if rank else np.ones((3, 3)))
assert (big[1:7:2, ::3] == 1).all() == (rank > 0)
assert big.sum() == (9 if rank else 0)
fixed = np.arange(4.0)
fixed.flags.writeable = rank != 0
dist.broadcast(fixed, src=0)

# A token goes round, in both sizes of message.
for count in (1, 300_000):
    token = np.zeros(count)
    if rank == 0:
        dist.send(token + 1, dst=1)
        assert dist.recv(token, src=size - 1, tag=7) == size - 1
        assert (token == size).all()
    else:
        dist.recv(token, src=rank - 1, tag=0 if rank == 1 else 7)
        dist.send(token + 1, dst=(rank + 1) % size, tag=7)

# A second group after the first is gone.
dist.destroy_process_group()
assert not dist.is_initialized()
dist.init_process_group("rallypoint", init_method="env://")
ones = np.ones(3)
dist.all_reduce(ones, op=dist.ReduceOp.AVG)
assert (ones == 1).all()
dist.destroy_process_group()
open(f"done.{rank}", "w").close()
"""


@pytest.mark.everyday
def test_every_operation(launch: Launch) -> None:
    workers = 3
    assert launch.run("--nproc-per-node", str(workers), launch.script(EVERYTHING)) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == workers


@pytest.mark.everyday
@pytest.mark.exact
def test_one_algorithm_for_all_is_rank_0s_wish(launch: Launch, seed: int) -> None:
    """Seen in the bits of a sum, which follow from an algorithm's order."""
    script = launch.script(
        "import os, sys, numpy as np\n"
        "import rallypoint as dist\n"
        "def summed(**options):\n"
        "    rng = np.random.default_rng([int(sys.argv[1]), dist.get_rank()])\n"
        "    values = rng.standard_normal(1000)\n"
        "    dist.all_reduce(values, **options)\n"
        "    return values.tobytes()\n"
        "dist.init_process_group()\n"
        "chosen, ring = summed(), summed(algorithm='ring')\n"
        "assert chosen != ring\n"
        "dist.destroy_process_group()\n"
        "if os.environ['RANK'] == '0': os.environ['RALLYPOINT_ALGORITHM'] = 'ring'\n"
        "dist.init_process_group()\n"
        "assert summed() == ring\n"
    )
    assert launch.run("--nproc-per-node", "3", script, str(seed)) == 0, launch.err


GROUPS = """
import warnings
import numpy as np
import rallypoint as dist

for again in range(2):
    assert dist.group.WORLD is None
    dist.init_process_group("shm")
    rank = dist.get_rank()
    assert dist.group.WORLD is dist.GroupMember.WORLD and dist.group.WORLD.rank() == rank
    assert dist.get_backend() == 'shm' and dist.is_available() and dist.is_torchelastic_launched()
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3], backend='rallypoint')
    values = np.full(5, rank)
    dist.all_reduce(values, group=(evens, odds)[rank % 2])
    assert (values == 2 + 2 * (rank % 2)).all()
    pair, pairs = dist.new_subgroups(2)
    assert pairs[rank // 2] is pair and dist.get_process_group_ranks(pair)[rank % 2] == rank
    dist.all_reduce(values, group=pair)
    assert (values == 6).all()
    some, both = dist.new_subgroups_by_enumeration([[3, 0], [1]])
    assert len(both) == 2 and (some is None) == (rank == 2)
    half = dist.split_group(odds, [[1], [0]]) if rank % 2 else None
    assert half is None or dist.get_process_group_ranks(half) == [rank]
    if rank != 1:
        trio = dist.new_group([3, 2, 0], use_local_synchronization=True, sort_ranks=False)
        assert dist.get_group_rank(trio, 3) == 0
        dist.barrier(trio)
    everyone = dist.new_group()
    dist.barrier(everyone)
    dist.destroy_process_group(everyone)
    dist.barrier()
    dist.destroy_process_group()
    try: dist.barrier(pair)
    except dist.NotInitializedError: pass
    else: raise AssertionError('a subgroup outlived its world')
"""


@pytest.mark.everyday
def test_groups(launch: Launch) -> None:
    assert launch.run("--nproc-per-node", "4", launch.script(GROUPS)) == 0, launch.err


FAILURES = {
    "raise": ("raise ValueError('bad thing')", "rank 1 raised ValueError: bad thing"),
    "exit": ("sys.exit(3)", "rank 1 exited with code 3"),
    "kill": ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
}


@pytest.mark.parametrize("how", ["raise", "exit", pytest.param("kill", marks=pytest.mark.everyday)])
def test_a_rank_fails_while_the_others_reduce(launch: Launch, how: str) -> None:
    failure, told = FAILURES[how]
    script = launch.script(
        "import os, subprocess, sys\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "values = np.ones(5000)\n"
        "subprocess.Popen(['sh', '-c', 'setsid sleep 600 & sleep 601'])\n"
        "for _ in range(20): dist.all_reduce(values)\n"
        f"if dist.get_rank() == 1: {failure}\n"
        "while True: dist.all_reduce(values)\n"
    )
    assert launch.run("--standalone", "--nproc-per-node", "4", script) == 1
    assert f"rallypoint: job failed: {told}" in launch.err
    launch.expect_nothing_left()


@pytest.mark.everyday
def test_survivors_learn_of_a_death_and_may_go_on(launch: Launch) -> None:
    """The error is catchable, names the rank, and the process is well afterwards."""
    script = launch.script(
        "import os, sys\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "values = np.ones(5000)\n"
        "try:\n"
        "    for _ in range(20): dist.all_reduce(values)\n"
        "    if rank == 2: os._exit(0)\n"  # dies without a word, and without failing the job
        "    while True: dist.all_reduce(values)\n"
        "except dist.PeerLostError as error:\n"
        "    assert error.rank == 2, error\n"
        "try:\n"
        "    dist.barrier()\n"
        "    sys.exit('a broken group went on')\n"
        "except dist.PeerLostError as error:\n"
        "    assert 'this process group is broken' in str(error)\n"
        "dist.destroy_process_group()\n"
        "open(f'survived.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("survived.*"))) == 2


@pytest.mark.everyday
def test_survivors_of_a_death_shrink_the_default_group(launch: Launch) -> None:
    script = launch.script(
        "import os\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "try:\n"
        "    dist.all_reduce(np.ones(5000))\n"
        "    if rank == 0: os._exit(0)\n"
        "    while True: dist.all_reduce(np.ones(5000))\n"
        "except dist.PeerLostError as error:\n"
        "    left = dist.shrink_group([error.rank])\n"
        "assert left is dist.group.WORLD and dist.get_world_size() == 2\n"
        "assert dist.get_rank() == rank - 1\n"
        "values = np.array([rank])\n"
        "dist.all_reduce(values)\n"
        "assert values == [3]\n"
        "assert dist.get_rank(dist.new_group([1])) == (0 if rank == 2 else -1)\n"
        "dist.destroy_process_group()\n"
        "open(f'survived.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("survived.*"))) == 2


@pytest.mark.everyday
def test_different_sizes_are_an_error_on_every_rank(launch: Launch) -> None:
    script = launch.script(
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "try:\n"
        "    dist.all_reduce(np.ones(3 + (rank == 2)))\n"
        "except dist.MismatchError as error:\n"
        "    told = str(error)\n"
        "    line = ' called all_reduce(float64[%d], SUM) at worker.py:5'\n"
        "    assert 'ranks 0-1, 3' + line % 3 in told and 'rank 2' + line % 4 in told, told\n"
        "    assert sorted(error.calls) == [0, 1, 2, 3], error.calls\n"
        "    open(f'raised.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "4", script) == 0, launch.err
    assert len(list(launch.directory.glob("raised.*"))) == 4


@pytest.mark.parametrize(
    "method", [pytest.param("tcp", marks=pytest.mark.everyday), "file", "store"]
)
def test_other_ways_to_meet(launch: Launch, method: str) -> None:
    """Without the launcher's variables, three processes meet where they are told to."""
    script = launch.script(
        "import os, sys, numpy as np, rallypoint as dist\n"
        "from rallypoint.store.file import FileStore\n"
        "rank, size = int(os.environ.pop('RANK')), int(os.environ.pop('WORLD_SIZE'))\n"
        "method, path = sys.argv[1:]\n"
        "where = {\n"
        "    'tcp': {'init_method': 'tcp://127.0.0.1:' + os.environ['FREE_PORT']},\n"
        "    'file': {'init_method': 'file://' + path},\n"
        "    'store': {},\n"
        "}[method]\n"
        "if method == 'store': where['store'] = FileStore(path, size)\n"
        "dist.init_process_group(rank=rank, world_size=size, **where)\n"
        "values = np.ones(2)\n"
        "dist.all_reduce(values)\n"
        "assert (values == 3).all()\n"
        "dist.destroy_process_group()\n"
    )
    meeting = str(launch.directory / "meeting")
    options = ("--nproc-per-node", "3", script, method, meeting)
    with socket.socket() as held:  # nobody else gets the port, and rank 0 can listen there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        environ = {"FREE_PORT": str(held.getsockname()[1])}
        assert launch.run(*options, environ=environ) == 0, launch.err


def test_missing_rank_is_named(launch: Launch) -> None:
    script = launch.script(
        "import datetime, glob, os, time, rallypoint as dist\n"
        "def meet(name, count):\n"
        "    while len(glob.glob(name)) < count: time.sleep(0.01)\n"
        "rank = os.environ['RANK']\n"
        "open('up.' + rank, 'w').close()\n"
        "meet('up.*', 3)\n"
        "if rank == '1':\n"
        "    meet('told.*', 2)\n"
        "    raise SystemExit\n"
        "try:\n"
        "    dist.init_process_group(timeout=datetime.timedelta(seconds=2))\n"
        "except dist.StoreTimeoutError as error:\n"
        "    assert 'missing: 1;' in str(error), error\n"
        "    assert not dist.is_initialized()\n"
        "    open('told.' + rank, 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("told.*"))) == 2


@pytest.mark.everyday
def test_ctrl_c_reaches_a_rank_that_waits(launch: Launch) -> None:
    """A signal interrupts a collective in Python, as it does any other code."""
    script = launch.script(
        "import os, pathlib, signal, threading, time\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "communicator = dist.group.WORLD.communicator\n"
        "def interrupt(begun):\n"
        "    while communicator.begun == begun: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "if dist.get_rank() == 0:\n"
        "    threading.Thread(target=interrupt, args=(communicator.begun,)).start()\n"
        "    try:\n"
        "        dist.all_reduce(np.ones(3))\n"
        "    except KeyboardInterrupt:\n"
        "        pathlib.Path('interrupted').touch()\n"
        "else:\n"
        "    while not os.path.exists('interrupted'): time.sleep(0.01)\n"
        "    try:\n"
        "        dist.all_reduce(np.ones(3))\n"
        "    except dist.PeerLostError as error:\n"
        "        assert 'rank 0' in str(error) and 'interrupted' in str(error), error\n"
        "        pathlib.Path('told').touch()\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert (launch.directory / "interrupted").exists()
    assert (launch.directory / "told").exists()


LATE = """
import os, time, numpy as np, rallypoint as dist
dist.init_process_group()
array = np.zeros(1)
for _ in range(2): dist.all_reduce(array)
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0 if SHARED else dist.get_rank()]})
for _ in range(2): dist.all_reduce(array)
begin, used = time.monotonic(), time.process_time()
for _ in range(100):
    if dist.get_rank() == 1: time.sleep(0.005)
    dist.all_reduce(array)
share = (time.process_time() - used) / (time.monotonic() - begin)
if dist.get_rank() == 0: assert share < 0.5, share
dist.barrier()
"""


@pytest.mark.parametrize("cores", [1, 2])
def test_a_rank_whose_peer_is_late_leaves_the_core_to_others(launch: Launch, cores: int) -> None:
    """A busy machine makes its share smaller, never larger."""
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip("it needs two CPUs")
    script = launch.script(LATE.replace("SHARED", str(cores == 1)))
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err


MANY_GROUPS = """
import random, statistics, sys, time
import numpy as np, rallypoint as dist
dist.init_process_group()
rank, rng = dist.get_rank(), random.Random(int(sys.argv[1]))
groups = [dist.new_group([0, 1]) for _ in range(120)]
value, late_ms = np.zeros(1), []
waiting = [dist.irecv(np.zeros(1), 0, group=group) for group in groups[:-1]] if rank == 1 else []
for _ in range(11):
    if rank == 0:
        time.sleep(rng.uniform(0.2, 0.35))  # until the other's naps are as long as they get
        value[0] = time.monotonic()
        dist.send(value, 1, group=groups[-1])
        continue
    work, ended = dist.irecv(value, 0, group=groups[-1]), []
    # A rank that waits would look for itself.
    work.get_future().then(lambda _: ended.append(time.monotonic()))
    while not ended: time.sleep(0.001)
    late_ms.append(1e3 * (ended[0] - value[0]))
if rank == 0:
    for group in groups[:-1]: dist.send(value, 1, group=group)
for work in waiting: work.wait()
if rank == 1: assert statistics.median(late_ms) < 10, late_ms
dist.destroy_process_group()
"""


@pytest.mark.alone  # beside other work, every message is late
def test_a_message_is_noticed_at_once_among_more_groups_than_one_sleep_listens_to(
    launch: Launch, seed: int
) -> None:
    """Half of a nap of 50 ms is 25 ms."""
    script = launch.script(MANY_GROUPS)
    assert launch.run("--nproc-per-node", "2", script, str(seed)) == 0, launch.err


@pytest.mark.everyday
def test_other_threads_run_while_a_rank_waits(launch: Launch) -> None:
    script = launch.script(
        "import os, threading, time\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 1:\n"
        "    while not os.path.exists('ticked'): time.sleep(0.01)\n"
        "    dist.barrier()\n"
        "else:\n"
        "    communicator = dist.group.WORLD.communicator\n"
        "    begun = communicator.begun\n"
        "    waiting = threading.Thread(target=dist.barrier)\n"
        "    waiting.start()\n"
        "    while communicator.begun == begun: pass\n"
        "    for _ in range(10): time.sleep(0.001)\n"
        "    open('ticked', 'w').close()\n"
        "    waiting.join()\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err


def train(launch: Launch, workers: int, history: str) -> tuple[list[float], float]:
    script = str(EXAMPLES / "train_digits.py")
    options = ("--standalone", "--nproc-per-node", str(workers), script, "--history", history)
    assert launch.run(*options, environ={"PET_PRELOAD": "sklearn.datasets"}) == 0, launch.err
    result = json.loads((launch.directory / history).read_text())
    return result["loss"], result["test_accuracy"]


@pytest.mark.exact
def test_training_is_the_same_with_any_number_of_workers(launch: Launch) -> None:
    losses_alone, accuracy_alone = train(launch, 1, "alone")
    losses, accuracy = train(launch, 4, "together")
    np.testing.assert_allclose(losses, losses_alone, rtol=0, atol=1e-9)
    assert accuracy == accuracy_alone >= 0.95
    assert "epoch 20/20" in launch.out


@pytest.mark.needs_torch
def test_ordinary_torch_script_gives_the_same_losses_as_under_torchrun(launch: Launch) -> None:
    script = str(EXAMPLES / "train_digits_ddp.py")
    arguments = ("--standalone", "--nproc-per-node", "2", script, "--epochs", "2")

    def output(launcher: tuple[str, ...]) -> str:
        for _ in range(3):
            if launch.run(*arguments, launcher=launcher) == 0:
                return launch.out
            # PyTorch's own fault, under any launcher: a gloo thread that outlives the interpreter.
            assert "terminate called without an active exception" in launch.err, launch.err
        raise AssertionError(launch.err)

    ours = output(OURS)
    assert ours == output(("-m", "torch.distributed.run"))
    assert ours.count("loss") == 2


def test_callbacks_that_wait_for_each_other_end_with_the_process(launch: Launch) -> None:
    script = launch.script(
        "import os, threading, time\n"
        "import numpy as np\n"
        "import rallypoint as dist\n"
        "dist.init_process_group()\n"
        "runs = threading.Event()\n"
        "def waits(_):\n"
        "    runs.set()\n"
        "    try:\n"
        "        second.wait()\n"
        "    except dist.PeerError as error:\n"
        "        print('told', type(error).__name__, flush=True)\n"
        "if dist.get_rank() == 0:\n"
        "    first = dist.all_reduce(np.ones(1), async_op=True)\n"
        "    second = dist.all_reduce(np.ones(1), async_op=True).get_future()\n"
        "    first.get_future().add_done_callback(waits)\n"
        "    open('ready', 'w').close()\n"
        "    runs.wait()\n"
        "else:\n"
        "    while not os.path.exists('ready'): time.sleep(0.01)\n"
        "    dist.all_reduce(np.ones(1))\n"
        "    dist.recv(np.ones(1), 0)\n"  # until rank 0 has ended
    )
    assert launch.run("--nproc-per-node", "2", script) != 0  # rank 1 had waited for a message
    assert "told PeerLostError" in launch.out, launch.out + launch.err


STRAY = """
import os, subprocess, sys, rallypoint as dist
from datetime import timedelta
if sys.argv[1:] == ["stray"]:
    dist.init_process_group(timeout=timedelta(seconds=4))
    sys.exit("it has joined")
dist.init_process_group()
if dist.get_rank() == 1:
    stray = subprocess.run([sys.executable, __file__, "stray"], stderr=subprocess.PIPE, text=True)
    with open("told", "w") as file:
        file.write(stray.stderr)
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
dist.barrier()
"""


@pytest.mark.everyday
def test_a_process_that_has_only_inherited_a_rank_is_told_so(launch: Launch) -> None:
    assert launch.run("--nproc-per-node", "2", launch.script(STRAY)) == 0, launch.err
    pid, told = ((launch.directory / name).read_text() for name in ("pid", "told"))
    assert told.startswith(
        f"rallypoint: rank 1 of this job is process {pid} on {os.uname().nodename}, which is in "
        "its group, and this one waits for a group of others; if it has only inherited RANK, unset "
        "that, or give it a rank of its own\n"
    )
    assert "StoreTimeoutError: rank 1 waited 2 s for rank 0 to join" in told.splitlines()[-1]


CHILDREN = """
import subprocess, sys, rallypoint as dist
dist.init_process_group()
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
dist.barrier()
"""


@pytest.mark.everyday
def test_children_of_all_ranks_may_form_a_group(launch: Launch) -> None:
    assert launch.run("--nproc-per-node", "2", launch.script(CHILDREN)) == 0, launch.err


@pytest.mark.everyday
def test_a_rank_may_be_several_processes_one_after_the_other(launch: Launch) -> None:
    launch.script("import rallypoint as dist\ndist.init_process_group()\ndist.barrier()\n", "a.py")
    both = launch.script(f"#!/bin/sh\n{sys.executable} a.py && exec {sys.executable} a.py\n", "b")
    Path(both).chmod(0o755)
    assert launch.run("--nproc-per-node", "2", "--no-python", both) == 0, launch.err
