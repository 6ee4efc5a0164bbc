"""Jobs of a real Slurm: started by srun, sbatch and as arrays, ended, requeued, and cut down.

Each command of docs/guides/slurm.md is one that a test here runs, word for word.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import WORKER
from tests.system.slurm_cluster import NODES, SlurmCluster, need_slurm, read

pytestmark = pytest.mark.system

GUIDE = Path(__file__).parents[2] / "docs/guides/slurm.md"
EXAMPLES = Path(__file__).parents[2] / "examples"
ALL_REDUCE = """
import os
import numpy
import rallypoint as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
numbers = numpy.full(1000, rank + 1.0)
dist.all_reduce(numbers)
print(f"rank {rank} of {size} on {os.uname().nodename}: {numbers.sum():.0f}", flush=True)
dist.destroy_process_group()
"""
# It writes down what its handler hears; after SIGTERM it waits for what may come a second time.
HANDLES_SIGNALS = """
import os, signal, time
rank, heard = os.environ["RANK"], []

def handle(number, _):
    heard.append(number)
    with open(f"heard.{rank}", "a") as file:
        file.write(signal.Signals(number).name + " ")

signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGUSR1, handle)
open(f"up.{rank}", "w").close()
while signal.SIGTERM not in heard:
    time.sleep(0.01)
until = time.monotonic() + 1.5
while time.monotonic() < until:
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def cluster(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    need_slurm()
    with Hosts(4) as hosts:
        cluster = SlurmCluster(hosts, tmp_path_factory.mktemp("slurm"))
        yield cluster
    for process in cluster.processes:
        process.wait()


class Job:
    """A user's directory, with train.py in it."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory

    def script(self, text: str, name: str = "train.py") -> None:
        (self.directory / name).write_text(text)

    def run(self, command: str, path: str = "") -> tuple[int, str, str]:
        return self.cluster.run(command, self.directory, path=path)

    def submit(self, command: str) -> str:
        return self.cluster.submit(command, self.directory)

    def said(self, name: str) -> str:
        return read(self.directory / name)

    def up(self) -> dict[str, str]:
        """What the newest worker of each host said: "ROUND RANK/SIZE NODE/NODES"."""
        return {path.name: path.read_text() for path in self.directory.glob("up.*")}

    def wait_until(self, is_so: Callable[[], object], what: str) -> None:
        self.cluster.wait_until(is_so, what, self.directory)

    def wait_for_up(self, expected: dict[str, str]) -> None:
        self.wait_until(lambda: expected.items() <= self.up().items(), str(expected))

    def go(self) -> None:
        """Let the workers end."""
        (self.directory / "go").touch()


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Job]:
    yield Job(cluster, tmp_path)
    cluster.clear()


def host_up(number: int, text: str) -> dict[str, str]:
    return {f"up.host{number}.0": text}


# Steps.


def test_a_step_is_one_job_of_all_its_nodes(job: Job) -> None:
    job.script(ALL_REDUCE)
    status, out, err = job.run("srun --nodes 3 --ntasks-per-node=1 rallypoint run train.py")
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        f"rank {rank} of 3 on host{rank + 1}: 6000" for rank in range(3)
    ]
    for rank in range(3):
        meeting = rf"node {rank} of 3, rendezvous at (n1:\d+, n2:\d+, n3:\d+); --on here ignores"
        assert re.search(rf"Slurm step \d+\.0 \(SLURM_STEP_NODELIST\): {meeting}", err), err


def test_tasks_without_a_launcher_are_the_ranks_of_one_job(job: Job) -> None:
    """Nor do they need scontrol."""
    job.script(ALL_REDUCE)
    command = f"srun --nodes 3 --ntasks-per-node=2 {sys.executable} train.py"
    status, out, err = job.run(command, only_srun(job))
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        f"rank {rank} of 6 on host{rank // 2 + 1}: 21000" for rank in range(6)
    ]


def only_srun(job: Job) -> str:
    """A PATH with srun and without scontrol."""
    programs = job.directory / "programs"
    programs.mkdir()
    for name in ("sh", "nsenter", "srun"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return str(programs)


def test_names_that_only_slurm_knows(job: Job) -> None:
    job.script(ALL_REDUCE)
    command = "srun --nodes 3 --ntasks-per-node=1 rallypoint run train.py"
    with job.cluster.without_names():
        status, out, err = job.run(command)
        assert (status, out.count("of 3 on host")) == (0, 3), err
        meeting = r"rendezvous at 10\.77\.0\.1:\d+, 10\.77\.0\.2:\d+, 10\.77\.0\.3:\d+;"
        assert re.search(meeting, err)
        where = job.run("srun --nodes 3 --ntasks-per-node=1 rallypoint where")
        assert "SLURM_STEP_NODELIST, scontrol show node" in where[1]
        status, out, err = job.run(command, only_srun(job))
    assert (status, out) == (2, "")
    assert err.count("this machine cannot resolve the hosts") == 3
    assert "add them to /etc/hosts" in err


def test_where(job: Job) -> None:
    _, out, err = job.run("srun --nodes 3 --ntasks-per-node=1 rallypoint where")
    for rank in range(3):
        assert re.search(rf"^node +{rank} of 3 +SLURM_NODEID, SLURM_STEP_NODELIST$", out, re.M), err


def test_a_batch_script_without_srun_is_told_how_to_use_all_nodes(job: Job) -> None:
    job.script("print('one machine')")
    job.submit("sbatch --nodes 2 --output job.out --wrap 'rallypoint run train.py'")
    job.wait_until(lambda: "one machine" in job.said("job.out"), "output of the job")
    assert job.said("job.out").count("one machine") == 1
    advice = [line for line in job.said("job.out").splitlines() if "rallypoint" in line]
    assert len(advice) == 1
    assert "this uses one of the 2 nodes of Slurm job" in advice[0]
    assert "srun --ntasks-per-node=1 rallypoint run" in advice[0]


def test_a_task_for_each_worker_is_refused(job: Job) -> None:
    job.script("open('ran', 'w')")
    status, out, err = job.run("srun --nodes 2 --ntasks-per-node=2 rallypoint run train.py")
    assert (status, out) == (2, "")
    assert err.count("srun --ntasks-per-node=1 rallypoint run --nproc-per-node 2 ...") == 4
    assert not (job.directory / "ran").exists()


def test_eight_steps_at_once(job: Job) -> None:
    """Of two nodes each, all on the same two; each ends when all have met."""
    job.script(
        "import os, time\n"
        "open('up.{SLURM_STEP_ID}.{RANK}.{WORLD_SIZE}'.format_map(os.environ), 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.1)\n"
    )
    step = "srun --overlap --nodes 2 --ntasks-per-node=1 rallypoint run train.py"
    # Launched one after the other: a slurmd of 22.05 was seen to die of so many launches at once.
    job.script(f"for i in $(seq 8); do {step} & sleep 0.2; done; wait", "steps.sh")
    process = job.cluster.start("salloc --nodes 2 sh steps.sh", job.directory)
    job.wait_until(lambda: len(job.up()) == 16, "16 workers")
    assert set(job.up()) == {f"up.{step}.{rank}.2" for step in range(8) for rank in (0, 1)}
    job.go()
    assert process.wait(60) == 0
    said = job.said("command.err")
    assert len(set(re.findall(r"rendezvous at (\S+), ", said))) == 8, said


HANGS = """
import time
import numpy
import rallypoint as dist

dist.init_process_group()
for _ in range(5):
    dist.all_reduce(numpy.ones(1))
open(f"up.{dist.get_rank()}", "w").close()
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(numpy.ones(1))
"""


def test_a_running_job_is_explained_from_another_step(job: Job) -> None:
    job.script(HANGS)
    number = job.submit(
        "sbatch --nodes 2 --output job.out --wrap"
        " 'srun --ntasks-per-node=1 rallypoint run train.py'"
    )
    job.wait_until(lambda: len(job.up()) == 2, "two workers")
    time.sleep(2)  # so long a wait counts as one
    status, out, err = job.run(
        f"srun --jobid {number} --overlap --nodes 1 --ntasks 1 rallypoint explain"
    )
    assert "rank 1 never entered all_reduce #5" in out, err
    assert status == 3
    status, out, err = job.run(
        f"srun --jobid {number} --overlap --nodes 1 --ntasks 1 rallypoint status"
    )
    assert status == 0, err
    assert "all_reduce #5" in out
    job.run(f"scancel {number}")


def test_a_generated_script_for_gpus(job: Job) -> None:
    """This Slurm has none, so nothing is submitted."""
    status, _, err = job.run(
        "rallypoint script slurm --nnodes 4 --gpus-per-node 8 --cpus-per-worker 12"
        " --time 12:00:00 train.py > job.sh"
    )
    assert status == 0, err
    assert "rallypoint run --nproc-per-node 8 train.py" in job.said("job.sh")
    assert job.run("bash -n job.sh") == (0, "", "")


# Ends.


def test_signals_reach_each_worker_once(job: Job) -> None:
    job.script(HANDLES_SIGNALS)
    # The shell waits for what runs in it, and then says how that ended.
    job.script(
        "trap : TERM USR1; rallypoint run --nproc-per-node 2 train.py;"
        " echo $? > status.$SLURM_NODEID\n",
        "task.sh",
    )
    number = job.submit(
        "sbatch --nodes 3 --output job.out --wrap 'srun --ntasks-per-node=1 bash task.sh'"
    )
    job.wait_until(lambda: len(job.up()) == 6, "six workers")
    job.run(f"scancel --signal=USR1 {number}")
    job.wait_until(lambda: all(job.said(f"heard.{rank}") for rank in range(6)), "SIGUSR1")
    time.sleep(1)  # for what is held
    job.run(f"scancel {number}")
    job.wait_until(lambda: all(job.said(f"status.{i}") for i in range(3)), "three exit statuses")
    assert [job.said(f"status.{i}") for i in range(3)] == ["143\n"] * 3
    assert {job.said(f"heard.{rank}") for rank in range(6)} == {"SIGUSR1 SIGTERM "}
    job.wait_until(lambda: not any(map(job.cluster.left, NODES)), "empty nodes")


def test_slurm_takes_generated_scripts(job: Job) -> None:
    flags = "--nnodes 2:3 --nproc-per-node 2 --job-name 'my job' --time 1:00:00"
    status, _, err = job.run(
        f"rallypoint script slurm {flags} train.py 'two words' | sbatch --test-only"
    )
    assert status == 0, err


REQUEUED = """
import os, time
name = "up." + os.environ["RANK"] + "." + os.environ.get("SLURM_RESTART_COUNT", "none")
open(name, "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
# in one piece, or those of others may come in between
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has ended\\n".encode())
"""


def test_a_generated_script_runs_and_is_requeued(job: Job) -> None:
    job.script(REQUEUED)
    status, _, err = job.run(
        "rallypoint script slurm --nnodes 3 --nproc-per-node 2 train.py > job.sh"
    )
    assert status == 0, err
    assert job.run("bash -n job.sh") == (0, "", "")
    status, _, err = job.run("sbatch --test-only job.sh")
    assert status == 0, err
    number = job.submit("sbatch job.sh")
    job.wait_until(lambda: len(job.up()) == 6, "six workers")
    assert set(job.up()) == {f"up.{rank}.none" for rank in range(6)}
    job.run(f"scontrol requeue {number}")
    job.wait_until(lambda: len(job.up()) == 12, "six workers of the next attempt")
    assert set(job.up()) >= {f"up.{rank}.1" for rank in range(6)}
    job.go()
    job.wait_until(lambda: not job.cluster.state(number), "the job's end")
    said = job.said(f"slurm-{number}.out")
    assert said.count("of 6 has ended") == 6, said
    ports = re.findall(r"rendezvous at n1:(\d+)", said)
    assert len(ports) == 6
    assert len(set(ports[:3])) == len(set(ports[3:])) == 1
    assert ports[0] != ports[3]


@pytest.mark.seldom
def test_training_that_is_requeued_saves_and_goes_on(job: Job) -> None:
    """The example's, but that it saves at no other time: no step is computed twice."""
    pytest.importorskip("sklearn")
    (job.directory / "examples").symlink_to(EXAMPLES)
    text = (EXAMPLES / "slurm" / "train_digits.sbatch").read_text()
    job.script(text.rstrip("\n") + " --checkpoint-every 1000 --epochs 2 --pause 0.2\n", "job.sh")
    number = job.submit("sbatch job.sh")

    def said() -> str:
        return job.said(f"slurm-{number}.out")

    job.wait_until(lambda: "4 workers continue after step 0\n" in said(), "training")
    time.sleep(2)
    job.run(f"scontrol requeue {number}")
    job.wait_until(lambda: "asked to end: saved after step " in said(), "the checkpoint")
    step = said().partition("saved after step ")[2].split()[0]
    assert 0 < int(step) < 44
    job.wait_until(lambda: not job.cluster.state(number), "the job's end")
    assert f"4 workers continue after step {step}\n" in said()
    assert "test accuracy 0.9" in said()


def test_the_others_go_on_without_a_lost_node(job: Job) -> None:
    job.script(WORKER)
    command = (
        "srun --nodes 3 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0"
        " rallypoint run --nnodes 2:3 train.py"
    )
    job.cluster.start(command, job.directory)
    for number in NODES:
        job.wait_for_up(host_up(number, f"0 {number - 1}/3 {number - 1}/3"))
    job.cluster.kill_step(3)
    for number in (1, 2):
        job.wait_for_up(host_up(number, f"1 {number - 1}/2 {number - 1}/2"))
    time.sleep(2)  # and srun lets them
    assert all(map(job.cluster.left, (1, 2))), job.cluster.story(job.directory)
    job.go()
    job.wait_until(lambda: not any(map(job.cluster.left, NODES)), "empty nodes")
    assert "failed" not in job.said("command.err")


# Arrays.


def test_an_array_goes_on_without_its_first_task_and_takes_it_in_again(job: Job) -> None:
    job.script(WORKER)
    command = (
        "sbatch --array=0-2 --nodes=1 --exclusive --requeue --open-mode=append --wrap"
        " 'srun rallypoint run --nnodes 2:3 --rdzv-backend c10d"
        " --rdzv-endpoint file:///shared/run --rdzv-id $SLURM_ARRAY_JOB_ID train.py'"
    )
    number = job.submit(command.replace("/shared", str(job.directory)))
    newest = wait_for_size(job, NODES, after=-1)
    node = int(job.cluster.ask(f"squeue -h -j {number}_0 -o %N").removeprefix("n"))
    others = tuple(each for each in NODES if each != node)
    killed_at = time.monotonic()
    job.cluster.kill_step(node)
    newest = wait_for_size(job, others, after=newest)
    print(f"the others went on {time.monotonic() - killed_at:.2f} s after task 0 was killed")
    requeued_at = time.monotonic()
    job.run(f"scontrol requeue {number}_0")
    wait_for_size(job, NODES, after=newest)
    print(f"and took it in {time.monotonic() - requeued_at:.2f} s after it was requeued")
    job.go()
    job.wait_until(lambda: not job.cluster.state(number), "the array's end")
    assert "failed" not in "".join(job.said(f"slurm-{number}_{task}.out") for task in range(3))


def wait_for_size(job: Job, numbers: tuple[int, ...], *, after: int) -> int:
    """Until workers on exactly these hosts make up a round newer than `after`; its number."""
    found: set[str] = set()

    def is_so() -> bool:
        up = job.up()
        told = [up.get(f"up.host{number}.0", "-1 -/-").split() for number in numbers]
        found.clear()
        found.update(f"{words[0]}/{words[1].rpartition('/')[2]}" for words in told)
        return len(found) == 1 and min(found).endswith(f"/{len(numbers)}") and newest() > after

    def newest() -> int:
        return int(min(found).partition("/")[0])

    job.wait_until(is_so, f"round of {numbers}")
    return newest()


# The guide.


@pytest.mark.everyday
def test_each_command_of_the_guide_is_tested_here() -> None:
    text = GUIDE.read_text()
    ours = Path(__file__).read_text()
    ours = re.sub(r'"\n\s+f?"', "", ours)  # a long text is written in pieces
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    commands = [line for block in blocks for line in block.replace("\\\n    ", "").splitlines()]
    assert len(commands) > 5
    for command in commands:
        assert re.sub(r"(?<!_)JOB", "{number}", command) in ours, command
