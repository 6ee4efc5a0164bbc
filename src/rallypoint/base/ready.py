"""One turn of an event loop: how long it may wait, and the callbacks that its selector holds."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from selectors import BaseSelector


def earliest(*alarms: float | None) -> float | None:
    """The first of these times; None: none is set."""
    return min((at for at in alarms if at is not None), default=None)


def left_until(at: float | None) -> float | None:
    """How many seconds to wait for this time (monotonic); None: without a limit."""
    return None if at is None else max(0.0, at - time.monotonic())


def call_ready(selector: BaseSelector, timeout_s: float | None) -> None:
    """Wait for events, and call what they belong to.

    What one callback unregisters is not called any more in the same turn: its descriptor may be
    closed, or another file's by then.
    """
    registered = selector.get_map()
    for key, _ in selector.select(timeout_s):
        if registered.get(key.fd) is key:
            key.data()
