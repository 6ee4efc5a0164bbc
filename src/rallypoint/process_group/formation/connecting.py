"""Connects the members of one group: they find each other through a store, connect, and agree.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from rallypoint._native import let_peers_read, region_bytes
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    HostError,
    InvalidArgumentError,
    PeerLostError,
    StoreError,
    SystemCallError,
)
from rallypoint.base.files import host_identity, machine_of
from rallypoint.base.record import Record
from rallypoint.base.refusals import refusal_in  # not later: an import needs a descriptor
from rallypoint.engine.communicator import Communicator, FarPeer, LateMesh, PeerMemoryAccess
from rallypoint.engine.recording import describe
from rallypoint.engine.segment import Offer, SegmentOwner, join_segment
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.groups.call_errors import Site, formed_key, found_while_forming
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms, ranks_per_host
from rallypoint.store.init_method import Presence, await_ranks
from rallypoint.store.store import Store

if TYPE_CHECKING:
    from rallypoint.cluster.interface_choice import NetworkChoice
    from rallypoint.process_group.formation.host_network import AnyError, NetworkDiagnosis

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


class _Table(Record):
    """What the first member sends to all others.

    Attributes:
        hosts: by rank, the number of its host; the same for ranks that share memory.
        have_cores: by rank, whether there is a core for each rank of its machine.
    """

    hosts: list[int]
    have_cores: list[bool]
    secret: str
    streams: int  # data connections between two ranks on different hosts
    is_sparse: bool  # connections between hosts are made when they are first needed
    override: str
    model_text: str


class GroupRequest(Record, kw_only=True):
    """A group that is to form, as one of its members asks for it.

    Attributes:
        store, prefix: the store through which the members connect, and the beginning of their keys
            there.
        rank, members: of this process in the group, and the members' global ranks.
        timeout: how long forming, and later a call, waits for a peer.
        options: how programs are chosen; the first member's apply to all.
        backend: as `check_backend` returns it.
        device: of this process, for libraries that take device memory; None: by LOCAL_RANK.
        name: the group's name for people.
        key_to_here: led the members here; deleted once no member needs the store any more.
        key_when_formed: is then set; empty if no process waits for it.
        is_across_jobs: the members are processes of several jobs, which know each other only
            through this store, not by a run's name or its token.
        connect_timeout: how long connecting may take once all have come, for each hundred members;
            None: the rest of `timeout`.
        gone: returns the ranks, in the group, that are known to have ended or left.
    """

    store: Store
    prefix: str
    rank: int
    members: Sequence[int]
    timeout: timedelta
    options: AlgorithmOptions
    backend: str = "rallypoint"
    device: object = None
    name: str = DEFAULT_GROUP
    key_to_here: str = ""
    key_when_formed: str = ""
    is_across_jobs: bool = False
    connect_timeout: timedelta | None = None
    gone: Callable[[], Collection[int]] = tuple

    def await_members(
        self, prefix: str, *, says: str = "", answer: Callable[[list[str]], str] | None = None
    ) -> str:
        """Wait until all members have called this with the same prefix; see `await_ranks`."""
        return await_ranks(
            self.store,
            prefix,
            rank=self.rank,
            world_size=len(self.members),
            timeout=self.timeout,
            global_ranks=self.members,
            says=says,
            answer=answer,
            gone=self.gone,
        )

    def report_formed(self, keys: Sequence[str] = ()) -> None:
        """This member needs no more keys at the store; the last one deletes them, also `keys`."""
        prefix, ranks, formed = self.prefix, range(len(self.members)), formed_key(self.prefix)
        if self.store.add(formed, 1) < len(ranks):
            return
        # A rank that checks meanwhile if it may join a world (opening.py) sees that it cannot.
        done = [*keys, *(f"{prefix}/{rank}/came" for rank in ranks)]
        done += [*(f"{prefix}/{rank}" for rank in ranks), formed, f"{prefix}/all"]
        if self.key_to_here:
            done.append(self.key_to_here)
        with suppress(StoreError, RuntimeError):  # a store that cannot, or that has just ended
            self.store.delete_keys(done)
        if self.key_when_formed:
            self.store.set(self.key_when_formed, "")


def form_communicator(request: GroupRequest) -> tuple[Communicator, Algorithms]:
    """Form the communicator of a group, with the algorithms that its calls can use."""
    try:
        return _form(request)
    except (OSError, RuntimeError) as error:
        refusal = refusal_in(error)
        if refusal is None:
            raise
        raise refusal from None


def _form(request: GroupRequest) -> tuple[Communicator, Algorithms]:
    store, prefix, rank, members = request.store, request.prefix, request.rank, request.members
    deadline = time.monotonic() + request.timeout.total_seconds()
    identity = host_identity() + f"/{rank}" * (request.backend == "tcp")
    text = request.await_members(
        prefix,
        says=f"{identity} {own_cores()}",
        answer=lambda said: json.dumps(_tabulate(said, request.options)),
    )
    table = _Table(**json.loads(text))
    if request.connect_timeout is not None:
        hundreds = -(-len(members) // 100)
        limit_s = hundreds * request.connect_timeout.total_seconds()
        deadline = min(deadline, time.monotonic() + limit_s)
    if request.backend == "shm":
        _check_one_host(table.hosts, members)
    network = None
    if len(set(table.hosts)) > 1:
        from rallypoint.process_group.formation.host_network import network_of  # one host has none

        # Outside the try: that no address is found is this rank's own failure.
        network = network_of(store, request.backend)
    member = _Member(request, table, deadline)
    try:
        peers, mesh = ([], None) if network is None else member.connect(network)
        algorithms = Algorithms(AlgorithmOptions(table.override, table.model_text))
        communicator, readable = member.share(
            lambda fd: _attach(fd, request, table, peers, mesh, algorithms)
        )
        communicator.set_reach(readable)
        communicator.watch_peers()
    except SystemCallError:
        raise  # what this rank lacks is no other's fault
    except (PeerLostError, HostError) as error:
        is_last_to_leave = rank == 0 and request.name == DEFAULT_GROUP
        found = found_while_forming(member.presence, error, is_last_to_leave=is_last_to_leave)
        raise member.explained(found) from None
    except CollectiveTimeoutError as error:
        raise member.explained(error) from None
    if request.name == DEFAULT_GROUP and os.environ.get("RALLYPOINT_DEBUG") == "1":
        from rallypoint.process_group.groups.debug import print_debug_table

        size, backend = len(members), request.backend
        print_debug_table(store, prefix, rank=rank, size=size, network=network, backend=backend)
    request.report_formed(member.keys())
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
        "streams": _streams(),
        "is_sparse": len(numbers) > _eager_hosts(),
        "override": options.override,
        "model_text": options.model_text,
    }


def _streams() -> int:
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


def _check_one_host(hosts: Sequence[int], members: Sequence[int]) -> None:
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise HostError(
                f"backend='shm' needs all ranks on one machine, but rank {members[rank]} and rank "
                f"{members[0]} are on different ones; use backend='rallypoint'"
            )


class _Member:
    """One member, once all have come and have the table."""

    def __init__(self, request: GroupRequest, table: _Table, deadline: float) -> None:
        self.presence = Presence(request.store, request.prefix, request.members)
        self._diagnosis: NetworkDiagnosis | None = None
        self._request = request
        self._table = table
        self._deadline = deadline

    def connect(self, network: NetworkChoice) -> tuple[list[FarPeer], LateMesh | None]:
        """Connect with the members on other hosts."""
        # Imported here so that groups of one host do not pay for it.
        from rallypoint.process_group.formation.host_network import Congestion, NetworkDiagnosis
        from rallypoint.process_group.formation.mesh import Mesh, Pass, RankAddress, listen

        request, table = self._request, self._table
        self._diagnosis = NetworkDiagnosis()
        congestion = Congestion()
        everywhere = "::" if ":" in network.address else "0.0.0.0"  # others know one of NAT's
        listener = listen(network.address if network.is_own else everywhere, congestion)
        # What others report if they cannot connect.
        choice = f"its host chose {network.name or network.address}: {network.why}"
        own = [network.address, listener.getsockname()[1], os.getpid(), choice]
        request.store.set(self._address_key(request.rank), json.dumps(own))
        far = [rank for rank, host in enumerate(table.hosts) if host != table.hosts[request.rank]]
        wanted = range(len(request.members)) if table.is_sparse else far
        keys = [self._address_key(rank) for rank in wanted]
        self.presence.wait(keys, self._deadline)
        texts = request.store.multi_get(keys)
        addresses = {
            rank: RankAddress(*json.loads(text)) for rank, text in zip(wanted, texts, strict=True)
        }
        # What identifies connections of the group.
        environ: Mapping[str, str] = {} if request.is_across_jobs else os.environ
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        token = os.fsencode(environ.get("RALLYPOINT_TOKEN", ""))
        mesh = Mesh(
            listener,
            rank=request.rank,
            members=request.members,
            admission=Pass(f"{run}/{request.prefix}", bytes.fromhex(table.secret), token),
            congestion=congestion,
            deadline=self._deadline,
            check=self.presence.check_all,
            diagnosis=self._diagnosis,
        )
        if table.is_sparse:
            return mesh.connect_neighbours(addresses, far, table.streams)
        return mesh.connect_all(addresses, table.streams), None

    def explained(self, error: AnyError) -> AnyError:
        """The error, with what is known of the network to other hosts."""
        return error if self._diagnosis is None else self._diagnosis.added_to(error)

    def share(self, attach: Callable[[int], Communicator]) -> tuple[Communicator, PeerMemoryAccess]:
        """Map the region shared by the members of this host; returns what memory is readable."""
        wanted = _wanted_memory()
        if wanted:
            let_peers_read()
        request, hosts, check = self._request, self._table.hosts, self.presence.check_all
        first, *others = (rank for rank, host in enumerate(hosts) if host == hosts[request.rank])
        key = self._segment_key(first)
        if request.rank != first:
            self.presence.wait([key], self._deadline)
            address, secret = json.loads(request.store.get(key))
            communicator, readable = join_segment(
                Offer(address, bytes.fromhex(secret)),
                request.rank,
                self._deadline,
                attach,
                lambda mapped: mapped.probe_memory() & wanted,
                check,
                first=request.members[first],
            )
            return communicator, PeerMemoryAccess(readable)
        owner = SegmentOwner(region_bytes(len(hosts)))
        readable = 0
        try:
            communicator = attach(owner.fd)
            if others:
                offer = owner.offer
                request.store.set(key, json.dumps([offer.address, offer.secret.hex()]))
                names = {rank: request.members[rank] for rank in others}
                probe = communicator.probe_memory
                readable = owner.hand_out(names, self._deadline, lambda: probe() & wanted, check)
        finally:
            owner.close()
        return communicator, PeerMemoryAccess(readable)

    def keys(self) -> list[str]:
        """All that the members have written."""
        hosts = self._table.hosts
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        keys = [self.presence.said_key(rank) for rank in range(len(hosts))]
        keys += map(self._segment_key, firsts)
        return keys + [self._address_key(rank) for rank in range(len(hosts)) if len(firsts) > 1]

    def _address_key(self, rank: int) -> str:
        return f"{self._request.prefix}/place/{rank}"

    def _segment_key(self, first: int) -> str:
        return f"{self._request.prefix}/segment/{first}"


def _wanted_memory() -> PeerMemoryAccess:
    """Private memory is read where that has proved faster, or, with RALLYPOINT_DIRECT=1, always."""
    text = os.environ.get("RALLYPOINT_DIRECT", "")
    if text not in ("", "0", "1"):
        raise InvalidArgumentError(f"RALLYPOINT_DIRECT={text!r} must be 0 or 1")
    if text == "0":
        return PeerMemoryAccess.NOTHING
    both = PeerMemoryAccess.ARENAS | PeerMemoryAccess.PRIVATE
    return both | PeerMemoryAccess.ALWAYS if text == "1" else both


def _attach(
    fd: int,
    request: GroupRequest,
    table: _Table,
    peers: Sequence[FarPeer],
    mesh: LateMesh | None,
    algorithms: Algorithms,
) -> Communicator:
    """The communicator of this member, in the shared region of this descriptor."""
    rank, ranks = request.rank, len(request.members)
    has_cores = all(table.have_cores)
    return Communicator(
        fd,
        rank=rank,
        ranks=ranks,
        plan=algorithms.planner(rank, ranks, ranks_per_host(table.hosts), has_cores=has_cores),
        timeout_s=request.timeout.total_seconds(),
        spins=SPINS_WITH_CORES if table.have_cores[rank] else 0,
        yields=YIELDS,
        global_ranks=request.members,
        synchronous_send=os.environ.get("RALLYPOINT_SYNCHRONOUS_SEND", "0") == "1",
        peers=peers,
        description=describe(request.name, request.prefix, request.members),
        site=lambda: str(Site.of_caller()),
        mesh=mesh,
    )
