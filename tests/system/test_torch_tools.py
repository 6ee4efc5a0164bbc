"""PyTorch's profiler, dispatch modes, hooks and flight recorder see the calls of our backend."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from rallypoint.pytorch.versions import HAS_BACKENDS  # noqa: E402

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("torch_tools.py")
has_backends = pytest.mark.skipif(not HAS_BACKENDS, reason="PyTorch before 2.14")


def launch(directory: Path, *words: str, **environ: str) -> list[dict[str, Any]]:
    """What each rank found."""
    launcher = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, SCRIPT, "rallypoint", directory, *words],
        env={**os.environ, "TMPDIR": str(directory), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = sorted(directory.glob("found.*.json"))
    return [json.loads(path.read_text()) for path in found]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("tools"))


def names(events: list[tuple[str, Any]], prefix: str) -> list[str]:
    return [name for name, _ in events if name.startswith(prefix)]


def test_a_trace_of_ddp_shows_each_collective_with_its_size(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert ["rallypoint:all_reduce", 9 * 11 + 11] in of_rank["ddp"]
        if HAS_BACKENDS:
            assert "c10d::allreduce_" in names(of_rank["ddp"], "c10d::")


def test_calls_are_events_of_their_own(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert [event for event in of_rank["calls"] if event[0].startswith("rallypoint:")] == [
            ["rallypoint:all_reduce", 7],
            ["rallypoint:all_gather_into_tensor", 7],
            ["rallypoint:all_reduce", 7],
            ["rallypoint:recv" if rank else "rallypoint:send", 7],
            ["rallypoint:barrier", 0],
        ]
        assert of_rank["sequence"] == 2


def test_the_group_says_what_it_is(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank["backend"] == of_rank["below"] == "rallypoint"
        assert of_rank["devices"] == ["cpu"]
        assert of_rank["config"] == "cpu:rallypoint"
        if HAS_BACKENDS:
            assert of_rank["timeout_s"] == 77
            assert of_rank["split"] == [rank, 2, "undefined"]


@has_backends
def test_operators_hooks_and_messages_of_functional_collectives(
    found: list[dict[str, Any]],
) -> None:
    operators = ["c10d::allreduce_", "c10d::_allgather_base_", "c10d::allreduce_"]
    for rank, of_rank in enumerate(found):
        message = "c10d::recv_" if rank else "c10d::send"
        assert names(of_rank["calls"], "c10d::") == [*operators, message, "c10d::barrier"]
        assert of_rank["counts"] == {"c10d.allreduce_": 1, "c10d.broadcast_": 1}
        assert of_rank["hooks"] == [
            *("before ALLREDUCE", "after ALLREDUCE"),
            *("before BARRIER", "after BARRIER"),
            "after BROADCAST",
        ]
        assert not of_rank["is_watched"]  # fast again
        assert of_rank["p2p"] == [1.0 - rank] * 2


@has_backends
def test_with_debugging_on_all_is_as_before(tmp_path: Path) -> None:
    """torch's wrapper then compares calls by gloo before they come to us."""
    for of_rank in launch(tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        assert of_rank["is_watched"] and of_rank["below"] == "rallypoint"
        assert ["rallypoint:all_reduce", 7] in of_rank["calls"]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"), reason="PyTorch before 2.14"
)
def test_torchs_analyzer_reads_the_flight_recorder_of_a_stuck_job(tmp_path: Path) -> None:
    launch(tmp_path, "stuck", TORCH_FR_BUFFER_SIZE="100")
    dumps = [pickle.loads((tmp_path / f"trace_{rank}").read_bytes()) for rank in (0, 1)]
    assert [len(dump["entries"]) for dump in dumps] == [3, 2]
    if "backend" not in torch._C._distributed_c10d._dump_fr_trace.__doc__:
        return  # 2.14's analyzer does not know its own recorder's names
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    done = subprocess.run(
        [*analyzer, tmp_path, "-p", "trace_"], capture_output=True, text=True, check=False
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "sequence number: 3" in told and "missing ranks: {1}" in told, told
    assert "input sizes: [[7]]" in told and "torch_tools.py" in told, told
