"""The parameters of a rendezvous handler, with torch's names and rules."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rallypoint.base.errors import InvalidArgumentError

_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


class RendezvousParameters:
    """How nodes meet.

    Args:
        backend: the name of a registered rendezvous.
        endpoint: where they meet; usually ``"host:port"``.
        run_id: the job's name.
        min_nodes, max_nodes: how many nodes a round may have.
        local_addr: the address at which others reach this node; None: chosen automatically.
        config: options of the backend, as in --rdzv-conf.

    Raises:
        InvalidArgumentError: there is no backend, or the numbers are impossible.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **config: Any,  # noqa: ANN401 - as torch's
    ) -> None:
        if not backend:
            raise InvalidArgumentError("a rendezvous needs the name of a backend, such as 'c10d'.")
        check_numbers(min_nodes, max_nodes)
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config: dict[str, Any] = config

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as torch's
        """Return an option, or `default` if it is not given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a boolean option: a bool, 1, 0, "true", "f", "yes", "n", ...

        Raises:
            InvalidArgumentError: it has another value.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).lower()
        if not isinstance(value, int | str) or text not in (*_TRUE, *_FALSE):
            raise InvalidArgumentError(
                f"the rendezvous option {key} is {value!r}; it must be true or false."
            )
        return text in _TRUE

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return an integer option.

        Raises:
            InvalidArgumentError: it has another value.
        """
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise InvalidArgumentError(
                f"the rendezvous option {key} is {value!r}; it must be an integer."
            ) from None


class RendezvousTimeout:
    """How long the parts of a rendezvous may take; None means the default.

    Attributes:
        join: until a round begins; 600 s.
        last_call: for latecomers, once the minimum of nodes has joined; 3 s.
        close: to tell the others that it is closed; 30 s.
        heartbeat: accepted for compatibility with torch and ignored: operations use the store's
            timeout.

    Raises:
        InvalidArgumentError: one is not positive.
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self.join = _positive("join", join, 600)
        self.last_call = _positive("last_call", last_call, 3)
        self.close = _positive("close", close, 30)
        self.heartbeat = _positive("heartbeat", heartbeat, 5)


def _positive(name: str, given: timedelta | None, default_s: int) -> timedelta:
    timeout = timedelta(seconds=default_s) if given is None else given
    if timeout <= timedelta(0):
        raise InvalidArgumentError(f"the {name} timeout is {timeout}; it must be positive.")
    return timeout


def read_timeouts(parameters: RendezvousParameters) -> RendezvousTimeout:
    """join_timeout, last_call_timeout, close_timeout and heartbeat_timeout, in seconds."""
    found: dict[str, Any] = {}
    for name in ("join", "last_call", "close", "heartbeat"):
        seconds = parameters.get_as_int(f"{name}_timeout")
        found[name] = None if seconds is None else timedelta(seconds=seconds)
    return RendezvousTimeout(**found)


def check_numbers(min_nodes: int, max_nodes: int) -> None:
    """Check numbers of nodes.

    Raises:
        InvalidArgumentError: they are impossible.
    """
    if min_nodes < 1:
        raise InvalidArgumentError(f"min_nodes is {min_nodes}; a round needs at least one node.")
    if max_nodes < min_nodes:
        raise InvalidArgumentError(
            f"max_nodes is {max_nodes}, less than min_nodes ({min_nodes}); it must be at least "
            "that."
        )
