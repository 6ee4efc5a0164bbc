"""A worker fails and all start again: in a fresh round, counted once, unless that is pointless."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from tests.system.conftest import Launch, parent_of
from tests.system.everyday import wait_until
from tests.system.test_preload import TEMPLATE, command_of

pytestmark = pytest.mark.system

DDP = Path(__file__).parents[2] / "examples" / "train_digits_ddp.py"
KILLS = int(os.environ.get("RALLYPOINT_TEST_KILLS", "2"))
KILLS_PER_JOB = 10

ROUNDS = """
import os, pathlib, signal, sys, time
from rallypoint.store.client import TCPStore
rank, number = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
assert store.list_keys() == [] or store.list_keys()[0].startswith(f"{number}/")
store.set(f"{number}/{rank}", "here")
store.wait([f"{number}/{other}" for other in range(3)])
words = os.environ["TORCHELASTIC_ERROR_FILE"].split("/")
os.write(1, f"round {number} rank {rank} port {os.environ['MASTER_PORT']} {words[-3]}"
            f" of {os.environ['TORCHELASTIC_MAX_RESTARTS']}\\n".encode())
if number < 2:
    store.set(f"{number}/{rank}/told", "")
    if rank == "1":
        store.wait([f"{number}/{other}/told" for other in range(3)])
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


def ports_by_round(text: str) -> dict[str, set[str]]:
    ports: dict[str, set[str]] = {}
    for number, port in re.findall(r"round (\d) rank \d port (\d+) attempt_\1 of 2", text):
        ports.setdefault(number, set()).add(port)
    return ports


@pytest.mark.everyday
def test_each_round_has_an_empty_store_on_a_port_of_its_own(launch: Launch) -> None:
    script = launch.script(ROUNDS)
    assert launch.run("--nproc-per-node", "3", "--max-restarts", "2", script) == 0
    ports = ports_by_round(launch.out)
    first, second, third = (ports[str(number)].pop() for number in range(3))
    assert first != second != third
    assert not any(ports.values())
    assert launch.out.count("round") == 9
    assert launch.err.count("failed: rank 1 was killed by SIGKILL") == 2
    assert "restart 1 of 2" in launch.err
    assert "restart 2 of 2" in launch.err
    assert "job failed" not in launch.err
    launch.expect_nothing_left()
    assert launch.left_files() == []


def test_a_given_port_is_the_same_in_each_round(launch: Launch, free_port: int) -> None:
    words = ["--nproc-per-node", "3", "--max-restarts", "2", "--master-port", str(free_port)]
    assert launch.run(*words, launch.script(ROUNDS)) == 0
    assert set().union(*ports_by_round(launch.out).values()) == {str(free_port)}


@pytest.mark.everyday
def test_a_failure_before_the_programs_work_is_not_tried_again(launch: Launch) -> None:
    assert launch.run("--max-restarts", "3", launch.script("import no_such_module")) == 1
    told = "raised ModuleNotFoundError: No module named 'no_such_module'"
    assert f"job failed: rank 0 {told}" in launch.err
    assert "it failed before its own code ran, so a retry would fail in the same way" in launch.err
    assert "restart 1" not in launch.err


def test_an_import_that_fails_at_work_of_a_module_is_tried_again(launch: Launch) -> None:
    launch.script("def work():\n    import no_such_module\nwork()", "mod.py")
    path = {"PYTHONPATH": str(launch.directory)}
    assert launch.run("--max-restarts", "1", "-m", "mod", environ=path) == 1
    assert "restart 1 of 1" in launch.err


def test_ctrl_c_during_a_restart_ends_the_job(launch: Launch) -> None:
    script = launch.script("""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("up." + os.environ["RANK"]).touch()
while len(list(pathlib.Path(".").glob("up.*"))) < 2: time.sleep(0.01)
if os.environ["RANK"] == "0": os.abort()
time.sleep(600)
""")
    process = launch.start("--verbose", "--nproc-per-node", "2", "--max-restarts", "9", script)
    wait_until(lambda: "stopping: rank 0 failed" in launch.err)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "stopped by SIGINT" in launch.err
    assert launch.left_over() == []


def workers_of(launch: Launch) -> set[int]:
    assert launch.process is not None
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {int(entry.name): parent_of(entry) for entry in entries}
    guardians = {pid for pid, parent in parents.items() if parent == launch.process.pid}
    found = {pid for pid, parent in parents.items() if parent in guardians}
    return {pid for pid in found if not command_of(pid).startswith(TEMPLATE)}


def kill_at_random(launch: Launch, chance: random.Random, kills: int) -> None:
    """One worker of each round, some while the round still starts, some while it trains."""
    before: set[int] = set()
    for _ in range(kills):
        deadline = time.monotonic() + 120
        while not (len(now := workers_of(launch)) == 4 and now.isdisjoint(before)):
            assert time.monotonic() < deadline, launch.err
            time.sleep(0.01)
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0.0, 3.0))
        else:
            told = launch.out.count("epoch")
            while launch.out.count("epoch") == told:
                assert time.monotonic() < deadline, launch.err
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.5))
        os.kill(chance.choice(sorted(now)), signal.SIGKILL)
        before = now


@pytest.mark.needs_torch
@pytest.mark.timeout(120 + 60 * KILLS)
def test_ddp_training_survives_kills_at_random_moments(launch: Launch, seed: int) -> None:
    chance = random.Random(seed)
    for done in range(0, KILLS, KILLS_PER_JOB):
        kills = min(KILLS_PER_JOB, KILLS - done)
        process = launch.start(
            "--nproc-per-node", "4", "--max-restarts", str(kills), str(DDP), "--epochs", "30"
        )  # fmt: skip
        kill_at_random(launch, chance, kills)
        assert process.wait(120) == 0, launch.err
        assert launch.out.count("test accuracy 0.9") == 1
        assert launch.err.count("was killed by SIGKILL\n") == kills
        assert f"restart {kills} of {kills}" in launch.err
        print(f"{done + kills} of {KILLS} kills: each was followed by a clean restart", flush=True)
