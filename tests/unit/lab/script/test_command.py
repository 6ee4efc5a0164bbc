"""`rallypoint script`: the texts that it prints, and what it refuses."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from tests.pages import ROOT

from rallypoint.lab.script import script

WHOLE = """\
#!/bin/bash
# Made by: rallypoint script slurm --nnodes 4 --nproc-per-node 8 --gpus-per-node 8 \
--cpus-per-worker 12 --time 12:00:00 --shutdown-timeout 90 train.py --note 'it is good'
# Add what your cluster requires (--account, --partition), and pass it to sbatch.
#SBATCH --job-name=train
#SBATCH --nodes=4
# One launcher on each node, which starts the workers there.
#SBATCH --ntasks-per-node=1
# For all workers of a node.
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
# Sent before the time limit: the workers have this long to save their work and end.
#SBATCH --signal=TERM@120
# Restarted if it is preempted or a node fails; its output continues in the same file.
#SBATCH --requeue
#SBATCH --open-mode=append

# Only nodes that know this token can join; a new one is drawn at each start of the job.
drawn=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')
export RALLYPOINT_TOKEN=${RALLYPOINT_TOKEN:-$drawn}

# When one launcher exits (on a drained node), those of other nodes keep running.
srun --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=0 --wait=0 \\
    rallypoint run --nproc-per-node 8 --shutdown-timeout 90 train.py --note 'it is good'
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str, kind: str = "slurm") -> str:
    assert script([kind, *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert script(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("kind", ["slurm", "jobset"])
def test_a_worker_for_each_gpu(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    image = ["--image", "i:1"] if kind == "jobset" else []
    given = printed(capsys, *image, "--gpus-per-node", "8", "t.py", kind=kind)
    same = [*image, "--gpus-per-node", "8", "--nproc-per-node", "8", "t.py"]
    assert given == printed(capsys, *same, kind=kind)
    other = printed(capsys, *same[:-3], "--nproc-per-node", "2", "t.py", kind=kind)
    assert "--nproc-per-node 8" not in other


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
        ("slurm --node-rank 1 t.py", "slurm: --node-rank is set by Slurm for each node; leave"),
        ("slurm --hosts a,b t.py", "slurm: --hosts is set by Slurm for each node; leave it out"),
        ("slurm --rdzv-endpoint a:1 t.py", "--rdzv-endpoint is set by Slurm"),
        ("slurm", "no script given; name one, as in: rallypoint script slurm train.py"),
        ("slurm --nnodes 0 t.py", "rallypoint script slurm: --nnodes is '0'"),
        ("slurm --gpus-per-node no t.py", "--gpus-per-node is 'no'; it must be an integer"),
        ("slurm --nproc-per-node gpu t.py", "add --gpus-per-node N"),
        ("slurm --nproc-per-node 0 t.py", "--nproc-per-node is '0'"),
        ("slurm --gpus 3 t.py", "unknown flag --gpus"),
        ("jobset t.py", "rallypoint script jobset: --image is missing"),
        ("jobset --image i", "no script given; name one, as in: rallypoint script jobset train.py"),
        ("jobset --image i --node-rank 1 t.py", "--node-rank is set by Kubernetes for each pod"),
        ("jobset --image i --token-file f t.py", "the token is in a Secret; leave out --token"),
        (
            "jobset --image i --nproc-per-node cpu t.py",
            "a machine's CPUs, but a pod has only part of",
        ),
        ("jobset --image i --nproc-per-node gpu t.py", "add --gpus-per-node N"),
        ("jobset --image i --memory much t.py", "--memory is 'much'; give a size, as in 8Gi"),
        (
            "jobset --image i --job-name My_Job t.py",
            "--job-name is 'My_Job'; it must start with a letter",
        ),
        (f"jobset --image i --job-name {'a' * 49} t.py", "at most 48 characters"),
        ("jobset --image i --time 1:00 t.py", "unknown flag --time"),
        ("pbs t.py", "'pbs' is not a kind of script; use slurm or jobset"),
        ("--nnodes 2 t.py", "'--nnodes' is not a kind of script; use slurm or jobset"),
    ],
)
def test_wrong_use(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *words.split())


@pytest.mark.parametrize("kind", ["slurm", "jobset --image i"])
@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x0b"])
@pytest.mark.parametrize("flag", ["--job-name", "--time", "--nnodes", "--log-dir", "--role"])
def test_no_value_ends_a_line(
    kind: str, end: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if flag == "--time" and kind != "slurm":
        return
    told = refused(capsys, *kind.split(), flag, f"a{end}scancel --me", "t.py")
    assert flag in told


def test_no_name_of_a_script_ends_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nscancel --me\u2028 b.py"
    for words in (["slurm", name], ["jobset", "--image", "i", name]):
        assert script(words) == 0
        printed = capsys.readouterr().out
        begun = [line for line in printed.splitlines() if line.startswith("scancel")]
        assert len(begun) == (words[0] == "slurm")  # within the quotes of srun's last argument
        head = printed[: printed.index("srun")] if words[0] == "slurm" else printed
        assert "\nscancel" not in head


# JobSet. That it is taken is seen in tests/unit/docs/test_manifests.py, for the example.

EXAMPLES = ROOT / "examples"


def container(text: str) -> dict[str, Any]:
    """Of the one kind of pod in a JobSet."""
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (found,) = job["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("example", ["kubernetes/jobset.yaml", "slurm/train_digits.sbatch"])
def test_the_examples_are_what_is_printed(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / example).read_text()
    kind, *words = text.partition("Made by: rallypoint script ")[2].splitlines()[0].split()
    assert text == printed(capsys, *words, kind=kind)


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", "2:3", "--max-restarts", "3", "train.py", "--lr", "1e-3", "yes", "", "a b"],
        ["-m", "my.train", "$(HOME)", "it's", '"', "ä: #{}[],", "-", "--x={1}", "0x10", ".5", "~"],
        [
            "--shutdown-timeout",
            "90",
            "t.py",
            "two\nlines",
            "back\\slash",
            "null",
            "1:30",
            "\U0001f600",
        ],
    ],
)
def test_each_word_arrives(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--image", "a.b/c:1", *words, kind="jobset")
    expected = ["--module" if word == "-m" else word.replace("$(", "$$(") for word in words]
    assert container(text)["command"] == ["rallypoint", "run", *expected]


def test_what_pods_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--image i:1 --nnodes 4 --nproc-per-node 8 --gpus-per-node 8 --cpus-per-worker 12"
    words += " --memory 512Gi --shutdown-timeout 90 my_dir/Train_GPT.v2.py"
    text = printed(capsys, *words.split(), kind="jobset")
    assert container(text)["resources"] == {
        "requests": {"cpu": "96", "memory": "512Gi"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    assert container(text)["image"] == "i:1"
    for line in (
        "  name: train-gpt-v2\n",
        "completions: 4\n",
        "parallelism: 4\n",
        "terminationGracePeriodSeconds: 105 #",
        "up to train-gpt-v2-node-0-3.train-gpt-v2\n",
        "name: train-gpt-v2-token\n",
    ):
        assert line in text
    least = container(printed(capsys, "--image", "i", "t.py", kind="jobset"))
    assert least["resources"] == {"requests": {"cpu": "1"}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], "rallypoint script jobset    a manifest"),
        (["slurm", "--help"], "sbatch job.sh"),
        (["jobset", "--help"], "kubectl apply -f job.yaml"),
    ],
)
def test_help_teaches(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(words) == 0
    assert expected in capsys.readouterr().out
    assert script([]) == 2
