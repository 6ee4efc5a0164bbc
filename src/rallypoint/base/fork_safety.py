"""Whether a process that has imported modules can fork workers: what it finds out about itself.

A forked child has only the thread that forked, and the driver of an accelerator does not work in
it. A module that reads its rank while it is imported would have the same rank in all children. What
is not known to be safe counts as unsafe. docs/decisions/120-template-process.md
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal would import more
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

# jemalloc, which pyarrow has, prepares its own thread for forks.
_SAFE_THREADS = ("jemalloc_bg_thd",)
_SAFE_FILES = ("/dev/null", "/dev/urandom", "/dev/random")
# Drivers, by the library that talks to them: NVIDIA, AMD, Ascend.
_DRIVERS = ("libcuda.so", "libamdhip64", "libascendcl")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci", "/dev/accel", "/dev/neuron")
_BACKENDS = ("torch.cuda", "torch.xpu", "torch.mtia", "torch.npu", "torch.hpu")
_PROBE_S = 5
_HAS_BAD_FORK = 3  # the probe's exit status
_OF_LIBRARY = ("os", "_collections_abc", "collections.abc")


class WatchedEnviron(os._Environ[str]):
    """`os.environ` while modules are imported: it remembers who touches a variable of a rank.

    Attributes:
        watched: the names of these variables.
        touched: where one was first touched: "reads RANK when it is imported (file.py:3)".
    """

    watched: Collection[str] = ()
    touched = ""

    @classmethod
    def begin(cls, watched: Collection[str]) -> None:
        """Watch, from now on."""
        cls.watched, cls.touched = watched, ""
        os.environ.__class__ = cls

    @classmethod
    def end(cls) -> None:
        """Stop watching."""
        os.environ.__class__ = os._Environ

    def __getitem__(self, key: str) -> str:
        self._note("reads", key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: str) -> None:
        self._note("sets", key)
        super().__setitem__(key, value)

    def _note(self, does: str, key: str) -> None:
        if key not in self.watched or WatchedEnviron.touched:
            return
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _OF_LIBRARY:
            frame = frame.f_back
        file = frame.f_code.co_filename.rpartition("/")[2]
        WatchedEnviron.touched = f"{does} {key} when it is imported ({file}:{frame.f_lineno})"


class Examination:
    """Compares this process with what it was at the beginning."""

    def __init__(self) -> None:
        self._descriptors = set(_descriptors())
        self._generators = _generators()

    def finding(self) -> str:
        """What keeps this process from being forked, as the end of a sentence about a module.

        Empty: nothing is known that does.
        """
        if WatchedEnviron.touched:
            return WatchedEnviron.touched
        before, self._generators = self._generators, _generators()
        for name, state in self._generators.items():
            if before.get(name, state) != state:
                return f"uses or seeds {name}'s random generator when it is imported"
        for number, path in _descriptors().items():
            if path.startswith(_DEVICES):
                return f"opens {path} when it is imported"
            if number not in self._descriptors and path not in _SAFE_FILES:
                return f"leaves a file open when it is imported ({path})"
        return _driver() or _child() or _probe() or _thread()


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one of the list itself
            continue
    return found


def _generators() -> dict[str, object]:
    """The states of global random generators, by module."""
    found: dict[str, object] = {}
    modules: dict[str, Any] = {**sys.modules}
    if "random" in modules and hasattr(modules["random"], "getstate"):
        found["random"] = modules["random"].getstate()
    if "numpy.random" in modules:
        found["numpy"] = modules["numpy.random"].get_state()[1].tobytes()
    if hasattr(modules.get("torch"), "default_generator"):
        found["torch"] = modules["torch"].default_generator.initial_seed()
    return found


def _driver() -> str:
    with open("/proc/self/maps", "rb") as file:
        maps = file.read().decode(errors="replace")
    loaded = [name for name in _DRIVERS if name in maps]
    return f"loads {loaded[0]}, the driver of an accelerator, when it is imported" if loaded else ""


def _child() -> str:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return ""
    return "leaves a child process when it is imported"


def _probe() -> str:
    """Fork, before threads are counted: pools that are prepared for it, as OpenBLAS's, end."""
    child = os.fork()
    if child == 0:
        try:
            _signal.alarm(_PROBE_S)
            os._exit(_HAS_BAD_FORK if _has_bad_fork() else 0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == _HAS_BAD_FORK:
        return "initializes an accelerator when it is imported"
    return f"leaves a process whose children end with status {status}" if status else ""


def _has_bad_fork() -> bool:
    """What PyTorch knows in a child of a process that has used an accelerator."""
    modules: dict[str, Any] = {**sys.modules}
    asked = [getattr(modules.get(name), "_is_in_bad_fork", None) for name in _BACKENDS]
    return any(ask() for ask in asked if ask is not None)


def _thread() -> str:
    own = str(os.getpid())
    for number in os.listdir("/proc/self/task"):
        if number == own:
            continue
        try:
            with open(f"/proc/self/task/{number}/comm", encoding="utf-8", errors="replace") as file:
                name = file.read().strip()
        except OSError:  # it has just ended
            continue
        if name not in _SAFE_THREADS:
            return f"leaves a thread running when it is imported{_title(int(number))}"
    return ""


def _title(number: int) -> str:
    """A thread's name, if Python knows it."""
    threading: Any = sys.modules.get("threading")
    known = [] if threading is None else threading.enumerate()
    names = [each.name for each in known if each.native_id == number]
    return f" ({names[0]})" if names else ""
