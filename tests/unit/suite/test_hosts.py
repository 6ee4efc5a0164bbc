"""Test hosts where they are impossible; the hosts themselves: tests/system/test_hosts.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.hosts import Hosts, why_not


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with programs: an `unshare` that may not, and no others but the shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = "#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n"
    (folder / "unshare").write_text(script)
    (folder / "unshare").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_what_is_missing_is_said(programs: Path) -> None:
    assert why_not() == (
        "nsenter, ip, nft is not installed (packages util-linux, iproute2, nftables)"
    )
    for name in ("nsenter", "ip", "nft"):
        (programs / name).touch(0o700)
    assert why_not() == "no network namespaces here: unshare failed: Operation not permitted"


def test_hosts_that_cannot_be_made_leave_nothing(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"could not be made: .* Operation not permitted"):
        Hosts(2)
    assert list(tmp_path.iterdir()) == [programs]
