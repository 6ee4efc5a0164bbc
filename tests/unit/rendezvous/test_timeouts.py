"""--rdzv-conf is read as torch's names say, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.rendezvous.timeouts import Timeouts, read_is_host, read_timeouts


def test_names_and_defaults() -> None:
    assert read_timeouts({}) == Timeouts()
    read = read_timeouts({"last_call_timeout": "0.5", "keep_alive_max_attempt": "3"})
    assert (read.last_call_s, read.silence_s) == (0.5, 3.0)
    assert read_timeouts({"is_host": "1", "read_timeout": "x"}) == Timeouts()


def test_small_jobs_beat_more_often() -> None:
    default = Timeouts()
    assert [default.heartbeat_of(nodes) for nodes in (2, 250, 500, 1000, 10_000)] == [
        0.25, 0.25, 0.5, 1.0, 1.0,
    ]  # fmt: skip
    assert read_timeouts({"keep_alive_max_attempt": "30"}).heartbeat_of(2) == 1.0


def test_a_short_silence_leaves_little_time_to_end_workers() -> None:
    limits = [
        Timeouts(heartbeat_s=silence_s, missed_heartbeats=1).kill_s
        for silence_s in (0.5, 1, 3, 5, 30)
    ]
    assert limits == pytest.approx([0.2, 0.2, 0.6, 1.0, 1.0])


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf"])
def test_no_number_of_seconds(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="join_timeout is"):
        read_timeouts({"join_timeout": text})


def test_unknown_name() -> None:
    with pytest.raises(InvalidArgumentError, match="c10d has no option 'last_cal'"):
        read_timeouts({"last_cal": "1"})


def test_is_host() -> None:
    assert read_is_host({}) is None
    assert read_is_host({"is_host": "True"}) is True
    assert read_is_host({"is_host": "0"}) is False
    with pytest.raises(InvalidArgumentError, match="is_host is 'maybe'"):
        read_is_host({"is_host": "maybe"})


def test_torchs_other_names_are_accepted() -> None:
    torchs = {"cas_backoff_max_seconds": "0.5", "heartbeat_timeout": "5", "store_type": "tcp"}
    assert read_timeouts(torchs) == Timeouts()
    read_timeouts({"ssl_cert": "a", "ssl_cert_key": "b", "ca_cert": "c"}, "etcd")
