"""Whether this agent must open the coming round's workers' store, as its rank 0, and where it is.

A proposal requests it; it is opened before the round is agreed, and its address is sent with the
acceptance.
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.messages import Accepted, Agreement, OpenStore, Propose
from rallypoint.rendezvous.job.round import Endpoint


class OwnStore:
    """The latest one that was requested."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._round = -1
        self._endpoint: Endpoint | None = None
        self._waits: Propose | None = None  # waits for the store to be opened

    def asked(self, new: Agreement, known: int) -> list[OpenStore]:
        """A list is proposed, following the agreement of that number: what to open for it."""
        if not self._is_for_me(new) or new.number <= known or new.round == self._round:
            return []
        self._round, self._endpoint = new.round, None
        return [OpenStore(round=new.round, members=new.members)]

    def told(self, answer: Accepted, new: Agreement) -> Accepted:
        """The acceptance of that list, with the store's address once it has one."""
        is_its = new.runs and new.round == self._round
        return answer.__replace__(store=self._endpoint) if is_its else answer

    def put_off(self, propose: Propose) -> None:
        """It was answered without the store: answer again when that is open."""
        new = propose.agreement
        if self._is_for_me(new) and new.round == self._round and self._endpoint is None:
            self._waits = propose

    def opened(self, round_number: int, endpoint: Endpoint) -> Propose | None:
        """It is open; returns the proposal to answer again, if there is one."""
        if round_number != self._round:
            return None
        self._endpoint = endpoint
        waits, self._waits = self._waits, None
        return waits

    def _is_for_me(self, new: Agreement) -> bool:
        return new.runs and new.members[0].key == self._key
