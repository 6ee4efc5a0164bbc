"""--rdzv-conf is read as torch's names say, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.rendezvous.patience import Patience, read_is_host, read_patience


def test_names_and_defaults() -> None:
    assert read_patience({}) == Patience()
    read = read_patience({"last_call_timeout": "0.5", "keep_alive_max_attempt": "3"})
    assert (read.last_call_s, read.silence_s) == (0.5, 3.0)
    assert read_patience({"is_host": "1", "read_timeout": "x"}) == Patience()


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf"])
def test_no_number_of_seconds(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="join_timeout is"):
        read_patience({"join_timeout": text})


def test_unknown_name() -> None:
    with pytest.raises(InvalidArgumentError, match="c10d does not know 'last_cal'"):
        read_patience({"last_cal": "1"})


def test_is_host() -> None:
    assert read_is_host({}) is None
    assert read_is_host({"is_host": "True"}) is True
    assert read_is_host({"is_host": "0"}) is False
    with pytest.raises(InvalidArgumentError, match="is_host is 'maybe'"):
        read_is_host({"is_host": "maybe"})
