"""Rounds from a rendezvous that a package provides (--rdzv-backend NAME).

    agent --reports--> this thread --next_rendezvous, num_nodes_waiting--> the package's handler
          <--orders---

There is no common coordinator, as with torchrun. Each agent applies the restart policy to its own
failures, makes the others return by joining the rendezvous again, and closes it when it gives up.
Nodes exchange through the round's store what follows from their ranks, and which have finished.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import InvalidArgumentError, RendezvousClosedError
from rallypoint.base.inbox import Inbox
from rallypoint.base.record import Record
from rallypoint.cluster.network import choose_network, own_addresses
from rallypoint.launch.job import Job, Rendezvous
from rallypoint.launch.rounds.source import RoundSource
from rallypoint.launch.rounds.store_host import ANY, StoreHost, addresses_of_members
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from rallypoint.rendezvous.job.reports import Finish, NodeReport, Order, Outcome, Start, Stop
from rallypoint.rendezvous.job.restart_policy import RoundEnd, judge
from rallypoint.rendezvous.job.round import Endpoint, Member, Seat, seats_of
from rallypoint.rendezvous.transport.codec import decode_record, encode

_CHECK_EVERY_S = 0.2
_GOODBYE_S = 2.0


class Card(Record, kw_only=True):
    """A node's message to the others of its round; node 0's says where the workers' store is."""

    member: Member
    last_round: int
    store: Endpoint | None = None


def rounds_of(job: Job, rendezvous: Rendezvous) -> PlugInRounds:
    """The rounds that this job's agent takes part in."""
    config: dict[str, object] = dict(rendezvous.configuration)
    if rendezvous.node_rank is not None:
        config.setdefault("rank", rendezvous.node_rank)
    handler = rendezvous_handler_registry.create_handler(
        RendezvousParameters(
            rendezvous.backend,
            ",".join(map(str, rendezvous.endpoints)),
            rendezvous.run_id,
            rendezvous.min_nodes,
            rendezvous.max_nodes,
            rendezvous.local_addr,
            **config,
        )
    )
    host = rendezvous.endpoints[0].host
    choice = choose_network(
        [host],
        {} if is_loopback(host) else os.environ,
        local_addr=rendezvous.local_addr,
        has_remote_peers=not is_loopback(host),
    )
    rounds = rounds_through(handler, job, choice.address)
    rounds.network = choice
    return rounds


def rounds_through(handler: RendezvousHandler, job: Job, address: str = "") -> PlugInRounds:
    """The rounds of a handler that a program has created; `address` is this node's, if known."""
    member = Member(
        key=os.urandom(8).hex(),
        host=job.host,
        local_world_size=job.local_world_size,
        role=job.role,
        address=address,
        addresses=() if is_loopback(address) else own_addresses(),
    )
    return PlugInRounds(handler, member, job.max_restarts)


class PlugInRounds(RoundSource):
    """One agent's side of it."""

    keeps_survivors = False  # a plug-in's rounds are of whole nodes

    def __init__(self, handler: RendezvousHandler, member: Member, max_restarts: int) -> None:
        super().__init__(member.key)
        self._handler = handler
        self._member = member
        self._max_restarts = max_restarts
        self._restarts = 0
        self._info: RendezvousInfo | None = None
        self._round = -1
        self._is_stopped = True  # that round
        self._has_succeeded = False
        self._report = NodeReport()
        self._stop_asked = ""
        self._store: StoreHost | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._posted: Inbox[Order] = Inbox()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    # RoundSource.

    def open(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._posted, selectors.EVENT_READ, self._take_posted)
        self._calls.put(lambda: self._join_round(""))
        self._thread.start()

    def tell(self, report: NodeReport) -> None:
        before, self._report = self._report, report
        is_current, was_current = report.round == self._round, before.round == self._round
        if is_current and report.broken and not (was_current and before.broken):
            self.orders.append(Stop(round=self._round, because=report.broken))
        asked = report.stop_asked or report.leaves
        if asked and not self._stop_asked:
            self._stop_asked = asked
            self._calls.put(self._handler.set_closed)
            if self._is_stopped:
                self.orders.append(Finish(outcome=Outcome.STOPPED, because=asked))
        if is_current and report.is_over and not (was_current and before.is_over):
            self._calls.put(lambda: self._ended(report))

    def tick(self) -> None:
        """See RoundSource. The thread keeps its own time."""

    def close(self) -> None:
        """See RoundSource. A handler that does not return is abandoned."""
        self._calls.put(None)
        if self._thread.ident is not None:
            self._thread.join(_GOODBYE_S)
        if self._store is not None:
            self._store.close()
        self._posted.close()

    def _take_posted(self) -> None:
        self.orders += self._posted.take()

    # The thread.

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_CHECK_EVERY_S)
                if call is None:
                    break
                call()
            except queue.Empty:
                self._try(self._check_others)
            except RendezvousClosedError as error:
                self._give_up(str(error))
            except Exception as error:  # a package's code; report whatever it is
                self._give_up(f"the rendezvous {self._handler.get_backend()!r} failed: {error}")
        self._try(self._handler.shutdown)

    def _try(self, what: Callable[[], object]) -> None:
        """Try what may fail because others have gone; the workers' own results decide then."""
        with suppress(Exception):
            what()

    def _join_round(self, because: str) -> None:
        seat = None
        while seat is None:
            self._info = self._handler.next_rendezvous()
            seat = self._seat(self._info)
        self._round, self._is_stopped, self._has_succeeded = seat.number, False, False
        self._posted.put(Start(seat=seat, because=because))

    def _seat(self, info: RendezvousInfo) -> Seat | None:
        """What follows from all nodes' cards; None if one does not arrive."""
        card = Card(member=self._member.__replace__(node_rank=info.rank), last_round=self._round)
        if info.rank == 0:
            card = card.__replace__(store=self._open_store(info))
        info.store.set(f"rallypoint/card/{info.rank}", encode(card))
        keys = [f"rallypoint/card/{rank}" for rank in range(info.world_size)]
        while not info.store.check(keys):
            if self._handler.num_nodes_waiting() > 0:
                return None
            time.sleep(_CHECK_EVERY_S / 4)
        cards = [decode_record(Card, bytes(info.store.get(key))) for key in keys]
        store = cards[0].store
        if store is None:
            raise InvalidArgumentError(
                "node 0 did not say where the workers' store is; update rallypoint there."
            )
        if self._store is not None and info.rank == 0 and not is_loopback(self._member.address):
            self._store.allow(addresses_of_members(each.member for each in cards))
        members = tuple([each.member for each in cards])
        number = max(each.last_round for each in cards) + 1
        return seats_of(members, number=number, store=store)[self._member.key]

    def _open_store(self, info: RendezvousInfo) -> Endpoint:
        if self._store is not None:
            self._store.close()
        known = info.bootstrap_store_info  # by node 0's address
        address = self._member.address or (known.master_addr if known else os.uname().nodename)
        self._store = StoreHost("127.0.0.1" if is_loopback(address) else ANY)
        self._store.serve()
        return Endpoint(host=address, port=self._store.port)

    def _check_others(self) -> None:
        """Check whether a node waits for a new round, and whether all have finished."""
        if self._info is None or self._round < 0:
            return
        if self._has_succeeded and self._all_have_succeeded(self._info):
            return
        if self._is_stopped or self._stop_asked:
            return
        if self._handler.is_closed():
            self._is_stopped = True
            self._give_up("another node gave up and closed the rendezvous")
        elif self._handler.num_nodes_waiting() > 0:
            self._is_stopped = True
            if self._has_succeeded:
                self._calls.put(lambda: self._join_round("another node needs a new round"))
            else:
                because = "another node joined, or needs a new round"
                self._posted.put(Stop(round=self._round, because=because))

    def _all_have_succeeded(self, info: RendezvousInfo) -> bool:
        keys = [f"rallypoint/done/{rank}" for rank in range(info.world_size)]
        because = "every worker succeeded"
        try:
            is_over = info.store.check(keys)
            if not is_over and self._handler.is_closed():
                is_over, because = True, "every worker of this node succeeded; another node gave up"
        except Exception:  # the node that served it has ended: this one is no longer needed
            is_over = True
            because = "every worker of this node succeeded; the node with the store has ended"
        if is_over:
            self._has_succeeded, self._info = False, None
            self._posted.put(Finish(outcome=Outcome.SUCCEEDED, because=because))
        return is_over

    def _ended(self, end: NodeReport) -> None:
        assert self._info is not None
        # A round that has succeeded is no longer asked to stop, as it may have been meanwhile.
        self._has_succeeded, self._is_stopped = end.succeeded, not end.succeeded
        if end.succeeded:
            self._info.store.set(f"rallypoint/done/{self._info.rank}", "1")
            return self._check_others()
        facts = RoundEnd(
            causes=end.causes,
            restarts_used=self._restarts,
            max_restarts=self._max_restarts,
            stop_asked=self._stop_asked,
            interrupted="" if end.causes else "another node needs a new round",
            unkillable=end.unkillable,
        )
        after = judge(facts)
        if after.outcome is None:
            self._restarts += after.is_restart
            return self._join_round(after.reason)
        self._try(self._handler.set_closed)
        finish = Finish(outcome=after.outcome, because=after.reason)
        if facts.root is not None:
            finish = finish.__replace__(culprit=self._info.rank, what=facts.root.text)
        self._posted.put(finish)
        return None

    def _give_up(self, because: str) -> None:
        if self._stop_asked:
            return
        self._posted.put(Finish(outcome=Outcome.GIVEN_UP, because=because))
