"""The count of the out-of-memory killer is found in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cluster.memory_limit import count_oom_kills


@pytest.mark.parametrize(
    ("cgroup", "place", "text"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill 3\n"),
        ("0::/host/path", "sys/fs/cgroup/memory.events", "oom_kill 3\noom_group_kill 8\n"),
        ("5:cpu:/\n4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill 3"),
        ("4:hugetlb,memory:/x", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 3"),
    ],
)
def test_where_it_stands(tmp_path: Path, cgroup: str, place: str, text: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)
    assert count_oom_kills(str(tmp_path)) == 3


def test_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert count_oom_kills(str(tmp_path)) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("nonsense\n0::/\n")
    assert count_oom_kills(str(tmp_path)) is None
