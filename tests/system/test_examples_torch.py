"""The examples that need PyTorch, each run as its first lines say.

What they print is compared with gloo's, with one process that computes the same without Rallypoint,
or with what the data say.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections import Counter
from typing import Any

import pytest
from tests.system.conftest import Launch
from tests.system.test_examples import EXAMPLES, accuracies, words_of
from tests.system.test_torch_libraries import installed

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(300)]

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\bloss'?:? +'?([0-9.]+)", text)]


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    """Images and labels as tensors."""
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


def test_gpt_by_name_by_the_switch_and_sharded(launch: Launch) -> None:
    """The losses are gloo's; sharded, but for rounding."""
    path = EXAMPLES / "train_gpt.py"
    told = []
    for number in range(4):
        words = [*words_of(path, number), "--steps", "40"]
        assert launch.run(*words) == 0, launch.err
        told.append(launch.out.splitlines())
    by_name, sharded, with_gloo, switched = told
    assert with_gloo[-1].endswith("the process group is gloo's")
    for each in (by_name, sharded, switched):
        assert each[-1].endswith("the process group is rallypoint's")
    assert len(with_gloo) == 3
    assert by_name[:-1] == switched[:-1] == with_gloo[:-1]
    expected = losses_of("\n".join(with_gloo))
    assert losses_of("\n".join(sharded)) == pytest.approx(expected, abs=2e-3)
    assert expected[-1] < expected[0]


def test_gpt_goes_on_in_the_same_processes(launch: Launch) -> None:
    words = words_of(EXAMPLES / "train_gpt_elastic.py")
    assert words[-1] == "30"
    assert launch.run(*words, "--steps", "60") == 0, launch.err
    assert "was killed by SIGKILL; 2 of 3 ranks are left; ranks 0-1 of 2 continue" in launch.err
    told = re.findall(r"rank \d of (\d), process (\d+): (\d+) steps done", launch.out)
    at_first = {process for size, process, step in told if (size, step) == ("3", "0")}
    later = {process for size, process, step in told if (size, step) == ("2", "29")}
    assert len(at_first) == 3
    assert len(later) == 2
    assert later < at_first
    first, _, last = losses_of(launch.out)
    assert last < first


def test_gpt_in_shards_goes_on_with_a_spare(launch: Launch) -> None:
    words = words_of(EXAMPLES / "train_gpt_elastic.py", 2)
    assert words[-2:] == ["--shards", "2"]
    assert launch.run(*words, "--steps", "40") == 0, launch.err
    assert "was killed by SIGKILL; a spare took over; ranks 0-3 of 4 continue" in launch.err
    assert launch.out.count("of 4, process ") == 4 + 4
    first, last = losses_of(launch.out)
    assert last < first


def test_training_goes_on_from_its_snapshot(launch: Launch, digits: tuple[Any, Any]) -> None:
    path = EXAMPLES / "train_digits_snapshot.py"
    words = words_of(path, 1)
    assert words[-2:] == ["--kill-in-epoch", "4"]
    assert launch.run(*words, "--epochs", "6") == 0, launch.err
    assert "failed: rank 1 was killed by SIGKILL" in launch.err
    assert re.findall(r"begin after (\d)", launch.out) == ["0", "3"]
    assert re.findall(r"epoch (\d)/6", launch.out) == ["1", "2", "3", "4", "5", "6"]
    expected = losses_without_a_failure(*digits, epochs=6)
    assert losses_of(launch.out) == pytest.approx(expected, rel=1e-3)
    assert accuracies(launch.out)[-1] > 0.9


def losses_without_a_failure(images: Any, labels: Any, *, epochs: int) -> list[float]:
    """Two workers' training in one process: both batches at each step."""
    import numpy
    import torch
    from torch import nn
    from torch.utils.data import DistributedSampler

    order = numpy.random.default_rng(0).permutation(len(labels))[:1437]
    images, labels = images[order], labels[order]
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    samplers = [
        DistributedSampler(range(len(labels)), 2, rank, seed=1, drop_last=True) for rank in (0, 1)
    ]
    means = []
    for epoch in range(epochs):
        losses = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ours, theirs = (list(sampler) for sampler in samplers)
        for at in range(0, len(ours) - 31, 32):
            chosen = ours[at : at + 32] + theirs[at : at + 32]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


def test_pipeline(launch: Launch, digits: tuple[Any, Any]) -> None:
    """The losses are those of all layers in one process, without microbatches."""
    import torch
    from torch import nn

    assert launch.run(*words_of(EXAMPLES / "train_pipeline.py"), "--epochs", "3") == 0, launch.err
    images, labels = digits
    torch.manual_seed(1)
    hidden = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    network = nn.Sequential(*hidden, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(2)
    expected = []
    for _ in range(3):
        losses = []
        for chosen in torch.randperm(1437, generator=order).split(64)[:-1]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        expected.append(sum(losses) / len(losses))
    assert losses_of(launch.out) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0] / 2


@pytest.mark.parametrize(
    ("library", "example"),
    [
        pytest.param("accelerate", "accelerate_digits.py", marks=pytest.mark.seldom),
        ("lightning", "lightning_digits.py"),
    ],
)
def test_library_learns_the_digits(launch: Launch, library: str, example: str) -> None:
    installed(library)
    pytest.importorskip("sklearn")
    words = words_of(EXAMPLES / "libraries" / example)
    assert launch.run(*words, "--epochs", "3", environ=OFFLINE) == 0, launch.err
    assert "2 workers, backend rallypoint" in launch.out
    assert len(accuracies(launch.out)) == 3
    assert accuracies(launch.out)[-1] > 0.9
    # No image counts twice, though 360 of them do not make whole batches for two workers.
    assert library != "accelerate" or launch.out.count("on 360 images") == 3


@pytest.mark.seldom
def test_transformers_learns_more_than_how_often_characters_occur(launch: Launch) -> None:
    installed("transformers")
    words = words_of(EXAMPLES / "libraries" / "transformers_gpt2.py")
    assert launch.run(*words, environ=OFFLINE) == 0, launch.err
    assert "2 workers, backend rallypoint" in launch.out
    counts = Counter(inspect.getsource(argparse))
    shares = [count / counts.total() for count in counts.values()]
    entropy = -sum(share * math.log(share) for share in shares)
    losses = losses_of(launch.out)
    assert losses[-1] < entropy - 0.3
