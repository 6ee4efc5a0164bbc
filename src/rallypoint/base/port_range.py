"""The ports that listeners may use: RALLYPOINT_PORT_RANGE=A-B, or --port-range."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from rallypoint.base.errors import HostError, InvalidArgumentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

VARIABLE = "RALLYPOINT_PORT_RANGE"


def read_port_range(text: str) -> range:
    """``"A-B"``, both included; empty text is port 0, any free one."""
    if not text:
        return range(1)
    first, dash, last = text.strip().partition("-")
    is_whole = first.isdecimal() and last.isdecimal() and dash
    if not is_whole or not 0 < int(first) <= int(last) < 65536:
        raise InvalidArgumentError(
            f"the port range is {text!r}; give the first and the last port, as in 20000-20999"
            f" (--port-range, or {VARIABLE})."
        )
    return range(int(first), int(last) + 1)


def bind_free(bind: Callable[[int], T]) -> T:
    """Call `bind` with ports of the range until one is free; returns its result."""
    text = os.environ.get(VARIABLE, "")
    ports = read_port_range(text)
    start = os.getpid() % len(ports)  # so that concurrent processes do not all try the same ports
    for port in [*ports[start:], *ports[:start]]:
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not port:
                raise
    all_of_them = f"all {len(ports)} ports" if len(ports) > 1 else "the only port"
    verb = "are" if len(ports) > 1 else "is"
    raise HostError(f"{all_of_them} of the port range {text} {verb} in use; give a wider one.")
