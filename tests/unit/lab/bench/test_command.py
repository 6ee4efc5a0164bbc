"""`rallypoint bench`: command lines that are refused before anything is measured."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.lab.bench import bench


@pytest.fixture(autouse=True)
def _nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RALLYPOINT_MPI_ENV", raising=False)
    before = signal.getsignal(signal.SIGTERM)  # it has its own while it measures
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all_reduc", "unknown operation 'all_reduc'; choose one of all_reduce"),
        ("send --nproc-per-node 1", "send takes two ranks"),
        ("reduce --sizes 8:x", "--sizes x is not a size; write it like 4096, 64K"),
        ("reduce --dtype float31", "--dtype float31 is unknown; it takes float32"),
        ("reduce --vs lam", "--vs lam is unknown; it takes gloo, mpich"),
        ("reduce --rounds 0", "--rounds needs an integer of at least 1, not '0'"),
        ("reduce --json no/such", "--json no/such: that directory does not exist"),
        ("reduce --mpi-env lam=x", "--mpi-env lam=x is not NAME=DIR"),
        ("reduce --hosts host1,host1", "--hosts names host1 twice"),
        (
            "reduce --hosts host1:2",
            "--nproc-per-node gives the number of ranks on each host",
        ),
        (
            "reduce --hosts host1,localhost",
            "--hosts localhost is a name that other hosts cannot resolve",
        ),
        ("reduce --hosts ,", "--hosts names no host"),
        ("reduce --hosts=-oProxyCommand=x", "--hosts -oProxyCommand=x is not a host name"),
        ("reduce --hosts a,me@-oX", "--hosts me@-oX is not a host name"),
        ("reduce --rsh ssh", "--rsh needs --hosts"),
        ("--ranks 2", "say what to measure: --calibrate, or an operation"),
        ("--calibrate --ranks 2,x", "--ranks needs integers of at least 2, not 'x'"),
        ("--calibrate --rounds 1", "--rounds needs integers of at least 2, not '1'"),
        ("--calibrate --out mine", "--out mine must end in .toml"),
        ("--calibrate more", "unexpected argument 'more'"),
    ],
)
def test_wrong_use(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plot a.pdf", "--plot a.pdf: name a file that ends in .png"),
        ("--vs mpich", "mpich is not installed; add --get-mpi to put it into"),
        (
            "--vs mpich --mpi-env mpich=.",
            "it has no program bin/python; name a virtual environment with mpi4py and mpich",
        ),
    ],
)
def test_what_is_missing(
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(["reduce", *words.split()]) == 1
    assert message in capsys.readouterr().err
