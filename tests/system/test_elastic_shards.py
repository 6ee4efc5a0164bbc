"""Replicas in shards come and go: what is left of one waits, and newcomers get only their shard."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.system.conftest import Launch
from tests.system.in_place_shards import BALLAST, BATCH, SAMPLES, SHARDS, SIZE, problem

from rallypoint.elastic import Sampler

PROGRAM = str(Path(__file__).with_name("in_place_shards.py"))
Told = list[dict[str, Any]]


def train(launch: Launch, steps: int, deaths: list[str], *flags: str) -> tuple[Told, Told]:
    """What the ranks told after each update, and at the end."""
    directory = launch.directory
    process = launch.start(*flags, PROGRAM, str(directory), str(steps), *deaths)
    assert process.wait(100) == 0, launch.err
    assert len(list(directory.glob("died-*"))) == len(deaths), launch.err
    texts = [path.read_text() for path in directory.glob("*.jsonl")]
    told = [json.loads(line) for text in texts for line in text.splitlines()]
    return [each for each in told if "result" not in each], [
        each for each in told if "result" in each
    ]


def shards_of(told: Told, steps: int) -> dict[tuple[int, int], str]:
    """Step and shard -> the weights, on whose bits all replicas agree."""
    found: dict[tuple[int, int], str] = {}
    for each in told:
        key = each["step"], each["shard"]
        assert found.setdefault(key, each["weights"]) == each["weights"], key
    assert sorted(found) == [(step + 1, shard) for step in range(steps) for shard in range(SHARDS)]
    return found


def one_alone(steps: int) -> numpy.ndarray:
    """The weights of one process."""
    inputs, targets = problem()
    weights, sampler = numpy.ones(SIZE), Sampler(SAMPLES, BATCH)
    for step in range(steps):
        batch = sampler.indices(step, 0, 1)
        weights -= 0.01 * ((inputs[batch] @ weights - targets[batch]) @ inputs[batch] / BATCH)
    return weights


def check_result(told: dict[tuple[int, int], str], steps: int) -> None:
    parts = [bytes.fromhex(told[steps, shard]) for shard in range(SHARDS)]
    numpy.testing.assert_allclose(numpy.frombuffer(b"".join(parts)), one_alone(steps), rtol=1e-9)


@pytest.mark.exact
def test_a_spare_takes_the_shard(
    launch: Launch, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each step has the bits of a run without losses, and a newcomer gets one shard."""
    chance, steps = random.Random(seed), 60
    at = sorted(chance.sample(range(1, steps - 1, 3), 2))
    deaths = [f"{step}:{chance.randrange(4)}" for step in at]
    print(deaths)
    told, ends = train(launch, steps, deaths, "--nproc-per-node", "4", "--spares", "2")
    quiet = Launch(tmp_path_factory.mktemp("quiet"))
    undisturbed, _ = train(quiet, steps, [], "--nproc-per-node", "4")
    assert shards_of(told, steps) == shards_of(undisturbed, steps)
    check_result(shards_of(told, steps), steps)
    check_bytes(ends)


def check_bytes(ends: Told) -> None:
    """Who has got the state from others has got one shard's bytes, and hardly more."""
    whole = (SIZE + SHARDS * BALLAST) * 8
    received = [size for each in ends for size in each["received"]]
    assert received, ends
    for size in received:
        assert whole / SHARDS <= size <= whole / SHARDS * 1.01, ends


def test_the_rest_of_a_replica_waits(
    launch: Launch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica goes on, and they train again with a new process."""
    monkeypatch.setenv("TEST_LATE_S", "0.5")
    steps = 400
    victim = random.Random(seed).randrange(4)
    flags = ["--nproc-per-node", "4", "--max-restarts", "3"]
    told, ends = train(launch, steps, [f"5:{victim}"], *flags)
    assert [each["size"] for each in told].count(2) > 0
    assert [each["result"] for each in ends] == ["trained"] * 4
    check_result(shards_of(told, steps), steps)


@pytest.mark.exact
def test_a_rank_too_many_is_idle(launch: Launch) -> None:
    told, ends = train(launch, 20, [], "--nproc-per-node", "5")
    assert {each["size"] for each in told} == {4}
    assert [each["result"] for each in ends if each["is_idle"]] == [None]
    check_result(shards_of(told, 20), 20)


@pytest.mark.everyday
def test_the_last_of_a_shard_is_lost(launch: Launch) -> None:
    directory = str(launch.directory)
    assert launch.run("--nproc-per-node", "2", PROGRAM, directory, "50", "5:1") == 1
    assert "StateLostError: all ranks that held shard 1 of the state were lost" in launch.err


def test_an_idle_rank_does_not_go_on_from_its_old_state(launch: Launch) -> None:
    """Both ranks that train are lost, of three; with the spares there are enough for a replica."""
    flags = ["--nproc-per-node", "3", "--spares", "2"]
    assert launch.run(*flags, PROGRAM, str(launch.directory), "500", "50:0", "50:1") == 1
    assert "StateLostError: all ranks that had" in launch.err
    assert "Traceback" not in launch.out
