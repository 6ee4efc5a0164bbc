"""A member's seat says of its workers what counting through the whole round would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.job.round import Endpoint, Member, Round

NODES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=9)


@given(NODES)
def test_seats_agree_with_a_count_of_all_workers(nodes: list[tuple[str, int]]) -> None:
    members = tuple(
        Member(key=f"k{i}", node_rank=i, host="h", local_world_size=size, role=role)
        for i, (role, size) in enumerate(nodes)
    )
    seats = Round(number=3, members=members, store=Endpoint(host="h", port=1)).seats()
    workers = [(i, role, local) for i, (role, size) in enumerate(nodes) for local in range(size)]
    counted = []
    for i, member in enumerate(members):
        seat = seats[member.key]
        assert (seat.number, seat.node_rank, seat.nodes) == (3, i, len(nodes))
        assert seat.world_size == len(workers)
        assert seat.role_world_size == sum(role == member.role for _, role, _ in workers)
        for place in seat.placements:
            counted.append((i, member.role, place.local_rank))
            assert place.rank == len(counted) - 1
            same_role = [role for _, role, _ in counted[:-1] if role == member.role]
            assert place.role_rank == len(same_role)
    assert counted == workers
