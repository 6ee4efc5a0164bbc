"""One node of a rendezvous, as a thread that takes part while the program works.

    the program's threads, in a NodeHandler <--condition--> NodeThread <--> the other nodes

This is the program's side of it. How a node reaches the others is not known here: see
launch/api/program_node.py.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

SeatT = TypeVar("SeatT")  # a node's place in a round


class NodeThread(ABC, Generic[SeatT]):
    """A node's thread, and its state. A node wants a round from its start.

    Attributes:
        changed: guards the others; notified when one of them changes.
        round: the latest one in which the program took its seat; -1: none yet.
        closed: why there is no further round, if there is none.
        error: what ended the thread, other than an order.
        missing: which nodes are present and missing, while there are too few, if known.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self.round = -1
        self.closed = ""
        self.error: Exception | None = None
        self.missing = ""
        self._wants = True  # it wants a round
        self._thread = threading.Thread(target=self._run, name=f"rendezvous {name}", daemon=True)

    def start(self) -> None:
        """Take part from now on."""
        self._thread.start()

    # With `changed` held.

    @property
    @abstractmethod
    def waiting(self) -> int:
        """The number of waiting nodes, at least 1, if `round` is over; otherwise 0."""

    @property
    @abstractmethod
    def is_spare(self) -> bool:
        """Whether it waits for a place in a round that runs without it."""

    @abstractmethod
    def take_seat(self) -> SeatT | None:
        """This node's seat in a round newer than `round`, if one runs."""

    # Without the lock, for the program's threads.

    @abstractmethod
    def want_round(self) -> None:
        """Leave `round`, if it is not over, and wait for the next one."""

    @abstractmethod
    def withdraw(self) -> None:
        """Stop taking part at once; the others continue."""

    @abstractmethod
    def end(self) -> None:
        """End the thread soon; never waits, as it is called when the handler is collected."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; returns whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            self._live()
        except Exception as error:  # reported to the waiting thread
            with self.changed:
                self.error = error
                self.changed.notify_all()

    @abstractmethod
    def _live(self) -> None:
        """Take part until `end`, or until the job is over; then free all resources."""
