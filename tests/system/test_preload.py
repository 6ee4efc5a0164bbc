"""`run --preload`: workers are forked from a process that has imported, and cannot tell.

Most tests preload a small module: what is tested does not depend on what is imported. Those with
PyTorch are at the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

pytestmark = pytest.mark.system

TEMPLATE = "rallypoint-template"
ALONE = "; each worker imports it itself\n"
# A line in one piece: print() of an unbuffered stdout writes each of its arguments alone.
SAY = """
import os
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

# What a program can see of its own start, and of how it was told its place.
SEES = """
import atexit, json, os, signal, sys
here = sys._getframe().f_code
print(json.dumps({
    "file": __file__, "name": __name__, "names": sorted(globals()),
    "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__, "package": __package__, "doc": __doc__,
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "code": here.co_filename,
    "executable": sys.executable, "flags": str(sys.flags), "directory": os.getcwd(),
    "streams": [(each.name, each.mode, each.encoding, each.errors, each.line_buffering,
                 each.write_through, each.fileno(), each.isatty())
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "same": sys.stdout is sys.__stdout__, "main": sys.modules["__main__"].__dict__ is globals(),
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 13, 15)],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "cpus": sorted(os.sched_getaffinity(0)), "hook": sys.excepthook.__qualname__,
    "descriptors": len(os.listdir("/proc/self/fd")),
    "environ": {name: text for name, text in os.environ.items()
                if name not in ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")},
    "same environ": os.environ.__class__.__name__ + os.popen("echo $RANK").read(),
}), flush=True)
"""


def template_of(launch: Launch) -> int:
    """The process that forks the workers, once it is ready."""
    found = [text for text in launch.running() if f": {TEMPLATE}" in text]
    return int(found[0].partition(":")[0]) if found else 0


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def sees(launch: Launch, *words: str) -> list[str]:
    assert launch.run("--nproc-per-node", "2", *words) == 0, launch.err
    return sorted(launch.out.splitlines())


def ended(launch: Launch) -> int:
    assert launch.process is not None
    return launch.process.wait(60)


class TestWhatAWorkerSees:
    @pytest.mark.everyday
    def test_a_script_sees_what_it_would_without(self, launch: Launch) -> None:
        words = (launch.script(SEES), "--flag", "a b", "")
        forked = sees(launch, "--preload", "colorsys", *words)
        assert forked == sees(launch, *words)

    def test_a_module_sees_what_it_would_without(self, launch: Launch) -> None:
        launch.script(SEES, "seeing.py")
        words = ("-m", "seeing", "--flag")
        forked = sees(launch, "--preload", "colorsys", *words)
        assert forked == sees(launch, *words)

    @pytest.mark.parametrize(
        "text",
        [
            "import os\ndef f():\n    raise ValueError('no')\nif os.environ['RANK'] == '1': f()",
            "import sys\nsys.exit('a text')",
            "raise SystemExit('another')",
            "raise SystemExit(7)",
            "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
            "def f(:",
            "import no_such_module",
            "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError",
            "import atexit\natexit.register(print, 'at exit')\nprint('end')",
            "import os\nos._exit(3)",
        ],
    )
    def test_it_ends_as_it_would_without(self, launch: Launch, text: str) -> None:
        script = launch.script(text)

        def ends(*words: str) -> tuple[int, str, list[str]]:
            status = launch.run("--nproc-per-node", "1", "--max-restarts", "1", *words, script)
            told = re.sub(r"pid \d+|\d+(\.\d+)? m?s\b|\d\d:\d\d:\d\d\S*", "?", launch.err)
            return status, launch.out, sorted(told.splitlines())  # a restart may be faster

        assert ends("--preload", "colorsys") == ends()

    @pytest.mark.everyday
    def test_what_the_imports_print_is_there_once(self, launch: Launch, tmp_path: Path) -> None:
        loud = "import os, sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n"
        modules(tmp_path, loud=loud + "os.system('echo from a shell')\n")
        script = launch.script(f"import loud, os\n{SAY}say(os.environ['RANK'])")
        environ = {"PYTHONPATH": path_with(tmp_path / "modules")}
        words = ("--nproc-per-node", "3", "--log-prefix", "{rank}:", "--preload", "loud", script)
        assert launch.run(*words, environ=environ) == 0
        lines = [line for line in launch.err.splitlines() if line.startswith("0:")]
        assert lines == ["0:to stdout", "0:to stderr", "0:from a shell"]
        assert sorted(launch.out.split()) == ["0:0", "1:1", "2:2"]

    def test_each_has_its_own_command_line(self, launch: Launch) -> None:
        text = f"import os, time\n{SAY}say(os.getpid(), os.environ['RANK'])\ntime.sleep(600)"
        script = launch.script(text)
        words = ("--preload", "colorsys", script, "--shard=${local_rank}")
        launch.start("--nproc-per-node", "2", *words)
        wait_until(lambda: launch.out.count("\n") == 2)
        for line in launch.out.splitlines():
            pid, rank = line.split()
            command = command_of(int(pid)).strip()
            assert command.endswith(f" -u {script} --shard={rank} [rank {rank}]")
        assert command_of(template_of(launch)).strip() == f"{TEMPLATE} colorsys"

    def test_random_numbers_differ(self, launch: Launch) -> None:
        pytest.importorskip("numpy")
        text = f"import numpy, random\n{SAY}say(numpy.random.rand(), random.random())"
        found = sees(launch, "--preload", "numpy.random,random", launch.script(text))
        assert len({each for line in found for each in line.split()}) == 4

    def test_variables_that_the_imports_set_are_kept(self, launch: Launch, tmp_path: Path) -> None:
        modules(tmp_path, sets="import os\nos.environ['SET'] = 'x'\nos.environ.pop('GONE', None)\n")
        text = (
            f"import os\n{SAY}"
            "say(os.environ.get('SET'), os.environ.get('GONE'), os.environ['RANK'])"
        )
        environ = {"PYTHONPATH": path_with(tmp_path / "modules"), "GONE": "no"}
        words = ("--nproc-per-node", "2", "--preload", "sets", launch.script(text))
        assert launch.run(*words, environ=environ) == 0
        assert sorted(launch.out.splitlines()) == ["x None 0", "x None 1"]


def modules(directory: Path, **texts: str) -> None:
    (directory / "modules").mkdir()
    for name, text in texts.items():
        (directory / "modules" / f"{name}.py").write_text(text)


def path_with(directory: Path) -> str:
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (
                "import os\nrank = os.environ.get('RANK')",
                "reads RANK when it is imported (odd.py:2)",
            ),
            ("import os\nos.environ['RANK'] = '0'", "sets RANK when it is imported (odd.py:2)"),
            (
                "import threading, time\n"
                "threading.Thread(target=time.sleep, args=(60,), name='mine', daemon=True).start()",
                "leaves a thread running when it is imported (mine)",
            ),
            ("raise OSError('no')", "cannot be imported (OSError: no)"),
            ("import sys\nsys.exit(3)", "cannot be imported (SystemExit: 3)"),
            ("import subprocess\nsubprocess.Popen(['sleep', '60'])", "leaves a child process"),
            ("file = open('/proc/self/stat')", "leaves a file open when it is imported (/proc/"),
            ("import random\nrandom.seed(3)", "uses or seeds random's random generator"),
            ("import os, beside", "imports beside from the script's directory"),
            (
                "import os, sys, types\n"
                "me, cuda = os.getpid(), types.ModuleType('torch.cuda')\n"
                "cuda._is_in_bad_fork = lambda: os.getpid() != me\n"
                "sys.modules['torch.cuda'] = cuda",
                "initializes an accelerator when it is imported",
            ),
        ],
        ids=lambda each: each.split("\n")[-1][:20] if "\n" in each else "",
    )
    def test_workers_start_without_it(
        self, launch: Launch, tmp_path: Path, text: str, told: str
    ) -> None:
        modules(tmp_path, odd=text)
        launch.script("", "beside.py")
        script = launch.script(f"{SAY}say(os.environ['RANK'])")
        environ = {"PYTHONPATH": path_with(tmp_path / "modules")}
        words = ("--nproc-per-node", "2", "--preload", "random,odd", script)
        assert launch.run(*words, environ=environ) == 0
        assert sorted(launch.out.split()) == ["0", "1"]
        assert launch.err.count("--preload: ") == 1
        assert f"--preload: odd {told}" in launch.err
        assert launch.err.endswith(ALONE)

    def test_an_import_that_ends_the_process(self, launch: Launch, tmp_path: Path) -> None:
        modules(tmp_path, odd="import os\nos.kill(os.getpid(), 9)")
        environ = {"PYTHONPATH": path_with(tmp_path / "modules")}
        script = launch.script(f"{SAY}say('here')")
        words = ("--nproc-per-node", "2", "--preload", "odd", script)
        assert launch.run(*words, environ=environ) == 0
        assert launch.out == "here\nhere\n"
        told = "--preload: the process that imports odd was killed by SIGKILL"
        assert f"{told}{ALONE}" in launch.err

    def test_an_import_that_takes_long(self, launch: Launch, tmp_path: Path) -> None:
        modules(tmp_path, odd="import time\ntime.sleep(600)")
        environ = {"PYTHONPATH": path_with(tmp_path / "modules")}
        script = launch.script(f"{SAY}say('here')")
        words = ("--nproc-per-node", "2", "--preload", "odd", script)
        assert launch.run(*words, environ=environ) == 0
        assert launch.out == "here\nhere\n"
        assert f"--preload: importing odd takes longer than 30 s{ALONE}" in launch.err


# Says where it is; rank 1 of the first round waits to be killed.
ROUNDS = """
import os, sys, time
number, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
is_forked = "rallypoint.base.template" in sys.modules
os.write(1, f"{number} {rank} {os.getpid()} {os.getppid()} {is_forked}\\n".encode())
if number == "0":
    time.sleep(600)
"""


# Kills the forked process of that number.
KILLS = """
import os
depth = 0
def count():
    global depth
    depth += 1
    fd = os.open(f"forks.{depth}", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x")
    number = os.lseek(fd, 0, os.SEEK_CUR)  # the end of its own write
    if os.environ["KILL_AT"] == f"{depth}.{number}":
        os.kill(os.getpid(), 9)
    os.close(fd)
os.register_at_fork(after_in_child=count)
"""


def lines_of(launch: Launch, number: int) -> list[list[str]]:
    found = [line.split() for line in launch.out.splitlines()]
    return sorted(words for words in found if words[0] == str(number))


class TestDeaths:
    @pytest.mark.everyday
    def test_a_restart_forks_from_the_same_process(self, launch: Launch) -> None:
        script = launch.script(ROUNDS)
        words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preload", "colorsys", script)
        launch.start(*words)
        wait_until(lambda: len(lines_of(launch, 0)) == 2)
        guardian = {int(words[3]) for words in lines_of(launch, 0)}
        assert guardian == {launch.guardian_pid()}
        os.kill(int(lines_of(launch, 0)[1][2]), signal.SIGKILL)
        assert ended(launch) == 0
        assert [words[4] for words in lines_of(launch, 0) + lines_of(launch, 1)] == ["True"] * 4
        assert {int(words[3]) for words in lines_of(launch, 1)} == guardian
        assert "rank 1 was killed by SIGKILL" in launch.err

    def test_one_that_dies_is_replaced(self, launch: Launch) -> None:
        script = launch.script(ROUNDS)
        words = ("--nproc-per-node", "2", "--max-restarts", "1", "-v", "--preload", "colorsys")
        launch.start("--json-events", "events", *words, script)
        wait_until(lambda: len(lines_of(launch, 0)) == 2)
        before = template_of(launch)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: template_of(launch) not in (0, before))
        assert len(lines_of(launch, 0)) == 2  # nobody else has noticed
        os.kill(int(lines_of(launch, 0)[1][2]), signal.SIGKILL)
        assert ended(launch) == 0
        assert [words[4] for words in lines_of(launch, 1)] == ["True"] * 2
        assert "the process that forks workers was killed by SIGKILL" in launch.err
        lines = (launch.directory / "events").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["event"] == "preload"]
        assert [event["state"] for event in events] == ["ready", "replaced", "ready"]
        assert {tuple(event["modules"]) for event in events} == {("colorsys",)}

    def test_one_that_is_stopped_is_not_waited_for(self, launch: Launch) -> None:
        script = launch.script(ROUNDS)
        words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preload", "colorsys", script)
        launch.start(*words)
        wait_until(lambda: len(lines_of(launch, 0)) == 2)
        os.kill(template_of(launch), signal.SIGSTOP)
        os.kill(int(lines_of(launch, 0)[1][2]), signal.SIGKILL)
        assert ended(launch) == 0
        assert [words[4] for words in lines_of(launch, 1)] == ["False"] * 2
        assert "--preload" not in launch.err  # it was not even asked
        assert not launch.running()

    @pytest.mark.parametrize("who", ["guardian", "launcher"])
    def test_nothing_outlives_guardian_or_launcher(self, launch: Launch, who: str) -> None:
        launch.start("--nproc-per-node", "2", "--preload", "colorsys", launch.script(ROUNDS))
        wait_until(lambda: len(lines_of(launch, 0)) == 2)
        assert launch.process is not None
        pid = launch.guardian_pid() if who == "guardian" else launch.process.pid
        os.kill(pid, signal.SIGKILL)
        launch.process.wait()
        wait_until(lambda: not launch.running())
        if who == "guardian":
            assert "guardian process was killed" in launch.err

    def test_a_worker_that_is_killed_at_once(self, launch: Launch) -> None:
        """Before and after the guardian knows its number: it is found and killed in any case."""
        text = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
        for _ in range(5):
            words = ("--nproc-per-node", "2", "--preload", "colorsys", launch.script(text))
            assert launch.run(*words) == 1
            assert "rank 1 was killed by SIGKILL" in launch.err

    @pytest.mark.alone
    @pytest.mark.parametrize(("fork", "status"), [("1.2", 0), ("2.1", 1)])
    def test_a_death_in_the_middle_of_a_fork(
        self, launch: Launch, tmp_path: Path, fork: str, status: int
    ) -> None:
        """The template forks the probe, then processes in between, each of which forks a worker."""
        modules(tmp_path, kills=KILLS)
        environ = {"PYTHONPATH": path_with(tmp_path / "modules"), "KILL_AT": fork}
        script = launch.script(ROUNDS.replace('"0"', '"none"'))
        words = ("--nproc-per-node", "2", "--preload", "kills", script)
        assert launch.run(*words, environ=environ) == status
        if status == 0:
            assert [words[4] for words in lines_of(launch, 0)] == ["False", "True"]
            assert launch.err == ""
        else:
            assert re.search(r"job failed: rank [01] was killed by SIGKILL", launch.err)

    def test_a_signal_while_it_imports(self, launch: Launch, tmp_path: Path) -> None:
        modules(tmp_path, odd="import time, os\nopen('importing', 'w')\ntime.sleep(60)")
        environ = {"PYTHONPATH": path_with(tmp_path / "modules")}
        words = ("--nproc-per-node", "2", "--preload", "odd", launch.script(ROUNDS))
        process = launch.start(*words, environ=environ)
        wait_until(lambda: (launch.directory / "importing").exists())
        process.terminate()
        assert process.wait(60) == 143
        assert not launch.running()


# Trains in three ways from a fixed seed, and prints each loss to the last bit; then a number that
# has no seed.
TRAINS = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
unseeded = torch.rand(1).item()
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
rank = int(os.environ["RANK"])

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.sin(torch.arange(8.0) * (index + rank))

def train(name, wrap):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True, num_workers=2)
    for batch in loader:
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(name, rank, loss.item().hex())

for backend in ("rallypoint", "gloo"):
    dist.init_process_group(backend)
    train(backend, DistributedDataParallel)
    if backend == "gloo":
        train("fsdp", fully_shard)
    dist.destroy_process_group()
say("unseeded", unseeded, "rallypoint.base.template" in sys.modules)
"""


@pytest.mark.alone  # a busy machine imports for longer than workers wait for it
def test_losses_are_the_same_to_the_last_bit(launch: Launch) -> None:
    pytest.importorskip("torch")
    script = launch.script(TRAINS)
    forked, normal = (
        sees(launch, *words, script) for words in (("--max-restarts", "3", "--preload", "auto"), ())
    )
    assert [line for line in forked if line[0] != "u"] == [
        line for line in normal if line[0] != "u"
    ]
    assert len(forked) == 3 * 2 * 8 + 2
    unseeded = [line.split() for line in forked if line[0] == "u"]
    assert [is_forked for _, _, is_forked in unseeded] == ["True", "True"]
    assert len({number for _, number, _ in unseeded}) == 2


def test_its_groups_are_recorded_as_without(launch: Launch) -> None:
    """What is registered while torch is imported is repeated in each worker."""
    pytest.importorskip("torch")
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "from rallypoint.pytorch import other_backends\n"
        f"{SAY}say(len(other_backends._groups), dist.get_rank())\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    words = ("--preload", "torch", launch.script(text))
    assert sees(launch, *words) == ["1 0", "1 1"]
