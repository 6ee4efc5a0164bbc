"""Workers get the variables and the command that --dry-run prints."""

from __future__ import annotations

import json
import re

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

DUMP = """
import json, os, sys
with open(f"seen.{os.environ['RANK']}", "w") as file:
    json.dump({"environ": dict(os.environ), "arguments": sys.argv[1:]}, file)
"""


@pytest.mark.everyday
@pytest.mark.parametrize(
    "flags",
    [
        ("--nproc-per-node=2",),
        ("--nproc-per-node=2", "--virtual-local-rank", "--shutdown-timeout=3", "--on-hang=off"),
    ],
)
def test_workers_get_what_a_dry_run_prints(flags: tuple[str, ...], launch: Launch) -> None:
    words = (*flags, "--rdzv-id=try", launch.script(DUMP), "${local_rank}")
    assert launch.run("--dry-run", *words) == 0, launch.err
    shared, *workers = launch.out.split("\nrank ")
    assert list(launch.directory.glob("seen.*")) == []
    assert launch.run(*words) == 0, launch.err
    for rank, text in enumerate(workers):
        seen = json.loads((launch.directory / f"seen.{rank}").read_text())
        assert text.startswith(f"{rank}, ")
        assert text.endswith(f" {rank}\n")
        assert seen["arguments"] == [str(rank)]
        told = dict(re.findall(r"^  ([A-Z_]+)=(.*)$", shared + text, re.MULTILINE))
        assert len(told) > 15
        unknown = {name for name, value in told.items() if value == "?"}
        assert unknown == {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
        assert {name: seen["environ"][name] for name in told} == {
            name: seen["environ"][name] if name in unknown else value
            for name, value in told.items()
        }
