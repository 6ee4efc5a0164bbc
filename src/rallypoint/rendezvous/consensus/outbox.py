"""An agent's next actions and messages, with reasons; messages to itself return to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rallypoint.rendezvous.consensus.messages import Action, Message, SendMessage
from rallypoint.rendezvous.job.decision import Decision


class Outbox:
    """The actions between two events.

    Attributes:
        own: this agent's messages to itself.
    """

    def __init__(self, key: str) -> None:
        self.own: deque[Message] = deque()
        self._key = key
        self._actions: list[Action] = []
        self._reasons: list[str] = []

    def add(self, actions: Iterable[Action], because: str = "") -> None:
        """To be done next, in this order."""
        for action in actions:
            if isinstance(action, SendMessage) and action.to == self._key:
                self.own.append(action.message)
            else:
                self._actions.append(action)
        if because:
            self._reasons.append(because)

    def take(self) -> Decision[Action]:
        """All actions; unread messages to itself are dropped."""
        self.own.clear()
        actions, self._actions = tuple(self._actions), []
        reason, self._reasons = "; ".join(self._reasons), []
        return Decision(actions, reason)
