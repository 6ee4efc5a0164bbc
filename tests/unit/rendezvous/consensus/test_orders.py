"""Which orders are said again, and when."""

from __future__ import annotations

from rallypoint.rendezvous.consensus.messages import Ballot
from rallypoint.rendezvous.consensus.rounds import Orders
from rallypoint.rendezvous.job.reports import Stop

BEAT_S = 1.0


def test_a_beat_that_was_under_way_is_not_answered_with_the_same_order() -> None:
    orders = Orders(Ballot(1, "a"))
    halt = orders.halt_all(Stop(round=3, because="b was lost"), now=10.0)
    assert not orders.must_repeat("c", 10.9, BEAT_S)
    assert orders.must_repeat("c", 11.1, BEAT_S)
    assert orders.halt(Stop(round=3, because="b was lost")) is halt
    assert orders.halt(Stop(round=2, because="that round has ended")).stop.round == 2
