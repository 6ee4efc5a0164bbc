"""An agent's link to its keeper: a thread that performs its voter's requests, message by message.

    send(message) --> newest of each kind --> KeyValueVoter <--> KeyValueClient --> take()

A waiting message is replaced by a newer one of its kind: candidates and coordinators repeat
themselves, and only the latest counts. Only the thread uses the voter and the client.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from rallypoint.base.inbox import Inbox
from rallypoint.rendezvous.consensus.messages import Message, Setup
from rallypoint.rendezvous.keyvalue.keeper import KeyValueClient
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRegister, KeyValueRules
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer, KeyValueVoter, is_same

_CLOSING_S = 0.2


class KeyValueLink:
    """The keeper, as one agent's driver uses it. Its key among agents is rules.KEEPER.

    Args:
        client: owned by the link from now on.
        clock: of leases, in seconds.
        rules: the agent's.
        is_needed: whether the first failure of the client, which `take` then raises, ends the
            agent's part; otherwise the keeper may be unavailable for a while.
    """

    def __init__(
        self,
        setup: Setup,
        client: KeyValueClient,
        clock: Callable[[], float],
        rules: type[KeyValueRules] = KeyValueRules,
        *,
        is_needed: bool = False,
    ) -> None:
        self._rules = rules
        self._voter = KeyValueVoter(setup, rules)
        self._client = client
        self._clock = clock
        self._is_needed = is_needed
        self._awake = threading.Condition()  # guards what follows
        self._waiting: dict[type, Message] = {}
        self._at_work: Message | None = None
        self._lost: list[str] = []
        self._is_closed = False
        self._answers: Inbox[list[Answer] | Exception] = Inbox()
        self._thread = threading.Thread(target=self._run, name="rendezvous keeper", daemon=True)
        self._thread.start()

    def register(self, setup: Setup) -> KeyValueRegister:
        """The agent's end of what the keeper keeps."""
        return KeyValueRegister(setup, self._rules)

    def fileno(self) -> int:
        """For a selector: readable when `take` has something."""
        return self._answers.fileno()

    def send(self, message: Message) -> None:
        """A Participant's message to the key KEEPER, or to the keeper's endpoints."""
        with self._awake:
            if not is_same(message, self._at_work):
                self._waiting[type(message)] = message
                self._awake.notify()

    def lost(self, key: str) -> None:
        """An agent has ended; call `Participant.closed` as well."""
        with self._awake:
            self._lost.append(key)

    def take(self) -> list[Answer]:
        """The keeper's answers so far, without waiting."""
        answers: list[Answer] = []
        for each in self._answers.take():
            if isinstance(each, Exception):
                raise each
            answers += each
        return answers

    def close(self) -> None:
        """End; waiting messages are lost."""
        with self._awake:
            self._is_closed = True
            self._awake.notify()
        # A request that hangs ends with the process; its conditions keep it from doing harm.
        self._thread.join(_CLOSING_S)
        self._answers.close()

    # The thread.

    def _run(self) -> None:
        while True:
            with self._awake:
                self._at_work = None
                while not self._waiting and not self._is_closed:
                    self._awake.wait()
                if self._is_closed:
                    break
                message = self._at_work = self._waiting.pop(next(iter(self._waiting)))
                lost, self._lost = self._lost, []
            for key in lost:
                self._voter.lost(key)
            self._work(message)
            answers = self._voter.take()
            if answers:
                self._answers.put(answers)
        with contextlib.suppress(Exception):  # the next one has to wait then
            request = self._voter.resign()
            if request is not None:
                self._client.carry_out(request)
        self._client.close()

    def _work(self, message: Message) -> None:
        try:
            request = self._voter.ask(message, self._clock())
            while request is not None:
                request = self._voter.go_on(self._client.carry_out(request), self._clock())
        except Exception as error:  # the keeper is unavailable, or its data or answer is invalid
            self._voter.failed(str(error))
            if self._is_needed:
                self._answers.put(error)
