"""What this process's control groups limit: memory, and the number of processes.

Both versions of control groups are supported. A limit may be set at any group above this process's
own, too. `root` is for tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.base.files import read_text

_ROOT = "/sys/fs/cgroup"


def count_oom_kills(root: str = "") -> int | None:
    """The number of kills by the out-of-memory killer so far; None if the kernel does not say.

    If the count has risen and a worker ended by SIGKILL, it ran out of memory.
    """
    for directory in _directories("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            for line in read_text(f"{directory}/{name}").splitlines():
                what, _, number = line.partition(" ")
                if what == "oom_kill" and number.isdigit():
                    return int(number)
    return None


def full_of_processes(root: str = "") -> tuple[str, int] | None:
    """The nearest group that is full of processes and threads, and its limit; None: none is."""
    for directory in _directories("pids", root):
        most = read_text(f"{directory}/pids.max").strip()
        current = read_text(f"{directory}/pids.current").strip()
        # One that was refused is not counted, and others may have ended since.
        if most.isdigit() and current.isdigit() and int(current) >= int(most) * 0.9 - 1:
            return directory.removeprefix(root), int(most)
    return None


def _directories(controller: str, root: str) -> Iterator[str]:
    """This process's own first, then those above it; inside a container, some may not exist."""
    for line in read_text(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = [_ROOT, f"{_ROOT}/unified"]
        elif controller in controllers.split(","):
            mounts = [f"{_ROOT}/{controller}"]
        else:
            continue
        for mount in mounts:
            group = path.rstrip("/")
            while group:
                yield f"{root}{mount}{group}"
                group = group.rpartition("/")[0]
            yield f"{root}{mount}"
