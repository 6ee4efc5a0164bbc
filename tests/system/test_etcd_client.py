"""The etcd client against a real etcd: of one member, or of three some of which die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.etcd_cluster import Cluster

from rallypoint.base.errors import StoreConnectionError, StoreError
from rallypoint.rendezvous.keyvalue.keeper import Transact


@pytest.fixture(params=[1])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, request.param)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.mark.everyday
def test_writes_are_conditional(cluster: Cluster) -> None:
    with cluster.client(timeout_s=120, try_timeout_s=60) as client:
        assert client.read("job/").pairs == ()
        first = client.transact(Transact(revisions={"job/a": 0}, puts={"job/a": b"1"}))
        assert first is not None
        assert client.transact(Transact(revisions={"job/a": 0}, puts={"job/a": b"other"})) is None
        client.transact(Transact(revisions={}, puts={"jobs": b"beside the prefix"}))
        second = client.transact(
            Transact(revisions={"job/a": first}, puts={"job/b": b"\x00\xff"}, deletes=("job/a",))
        )
        assert second is not None
        assert [tuple(pair) for pair in client.read("job/").pairs] == [
            ("job/b", b"\x00\xff", second)
        ]


def test_keys_end_with_their_lease(cluster: Cluster) -> None:
    with cluster.client() as client:
        kept, left = client.grant(60), client.grant(1)
        client.transact(Transact(revisions={}, puts={"job/kept": b"k"}, lease=kept))
        written = client.transact(Transact(revisions={}, puts={"job/left": b"l"}, lease=left))
        assert written is not None
        until = time.monotonic() + 60
        while [pair.key for pair in client.read("job/").pairs] != ["job/kept"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert client.keep_alive(kept)
        assert not client.keep_alive(left)


def test_an_error_of_the_cluster_is_told_at_once(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(StoreError, match="lease not found"):
        client.transact(Transact(revisions={}, puts={"job/a": b"1"}, lease="12345"))


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_writes_go_on_when_the_leader_dies(cluster: Cluster) -> None:
    with cluster.client() as client:
        revision = client.transact(Transact(revisions={"job/n": 0}, puts={"job/n": b"0"}))
        dead = cluster.leader()
        cluster.kill(dead)
        for i in range(1, 20):
            assert revision is not None, f"write {i} was taken for another's"
            revision = client.transact(
                Transact(revisions={"job/n": revision}, puts={"job/n": b"%d" % i})
            )
        assert client.read("job/").pairs[0].value == b"19"


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_without_a_majority_the_error_names_the_endpoints(cluster: Cluster) -> None:
    with cluster.client() as ready:
        ready.read("job/")
    cluster.kill(0)
    cluster.kill(1)
    host, port = cluster.endpoints[2]
    with (
        cluster.client(timeout_s=1.5) as client,
        pytest.raises(StoreConnectionError, match=f"{host}:{port} answered transact"),
    ):
        client.transact(Transact(revisions={}, puts={"job/a": b"1"}))


def test_a_lost_answer_is_not_taken_for_a_refusal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.client() as client:
        client.read("job/")
        carry_out = client._try
        lose = [True]

        def answer_lost(path: str, body: str) -> dict[str, object]:
            answer = carry_out(path, body)
            if lose.pop() if lose else False:
                raise TimeoutError("lost")
            return answer

        monkeypatch.setattr(client, "_try", answer_lost)
        written = client.transact(Transact(revisions={"job/a": 0}, puts={"job/a": b"mine"}))
        assert client.read("job/").pairs[0].revision == written
