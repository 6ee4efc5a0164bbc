"""What every pure state machine here returns for an event: what to do now, and why."""

from __future__ import annotations

from rallypoint.base.record import Record


class Decision(Record):
    """Actions for the driver, in this order; an empty reason: nothing worth reporting happened."""

    actions: tuple[Record, ...] = ()
    reason: str = ""

    def __add__(self, then: Decision) -> Decision:
        """Both, one after the other."""
        reasons = [text for text in (self.reason, then.reason) if text]
        return Decision(self.actions + then.actions, "; ".join(reasons))


NOTHING = Decision()
