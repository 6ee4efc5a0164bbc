"""Counts the kills by the kernel's out-of-memory killer in the control group of this process.

If the count has risen and a worker ended by SIGKILL, it ran out of memory. Both versions of control
groups are supported.
"""

from __future__ import annotations


def count_oom_kills(root: str = "") -> int | None:
    """The number of kills so far; None if the kernel does not say. `root` is for tests."""
    for line in _read(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            places = [f"/sys/fs/cgroup{path}", "/sys/fs/cgroup", f"/sys/fs/cgroup/unified{path}"]
            name = "memory.events"
        elif "memory" in controllers.split(","):
            places = [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
            name = "memory.oom_control"
        else:
            continue
        # Inside a container the path may be the host's: then the group is at the top.
        for place in places:
            count = _oom_kill(_read(f"{root}{place}/{name}"))
            if count is not None:
                return count
    return None


def _oom_kill(text: str) -> int | None:
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.isdigit():
            return int(number)
    return None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
