"""One turn of an event loop whose selector's data are callbacks."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from selectors import BaseSelector


def call_ready(selector: BaseSelector, timeout_s: float | None) -> None:
    """Wait for events, and call what they belong to.

    What one callback unregisters is not called any more in the same turn: its descriptor may be
    closed, or another file's by then.
    """
    registered = selector.get_map()
    for key, _ in selector.select(timeout_s):
        if registered.get(key.fd) is key:
            key.data()
