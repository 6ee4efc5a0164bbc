"""--rdzv-conf, by torch's names: how long a dynamic rendezvous waits, and who is its host.

The defaults, and why they are not torch's:
    join_timeout            600 s   as torch's
    last_call_timeout       3 s     (30) who comes later costs the others a restart, not a place
    keep_alive_interval     1 s     (5)  a beat is a few bytes on an open connection
    keep_alive_max_attempt  5       (3)  so that silence is noticed after 5 s, not after 15
    close_timeout           30 s    as torch's: how long a lost coordinator is looked for again
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record

_NAMES = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "close_timeout": "close_s",
    "keep_alive_interval": "beat_s",
    "keep_alive_max_attempt": "missed_beats",
}
# They mean something to torch's handlers only.
_IGNORED = ("read_timeout", "store_type", "use_libuv")
_IS_HOST = "is_host"
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


class Patience(Record, kw_only=True):
    """All of it, in seconds."""

    join_timeout_s: float = 600.0
    last_call_s: float = 3.0
    close_s: float = 30.0
    beat_s: float = 1.0
    missed_beats: float = 5.0

    @property
    def silence_s(self) -> float:
        """After how long without a word a peer counts as lost."""
        return self.beat_s * self.missed_beats


def read_patience(configuration: Mapping[str, str]) -> Patience:
    """Read it.

    Raises:
        InvalidArgumentError: an unknown name, or no number of seconds.
    """
    found = {}
    for name, text in configuration.items():
        if name in _IGNORED or name == _IS_HOST:
            continue
        if name not in _NAMES:
            raise InvalidArgumentError(
                f"--rdzv-conf: unknown {name!r}; there are {', '.join((*_NAMES, _IS_HOST))}."
            )
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9 or (value == 0 and name.startswith("keep_alive")):
            raise InvalidArgumentError(
                f"--rdzv-conf: {name} is {text!r}; give a number of seconds."
            )
        found[_NAMES[name]] = value
    return Patience(**found)


def read_is_host(configuration: Mapping[str, str]) -> bool | None:
    """Whether this agent is to be at the endpoint, as in is_host=1; None: it finds out itself.

    Raises:
        InvalidArgumentError: neither yes nor no.
    """
    text = configuration.get(_IS_HOST)
    if text is None:
        return None
    if text.lower() not in (*_TRUE, *_FALSE):
        raise InvalidArgumentError(f"--rdzv-conf: is_host is {text!r}; give true or false.")
    return text.lower() in _TRUE
