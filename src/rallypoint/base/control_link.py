"""The worker's side of in-place recovery: it receives its place in new rounds.

A thread waits at the control socket, so that calls which can no longer succeed end at once, and so
that the launcher can distinguish a busy worker from a stopped one.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from rallypoint.base import worker_hook
from rallypoint.base.control_message import (
    MAX_MESSAGE_BYTES,
    Kept,
    Known,
    Place,
    Released,
    Stage,
    WorkerReport,
    decode,
    encode,
    move,
)
from rallypoint.base.errors import ControlMessageError
from rallypoint.base.worker_env import STANDBY
from rallypoint.base.worker_hook import ControlSocket

_PAUSE_S = 0.01
_ANSWER_S = 2.0
_SEND_FOR_S = 5.0  # to an agent that takes nothing
# A wait as long as a step that takes as long as that: this process was stopped, or as good as.
_STEP_S, _STOPPED_S = 1.0, 1.5


class ControlLink:
    """The connection of this process to the agent that launched it.

    Attributes:
        stage: how far it is, in round `round`.
        is_newcomer: it was started on standby, for a job in which others have a state already.
        withdraw: called, in another thread, with a new place before it becomes `newest`; it must
            end calls that can no longer succeed.
    """

    def __init__(self, descriptor: int) -> None:
        self.newest: Place | None = None
        self.withdraw: Callable[[Place], None] = _nothing
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._end = ControlSocket(self._socket.fileno())
        self._changed = threading.Condition()
        self.is_newcomer = os.environ.get(STANDBY) == "1"
        self.stage = Stage.SPARE if self.is_newcomer else Stage.ASSIGNED
        self.round = self._kept = -1
        self._is_elastic = False
        self._pid = os.getpid()
        threading.Thread(target=self._listen, name="rallypoint-control", daemon=True).start()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that was launched, and not a child that it forked."""
        return os.getpid() == self._pid

    @property
    def is_elastic(self) -> bool:
        """Whether this process continues when others are lost."""
        return self._is_elastic

    def enroll(self) -> None:
        """From now on, this process continues when others are lost."""
        with self._changed:
            self._is_elastic = True
            self._say()

    def ready(self) -> None:
        """This process, on standby, waits for a place."""
        self._reach(Stage.READY, -1)

    def joined(self, number: int, *, is_elastic: bool | None = None) -> None:
        """It has formed that round's group; None: it continues when others are lost as before."""
        self._reach(Stage.JOINED, number, is_elastic=is_elastic)

    def synchronized(self, number: int, *, begins_again: bool) -> None:
        """All ranks of that round have the state, and this process continues when others are lost.

        `begins_again`: with a step that it had begun before others were lost.
        """
        self._reach(Stage.SYNCHRONIZED, number, is_elastic=True, begins_again=begins_again)

    def leave(self) -> bool:
        """Stop continuing when others are lost; False if there is a newer round to go to first.

        The agent answers, unless it has announced such a round to this process, or does not run.
        """
        with self._changed:
            if self.stage is Stage.ASSIGNED:
                return False
            self._reach(Stage.LEAVING, self.round, is_elastic=False)
            self._changed.wait_for(lambda: self.stage is not Stage.LEAVING, _ANSWER_S)
            if self.stage is Stage.LEAVING:
                self.stage = move(self.stage, Stage.LEFT)
            return self.stage is Stage.LEFT

    def send(self, message: Known) -> None:
        """Send one message."""
        packet = encode(message)
        until = time.monotonic() + _SEND_FOR_S
        while self._end.is_open and time.monotonic() < until:
            try:
                self._socket.send(packet)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except OSError:  # the agent has ended, and we shall
                return

    def wait(self, after: int, timeout_s: float) -> Place | None:
        """The newest place in a round after that one; None: none arrives in time.

        If this process is stopped meanwhile, and so hears nothing, the time restarts after it.
        """
        left_s = timeout_s
        with self._changed:
            while not self._is_newer(after) and left_s > 0:
                began = time.monotonic()
                self._changed.wait(min(left_s, _STEP_S))
                passed_s = time.monotonic() - began
                left_s = left_s - passed_s if passed_s < _STOPPED_S else timeout_s
            return self.newest if self._is_newer(after) else None

    def is_kept(self, after: int) -> bool:
        """Whether there will be a place in a round after that one, as long as the agent lives."""
        return self._kept >= after

    def _is_newer(self, than: int) -> bool:
        return self.newest is not None and self.newest.round > than

    def _reach(
        self, to: Stage, number: int, *, is_elastic: bool | None = None, begins_again: bool = False
    ) -> None:
        with self._changed:
            self._is_elastic = self._is_elastic if is_elastic is None else is_elastic
            if number >= self.round:  # else it has heard of its place in a newer one
                self.stage, self.round = move(self.stage, to), number
            self._say(begins_again=begins_again)

    def _say(self, *, begins_again: bool = False) -> None:
        self.send(WorkerReport(self.stage, self.round, self._is_elastic, begins_again))

    def _listen(self) -> None:
        try:
            self._hear_all()
        finally:
            self._kept = -1  # that promise is void

    def _hear_all(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            try:
                poll.poll()
                if not self._end.is_open:
                    return  # the program has closed it, and these are another file's bytes
                packet = self._socket.recv(MAX_MESSAGE_BYTES + 1)
                if not packet:
                    return
                message = decode(packet)
            except (BlockingIOError, ControlMessageError):
                continue
            except OSError:
                return
            if isinstance(message, Place):
                self._hear(message)
            elif isinstance(message, Kept):
                with self._changed:
                    self._kept = max(self._kept, message.round)
            elif isinstance(message, Released):
                with self._changed:
                    if self.stage is Stage.LEAVING:
                        self.stage = move(self.stage, Stage.LEFT)
                    self._changed.notify_all()

    def _hear(self, place: Place) -> None:
        with self._changed:
            if self._is_newer(place.round - 1):
                return
            self.withdraw(place)
            self.newest = place
            if worker_hook.place_changed is not None:
                worker_hook.place_changed(place.environ)
            if self.stage is not Stage.LEFT:
                self._is_elastic |= self.stage is Stage.LEAVING
                self.stage, self.round = move(self.stage, Stage.ASSIGNED), place.round
                self._say()
            self._changed.notify_all()


def _nothing(_: Place) -> None:
    """No calls to end yet."""


_link: ControlLink | None = None


def control_link() -> ControlLink | None:
    """The link of this process, begun if necessary.

    None: no agent launched it, or it was forked from a worker.
    """
    global _link  # noqa: PLW0603 - a process has one control socket
    control = worker_hook.control
    if _link is None and control is not None and control.is_open:
        _link = ControlLink(control.fd)
    return _link if _link is not None and _link.is_ours else None


def existing_link() -> ControlLink | None:
    """The link of this process, if it has begun."""
    return _link if _link is not None and _link.is_ours else None
