"""RALLYPOINT_DEBUG=1: what each rank was given."""

from __future__ import annotations

import os
import re

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

NUMPY = "import rallypoint as dist; dist.init_process_group(); dist.barrier()"
TORCH = (
    "import torch.distributed as dist; dist.init_process_group('rallypoint'); dist.barrier();"
    " dist.new_group([0, 1]); dist.destroy_process_group()"
)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(NUMPY, id="numpy"),
        pytest.param(TORCH, id="torch", marks=pytest.mark.needs_torch),
    ],
)
def test_one_table_of_all_ranks(launch: Launch, script: str) -> None:
    environ = {"RALLYPOINT_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert launch.run("--nproc-per-node", "2", launch.script(script), environ=environ) == 0
    head, *rows = [line for line in launch.err.splitlines() if line.startswith("rallypoint: ")]
    assert head.split("  ")[0] == "rallypoint: rank"
    assert len(rows) == 2  # and none for other groups
    where = head.index("devices")
    for rank, row in enumerate(rows):
        assert re.match(rf"rallypoint: {rank} +{rank} +{os.uname().nodename} \(pid \d+\)", row)
        assert row[where:].startswith("0,1  ")  # aligned
        assert row.endswith("rallypoint")


def test_who_does_not_have_the_variable_holds_up_nobody(launch: Launch) -> None:
    script = launch.script(
        "import os\nif os.environ['RANK'] == '1': del os.environ['RALLYPOINT_DEBUG']\n" + NUMPY
    )
    environ = {"RALLYPOINT_DEBUG": "1"}
    assert launch.run("--nproc-per-node", "2", script, environ=environ) == 0
    assert re.search(r"^rallypoint: 1 +-( +-){5}$", launch.err, re.MULTILINE), launch.err
