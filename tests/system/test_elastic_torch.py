"""Elastic training in PyTorch goes on when ranks are killed, and computes as it does without.

What it is compared with is computed here, in one process, without Rallypoint.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.system.conftest import Launch

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(1200)]

torch: Any = pytest.importorskip("torch")

from tests.system.torch_elastic import (  # noqa: E402
    BATCH,
    PLACES,
    SAMPLES,
    Network,
    batches,
    bits,
    bits_of,
    loss_of,
    samples,
)
from tests.system.torch_options import MODELS, Training, uses_middle  # noqa: E402

from rallypoint.elastic import Sampler  # noqa: E402

SCRIPT = Path(__file__).with_name("torch_elastic.py")
OPTIONS = Path(__file__).with_name("torch_options.py")
STEPS = 40
# In the middle of buckets; 20 in `make check-long`.
KILLS = int(os.environ.get("RALLYPOINT_TEST_BUCKET_KILLS", "2"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the workers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plan(chance: random.Random, sizes: list[int]) -> list[str]:
    """When, who and where: STEP:RANK:PLACE, by the number of ranks then; one of them is rank 0."""
    steps = sorted(chance.sample(range(3, STEPS - 3, 4), len(sizes)))
    victims = [chance.randrange(size) for size in sizes]
    victims[chance.randrange(len(sizes))] = 0
    places = chance.sample(PLACES, len(sizes))
    told = [":".join(map(str, each)) for each in zip(steps, victims, places, strict=True)]
    print(told)
    return told


def train(launch: Launch, kind: str, deaths: list[str], *flags: str) -> list[dict[str, Any]]:
    """What the ranks wrote after each update.

    With restarts left, a new process takes an empty place as soon as it has come up.
    """
    directory = launch.directory
    words = ["--max-restarts", "100", *flags, str(SCRIPT), str(directory), kind, str(STEPS)]
    # Each process imports PyTorch and its compiler: many seconds on a busy machine.
    assert launch.start(*words, *deaths).wait(500) == 0, launch.err
    assert len(list(directory.glob("died-*"))) == len(deaths), launch.err
    assert launch.left_files() == []
    texts = [path.read_text() for path in directory.glob("*.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def by_step(told: list[dict[str, Any]], name: str, steps: int = STEPS) -> list[Any]:
    """A value that all ranks agree on, for each step."""
    values: dict[int, Any] = {}
    for each in told:
        assert values.setdefault(each["step"], each[name]) == each[name], each
    assert sorted(values) == list(range(1, steps + 1))
    return [values[step] for step in sorted(values)]


@pytest.mark.exact
def test_the_bits_are_those_of_a_run_without_kills(launch: Launch, seed: int) -> None:
    """Spares take the numbers of the dead. Sums of two are the same in any order."""
    deaths = plan(random.Random(seed), [2, 2])
    told = train(launch, "options", deaths, "--nproc-per-node", "2", "--spares", "1")
    assert by_step(told, "bits") == two_alone(), deaths
    assert {each["size"] for each in told} == {2}
    assert len({each["pid"] for each in told}) == 2 + 2  # who lived kept its process


def two_alone() -> list[str]:
    """The bits after each step of two ranks, one after the other in this process."""
    torch.manual_seed(0)
    network = Network("options").double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    parameters, buffers = list(network.parameters()), list(network.buffers())
    told = []
    for step in range(STEPS):
        before = [each.clone() for each in buffers]
        sums = [torch.zeros_like(each) for each in parameters]
        for rank in (1, 0):  # rank 0's buffers stay
            for buffer, copy in zip(buffers, before, strict=True):
                buffer.copy_(copy)
            optimizer.zero_grad()
            for part in batches("options", step, rank):
                loss_of(network, "options", step, rank, part).backward()
            for each, total in zip(parameters, sums, strict=True):
                if each.grad is not None:
                    total.add_(each.grad)
        for each, total in zip(parameters, sums, strict=True):
            each.grad = total / 2
        optimizer.step()
        schedule.step()
        told.append(bits(network))
    return told


@pytest.mark.exact
@pytest.mark.timeout(600 + 60 * KILLS)
def test_each_option_has_the_bits_of_a_run_without_kills(launch: Launch, seed: int) -> None:
    """A rank dies while a model's bucket in the middle is reduced, of each model in turn."""
    chance = random.Random(seed)
    victims = list(MODELS)
    chance.shuffle(victims)
    deaths, step = list[str](), 0
    for name in itertools.islice(itertools.cycle(victims), KILLS):
        step, rank = step + chance.randrange(3, 8), chance.randrange(2)
        while name == "unused" and not uses_middle(step, rank):
            step += 1
        deaths.append(f"{step}:{rank}:{name}")
    print(deaths)
    directory, steps = launch.directory, step + 10
    words = ["--nproc-per-node", "2", "--spares", "2"]
    words += ["--max-restarts", str(max(0, KILLS - 2))]
    process = launch.start(*words, str(OPTIONS), str(directory), str(steps), *deaths)
    assert process.wait(500 + 60 * KILLS) == 0, launch.err
    assert len(list(directory.glob("died-*"))) == len(deaths), launch.err
    texts = [path.read_text() for path in directory.glob("*.jsonl")]
    told = [json.loads(line) for text in texts for line in text.splitlines()]
    assert by_step(told, "bits", steps) == options_alone(steps)
    assert {each["size"] for each in told} == {2}
    assert len({each["pid"] for each in told}) == 2 + KILLS


def options_alone(steps: int) -> list[str]:
    """The bits after each step of two ranks, one after the other in this process."""
    training, told = Training(), []
    parameters = [each for n in training.networks.values() for each in n.parameters()]
    for step in range(steps):
        sums = [torch.zeros_like(each) for each in parameters]
        for rank in (0, 1):
            training.zero_grad()
            for loss in training.losses(training.networks, step, rank):
                loss.backward()
            for each, total in zip(parameters, sums, strict=True):
                if each.grad is not None:
                    total.add_(each.grad)
        for each, total in zip(parameters, sums, strict=True):
            each.grad = total / 2
        training.update()
        told.append(training.bits())
    return told


@pytest.mark.exact
def test_fewer_ranks_train_with_the_same_batches(launch: Launch, seed: int) -> None:
    deaths = plan(random.Random(seed), [3, 2])
    told = train(launch, "shares", deaths, "--nproc-per-node", "3", "--max-restarts", "0")
    by_step(told, "bits")
    assert {each["size"] for each in told} == {1, 2, 3}
    assert len({each["pid"] for each in told}) == 3
    assert by_step(told, "loss") == pytest.approx(one_alone(), rel=1e-9)


def test_replicas_in_shards(launch: Launch, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare takes the shard of the first rank to die; the second one's replica is left idle."""
    deaths = plan(random.Random(seed), [4, 4])
    monkeypatch.setenv("TEST_PROCESSES", "5")
    flags = ("--nproc-per-node", "4", "--spares", "1", "--max-restarts", "0")
    told = train(launch, "sharded", deaths, *flags)
    for shard in (0, 1):
        by_step([each for each in told if each["shard"] == shard], "bits")
    assert by_step(told, "loss") == pytest.approx(one_alone(), rel=1e-9)
    assert {each["size"] for each in told} == {3, 4}
    assert len({each["pid"] for each in told}) == 4 + 1


def test_a_spare_whose_script_uses_pytorchs_groups(launch: Launch) -> None:
    script = launch.script(
        "import time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "time.sleep(5)\n"
    )
    assert launch.run("--nproc-per-node", "1", "--spares", "1", script) == 0, launch.err
    assert "the script uses PyTorch's process groups, but workers on standby" in launch.err
    assert "Traceback" not in launch.err


@pytest.mark.seldom
@pytest.mark.exact
def test_shards_of_spares_have_the_same_bits(launch: Launch, seed: int) -> None:
    """A rank is lost, and then both ranks of a replica at one place in one step."""
    chance = random.Random(seed)
    one, both = chance.randrange(3, 12), chance.randrange(15, 25)
    place, replica = chance.choice(PLACES), chance.randrange(2)
    deaths = [f"{one}:{chance.randrange(4)}:{chance.choice(PLACES)}"]
    deaths += [f"{both}:{2 * replica + shard}:{place}" for shard in (0, 1)]
    print(deaths)
    flags = ("--nproc-per-node", "4", "--spares", "2")
    told = train(launch, "replaced", deaths, *flags)
    alone = four_alone()
    for shard in (0, 1):
        assert by_step([each for each in told if each["shard"] == shard], "bits") == alone[shard]
    assert {each["size"] for each in told} == {4}
    assert len({each["pid"] for each in told}) == 4 + 3
    # A spare has got the bytes of one shard, and hardly more.
    own = [max(each["own"] for each in told if each["shard"] == shard) for shard in (0, 1)]
    first = {each["pid"] for each in told if each["step"] == 1}
    spares = {each["pid"]: each for each in told if each["pid"] not in first}.values()
    received = [(each["shard"], size) for each in spares for size in each["received"]]
    assert len(received) >= 3, received
    for shard, size in received:
        assert own[shard] <= size <= sum(own) / 2 * 1.01, (own, received)


def four_alone() -> list[list[str]]:
    """For both shards, the bits after each step of two replicas of two ranks, here, one by one."""
    torch.manual_seed(0)
    network = Network("replaced").double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    parameters, sampler = list(network.parameters()), Sampler(SAMPLES, BATCH)
    inputs, labels = samples()
    told: list[list[str]] = [[], []]
    for step in range(STEPS):
        gradients = []
        for rank in range(4):
            mine = sampler.indices(step, rank, 4)
            optimizer.zero_grad()
            loss_of(network, "replaced", step, rank, (inputs[mine], labels[mine])).backward()
            gradients.append([each.grad for each in parameters])
        for each, *parts in zip(parameters, *gradients, strict=True):
            first, second = parts[0] + parts[1], parts[2] + parts[3]  # in replicas, then over them
            each.grad = first + second
        optimizer.step()
        schedule.step()
        for shard in (0, 1):
            tensors = network.state_dict().values()
            told[shard].append(bits_of(each.chunk(2)[shard] for each in tensors))
    return told


def one_alone() -> list[float]:
    """The losses of one process that takes each batch whole."""
    inputs, labels = samples()
    torch.manual_seed(0)
    network = Network("shares").double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    epochs = range(STEPS * BATCH // SAMPLES + 1)
    order = numpy.concatenate(
        [numpy.random.default_rng((0, each)).permutation(SAMPLES) for each in epochs]
    )
    losses = []
    for step in range(STEPS):
        batch = order[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
