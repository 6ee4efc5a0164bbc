"""A text passed on by PMIx, with a library that keeps notes in a file (pmix_server.cc)."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from rallypoint.base.errors import HostError, StoreTimeoutError
from rallypoint.cluster.pmi import Waiting, pmix

TEXT = "40001,6162,10.0.0.1,fd77::1"
KEY = "rallypoint.meeting.job@1"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where PMIx is installed."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    folder = tmp_path_factory.mktemp("pmix")
    (folder / "lib").mkdir()
    source = Path(__file__).with_name("pmix_server.cc")
    library = folder / "lib/libpmix.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "note"


@pytest.fixture
def environ(prefix: Path, note: Path) -> dict[str, str]:
    return {"PMIX_PREFIX": str(prefix), "PMIX_NOTE": str(note)}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does not get its turn is not killed."""
    monkeypatch.setattr(pmix, "_FAREWELL_S", 60.0)


@pytest.fixture(autouse=True)
def leave() -> Iterator[list[Callable[[], None]]]:
    """What each process does at its end, which here is the test's."""
    ends: list[Callable[[], None]] = []

    def register(end: Callable[..., None], *arguments: object) -> None:
        ends.append(lambda: end(*arguments))

    with patch("atexit.register", register):
        yield ends
    while ends:
        ends.pop()()


def waiting(timeout_s: float = 60.0) -> Waiting:
    return Waiting(timedelta(seconds=timeout_s), "the others", speaks=False)


def test_all_get_what_rank_0_says(
    environ: dict[str, str], note: Path, leave: list[Callable[[], None]]
) -> None:
    """In any order; each then stays in PMIx until its process ends."""
    texts = ["", "", TEXT]
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda text: pmix.pass_on(text, waiting(), environ), texts)] == [TEXT] * 3
    assert note.read_text() == f"{KEY}\n{TEXT}\n"
    assert len(leave) == 3
    assert not [*note.parent.glob("note.left.*")]
    while leave:
        leave.pop()()
    assert len([*note.parent.glob("note.left.*")]) == 3


def test_a_forked_child_does_not_end_it(
    environ: dict[str, str], note: Path, leave: list[Callable[[], None]]
) -> None:
    pmix.pass_on(TEXT, waiting(), environ)
    with patch("os.getpid", return_value=os.getpid() + 1):
        leave[0]()
    assert not [*note.parent.glob("note.left.*")]


def test_rank_0_does_not_come(environ: dict[str, str], leave: list[Callable[[], None]]) -> None:
    with pytest.raises(StoreTimeoutError, match="for the others; look for their first error"):
        pmix.pass_on("", waiting(0.1), environ)
    assert not leave  # its child was ended at once


def test_why_it_failed_is_told(environ: dict[str, str]) -> None:
    with pytest.raises(HostError) as raised:
        pmix.pass_on(TEXT, waiting(), {**environ, "PMIX_FAILS": "PMIx_Init"})
    told = str(raised.value)
    assert "(PMIx): PMIx_Init failed: OUT-OF-ORDER (-25); import mpi4py.MPI before" in told


# The child itself, as a function of this process.


def child(monkeypatch: pytest.MonkeyPatch, given: str, *libraries: str, **environ: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return pmix.main(libraries)


def test_what_is_published_is_found(
    environ: dict[str, str],
    note: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the first library that can be loaded; later than it is asked for."""
    libraries = ("/no/libpmix.so.2", *pmix.libraries(environ))
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(child, monkeypatch, "\n", *libraries, **environ)
        pmix.pass_on(TEXT, waiting(), environ)
        assert looking.result() == 0
    assert capsys.readouterr().out == f"{TEXT}\n"
    assert child(monkeypatch, f"{TEXT}1\n", *libraries, **environ) == 0
    assert capsys.readouterr().out == f"{TEXT}1\n"
    assert note.read_text() == f"{KEY}\n{TEXT}1\n"


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("PMIx_Init", "PMIx_Init failed: OUT-OF-ORDER (-25)"),
        ("PMIx_Lookup", "PMIx_Lookup failed: OUT-OF-ORDER (-25)"),
        ("type", "rank 0's value has type 4"),
    ],
)
def test_what_fails_is_named(
    environ: dict[str, str],
    note: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: str,
    told: str,
) -> None:
    note.write_text(f"{KEY}\n{TEXT}\n")
    given = {**environ, "PMIX_FAILS": fails}
    assert child(monkeypatch, "\n", *pmix.libraries(environ), **given) == 1
    assert capsys.readouterr().err == f"{told}\n"


def test_a_library_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert child(monkeypatch, "\n", "libc.so.6") == 1
    assert "undefined symbol: PMIx_Init" in capsys.readouterr().err
    assert child(monkeypatch, "\n", "/no/libpmix.so.2") == 1
    assert "no PMIx library can be loaded (/no/libpmix.so.2" in capsys.readouterr().err
