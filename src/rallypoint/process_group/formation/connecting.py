"""Brings the members of one group together: they meet at a store, connect, and agree.

    1. each member says on which host it is; the first one makes a table of the hosts
    2. on each host, the first member creates the shared region and hands it to the others
    3. members on different hosts connect with each other (mesh.py)

No two groups of a job have the same prefix, so nothing of an earlier group can be mistaken for this
one's. The last member to finish deletes the keys at the store. Which ranks form which group is
decided elsewhere.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from rallypoint._native import let_peers_read, region_bytes
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    HostError,
    InvalidArgumentError,
    PeerLostError,
    StoreError,
    SystemCallError,
)
from rallypoint.base.refusals import tells_refusals
from rallypoint.cluster.interface import host_identity, machine_of
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.engine.communicator import Communicator, FarPeer, LateMesh, PeerMemoryAccess
from rallypoint.engine.recording import describe
from rallypoint.engine.segment import Offer, SegmentOwner, join_segment
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.formation.explain_network import NetworkLook
from rallypoint.process_group.formation.host_network import Congestion, network_of
from rallypoint.process_group.formation.mesh import (
    Pass,
    RankAddress,
    connect_all,
    connect_neighbours,
    listen,
)
from rallypoint.process_group.groups.accounts import Site, formed_key, found_while_forming
from rallypoint.process_group.groups.debug import tell_roster
from rallypoint.process_group.planning import (
    AlgorithmOptions,
    Algorithms,
    ranks_per_host,
)
from rallypoint.store.init_method import Presence, await_ranks
from rallypoint.store.store import Store

SPINS_WITH_CORES = 50
YIELDS = 1000


def own_cores() -> str:
    """The cores that this thread may use, as the hexadecimal digits of a mask.

    Pods and containers are separate hosts, but those of one machine share its cores. Each rank may
    use its own set of cores (taskset, `--numa-binding`): two ranks bound to one core each have
    enough cores, two bound to the same core do not. Reasons and figures are in
    docs/decisions/003-waiting.md.
    """
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def have_cores(machines: Sequence[str], cores: Sequence[str]) -> list[bool]:
    """By rank, whether its machine has a core for each, from what `own_cores` says on each rank."""
    together: dict[str, int] = {}
    for machine, digits in zip(machines, cores, strict=True):
        together[machine] = together.get(machine, 0) | int(digits, 16)
    ranks = Counter(machines)
    return [together[machine].bit_count() >= ranks[machine] for machine in machines]


STREAMS = 1  # docs/decisions/046-tcp.md
_MOST_STREAMS = 16
EAGER_HOSTS = 64  # docs/decisions/092-far-peers.md


@dataclass(frozen=True, slots=True)
class _Table:
    """What the first member sends to all others.

    Attributes:
        hosts: by rank, the number of its host; the same for ranks that share memory.
        have_cores: by rank, whether there is a core for each rank of its machine.
        secret: a secret of the members.
        streams: the number of data connections between two ranks on different hosts.
        is_sparse: connections between hosts are made when they are first needed.
    """

    hosts: list[int]
    have_cores: list[bool]
    secret: str
    streams: int
    is_sparse: bool
    override: str
    model_text: str

    @property
    def options(self) -> AlgorithmOptions:
        return AlgorithmOptions(self.override, self.model_text)


@tells_refusals
def form_communicator(
    store: Store,
    prefix: str,
    *,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    options: AlgorithmOptions,
    backend: str = "rallypoint",
    name: str = DEFAULT_GROUP,
    way: str = "",
    done: str = "",
    is_across_jobs: bool = False,
    connect_timeout: timedelta | None = None,
) -> tuple[Communicator, Algorithms]:
    """Form the communicator of `members` (global ranks); this process is the one at `rank`.

    Returns it with its algorithms, from the first member's `options`, which apply to all. `name` is
    the group's name for people. Once no member needs the store, the last one deletes their keys and
    the key `way`, and sets the key `done`. Members of several jobs (`is_across_jobs`) know each
    other only through this store, not by a run's name or its token. Once all members have come,
    they have `connect_timeout` left for each hundred of them (None: the rest of `timeout`).
    """
    deadline = time.monotonic() + timeout.total_seconds()
    identity = f"{host_identity()}/{rank}" if backend == "tcp" else host_identity()
    told = await_ranks(
        store,
        prefix,
        rank=rank,
        world_size=len(members),
        timeout=timeout,
        global_ranks=members,
        says=f"{identity} {own_cores()}",
        answer=lambda said: json.dumps(_tabulate(said, options)),
    )
    table = _Table(**json.loads(told))
    if connect_timeout is not None:
        hundreds = -(-len(members) // 100)
        limit_s = hundreds * connect_timeout.total_seconds()
        deadline = min(deadline, time.monotonic() + limit_s)
    presence = Presence(store, prefix, members)
    if backend == "shm":
        _check_one_host(table.hosts, members)
    # Not in what follows: an address that cannot be found is this rank's own trouble.
    network = network_of(store, backend) if len(set(table.hosts)) > 1 else None
    look = NetworkLook()
    admission = _admission(prefix, table.secret, is_across_jobs=is_across_jobs)
    try:
        peers, mesh = _connect(
            store, prefix, rank, members, table, deadline, network, presence, look, admission
        )
        algorithms = Algorithms(table.options)
        description = describe(name, prefix, members)
        attach = _attacher(rank, members, timeout, table, peers, mesh, algorithms, description)
        communicator, reach = _share(
            store, prefix, rank, members, table.hosts, deadline, attach, presence
        )
        communicator.set_reach(reach)
        communicator.watch_peers()
    except SystemCallError:
        raise  # what this rank lacks is no other's fault
    except (PeerLostError, HostError) as error:
        is_last_to_leave = rank == 0 and name == DEFAULT_GROUP
        found = found_while_forming(presence, error, is_last_to_leave=is_last_to_leave)
        raise look.added_to(found) from None
    except CollectiveTimeoutError as error:
        raise look.added_to(error) from None
    if name == DEFAULT_GROUP:
        tell_roster(store, prefix, rank=rank, size=len(members), network=network, backend=backend)
    hosts = table.hosts
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    keys = [presence.said_key(rank) for rank in range(len(hosts))]
    keys += [f"{prefix}/segment/{first}" for first in firsts]
    keys += [f"{prefix}/place/{rank}" for rank in range(len(hosts)) if len(firsts) > 1]
    say_formed(store, prefix, len(members), keys, way=way, done=done)
    return communicator, algorithms


def _tabulate(said: Sequence[str], options: AlgorithmOptions) -> dict[str, object]:
    """The table, from the host and the cores of each rank."""
    identities, cores = zip(*(each.rsplit(" ", 1) for each in said), strict=True)
    numbers: dict[str, int] = {}
    hosts = [numbers.setdefault(identity, len(numbers)) for identity in identities]
    return {
        "hosts": hosts,
        "have_cores": have_cores([machine_of(each) for each in identities], cores),
        "secret": os.urandom(32).hex(),
        "streams": _wished_streams(),
        "is_sparse": len(numbers) > _eager_hosts(),
        "override": options.override,
        "model_text": options.model_text,
    }


def _wished_streams() -> int:
    text = os.environ.get("RALLYPOINT_STREAMS", str(STREAMS))
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_STREAMS:
        raise InvalidArgumentError(
            f"RALLYPOINT_STREAMS={text!r} must be a number of connections from 1 to {_MOST_STREAMS}"
        )
    return int(text)


def _eager_hosts() -> int:
    """Up to this many hosts, each rank connects to each rank on other hosts at the start."""
    text = os.environ.get("RALLYPOINT_EAGER_HOSTS", str(EAGER_HOSTS))
    if not text.isdecimal():
        raise InvalidArgumentError(f"RALLYPOINT_EAGER_HOSTS={text!r} must be a number of hosts")
    return int(text)


def say_formed(
    store: Store, prefix: str, ranks: int, keys: Sequence[str], *, way: str = "", done: str = ""
) -> None:
    """Report that this rank no longer needs the keys at the store; the last one deletes them.

    Args:
        keys: further keys, besides those of await_ranks.
        way, done: as in form_communicator.
    """
    if store.add(formed_key(prefix), 1) < ranks:
        return
    # A rank that checks meanwhile if it may still join a world (opening.py) sees that it may not.
    came = [f"{prefix}/{rank}/came" for rank in range(ranks)]
    came += [f"{prefix}/{rank}" for rank in range(ranks)]
    _forget(store, [*keys, *came, formed_key(prefix), f"{prefix}/all"] + [way] * bool(way))
    if done:
        store.set(done, "")


def _forget(store: Store, keys: Sequence[str]) -> None:
    with suppress(StoreError, RuntimeError):  # a store that cannot, or that has just ended
        store.delete_keys(keys)


def _check_one_host(hosts: Sequence[int], members: Sequence[int]) -> None:
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise HostError(
                f"backend='shm' needs all ranks on one machine, but rank {members[rank]} and rank "
                f"{members[0]} are on different ones; use backend='rallypoint'"
            )


def _connect(
    store: Store,
    prefix: str,
    rank: int,
    members: Sequence[int],
    table: _Table,
    deadline: float,
    network: NetworkChoice | None,
    presence: Presence,
    look: NetworkLook,
    admission: Pass,
) -> tuple[list[FarPeer], LateMesh | None]:
    """Connect with the members on other hosts, if there are any."""
    far = [peer for peer, host in enumerate(table.hosts) if host != table.hosts[rank]]
    if not far or network is None:
        return [], None
    congestion = Congestion()
    everywhere = "::" if ":" in network.address else "0.0.0.0"  # others know us by one of NAT's
    listener = listen(network.address if network.is_own else everywhere, congestion)
    place = [network.address, listener.getsockname()[1], os.getpid(), _told(network)]
    store.set(f"{prefix}/place/{rank}", json.dumps(place))
    wanted = range(len(members)) if table.is_sparse else far
    keys = [f"{prefix}/place/{peer}" for peer in wanted]
    presence.wait(keys, deadline)
    told = store.multi_get(keys)
    places = {peer: RankAddress(*json.loads(each)) for peer, each in zip(wanted, told, strict=True)}
    if table.is_sparse:
        return connect_neighbours(
            listener,
            rank=rank,
            places=places,
            far=far,
            members=members,
            admission=admission,
            streams=table.streams,
            congestion=congestion,
            deadline=deadline,
            check=presence.check_all,
            look=look,
        )
    peers = connect_all(
        listener,
        rank=rank,
        places=places,
        members=members,
        admission=admission,
        streams=table.streams,
        congestion=congestion,
        deadline=deadline,
        check=presence.check_all,
        look=look,
    )
    return peers, None


def _admission(prefix: str, secret: str, *, is_across_jobs: bool) -> Pass:
    """What identifies connections of the group."""
    run = "" if is_across_jobs else os.environ.get("TORCHELASTIC_RUN_ID", "")
    token = "" if is_across_jobs else os.environ.get("RALLYPOINT_TOKEN", "")
    return Pass(f"{run}/{prefix}", bytes.fromhex(secret), os.fsencode(token))


def _told(network: NetworkChoice) -> str:
    """What to report about it if others cannot connect."""
    return f"its host chose {network.name or network.address}: {network.why}"


def _share(
    store: Store,
    prefix: str,
    rank: int,
    members: Sequence[int],
    hosts: Sequence[int],
    deadline: float,
    attach: Callable[[int], Communicator],
    presence: Presence,
) -> tuple[Communicator, PeerMemoryAccess]:
    """Map the region shared by the members of this host; returns what peer memory is readable."""
    wished = _wished_reach()
    if wished:
        let_peers_read()
    here = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    key = f"{prefix}/segment/{here[0]}"
    if rank != here[0]:
        presence.wait([key], deadline)
        address, secret = json.loads(store.get(key))
        offer = Offer(address, bytes.fromhex(secret))
        communicator, reach = join_segment(
            offer,
            rank,
            deadline,
            attach,
            lambda mapped: mapped.probe_memory() & wished,
            presence.check_all,
            first=members[here[0]],
        )
        return communicator, PeerMemoryAccess(reach)
    owner = SegmentOwner(region_bytes(len(hosts)))
    reach = 0
    try:
        communicator = attach(owner.fd)
        if len(here) > 1:
            store.set(key, json.dumps([owner.offer.address, owner.offer.secret.hex()]))
            reach = owner.hand_out(
                {peer: members[peer] for peer in here[1:]},
                deadline,
                lambda: communicator.probe_memory() & wished,
                presence.check_all,
            )
    finally:
        owner.close()
    return communicator, PeerMemoryAccess(reach)


def _wished_reach() -> PeerMemoryAccess:
    """Private memory is read where that is found to be faster, or, if it is wished, always."""
    text = os.environ.get("RALLYPOINT_DIRECT", "")
    if text not in ("", "0", "1"):
        raise InvalidArgumentError(f"RALLYPOINT_DIRECT={text!r} must be 0 or 1")
    if text == "0":
        return PeerMemoryAccess.NOTHING
    reach = PeerMemoryAccess.ARENAS | PeerMemoryAccess.PRIVATE
    return reach | PeerMemoryAccess.ALWAYS if text == "1" else reach


def _attacher(
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    table: _Table,
    peers: Sequence[FarPeer],
    mesh: LateMesh | None,
    algorithms: Algorithms,
    description: str,
) -> Callable[[int], Communicator]:
    """How this rank turns the shared region's descriptor into its communicator."""
    ranks = len(members)
    return lambda fd: Communicator(
        fd,
        rank=rank,
        ranks=ranks,
        plan=algorithms.planner(
            rank, ranks, ranks_per_host(table.hosts), has_cores=all(table.have_cores)
        ),
        timeout_s=timeout.total_seconds(),
        spins=SPINS_WITH_CORES if table.have_cores[rank] else 0,
        yields=YIELDS,
        global_ranks=members,
        synchronous_send=os.environ.get("RALLYPOINT_SYNCHRONOUS_SEND", "0") == "1",
        peers=peers,
        description=description,
        site=lambda: str(Site.of_caller()),
        mesh=mesh,
    )
