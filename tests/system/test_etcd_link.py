"""An agent's way to a real etcd: what it asks is answered, in its own time, by whoever is there."""

from __future__ import annotations

import select
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.etcd_cluster import Cluster

from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Agreement,
    Ballot,
    Message,
    Over,
    Prepare,
    Promise,
    Propose,
    Refused,
    Setup,
)
from rallypoint.rendezvous.consensus.register import before_all
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import Finish, Outcome
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient, read_tls
from rallypoint.rendezvous.keyvalue.key_value_link import KeyValueLink
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer
from rallypoint.rendezvous.timeouts import Timeouts

pytestmark = pytest.mark.system

TIMEOUTS = Timeouts(heartbeat_s=0.3, missed_heartbeats=3.0, close_s=5.0, read_s=1.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, 1)
    try:
        with cluster.client() as client:
            client.read("ready/")
        yield cluster
    finally:
        cluster.close()


def _link(setup: Setup, tls: ssl.SSLContext | None = None) -> KeyValueLink:
    places = [(each.host, each.port) for each in setup.endpoints]
    client = EtcdClient(places, timeout_s=setup.timeouts.read_s, tls=tls)
    return KeyValueLink(setup, client, time.monotonic)


class Agent:
    """One agent that only talks to etcd."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        places = tuple([Endpoint(host=host, port=port) for host, port in cluster.endpoints])
        self.me = Member(key=name, host=name, local_world_size=1)
        self.none = before_all(places)
        setup = Setup(
            me=self.me, run_id="a job", limits=Limits(), endpoints=places, timeouts=TIMEOUTS
        )
        self.link = _link(setup)

    def say(self, message: Message, *, within_s: float = 60.0) -> Answer:
        self.link.send(message)
        deadline = time.monotonic() + within_s
        while select.select([self.link], [], [], max(0.0, deadline - time.monotonic()))[0]:
            for answer in self.link.take():
                return answer
        raise AssertionError(f"no answer to {message}")

    def stand(self, term: int, decided: Agreement | None = None) -> Answer:
        ballot = Ballot(term, self.me.key)
        told = self.none if decided is None else decided
        return self.say(Prepare(ballot=ballot, stamp=1.0, decided=told, is_trial=False))

    def propose(self, term: int, agreement: Agreement) -> Answer:
        ballot = Ballot(term, self.me.key)
        return self.say(Propose(ballot=ballot, stamp=2.0, agreement=agreement, decided=agreement))

    def agreement(self, number: int, *others: Agent, finish: Finish | None = None) -> Agreement:
        members = (self.me, *[other.me for other in others])
        return Agreement(number=number, members=members, host="A", finish=finish)


@pytest.fixture
def two(cluster: Cluster) -> Iterator[tuple[Agent, Agent]]:
    agents = Agent("A", cluster), Agent("B", cluster)
    yield agents
    for agent in agents:
        agent.link.close()


def test_from_the_first_claim_to_the_end(two: tuple[Agent, Agent]) -> None:
    a, b = two
    assert isinstance(a.stand(1), Promise)
    held = a.agreement(0, b)
    for _ in range(2):
        accepted = a.propose(1, held)
        assert isinstance(accepted, Accepted)
        assert (accepted.number, accepted.stamp) == (0, 2.0)
    refused = b.stand(2)
    assert isinstance(refused, Refused)
    assert refused.leader == a.me
    # It is silent from now on.
    time.sleep(TIMEOUTS.silence_s * 1.1)
    learned = b.stand(2)
    assert isinstance(learned, Refused)
    assert learned.decided == held
    assert isinstance(b.stand(2, held), Promise)
    deposed = a.propose(1, a.agreement(1))
    assert isinstance(deposed, Refused)
    assert deposed.promised == Ballot(2, "B")
    finish = Finish(outcome=Outcome.SUCCEEDED, because="all is done")
    assert isinstance(b.propose(2, held.__replace__(number=1, finish=finish)), Accepted)
    assert a.stand(3, held) == Over(finish=finish)


def test_without_etcd_it_says_who_does_not_answer(
    cluster: Cluster, two: tuple[Agent, Agent]
) -> None:
    cluster.kill(0)
    host, port = cluster.endpoints[0]
    answer = two[0].stand(1)
    assert isinstance(answer, str)
    assert f"no etcd member at {host}:{port} answered" in answer


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ca.pem, and cert.pem and key.pem for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt install openssl")
    directory = tmp_path_factory.mktemp("tls")
    commands = (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ca -days 2",
        "req -newkey rsa:2048 -nodes -keyout key.pem -out cert.csr -subj /CN=etcd",
        "x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2"
        " -extfile names",
    )
    (directory / "names").write_text(
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    for command in commands:
        subprocess.run(
            ["openssl", *command.split()], cwd=directory, check=True, capture_output=True
        )
    return directory


def test_https_with_certificates(tmp_path: Path, authority: Path) -> None:
    names = {name: str(authority / f"{name}.pem") for name in ("ca", "cert", "key")}
    cluster = Cluster(
        tmp_path,
        1,
        "--cert-file",
        names["cert"],
        "--key-file",
        names["key"],
        "--trusted-ca-file",
        names["ca"],
        "--client-cert-auth",
        scheme="https",
    )
    try:
        configuration = {"protocol": "https", "cacert": names["ca"]}
        mine = {**configuration, "cert": names["cert"], "key": names["key"]}
        for given, is_let_in in ((mine, True), (configuration, False)):
            (place,) = [Endpoint(host=host, port=port) for host, port in cluster.endpoints]
            setup = Setup(
                me=Member(key="A", host="A", local_world_size=1),
                run_id="j",
                limits=Limits(),
                endpoints=(place,),
                timeouts=TIMEOUTS.__replace__(read_s=8.0 if is_let_in else 1.0),
            )
            link = _link(setup, read_tls(given))
            ballot = Ballot(1, "A")
            link.send(
                Prepare(ballot=ballot, stamp=0.0, decided=before_all((place,)), is_trial=False)
            )
            assert select.select([link], [], [], 20)[0]
            (answer,) = link.take()
            assert isinstance(answer, Promise) == is_let_in, answer
            link.close()
    finally:
        cluster.close()
