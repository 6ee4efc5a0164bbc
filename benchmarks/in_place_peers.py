"""How long do ranks stand still that outlive a loss, with Rallypoint and with others?

One of 4 ranks on one host is killed with -9, at random, while all of them reduce; measured is the
time until all others, or all new ones, have reduced again, by the killer's clock. Contenders take
turns; each job is disturbed once. A table, and JSON.

    rallypoint   the three survivors go on
    ulfm         the three survivors go on: Open MPI's revoke, shrink and agree
    torchft      the three survivors go on: a Manager in each, over gloo
    pccl         the three survivors go on: PCCL's master says who is left, and they retry
    reconfigure  the three survivors go on: PyTorch's own, from 2.14 on, over gloo, where they know
                 from the beginning that one will be lost
    nvrx         the three survivors go on: NVIDIA's in-process restart, over gloo
    torchrun     all four processes are started again
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from in_place_job import Job, StuckError
from in_place_recovery import one_host, spread
from table import print_table, save

from rallypoint import TCPStore

SIZE = 4
_PATIENCE_S = 90.0
_START_S = 180.0  # four processes import torch
# Workers that share their store with torchrun's agents, the default, often read what was meant for
# the round before, and wait for the rest; it is measured without.
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_QUIET = {"TORCH_CPP_LOG_LEVEL": "error"}  # waits that end without success are no news

# What each process does first: it holds a state of so many bytes.
_TELL = """
import os, socket, sys, time, numpy
held = numpy.ones(int(os.environ["HELD"]) // 8)
name = f"{sys.argv[1]}/{socket.gethostname()}.{os.getpid()}.told"
def good(round, rank, size):
    with open(name, "a") as file:
        file.write(f"good {time.monotonic():.6f} {round} {rank} {size} 0\\n")
"""

ULFM = """
import numpy
from mpi4py import MPI
group, round, is_new = MPI.COMM_WORLD.Dup(), 0, True
group.Set_errhandler(MPI.ERRORS_RETURN)
while True:
    time.sleep(0.002)
    try:
        numbers = numpy.full(1000, group.rank + 1.0)
        group.Allreduce(MPI.IN_PLACE, numbers)
        group.Agree(1)
    except MPI.Exception:
        group.Revoke()
        group = group.Shrink()
        group.Set_errhandler(MPI.ERRORS_RETURN)
        round, is_new = round + 1, True
        continue
    assert (numbers == group.size * (group.size + 1) / 2).all()
    if is_new:
        good(round, group.rank, group.size)
        is_new = False
"""

TORCHFT = """
import torch
from datetime import timedelta
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
limit = timedelta(seconds=float(sys.argv[2]))
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=limit), load_state_dict=lambda state: None, state_dict=dict,
    min_replica_size=1, timeout=limit, quorum_timeout=timedelta(seconds=60), rank=0, world_size=1,
    store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=sys.argv[3],
    replica_id=sys.argv[4],
)
before = 0
while True:
    time.sleep(0.002)
    manager.start_quorum()
    numbers = torch.ones(1000)
    manager.allreduce(numbers).wait()
    size = manager.num_participants()
    # The mean, to which those that begin add zeros.
    if not manager.should_commit() or not (numbers == 1.0).all():
        before = 0
        continue
    if size != before:
        good(manager._quorum_id, manager.participating_rank() or 0, size)
        before = size
"""

# The loop of PCCL's own examples: peers that wait are let in, and what fails is tried again. It
# knows no ranks, and tells only how many have reduced.
PCCL = """
import numpy
from pccl import Attribute, Communicator, PCCLError, ReduceOp
number, peers = int(sys.argv[3]), Communicator(sys.argv[2])
peers.connect(n_attempts=15)
def size():
    return peers.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
def let_in():
    while True:
        try:
            if peers.are_peers_pending():
                peers.update_topology()
            return
        except PCCLError:
            continue
def reduced(ones, numbers):
    while size() > 1:
        try:
            return peers.all_reduce(ones, numbers, op=ReduceOp.SUM).local_world_size
        except PCCLError:
            continue
    return 1
before, ones, is_first = 0, numpy.ones(1000, numpy.float32), True
while True:
    time.sleep(0.002)
    if not is_first:  # connect() has let this one in
        let_in()
    is_first = False
    numbers = numpy.zeros_like(ones)
    now = reduced(ones, numbers)
    if now == 1:
        continue
    assert (numbers == now).all(), (now, numbers)
    if now != before:
        good(SIZE - now, number, now)
        before = now
"""

# Until a call fails.
_REDUCE = """
import torch
import torch.distributed as dist
def reduce(round, rank, size):
    is_new = True
    while True:
        time.sleep(0.002)
        numbers = torch.full((1000,), rank + 1.0)
        dist.all_reduce(numbers)
        assert (numbers == size * (size + 1) / 2).all()
        if is_new:
            good(round, rank, size)
            is_new = False
"""

TORCHRUN = f"""{_REDUCE}
dist.init_process_group("gloo")
reduce(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank(), SIZE)
"""


RECONFIGURE = """
import torch
import torch.distributed as dist
from datetime import timedelta
backend, port, number = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limit = timedelta(seconds=float(sys.argv[5]))
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
dist.init_process_group(
    backend, world_size=SIZE, rank=number, store=dist.PrefixStore("group", store), timeout=limit,
    enable_reconfigure=True,
)
round, is_new = 0, True
def form():
    size = SIZE - round
    place = store.add(f"{round}/came", 1)
    store.set(f"{round}/{place}", dist._get_reconfigure_handle())
    handles = [store.get(f"{round}/{each}").decode() for each in range(1, size + 1)]
    dist._reconfigure(round + 1, handles, timeout=limit).wait()
form()
while True:
    time.sleep(0.002)
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.full((1000,), rank + 1.0)
    try:
        dist.all_reduce(numbers)
    except RuntimeError:
        dist.group.WORLD.abort()
        round, is_new = round + 1, True
        form()
        continue
    assert (numbers == size * (size + 1) / 2).all()
    if is_new:
        good(round, rank, size)
        is_new = False
"""


# A store of its own, and a short limit of gloo's: what its guide says of the loss of rank 0, and of
# ranks that wait for one that is lost.
NVRX = f"""{_REDUCE}
from datetime import timedelta
from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper
from nvidia_resiliency_ext.inprocess.store import StoreMixin
port, limit = int(sys.argv[2]), timedelta(seconds=float(sys.argv[4]))
os.environ.update(RANK=sys.argv[3], WORLD_SIZE=str(SIZE))
class Store(dist.TCPStore, StoreMixin):
    def __init__(self):
        super().__init__("127.0.0.1", port, None, False, timedelta(seconds=60))
@Wrapper(store_factory=Store, monitor_process_pidfile=sys.argv[1] + "/monitor.{{rank}}")
def train(call: CallWrapper = None):
    round, rank, size = call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("group/" + str(round), Store())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    reduce(round, rank, size)
train()
"""


@contextmanager
def script_of(text: str) -> Iterator[str]:
    """A file with this program."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "script.py")
        path.write_text(f"SIZE = {SIZE}\n{_TELL}{text}")
        yield str(path)


@contextmanager
def ulfm(environment: str) -> Iterator[Job]:
    """Open MPI's fault tolerance."""
    scripts = Path(environment, "bin")
    flags = ["--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "-np", str(SIZE)]
    with script_of(ULFM) as script:
        command = [str(scripts / "mpirun"), *flags, str(scripts / "python"), script]
        with Job(command, SIZE) as job:
            job.start()
            job.await_size(0.0, SIZE)
            yield job


@contextmanager
def torchft(environment: str, timeout_s: float) -> Iterator[Job]:
    """A lighthouse, and four replicas of one process; torchft's own tests have these flags."""
    scripts = Path(environment, "bin")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--min_replicas", "1", "--join_timeout_ms", "300", "--bind", f"127.0.0.1:{port}"]
    lighthouse = subprocess.Popen(
        [str(scripts / "torchft_lighthouse"), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with script_of(TORCHFT) as script:
            program = [str(scripts / "python"), script]
            worker = [str(timeout_s), f"http://127.0.0.1:{port}"]
            with Job(program, SIZE, worker=[*worker, "r{number}"]) as job:
                for number in range(SIZE):
                    job.start(number)
                job.await_size(0.0, SIZE, _START_S)
                yield job
    finally:
        lighthouse.kill()
        lighthouse.wait()


@contextmanager
def pccl(environment: str) -> Iterator[Job]:
    """A master, and four peers."""
    python = str(Path(environment, "bin", "python"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    master = subprocess.Popen(
        [python, "-m", "pccl.master", "--listen-address", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with (
            script_of(PCCL) as script,
            Job([python, script], SIZE, worker=[address, "{number}"]) as job,
        ):
            for number in range(SIZE):
                job.start(number)
            job.await_size(0.0, SIZE, _START_S)
            yield job
    finally:
        master.kill()
        master.wait()


@contextmanager
def reconfigure(environment: str, backend: str, timeout_s: float) -> Iterator[Job]:
    """Four processes, and a store that none of them serves."""
    python = str(Path(environment, "bin", "python"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with store, script_of(RECONFIGURE) as script:
        worker = [backend, str(store.port), "{number}", str(timeout_s)]
        with Job([python, script], SIZE, worker=worker) as job:
            for number in range(SIZE):
                job.start(number)
            job.await_size(0.0, SIZE, _START_S)
            yield job


@contextmanager
def nvrx(environment: str, timeout_s: float) -> Iterator[Job]:
    """Four processes with a monitor each, and a store that none of them serves."""
    python = str(Path(environment, "bin", "python"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with store, script_of(NVRX) as script:
        worker = [str(store.port), "{number}", str(timeout_s)]
        with Job([python, script], SIZE, worker=worker, environ=_QUIET) as job:
            try:
                for number in range(SIZE):
                    job.start(number)
                job.await_size(0.0, SIZE, _START_S)
                yield job
            finally:  # they would outlive those that they watch
                for path in job.directory.glob("monitor.*"):
                    with suppress(ProcessLookupError):
                        os.kill(int(path.read_text()), signal.SIGKILL)


@contextmanager
def torchrun(environment: str) -> Iterator[Job]:
    """All processes are started again."""
    scripts = Path(environment, "bin")
    flags = ["--standalone", "--nproc-per-node", str(SIZE), "--max-restarts", "100"]
    with script_of(TORCHRUN) as script:
        program = [str(scripts / "python"), "-m", "torch.distributed.run"]
        with Job([*program, *flags, script], SIZE, environ=_OWN_STORE) as job:
            job.start()
            job.await_size(0.0, SIZE, _START_S)
            yield job


def recovery_s(job: Job, chance: random.Random, *, restarts: bool) -> float:
    """Kill one, and wait for the others."""
    time.sleep(1.0 + chance.random() * 0.1)
    members = job.members()
    victim = chance.choice(sorted(members, key=lambda each: members[each].rank))
    since = job.signal(victim)
    if restarts:
        return job.await_size(since, SIZE, _PATIENCE_S) - since
    return job.recovery(since, [victim], whole=False, patience_s=_PATIENCE_S).went_on_s


Begin = Callable[[], AbstractContextManager[Job]]


def contenders(options: argparse.Namespace) -> dict[str, Begin]:
    """Those that are there."""
    found: dict[str, Begin] = {
        "rallypoint": lambda: one_host(SIZE, worker=["--bytes", str(options.bytes)])
    }
    if options.openmpi:
        found["ulfm"] = lambda: ulfm(options.openmpi)
    if options.pccl:
        found["pccl"] = lambda: pccl(options.pccl)
    for limit_s in options.timeout_s:
        if options.torchft:
            found[f"torchft, {limit_s:g} s"] = partial(torchft, options.torchft, limit_s)
        if options.reconfigure:
            for backend in ("gloo", "rallypoint"):
                name = f"reconfigure, {backend}, {limit_s:g} s"
                found[name] = partial(reconfigure, options.reconfigure, backend, limit_s)
        if options.nvrx:
            found[f"nvrx, {limit_s:g} s"] = partial(nvrx, options.nvrx, limit_s)
    if options.torch:
        found["torchrun"] = lambda: torchrun(options.torch)
    return found


def measure(options: argparse.Namespace, chance: random.Random) -> list[dict[str, object]]:
    begins = contenders(options)
    times: dict[str, list[float]] = {name: [] for name in begins}
    stuck = dict.fromkeys(begins, 0)
    for turn in range(options.trials):
        for name in list(begins) if turn % 2 == 0 else reversed(list(begins)):
            try:
                with begins[name]() as job:
                    times[name].append(recovery_s(job, chance, restarts=name == "torchrun"))
            except StuckError as error:
                stuck[name] += 1
                print(f"{name}: {error}", file=sys.stderr)
    ours = statistics.median(times["rallypoint"]) if times["rallypoint"] else None
    rows = []
    for name, values in times.items():
        row = {"contender": name, "trials": len(values), "stuck": stuck[name]}
        ahead = statistics.median(values) / ours if values and ours else None
        rows.append({**row, **spread(values, ""), "to_ours": ahead})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=80, help="that each process holds")
    parser.add_argument("--pages", choices=("small", "huge"), default="small", help="of them")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--openmpi", metavar="DIR", help="environment with openmpi and mpi4py")
    parser.add_argument("--torchft", metavar="DIR", help="environment with torchft")
    parser.add_argument("--pccl", metavar="DIR", help="environment with pypccl and numpy")
    parser.add_argument(
        "--timeout-s",
        type=float,
        nargs="+",
        default=[5.0],
        help="of an operation, for torchft, reconfigure and nvrx; one contender for each",
    )
    parser.add_argument(
        "--reconfigure", metavar="DIR", help="environment with torch 2.14 or newer and rallypoint"
    )
    parser.add_argument(
        "--nvrx", metavar="DIR", help="environment with torch and nvidia-resiliency-ext"
    )
    parser.add_argument("--torch", metavar="DIR", help="environment with torch, for torchrun")
    parser.add_argument("--no-results", action="store_true", help="do not write the JSON file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and what was started ends with us
    os.environ["HELD"] = str(options.bytes)
    if options.pages == "small":
        os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"  # NumPy asks for huge ones otherwise
    print(f"seed {options.seed}; load average {os.getloadavg()[0]:.1f}", flush=True)
    rows = measure(options, random.Random(options.seed))
    columns = list(rows[0])
    cells = [
        [f"{each:.1f}" if isinstance(each, float) else str(each) for each in row.values()]
        for row in rows
    ]
    print_table([name.replace("_", " ") for name in columns], cells)
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    if not options.no_results:
        save("in_place_peers", rows)


if __name__ == "__main__":
    main()
