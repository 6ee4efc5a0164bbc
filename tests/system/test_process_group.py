"""Real jobs under `rallypoint run` that communicate, and the ways in which they fail."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import SOON_S
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


@pytest.mark.parametrize("workers", [2, 4])
def test_every_operation(launch: Launch, workers: int) -> None:
    code = launch.run("--standalone", "--nproc-per-node", str(workers), launch.script(EVERYTHING))
    assert (code, launch.err) == (0, "")
    assert len(list(launch.directory.glob("done.*"))) == workers
    assert launch.left_over() == []


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


def test_groups(launch: Launch) -> None:
    code = launch.run("--nproc-per-node", "4", launch.script(GROUPS))
    assert (code, launch.err) == (0, "")


FAILURES = {
    "raise": ("raise ValueError('bad thing')", "rank 1 raised ValueError: bad thing"),
    "exit": ("sys.exit(3)", "rank 1 exited with code 3"),
    "kill": ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_fails_while_the_others_reduce(launch: Launch, how: str) -> None:
    failure, told = FAILURES[how]
    script = launch.script(
        "import os, pathlib, subprocess, sys, time\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "values = np.ones(5000)\n"
        "dist.all_reduce(values)\n"
        "subprocess.Popen(['sh', '-c', 'setsid sleep 600 & sleep 601'])\n"
        "if dist.get_rank() == 1:\n"
        f"    time.sleep(0.3); pathlib.Path('failing').touch(); {failure}\n"
        "while True: dist.all_reduce(values)\n"
    )
    process = launch.start("--standalone", "--nproc-per-node", "4", script)
    launch.wait_for("failing")
    begin = time.monotonic()
    assert process.wait(30) == 1
    assert time.monotonic() - begin < SOON_S
    assert f"rallypoint: job failed: {told}" in launch.err
    assert launch.left_over() == []


def test_survivors_learn_of_a_death_and_may_go_on(launch: Launch) -> None:
    """The error is catchable, names the rank, and the process is well afterwards."""
    script = launch.script(
        "import os, sys, time\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "values = np.ones(5000)\n"
        "dist.all_reduce(values)\n"
        "if rank == 2:\n"
        "    time.sleep(0.2)\n"
        "    os._exit(0)\n"  # dies without a word, and without failing the job
        "begin = time.monotonic()\n"
        "try:\n"
        "    while True: dist.all_reduce(values)\n"
        "except dist.PeerLostError as error:\n"
        "    assert error.rank == 2, error\n"
        f"    assert time.monotonic() - begin < {SOON_S}\n"
        "try:\n"
        "    dist.barrier()\n"
        "    sys.exit('a broken group went on')\n"
        "except dist.PeerLostError as error:\n"
        "    assert 'cannot be used any more' in str(error)\n"
        "dist.destroy_process_group()\n"
        "open(f'survived.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("survived.*"))) == 2


def test_survivors_of_a_death_shrink_the_default_group(launch: Launch) -> None:
    script = launch.script(
        "import os\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "dist.all_reduce(np.ones(5000))\n"
        "if rank == 0:\n"
        "    os._exit(0)\n"
        "try:\n"
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


@pytest.mark.parametrize("method", ["tcp", "file", "store"])
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
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    meeting = str(launch.directory / "meeting")
    options = ("--nproc-per-node", "3", script, method, meeting)
    assert launch.run(*options, environ={"FREE_PORT": port}) == 0, launch.err


def test_missing_rank_is_named(launch: Launch) -> None:
    script = launch.script(
        "import os, sys, time, datetime, rallypoint as dist\n"
        "if os.environ['RANK'] == '1': time.sleep(2); sys.exit()\n"
        "try:\n"
        "    dist.init_process_group(timeout=datetime.timedelta(seconds=0.5))\n"
        "except dist.StoreTimeoutError as error:\n"
        "    assert 'missing: 1;' in str(error), error\n"
        "    assert not dist.is_initialized()\n"
        "    open('told.' + os.environ['RANK'], 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("told.*"))) == 2


WRONG_USE = """
import os, sys
import numpy as np
import rallypoint as dist

def expect(kind, words, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        assert words in str(error), error
        assert '\\n' not in str(error)
        return error
    sys.exit(f'{call} {arguments} did not raise {kind}')

x = np.ones(3)
for call, arguments in ((dist.get_rank, ()), (dist.all_reduce, (x,)), (dist.barrier, ()),
                        (dist.send, (x, 0)), (dist.destroy_process_group, ())):
    error = expect(ValueError, 'has not been initialized', call, *arguments)
    assert isinstance(error, RuntimeError)
expect(ValueError, "backend='nonesuch'", dist.init_process_group, 'nonesuch')
expect(ValueError, 'RANK', dist.init_process_group, rank=99)
expect(ValueError, 'carrier-pigeon', dist.init_process_group, init_method='carrier-pigeon://x')
dist.init_process_group()
error = expect(RuntimeError, 'already initialized', dist.init_process_group)
assert isinstance(error, ValueError)
x.flags.writeable = False
expect(TypeError, 'read-only', dist.all_reduce, x)
expect(TypeError, 'm8', dist.all_reduce, np.ones(3, 'm8[s]'))
expect(TypeError, 'BAND does not apply', dist.all_reduce, np.ones(3), dist.ReduceOp.BAND)
expect(TypeError, 'native byte order', dist.all_reduce, np.ones(3, '>f8'))
expect(TypeError, 'not builtins.list', dist.all_reduce, [1.0])
expect(ValueError, 'ReduceOp.SUM', dist.all_reduce, np.ones(3), 'sum')
expect(ValueError, 'src=2 is not a rank', dist.broadcast, np.ones(3), 2)
expect(ValueError, 'this rank itself', dist.send, np.ones(3), dist.get_rank())
expect(ValueError, "an array for each of the group's 2 ranks, but has 1",
       dist.all_gather, [np.ones(3)], np.ones(3))
expect(ValueError, f'tensor_list[{dist.get_rank()}] is float64[4] and holds 4 items, but 3 are',
       dist.all_gather, [np.ones(4), np.ones(4)], np.ones(3))
expect(ValueError, 'needs a factor', dist.all_reduce, np.ones(3), dist.ReduceOp.PREMUL_SUM)
y = np.ones(3)
dist.all_reduce(y)  # none of this has hurt the group
assert (y == 2).all()
"""


def test_wrong_use_is_one_clear_sentence_and_harmless(launch: Launch) -> None:
    assert launch.run("--nproc-per-node", "2", launch.script(WRONG_USE)) == 0, launch.err


def test_ctrl_c_reaches_a_rank_that_waits(launch: Launch) -> None:
    """A signal interrupts a collective in Python, as it does any other code."""
    script = launch.script(
        "import os, pathlib, signal, sys, threading, time\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 0:\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    try:\n"
        "        dist.all_reduce(np.ones(3))\n"
        "    except KeyboardInterrupt:\n"
        "        pathlib.Path('interrupted').touch()\n"
        "else:\n"
        "    time.sleep(0.6)\n"
        "    try:\n"
        "        dist.all_reduce(np.ones(3))\n"
        "    except dist.PeerLostError as error:\n"
        "        assert 'rank 0' in str(error) and 'interrupted' in str(error), error\n"
        "        pathlib.Path('told').touch()\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert (launch.directory / "interrupted").exists()
    assert (launch.directory / "told").exists()


def test_other_threads_run_while_a_rank_waits(launch: Launch) -> None:
    script = launch.script(
        "import threading, time\n"
        "import numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(0.5)\n"
        "    dist.barrier()\n"
        "else:\n"
        "    ticks = 0\n"
        "    waiting = threading.Thread(target=dist.barrier)\n"
        "    waiting.start()\n"
        "    while waiting.is_alive(): time.sleep(0.01); ticks += 1\n"
        "    assert ticks >= 10, ticks\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err


def train(launch: Launch, workers: int, history: str) -> tuple[list[float], float]:
    script = str(EXAMPLES / "train_digits.py")
    options = ("--standalone", "--nproc-per-node", str(workers), script, "--history", history)
    assert launch.run(*options) == 0, launch.err
    result = json.loads((launch.directory / history).read_text())
    return result["loss"], result["test_accuracy"]


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
    begin = time.monotonic()
    assert launch.run("--nproc-per-node", "2", script) != 0  # rank 1 had waited for a message
    assert time.monotonic() - begin < 30, launch.err
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
