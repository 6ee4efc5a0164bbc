"""Ctrl-C at random instants of collectives and messages: who is interrupted is free at once, the
others are told in what, and nobody's data are spoilt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

INTERRUPTS = int(os.environ.get("RALLYPOINT_TEST_INTERRUPTS", "40"))
NAMES = {"message": {"send", "recv"}}  # of the engine, where they are others


@pytest.mark.timeout(60 + INTERRUPTS)
def test_ctrl_c_at_any_instant(seed: int) -> None:
    program = [sys.executable, str(Path(__file__).with_name("interrupts.py"))]
    with subprocess.Popen(
        [*program, str(seed), str(INTERRUPTS)], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        seen = [json.loads(line) for line in run.stdout]
    ways: Counter[str] = Counter()
    times: list[float] = []
    for each in seen:
        story = json.dumps(each, indent=1)
        by_rank = {told["rank"]: told for told in each["told"]}
        assert by_rank.keys() == {0, 1}, story
        for rank, told in by_rank.items():
            if each["times"] == 1:
                times.append(told["after_s"])
            if rank in each["victims"] and told["kind"] == "KeyboardInterrupt":
                continue
            # Of two that are interrupted, one may hear of the other first.
            other = by_rank[1 - rank]
            assert other["rank"] in each["victims"], story
            assert other["kind"] == "KeyboardInterrupt", story
            assert told["kind"] == "PeerLostError", story
            assert told["culprit"] == other["rank"], story
            ways[_check_words(told["text"], other["rank"], other["operation"])] += 1
    assert run.returncode == 0
    assert len(seen) == INTERRUPTS
    again = sum(each["times"] - 1 for each in seen)
    print(
        f"{INTERRUPTS} interrupts: peers were told of {ways['a call']} calls and {ways['the end']}"
        f" ends of the group, all after at most {max(times):.2f} s; {again} were sent again"
    )
    assert ways["the end"] > 0
    assert again <= 2 + INTERRUPTS // 50
    assert max(times) < SOON_S


WAITS = """
import os, signal, threading, time
import rallypoint as dist
for backend in ("shm", "tcp"):
    dist.init_process_group(backend)
    dist.barrier()
    try:
        if dist.get_rank() == 0:
            time.sleep(0.5)
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        dist.barrier()
    except (KeyboardInterrupt, dist.PeerLostError) as error:
        print(type(error).__name__, error, flush=True)
    dist.destroy_process_group()
"""


def test_peers_are_told_which_call_was_interrupted(launch: Launch) -> None:
    assert launch.start("--nproc-per-node", "2", launch.script(WAITS)).wait(60) == 0, launch.err
    interrupted, again, *told = sorted(launch.out.splitlines())
    assert interrupted.strip() == again.strip() == "KeyboardInterrupt", launch.out
    assert [_check_words(line, 1, "barrier") for line in told] == ["a call"] * 2


def _check_words(text: str, victim: int, operation: str) -> str:
    """What a peer was told of: a call that was interrupted, or the end of the group, if Ctrl-C came
    between two calls or in a wait for one in the background."""
    if "exited or left the group before" in text:
        return "the end"
    named = re.search(rf"rank {victim} \(pid \d+\) was interrupted in (\w+) #\d+ ", text)
    assert named is not None, text
    assert named[1] in NAMES.get(operation, {operation}), (text, operation)
    assert f"on rank {victim};" in text
    return "a call"


FORMINGS = INTERRUPTS // 2


@pytest.mark.timeout(120 + FORMINGS)
def test_ctrl_c_while_a_group_forms(seed: int, launch: Launch) -> None:
    """Both ranks may form the next one at once: nobody waits for what was given up."""
    script = str(Path(__file__).with_name("forming.py"))
    words = ("--nproc-per-node", "2", script, str(seed), str(FORMINGS))
    assert launch.start(*words).wait(100 + FORMINGS) == 0, launch.err
    said = [json.loads(line) for line in launch.out.splitlines()]
    print(said)
    assert [each["formed"] for each in said] == [FORMINGS] * 2
    assert all(each["interrupted"] > 0 for each in said)
    # The other looks once a second whether it is waited for; that a rank died may take two looks.
    assert max(each["longest_s"] for each in said) < 4 + SOON_S


LEAVES = """
import sys, time, numpy as np, rallypoint as dist
kept, longest_s = [], 0.0  # a program that keeps a call keeps its group's connections
for turn in range(int(sys.argv[1])):
    dist.init_process_group("tcp")
    dist.barrier()
    values = [np.ones(300_000, np.float32) for _ in range(4)]
    if dist.get_rank() == 1:
        kept.append([dist.all_reduce(each, async_op=True) for each in values[:3]])
        time.sleep(turn % 7 * 1e-4)
        dist.destroy_process_group()
        continue
    began_s = time.monotonic()
    try:
        for each in values:
            dist.all_reduce(each)
    except dist.PeerLostError as error:
        assert "left the group" in str(error), error
        longest_s = max(longest_s, time.monotonic() - began_s)
    dist.destroy_process_group()
if longest_s:
    print(longest_s)
"""


def test_who_leaves_with_calls_under_way_is_missed_at_once(launch: Launch) -> None:
    script = launch.script(LEAVES)
    turns = str(max(28, INTERRUPTS // 20))
    assert launch.start("--nproc-per-node", "2", script, turns).wait(100) == 0, launch.err
    assert 0 < float(launch.out) < SOON_S
