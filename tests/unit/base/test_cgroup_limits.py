"""What control groups limit is found in both of their versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.base.cgroup_limits import count_oom_kills, full_of_processes


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


@pytest.mark.parametrize(
    ("cgroup", "group", "most", "current", "is_full"),
    [
        ("0::/job", "sys/fs/cgroup/job", "40", "40", True),
        ("0::/job/step", "sys/fs/cgroup/job", "40", "39", True),
        ("0::/job", "sys/fs/cgroup", "40", "40", True),
        ("8:pids:/job", "sys/fs/cgroup/pids/job", "40", "40", True),
        ("8:pids:/host/path", "sys/fs/cgroup/pids", "40", "40", True),
        ("0::/job", "sys/fs/cgroup/job", "40", "20", False),
        ("0::/job", "sys/fs/cgroup/job", "max", "20", False),
        ("0::/job", "sys/fs/cgroup/other", "40", "40", False),
        ("4:memory:/job", "sys/fs/cgroup/job", "40", "40", False),
    ],
)
def test_a_group_that_is_full_of_processes(
    tmp_path: Path, cgroup: str, group: str, most: str, current: str, is_full: bool
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    (tmp_path / group).mkdir(parents=True)
    (tmp_path / group / "pids.max").write_text(most + "\n")
    (tmp_path / group / "pids.current").write_text(current + "\n")
    found = full_of_processes(str(tmp_path))
    assert found == ((f"/{group}", int(most)) if is_full else None)
