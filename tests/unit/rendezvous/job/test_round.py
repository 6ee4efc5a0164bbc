"""A member's seat says of its workers what counting through the whole round would; endpoints are
read as they are written.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.rendezvous.job.round import Endpoint, Member, seats_of

NODES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=9)


@given(NODES)
def test_seats_agree_with_a_count_of_all_workers(nodes: list[tuple[str, int]]) -> None:
    members = tuple(
        Member(key=f"k{i}", node_rank=i, host="h", local_world_size=size, role=role)
        for i, (role, size) in enumerate(nodes)
    )
    seats = seats_of(members, number=3, store=Endpoint(host="h", port=1))
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


PORTS = st.integers(0, 65535)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
HOSTS = st.one_of(NAMES, st.ip_addresses().map(str))


@given(HOSTS, PORTS, PORTS)
def test_an_endpoint_is_read_as_it_is_written(host: str, port: int, default_port: int) -> None:
    endpoint = Endpoint(host=host, port=port)
    text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert str(endpoint) == text
    assert Endpoint.parse(text, default_port, name="it") == endpoint
    assert Endpoint.parse(f" {text}\n", None, name="it") == endpoint
    without_port = Endpoint.parse(text[: -len(f":{port}")], default_port, name="it")
    assert without_port == Endpoint(host=host, port=default_port)


@given(st.lists(st.builds(Endpoint, host=HOSTS, port=PORTS)))
def test_several_endpoints_have_commas_between_them(endpoints: list[Endpoint]) -> None:
    text = ", ".join(["", *map(str, endpoints), ""])
    assert Endpoint.parse_all(text, 7, name="it") == tuple(endpoints)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1", "a:", "a:b", "a:-1", "a:65536", "a:1_0", "a:\u0661", f"a:{'9' * 5000}"),
        *("::1", "fd00::1:2", "[]", "[]:1", "[::1", "[::1:2", "::1]", "[::1]x:2", "[[::1]]:2"),
        *("a]:1", "[a:1"),
    ],
)
def test_an_ill_formed_endpoint_is_refused_with_its_text(text: str) -> None:
    sentence = re.escape(
        f"it is {text!r}; it must be HOST:PORT, with a port below 65536, and an IPv6 address in"
        " brackets."
    )
    with pytest.raises(InvalidArgumentError, match=f"^{sentence}$"):
        Endpoint.parse(text, 7, name="it")


def test_without_a_default_an_endpoint_needs_a_port() -> None:
    for text in ("host", "[::1]"):
        with pytest.raises(InvalidArgumentError, match="it must be HOST:PORT"):
            Endpoint.parse(text, None, name="it")
