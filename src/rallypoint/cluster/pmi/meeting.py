"""Connects processes that mpirun, srun or similar started, through a store of rank 0.

    rank 0     opens it at a free port, and has the launcher pass on its addresses, the port and
               a token to all (mpi4py, pmi.py, pmix.py)
    the others try these addresses, until one of them proves that it knows the token

srun passes on no messages. There, rank 0 takes the first free port of a few that are derived from
the step, and the others try them all. Processes connect once; all their groups form at that store,
which lives as long as rank 0. cluster/environments determines the rank of a process.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import HostError, InvalidArgumentError, StoreConnectionError
from rallypoint.cluster.environments import LaunchedProcess, find_process
from rallypoint.cluster.network import addresses_of, can_bind, chosen_address, own_addresses
from rallypoint.cluster.pmi import Waiting
from rallypoint.store.client import TCPStore
from rallypoint.store.init_method import JoinedStore, await_ranks
from rallypoint.store.server import StoreServer
from rallypoint.store.store import Store

_TOKEN = "RALLYPOINT_TOKEN"
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_LOOPBACK, _EVERYWHERE = "127.0.0.1", "::"
_MOST_TEXT = 900  # PMI limits values to 1024 characters
_PAUSE_S = 0.05
_FIRST_TRY_S, _LONGEST_TRY_S = 0.5, 8.0

HostAndPort = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store through which this process has connected to the others.

    Attributes:
        address: rank 0's, as this process reaches it; on rank 0's machine, as other machines do.
        store: a connection, which shows the others that this process exists.
        server: rank 0's server, which lives as long as this object.
    """

    process: LaunchedProcess
    address: str
    port: int
    token: bytes
    store: Store
    server: StoreServer | None

    def open(self, timeout: timedelta) -> JoinedStore:
        """Open another connection to the store."""
        store = TCPStore(
            self.address, self.port, timeout=timeout, wait_for_workers=False, token=self.token
        )
        me = self.process
        return JoinedStore(store=store, rank=me.rank, world_size=me.size, is_rank_0s=True)


_meeting: Meeting | None = None
_announced: tuple[str, ...] = ()


def open_launched(
    environ: MutableMapping[str, str], *, rank: int = -1, world_size: int = -1, timeout: timedelta
) -> JoinedStore | None:
    """The store of the job whose launcher started this process; None if ``env://`` suffices.

    It also sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. The arguments are those of
    `find_process`.
    """
    if _meeting is not None and _announced == _said(environ):
        return _meeting.open(timeout)  # this process announced that address to PyTorch itself
    process = process_to_meet(environ, rank=rank, world_size=world_size)
    return None if process is None else meet(process, timeout, environ).open(timeout)


def process_to_meet(
    environ: MutableMapping[str, str], *, rank: int = -1, world_size: int = -1
) -> LaunchedProcess | None:
    """This process's identity, if it needs a rendezvous; also sets its numbers in `environ`.

    None: nothing has to be found out, or MASTER_ADDR and MASTER_PORT are set.
    """
    process = find_process(environ, rank=rank, world_size=world_size)
    if process is None:
        return None
    if process.wrong:
        raise InvalidArgumentError(process.wrong)
    for name, value in process.to_environ().items():
        if not environ.get(name):
            environ[name] = value
    return None if any(_said(environ)) else process


def meet(
    process: LaunchedProcess, timeout: timedelta, environ: MutableMapping[str, str]
) -> Meeting:
    """Connect to the other processes, or return the earlier result; all of them call it."""
    global _meeting  # noqa: PLW0603 - there is one rendezvous per process
    if _meeting is None:
        _meeting = _meet(process, timeout, environ)
    return _meeting


def announce(environ: MutableMapping[str, str], address: str, port: int) -> None:
    """Set MASTER_ADDR and MASTER_PORT to another store of this job."""
    global _announced  # noqa: PLW0603 - as above
    environ.update(zip(_MEETING, (address, str(port)), strict=True))
    _announced = _said(environ)


def withdraw(environ: MutableMapping[str, str]) -> None:
    """Undo `announce`, unless the variables have changed since."""
    if _meeting is not None and _announced == _said(environ):
        for name in _MEETING:
            environ.pop(name, None)


def _said(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(environ.get(name, "") for name in _MEETING)


def _meet(
    process: LaunchedProcess, timeout: timedelta, environ: MutableMapping[str, str]
) -> Meeting:
    others = f"the other processes of {process.place}"
    waiting = Waiting(timeout, others, speaks=process.rank == 0)
    token = _token(process, environ)
    server = _serve(process, token) if process.rank == 0 else None
    try:
        addresses = [(_LOOPBACK, server.port)] if server else _resolved(process.endpoints)
        if process.size > 1 and not process.endpoints:
            text = _invitation(server, token, process, environ) if server else ""
            told, token = _read(_pass_on(process, text, waiting, environ))
            addresses = addresses if server else told
            if not environ.get(_TOKEN):
                environ[_TOKEN] = os.fsdecode(token)  # connections between ranks require it as well
        store = _find(process, addresses, token, waiting)
        try:
            address = _gather(process, store, waiting)
        except BaseException:
            store.close()
            raise
    except BaseException:
        if server is not None:
            server.close()
        raise
    return Meeting(process, address, store.port, token, store, server)


def _token(process: LaunchedProcess, environ: Mapping[str, str]) -> bytes:
    """What a store of this job knows; no secret if it is made of the job's name alone."""
    own = environ.get(_TOKEN, "")
    if process.endpoints:
        return os.fsencode(f"{own}/{process.run_id}")
    return os.fsencode(own or os.urandom(16).hex())


def _serve(process: LaunchedProcess, token: bytes) -> StoreServer:
    """Open rank 0's store, at a free port, or at one of those that the others try."""
    host = _LOOPBACK if process.is_local else _EVERYWHERE
    if not process.endpoints or process.size == 1:
        return StoreServer(host, token=token)
    refusal: StoreConnectionError | None = None
    for _, port in map(_host_and_port, process.endpoints):
        try:
            # Other jobs may try this port, and are turned away: that need not be logged.
            return StoreServer(host, port, token=token, log_fd=-1)
        except StoreConnectionError as error:
            refusal = error
    raise StoreConnectionError(
        f"rank 0 of {process.place} cannot listen at any of {', '.join(process.endpoints)}"
        f" ({refusal}); set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
        endpoint=process.endpoints[0],
        operation="init_process_group",
    )


def _invitation(
    server: StoreServer, token: bytes, process: LaunchedProcess, environ: Mapping[str, str]
) -> str:
    """The text PORT,TOKEN,ADDRESS,...: where rank 0 can be reached, as far as it knows."""
    if process.is_local:
        addresses: Sequence[str] = (_LOOPBACK,)
    elif chosen := chosen_address(environ):
        addresses = (chosen,)
    else:
        addresses = own_addresses() or (_LOOPBACK,)
    words = [str(server.port), token.hex()]
    for address in addresses:
        if len(",".join([*words, address])) <= _MOST_TEXT or len(words) == 2:
            words.append(address)
    return ",".join(words)


def _read(text: str) -> tuple[list[HostAndPort], bytes]:
    """Parse an invitation."""
    try:
        port, token, *addresses = text.split(",")
        return [(address, int(port)) for address in addresses], bytes.fromhex(token)
    except ValueError:
        raise HostError(
            f"the launcher passed on {text[:80]!r} from rank 0, which is not an address; all "
            "ranks need the same version of rallypoint."
        ) from None


def _pass_on(
    process: LaunchedProcess, text: str, waiting: Waiting, environ: MutableMapping[str, str]
) -> str:
    """Have the launcher pass rank 0's text to all processes."""
    world = _initialized_mpi(process)
    if world is not None:
        return str(world.bcast(text, root=0))
    if process.passes_on == "PMI_FD":
        from rallypoint.cluster.pmi import pmi

        return pmi.pass_on(text, waiting, environ)
    if process.passes_on:
        from rallypoint.cluster.pmi import pmix

        return pmix.pass_on(text, waiting, environ)
    raise HostError(
        f"{process.place} started this as rank {process.rank} of {process.size} ({process.by}), "
        "but offers no means to find the others (PMI_FD and PMIX_NAMESPACE are not set); import "
        "mpi4py.MPI before init_process_group, or set RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT."
    )


def _initialized_mpi(process: LaunchedProcess) -> Any:  # noqa: ANN401 - of mpi4py
    """COMM_WORLD, if this process already uses mpi4py in the same job."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    world = mpi.COMM_WORLD
    is_same = (world.Get_rank(), world.Get_size()) == (process.rank, process.size)
    return world if is_same else None


def _find(
    process: LaunchedProcess, addresses: Sequence[HostAndPort], token: bytes, waiting: Waiting
) -> TCPStore:
    """Connect to the first of these addresses whose server knows the token."""
    listed = ", ".join(endpoint_of(host, port) for host, port in addresses)
    left = timedelta(seconds=max(waiting.left_s, 0.001))
    looking = Waiting(left, f"rank 0's store at {listed}", speaks=process.rank == 1)
    patience_s = _FIRST_TRY_S
    why = "nothing listens there"
    while True:
        for host, port in addresses:
            if not _listens(host, port, patience_s):
                continue
            try:
                # Another program may listen there, and never answer.
                limit = timedelta(seconds=4 * patience_s)
                return TCPStore(host, port, timeout=limit, wait_for_workers=False, token=token)
            except StoreConnectionError as error:
                why = str(error)
        if looking.left_s <= 0:
            raise StoreConnectionError(
                f"rank {process.rank} could not reach rank 0's store at {listed} ({why}); look for"
                " rank 0's first error, and for a firewall between the machines",
                endpoint=endpoint_of(*addresses[0]),
                operation="init_process_group",
            )
        looking.check()
        time.sleep(_PAUSE_S)
        patience_s = min(2 * patience_s, _LONGEST_TRY_S)


def _gather(process: LaunchedProcess, store: TCPStore, waiting: Waiting) -> str:
    """Wait until all processes have arrived; returns rank 0's address, for this process to use and
    announce.

    A process on another machine takes the address at which it succeeded. Those on rank 0's machine
    take that of the first process elsewhere, because a loopback address would be useless to others.
    """
    key = "meeting/address"
    is_elsewhere = not can_bind(store.host)
    if is_elsewhere:
        store.compare_set(key, "", store.host)
    left = timedelta(seconds=max(waiting.left_s, 0.001))
    await_ranks(store, "meeting", rank=process.rank, world_size=process.size, timeout=left)
    if is_elsewhere:
        return store.host
    return store.get(key).decode() if store.check([key]) else _LOOPBACK


def _listens(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens there; otherwise a store's client would wait for it."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def _resolved(endpoints: Sequence[str]) -> list[HostAndPort]:
    """The addresses to try."""
    named = [_host_and_port(endpoint) for endpoint in endpoints]
    found = {host: addresses_of(host) for host in dict.fromkeys(host for host, _ in named)}
    return [(address, port) for host, port in named for address in found[host]]


def _host_and_port(endpoint: str) -> HostAndPort:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
