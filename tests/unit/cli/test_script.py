"""`rallypoint script slurm`: the text that it prints, and what it refuses."""

from __future__ import annotations

import subprocess

import pytest

from rallypoint.cli.script import script

WHOLE = """\
#!/bin/bash
# Made by: rallypoint script slurm --nnodes 4 --nproc-per-node 8 --gpus-per-node 8 \
--cpus-per-worker 12 --time 12:00:00 --shutdown-timeout 90 train.py --note 'it is good'
# Add what your cluster asks for (--account, --partition), and give it to sbatch.
#SBATCH --job-name=train
#SBATCH --nodes=4
# One launcher on each node, which starts the workers there.
#SBATCH --ntasks-per-node=1
# For all workers of a node.
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
# Before the time limit: so long the workers have to save what they did, and to end.
#SBATCH --signal=TERM@120
# Started again if it is preempted or a node fails; its output goes on in the same file.
#SBATCH --requeue
#SBATCH --open-mode=append

# Who does not know it is not let in; drawn each time that the job starts.
drawn=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')
export RALLYPOINT_TOKEN=${RALLYPOINT_TOKEN:-$drawn}

# A launcher that has left (a drained node's) does not end those of other nodes.
srun --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=0 --wait=0 \\
    rallypoint run --nproc-per-node 8 --shutdown-timeout 90 train.py --note 'it is good'
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert script(["slurm", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert script(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_the_whole_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nnodes 4 --nproc-per-node=8 --gpus-per-node 8 --cpus-per-worker 12 --time 12:00:00"
    words += " --shutdown-timeout 90 train.py --note"
    text = printed(capsys, *words.split(), "it is good")
    assert text == WHOLE
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py", ["--nodes=1\n", "--cpus-per-task=1\n", "--signal=TERM@60", "run train.py\n"]),
        ("-m my.train", ["--job-name=train\n", "rallypoint run --module my.train\n"]),
        ("--job-name mine train.py", ["--job-name=mine\n", "rallypoint run train.py\n"]),
        (
            "--nnodes 2:8 --nproc-per-node 4 t.py",
            [
                "--nodes=2-8\n",
                "#SBATCH --no-kill\n",
                "srun --ntasks-per-node=1 --cpus-per-task=4 --no-kill --kill-on-bad-exit=0",
                "run --nnodes 2:8 --nproc-per-node 4 t.py\n",
            ],
        ),
        (
            "--nproc-per-node gpu --gpus-per-node 4 --cpus-per-worker 8 t.py",
            ["--cpus-per-task=32\n", "--gpus-per-node=4\n", "run --nproc-per-node gpu t.py\n"],
        ),
        ("--nproc-per-node cpu t.py", ["--exclusive\n", "--cpus-per-task=$SLURM_CPUS_ON_NODE "]),
        ("t.py --nnodes 7", ["--nodes=1\n", "rallypoint run t.py --nnodes 7\n"]),
    ],
)
def test_what_flags_become(
    words: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *words.split())
    for each in expected:
        assert each in text


def test_a_token_that_is_given_is_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert "urandom" not in printed(capsys, "--token-file", "secret", "train.py")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("slurm --node-rank 1 t.py", "slurm: --node-rank is what Slurm says of each node; leave"),
        ("slurm --hosts a,b t.py", "slurm: --hosts is what Slurm says of each node; leave it out"),
        ("slurm --rdzv-endpoint a:1 t.py", "--rdzv-endpoint is what Slurm says"),
        ("slurm", "no script given; name one, as in: rallypoint script slurm train.py"),
        ("slurm --nnodes 0 t.py", "rallypoint script slurm: --nnodes is '0'"),
        ("slurm --gpus-per-node no t.py", "--gpus-per-node is 'no'; it must be a whole number"),
        ("slurm --nproc-per-node gpu t.py", "add --gpus-per-node N"),
        ("slurm --nproc-per-node 0 t.py", "--nproc-per-node is '0'"),
        ("slurm --gpus 3 t.py", "unknown flag --gpus"),
        ("pbs t.py", "'pbs' is no kind of script; there is slurm"),
        ("--nnodes 2 t.py", "'--nnodes' is no kind of script; there is slurm"),
    ],
)
def test_wrong_use(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *words.split())


@pytest.mark.parametrize("words", [["--help"], ["slurm", "--help"]])
def test_help_teaches(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert script(words) == 0
    assert "sbatch job.sh" in capsys.readouterr().out
    assert script([]) == 2
