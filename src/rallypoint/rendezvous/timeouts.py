"""--rdzv-conf, by torch's names: how long a dynamic rendezvous waits, and which nodes decide.

The defaults, and why they are not torch's:
    join_timeout            600 s   as torch's
    last_call_timeout       3 s     (30) a late node costs the others a restart, not a place
    keep_alive_interval     1 s     (5)  a heartbeat is a few bytes on an open connection; small
                                         jobs send more of them: `Timeouts.heartbeat_of`
    keep_alive_max_attempt  5       (3)  so that silence is noticed after 5 s, not after 15

With etcd only:
    close_timeout           30 s    as torch's; how long late joiners get the job's outcome
    outage_timeout          30 s    how long a job continues while etcd is unavailable
    read_timeout            2 s     (60) for one request; failed ones are repeated anyway

With c10d, torch's close_timeout and read_timeout have no effect: an agent that ends notifies the
others.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record

NO_SILENCE = float("inf")  # heartbeats that may be missed, where only a lost connection counts
_NAMES = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "keep_alive_interval": "heartbeat_s",
    "keep_alive_max_attempt": "missed_heartbeats",
    "close_timeout": "close_s",
    "outage_timeout": "outage_s",
    "read_timeout": "read_s",
}
# Only torch's handlers use these.
_IGNORED = ("store_type", "use_libuv", "cas_backoff_max_seconds", "heartbeat_timeout")
_ETCD_ONLY = ("close_timeout", "outage_timeout", "read_timeout")
# How to reach etcd; keyvalue/etcd_client.py reads them.
_ETCD_NAMES = ("protocol", "cacert", "cert", "key", "ca_cert", "ssl_cert", "ssl_cert_key")
_MUST_BE_POSITIVE = ("keep_alive_interval", "keep_alive_max_attempt", "read_timeout")
_IS_HOST, _QUORUM = "is_host", "quorum"
_QUORUMS = ("members", "host")
_MOST_BEATS_PER_S = 1000  # for all members of a round together
_KILL_SHARE, _KILL_LEAST_S, _KILL_MOST_S = 0.2, 0.2, 1.0  # of the silence; see `kill_s`


class Timeouts(Record, kw_only=True):
    """All timeouts, in seconds.

    Attributes:
        most_beats: the number of heartbeats within `silence_s` in small jobs.
    """

    join_timeout_s: float = 600.0
    last_call_s: float = 3.0
    heartbeat_s: float = 1.0
    missed_heartbeats: float = 5.0
    most_beats: float = 20.0
    close_s: float = 30.0
    outage_s: float = 30.0
    read_s: float = 2.0

    @property
    def silence_s(self) -> float:
        """A peer without any message for this long counts as lost."""
        return self.heartbeat_s * self.missed_heartbeats

    @property
    def kill_s(self) -> float:
        """The time within which an agent has stopped its workers once no other hears it any more.

        Others wait for it after the silence, before they continue without that agent. It is short
        where the silence is, for users who prefer a quick recovery.
        """
        return min(_KILL_MOST_S, max(_KILL_LEAST_S, _KILL_SHARE * self.silence_s))

    def heartbeat_of(self, nodes: int) -> float:
        """The interval of heartbeats of each of that many members.

        What a coordinator knows of a member, or of a quorum, is up to two heartbeats old, and the
        next one may be one more away: a pause of `silence_s` less three heartbeats does no harm. So
        they are as frequent as the coordinator can handle.
        """
        often = max(self.silence_s / self.most_beats, nodes / _MOST_BEATS_PER_S)
        return min(self.heartbeat_s, often)


def read_timeouts(configuration: Mapping[str, str], backend: str = "c10d") -> Timeouts:
    """The timeouts in --rdzv-conf."""
    is_etcd = backend == "etcd"
    names = {n: to for n, to in _NAMES.items() if is_etcd or n not in _ETCD_ONLY}
    others = _ETCD_NAMES if is_etcd else (_IS_HOST, _QUORUM)
    found = {}
    for name, text in configuration.items():
        if name in (*_IGNORED, *others) or (name in _ETCD_ONLY and not is_etcd):
            continue
        if name not in names:
            known = (*names, *others)
            raise InvalidArgumentError(
                f"--rdzv-conf: {backend} has no option {name!r}; it has {', '.join(known)}."
            )
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9 or (value == 0 and name in _MUST_BE_POSITIVE):
            raise InvalidArgumentError(
                f"--rdzv-conf: {name} is {text!r}; it must be a number of seconds."
            )
        found[_NAMES[name]] = value
    return Timeouts(**found)


def read_is_host(configuration: Mapping[str, str]) -> bool | None:
    """Whether this agent should be at the endpoint, as in is_host=1; None: it finds out itself."""
    text = configuration.get(_IS_HOST)
    if text is None:
        return None
    is_host = read_bool(text)
    if is_host is None:
        raise InvalidArgumentError(f"--rdzv-conf: is_host is {text!r}; it must be true or false.")
    return is_host


def read_bool(text: str) -> bool | None:
    """What the text says, as torch reads it; None: neither true nor false."""
    is_true = text.lower() in ("1", "true", "t", "yes", "y")
    return is_true if is_true or text.lower() in ("0", "false", "f", "no", "n") else None


def read_quorum(configuration: Mapping[str, str]) -> str:
    """Which agents can continue without others, as in quorum=members: any quorum of them; host:
    only with the agent that began the job, as in torchrun.
    """
    text = configuration.get(_QUORUM, _QUORUMS[0])
    if text not in _QUORUMS:
        raise InvalidArgumentError(
            f"--rdzv-conf: quorum is {text!r}; it must be {' or '.join(_QUORUMS)}."
        )
    return text


def read_attempt(environ: Mapping[str, str]) -> int:
    """Which start of this job by a scheduler this is: agents of different starts are not peers."""
    text = environ.get("SLURM_RESTART_COUNT", "0")
    if not text.isdecimal():
        raise InvalidArgumentError(f"SLURM_RESTART_COUNT is {text!r}; it must be a number.")
    return int(text)
