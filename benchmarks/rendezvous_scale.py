"""Can one coordinator gather thousands of nodes? It runs without workers of its own in this
process; the others are links of a few client processes, over real sockets with a job token. From
the first call until each has its own seat, and from one's death until all others know.

The others would have processors of their own: here, with a few for all, they read no more of what
they are told than their answers take.

    python benchmarks/rendezvous_scale.py --nodes 10000
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import select
import selectors
import socket
import subprocess
import sys
import time
from math import nan
from typing import Any

from table import print_table, save

from rallypoint.launch.rounds.elastic import ElasticRounds
from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Ballot,
    Go,
    Led,
    Over,
    Setup,
)
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import Join, NodeReport, Start
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.timeouts import Timeouts
from rallypoint.rendezvous.transport.codec import (
    ACK,
    ACK_NUMBERS,
    BEAT,
    BEAT_NUMBERS,
    VERSION,
    decode,
    encode,
)
from rallypoint.rendezvous.transport.link import Caller, ConnectionListener, Link

JOIN_TARGET_S, DEATH_TARGET_S = 5.0, 0.5
TOKEN = b"secret"
RUN_ID = "scale"
BEAT_S, PATIENCE_S = 1.0, 60.0
QUIET_S = 3.0  # between the last one's seat and the death: all heartbeat, and nothing else happens
PROPOSED = re.compile(rb'\[\d+,"Propose",\[(\d+),"(\w+)"\],([^,]+),\[(\d+),')
HALT = f'[{VERSION},"Halt",'.encode()
FEW_CALLS = 256  # under way at once in each client process


class Node:
    """What a client remembers of one of its nodes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = f"m{number}"
        self.has_key = False  # of the coordinator
        self.ballot: Ballot | None = None
        self.stamp = nan
        self.round = self.agreed = -1


class Clients(ConnectionListener):
    """The links of one client process; each is a node that joins, heartbeats, votes and obeys."""

    def __init__(self, port: int, nodes: int, first: int, count: int) -> None:
        self._port, self._nodes, self._first, self._count = port, nodes, first, count
        self._selector = selectors.DefaultSelector()
        self._of: dict[Link, Node] = {}
        self._seats: dict[int, tuple[int, str, int]] = {}
        self._links: list[Link] = []
        self._beaten_at, self._next = time.monotonic(), 0
        self._under_way = 0
        self._stopped: set[int] = set()
        self._is_over = False

    def run(self) -> None:
        """Join; say so; then wait for the word to die, and for the news of a death."""
        links = self._links
        begin = time.time()
        while len(self._seats) < self._count:
            while len(links) < self._count and self._under_way < FEW_CALLS:
                link = Caller(("127.0.0.1", self._port), self._selector, self, TOKEN)
                self._of[link] = Node(self._first + len(links))
                self._under_way += 1
                links.append(link)
            self._turn()
        self._tell({"begin": begin, "end": time.time(), "seats": list(self._seats.values())})
        expected, died = self._count, None
        if self._await_word() == "die":
            died = time.time()
            del self._of[links[0]]
            links[0].close()
            expected -= 1
        while len(self._stopped) < expected and not self._is_over:
            self._turn()
        self._tell({"died": died, "told": time.time(), "stopped": len(self._stopped)})
        sys.stdin.readline()

    def _await_word(self) -> str:
        """The next word of the coordinator's process; meanwhile nodes send heartbeats as before."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda: None)
        while not select.select([sys.stdin], [], [], 0)[0]:
            self._turn()
        self._selector.unregister(sys.stdin)
        return sys.stdin.readline().strip()

    def opened(self, link: Link) -> None:
        """See ConnectionListener."""
        self._under_way -= 1
        node = self._of[link]
        link.send(node.key.encode())
        member = Member(
            key=node.key, host=f"node{node.number}", local_world_size=8, address="127.0.0.1"
        )
        join = Join(
            run_id=RUN_ID,
            report=NodeReport(),
            min_nodes=self._nodes,
            max_nodes=self._nodes,
            member=member,
        )
        link.send(encode(join))

    def received(self, link: Link, payload: bytes) -> None:
        """See ConnectionListener."""
        node = self._of[link]
        if not node.has_key:
            node.has_key = True
            return
        if payload[:1] == ACK:
            _, _, _, node.stamp, _, node.agreed, _, _ = ACK_NUMBERS.unpack_from(payload)
            return
        if payload.startswith(HALT):
            self._stopped.add(node.number)
            return
        proposed = PROPOSED.match(payload)
        if proposed is not None:
            ballot = Ballot(int(proposed[1]), proposed[2].decode())
            stamp, number = float(proposed[3]), int(proposed[4])
            accepted = Accepted(ballot=ballot, voter=node.key, stamp=stamp, number=number)
            link.send(encode(accepted))
            return
        match decode(payload):
            case Led(ballot=ballot, stamp=agreed_at, number=number):
                node.ballot, node.agreed = ballot, number
                node.stamp = nan if agreed_at is None else agreed_at
                self._beat(link, node)
            case Go(start=Start(seat=seat)):
                node.round = seat.number
                self._seats[node.number] = (seat.node_rank, seat.store.host, seat.nodes)
            case Over():
                self._is_over = True

    def failed(self, link: Link, what: str) -> None:
        """See ConnectionListener."""
        print(what, file=sys.stderr)

    def closed(self, link: Link, why: str) -> None:
        """See ConnectionListener."""
        raise SystemExit(f"node {self._of[link].number} lost the coordinator: {why}")

    def _beat(self, link: Link, node: Node) -> None:
        assert node.ballot is not None
        times = (time.monotonic(), node.stamp)
        runs = node.round >= 0
        numbers = (node.agreed, node.round, 0, runs, not runs)
        head = BEAT_NUMBERS.pack(BEAT, node.ballot.term, *times, *numbers)
        link.send(head + f"{node.key}\0{node.ballot.candidate}".encode())

    def _turn(self) -> None:
        for key, _ in self._selector.select(0.02):
            key.data()
        now = time.monotonic()
        due = int(min(1.0, (now - self._beaten_at) / BEAT_S) * len(self._links))
        if not due:
            return
        self._beaten_at = now
        for _ in range(due):  # in turn: agents of their own would not all heartbeat at one time
            self._next = (self._next + 1) % len(self._links)
            link = self._links[self._next]
            node = self._of.get(link)
            if node is not None and node.ballot is not None:
                self._beat(link, node)

    def _tell(self, what: dict[str, object]) -> None:
        print(json.dumps(what), flush=True)


def coordinator(nodes: int) -> tuple[ElasticRounds, int]:
    """The agent that gathers, for this many nodes and itself."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    member = Member(key="m0", host="node0", local_world_size=8, address="127.0.0.1", port=port)
    setup = Setup(
        me=member,
        run_id=RUN_ID,
        limits=Limits(min_nodes=nodes, max_nodes=nodes),
        endpoints=(Endpoint(host="127.0.0.1", port=port),),
        slot=0,
        timeouts=Timeouts(heartbeat_s=BEAT_S),
    )
    return ElasticRounds(setup, listener, TOKEN), port


def measure(nodes: int, processes: int) -> dict[str, float]:
    """One rendezvous of this many nodes, and one death."""
    host, port = coordinator(nodes)
    selector = selectors.DefaultSelector()
    host.open(selector)
    share = (nodes - 1) // processes
    clients = []
    for i in range(processes):
        count = share if i < processes - 1 else nodes - 1 - share * (processes - 1)
        numbers = map(str, (port, nodes, 1 + share * i, count))
        command = [sys.executable, __file__, "--client", *numbers]
        clients.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    try:
        cpu = time.process_time()
        joined = answers(host, selector, clients)
        cpu = time.process_time() - cpu
        seats = [seat for each in joined for seat in each["seats"]]
        check(seats, nodes)
        work(host, selector, QUIET_S)
        for i, client in enumerate(clients):
            say(client, "die" if i == 0 else "wait")
        told = answers(host, selector, clients)
        if max(each["told"] for each in told) <= told[0]["died"]:
            raise SystemExit(
                "the round was ended before the death: some nodes were silent, or so"
                " it seemed to a coordinator that was busy with all of them"
            )
        if sum(each["stopped"] for each in told) != nodes - 2:
            raise SystemExit("not all nodes were told of the death")
    finally:
        for client in clients:
            client.kill()
            client.wait()
        host.close()
    return {
        "nodes": nodes,
        "join_s": max(each["end"] for each in joined) - min(each["begin"] for each in joined),
        "coordinator_cpu_s": cpu,
        "death_s": max(each["told"] for each in told) - told[0]["died"],
    }


def check(seats: list[list[Any]], nodes: int) -> None:
    """Each has a rank of its own, and all know as many nodes and an address."""
    if sorted(rank for rank, _, _ in seats) != list(range(1, nodes)):
        raise SystemExit("the ranks are not 1, 2, ...")
    if {(host, count) for _, host, count in seats} != {("127.0.0.1", nodes)}:
        raise SystemExit("not all nodes know the same store, or number of nodes")


def answers(
    host: ElasticRounds, selector: selectors.BaseSelector, clients: list[subprocess.Popen[str]]
) -> list[dict[str, Any]]:
    """One line of each client; the coordinator works meanwhile, as in an agent's loop."""
    lines: dict[int, str] = {}

    def read(i: int) -> None:
        stdout = clients[i].stdout
        assert stdout is not None
        lines[i] = stdout.readline()
        selector.unregister(stdout)

    for i, client in enumerate(clients):
        assert client.stdout is not None
        selector.register(client.stdout, selectors.EVENT_READ, lambda i=i: read(i))
    deadline = time.monotonic() + PATIENCE_S
    while len(lines) < len(clients):
        if time.monotonic() > deadline:
            raise SystemExit(f"only {len(lines)} of {len(clients)} processes are done")
        turn(host, selector, PATIENCE_S)
    return [json.loads(lines[i]) for i in range(len(clients))]


def work(host: ElasticRounds, selector: selectors.BaseSelector, for_s: float) -> None:
    """Let the coordinator work for so long."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        turn(host, selector, end - time.monotonic())


def turn(host: ElasticRounds, selector: selectors.BaseSelector, most_s: float) -> None:
    """One turn of the coordinator's loop, as in an agent's."""
    alarm_s = most_s if host.wake_at is None else host.wake_at - time.monotonic()
    for key, _ in selector.select(max(0.0, min(alarm_s, most_s))):
        key.data()
    if host.wake_at is not None and time.monotonic() >= host.wake_at:
        host.tick()
    host.orders.clear()


def say(client: subprocess.Popen[str], word: str) -> None:
    assert client.stdin is not None
    client.stdin.write(word + "\n")
    client.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--processes", type=int, default=2, help="in which the nodes are")
    parser.add_argument("--no-results", action="store_true", help="write no file")
    parser.add_argument("--client", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.client:
        return Clients(*options.client).run()
    rows = [measure(nodes, options.processes) for nodes in options.nodes]
    print(f"rendezvous of real sockets with a token, {os.cpu_count()} cores for all\n")
    columns = ("nodes", "join_s", "coordinator_cpu_s", "death_s")
    cells = [[f"{row['nodes']}", *(f"{row[name]:.3f}" for name in columns[1:])] for row in rows]
    print_table([name.replace("_", " ") for name in columns], cells)
    last = rows[-1]
    for name, target in (("join_s", JOIN_TARGET_S), ("death_s", DEATH_TARGET_S)):
        verdict = "met" if last[name] <= target else "MISSED"
        print(f"{name} of {last['nodes']} nodes: {last[name]:.3f} (target: {target:g}): {verdict}")
    if not options.no_results:
        save("rendezvous_scale", rows)
    return None


if __name__ == "__main__":
    main()
