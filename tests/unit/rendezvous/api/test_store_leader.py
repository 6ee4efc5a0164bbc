"""The one who leads in a store: places and the time go in, the state comes out."""

from __future__ import annotations

from rallypoint.rendezvous.api.store_leader import StoreLeader
from rallypoint.rendezvous.api.store_state import Place, RendezvousState
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.round import Member

LIMITS = Limits(min_nodes=2, max_nodes=3, join_timeout_s=1e9, last_call_s=3.0)
SILENCE_S = 5.0


class Nodes:
    """Places in a store, and one who looks at them; node n has the key "kn"."""

    def __init__(self, state: RendezvousState | None = None) -> None:
        self.now = 0.0
        self.names: dict[int, str] = {}
        self.places: dict[int, Place | None] = {}
        self.state = state or RendezvousState(term=1, lead="k0", slot=0)
        self.silent: tuple[int, ...] = ()
        self.lead = StoreLeader(LIMITS, self.state, SILENCE_S, self.now)

    def come(self, *slots: int) -> RendezvousState:
        for slot in slots:
            name = self.names.get(slot, f"host{slot}")
            member = Member(key=f"k{slot}", host=name, local_world_size=1)
            self.places[slot] = Place(member=member)
        return self.look()

    def end(self, number: int, *slots: int) -> RendezvousState:
        for slot in slots:
            place = self.places[slot]
            assert place is not None
            self.places[slot] = place.__replace__(ended=number)
        return self.look()

    def look(self, after_s: float = 0.0, *, beating: tuple[int, ...] = ()) -> RendezvousState:
        self.now += after_s
        for slot in beating:
            place = self.places[slot]
            assert place is not None
            self.places[slot] = place.__replace__(beat=place.beat + 1)
        # As the store does it: given up for good, and no further looks at it.
        known = self.lead.slots
        shown = {s: p for s, p in self.places.items() if s in known or s >= self.lead.next_slot}
        self.state, self.silent = self.lead.looked(shown, self.now)
        for slot in self.silent:
            self.places[slot] = None
        return self.state

    def hosts(self) -> list[str]:
        return [member.host for member in self.state.members]


def test_complete_at_once_with_all_of_them() -> None:
    nodes = Nodes()
    assert not nodes.come(0, 1).runs
    state = nodes.come(2)
    assert (state.runs, state.round, state.first) == (True, 0, 0)
    assert nodes.hosts() == ["host0", "host1", "host2"]


def test_a_last_call_once_there_are_enough() -> None:
    nodes = Nodes()
    assert nodes.come(0).text == "1 of at least 2 nodes joined (host0); missing 1"
    nodes.come(1)
    assert nodes.lead.wake_at == 3.0
    assert not nodes.look(2.9).runs
    assert nodes.look(0.1).runs


def test_who_comes_late_stops_the_round_and_all_keep_their_ranks() -> None:
    nodes = Nodes()
    nodes.names = {0: "host8", 1: "host9", 2: "host7"}
    nodes.come(0, 1)
    nodes.look(3)
    state = nodes.come(2)
    assert (state.stopped, state.waiting) == ("host7 joined", 1)
    assert nodes.end(0, 0).stopped  # the other one has not come back yet
    state = nodes.end(0, 1)
    assert (state.round, state.runs, state.stopped) == (1, True, "")
    assert nodes.hosts() == ["host8", "host9", "host7"]


def test_nobody_is_disturbed_by_one_there_is_no_room_for() -> None:
    nodes = Nodes()
    nodes.come(0, 1, 2)
    state = nodes.come(3)
    assert (state.stopped, state.waiting) == ("", 1)
    nodes.places[1] = None
    assert "left" in nodes.look().stopped
    nodes.end(0, 0, 2)
    assert nodes.hosts() == ["host0", "host3", "host2"]


def test_silence_is_death_unless_it_is_ours() -> None:
    nodes = Nodes()
    nodes.come(0, 1, 2)
    nodes.look(4, beating=(1,))
    state = nodes.look(1)
    assert nodes.silent == (2,)
    assert "host2) was lost: nothing came for 5 s" in state.stopped
    nodes.end(0, 0, 1)
    assert nodes.look(3).round == 1
    assert nodes.hosts() == ["host0", "host1"]


def test_a_successor_goes_on_with_the_round_and_misses_who_led() -> None:
    nodes = Nodes()
    before = nodes.come(0, 1, 2)
    heir = Nodes(before.__replace__(term=2, lead="k1", slot=1))
    heir.places = {**nodes.places, 0: None}
    state = heir.look()
    assert (state.round, state.runs) == (0, True)
    assert state.stopped == "node 0 (host0) was lost: it was lost with the one that led"
    heir.end(0, 1, 2)
    state = heir.look(3)
    assert (state.round, state.runs, state.first) == (1, True, 1)
    assert heir.hosts() == ["host2", "host1"] or heir.hosts() == ["host1", "host2"]


def test_a_successor_of_an_undisturbed_round_does_not_disturb_it() -> None:
    nodes = Nodes()
    before = nodes.come(0, 1, 2)
    heir = Nodes(before.__replace__(term=2, lead="k1", slot=1))
    heir.places = dict(nodes.places)
    state = heir.look()
    assert (state.round, state.runs, state.stopped) == (0, True, "")


def test_a_successor_gathers_whom_its_predecessor_gathered() -> None:
    nodes = Nodes()
    nodes.come(0, 1, 2)
    between = nodes.end(0, 0)
    assert between.stopped
    heir = Nodes(between.__replace__(term=2, lead="k1", slot=1))
    heir.places = dict(nodes.places)
    assert heir.look().stopped == "node 0 (host0) wants a new round"
    assert heir.end(0, 1, 2).round == 1
    assert heir.hosts() == ["host0", "host1", "host2"]


def test_all_may_leave_and_others_begin_anew() -> None:
    nodes = Nodes()
    nodes.come(0, 1)
    nodes.look(3)
    nodes.places.update({0: None, 1: None})
    assert not nodes.look().runs
    assert nodes.state.first == 2
    nodes.come(2, 3)
    assert nodes.look(3).round == 1
    assert nodes.hosts() == ["host2", "host3"]
