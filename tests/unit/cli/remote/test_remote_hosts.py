"""Lists of hosts as Open MPI, MPICH, DeepSpeed and Horovod write them, and those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cli.options import UsageError
from rallypoint.cli.remote.hosts import RemoteHost, read_hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", "", "a")]),
        ("a,b:4", [("a", "", "a"), ("b", "4", "b")]),
        (" a , b ,", [("a", "", "a"), ("b", "", "b")]),
        ("me@a:2,10.0.0.7", [("me@a", "2", "a"), ("10.0.0.7", "", "10.0.0.7")]),
        ("fd77::1,[fd77::2]:4", [("fd77::1", "", "fd77::1"), ("fd77::2", "4", "fd77::2")]),
        ("me@[fd77::2]", [("me@fd77::2", "", "fd77::2")]),
        ("localhost:2", [("localhost", "2", "localhost")]),
        # Several "hosts" that are this machine, to try what several would do.
        (
            "localhost:2,127.0.0.1",
            [("localhost", "2", "localhost"), ("127.0.0.1", "", "127.0.0.1")],
        ),
    ],
)
def test_lists(text: str, expected: list[tuple[str, str, str]]) -> None:
    found = read_hosts({"--hosts": text})
    assert [(host.name, host.workers, host.address) for host in found] == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "--hosts names no host."),
        (",", "--hosts names no host."),
        ("a,b:0", "'b:0' is not a host; write HOST, HOST:N or USER@HOST:N"),
        ("a:four", "'a:four' is not a host"),
        ("a:", "'a:' is not a host"),
        (":4", "':4' is not a host"),
        ("@a", "'@a' is not a host"),
        ("[fd77::1]4", r"'\[fd77::1\]4' is not a host"),
        ("-oProxyCommand=true", "'-oProxyCommand=true' is not a host"),
        ("me@-x", "'me@-x' is not a host"),
        ("-oX@a:2", "'-oX@a:2' is not a host"),
        ("[-oX]:2", r"'\[-oX\]:2' is not a host"),
        ("a b", "'a b' is not a host"),
        ("a\x1b[2J", r"'a\\x1b\[2J' is not a host"),
        ("a,b,me@a:4", "names a twice; name it once with its number of workers, as in a:8"),
        ("a,localhost", "other hosts cannot reach this one as localhost"),
    ],
)
def test_lists_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_hosts({"--hosts": text})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# ours\na slots=4   # Open MPI, DeepSpeed, Horovod\n\nb:2\n  c\nme@d slots=3 max_slots=6\n"
    )
    assert read_hosts({"--hostfile": str(path)}) == (
        RemoteHost("a", "4"),
        RemoteHost("b", "2"),
        RemoteHost("c", ""),
        RemoteHost("me@d", "3"),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a\nb slots=no\n", "line 2: 'slots=no' is not understood; a line is HOST, HOST:N or"),
        ("a:2 slots=2\n", "line 1: 'slots=2' is not understood"),
        ("a cpu=2\n", "line 1: 'cpu=2' is not understood"),
        ("# nobody\n", "names no host"),
        ("a\na\n", "names a twice"),
    ],
)
def test_files_that_cannot_be(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        read_hosts({"--hostfile": str(path)})
    assert f"--hostfile {path}" in str(caught.value)


def test_one_way_of_naming_them() -> None:
    with pytest.raises(UsageError, match="--hosts and --hostfile both name the hosts; give one"):
        read_hosts({"--hosts": "a", "--hostfile": "f"})
    with pytest.raises(UsageError, match=r"--hostfile /none cannot be read \(No such file or dir"):
        read_hosts({"--hostfile": "/none"})
