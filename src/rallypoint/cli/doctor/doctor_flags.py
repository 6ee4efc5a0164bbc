"""The flags of `rallypoint doctor`, most of them those of `run`, and what to examine by them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rallypoint.base.address import is_loopback
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.port_range import read_port_range
from rallypoint.cli.flags import JobOptions, read_token
from rallypoint.cli.options import HELP, JSON, Flag, UsageError, seconds, text
from rallypoint.cli.read_job import DEFAULT_PORTS, read_endpoints, read_place
from rallypoint.cli.remote.plan import FORWARDED, RemoteHost, named_variables, read_hosts
from rallypoint.cli.surroundings import fill_in, recognized
from rallypoint.cluster.remote_shell import SSH, forwarded
from rallypoint.doctor.cluster_facts import NOWHERE, Surroundings
from rallypoint.doctor.collect import LookOrder
from rallypoint.launch.job import TOKEN

PROGRAM = "rallypoint doctor"
_WAIT_S = 10.0
_OWN_MEETING = ("--standalone", "--on", "--node-rank", "--local-addr")
# For these, the endpoint is a separate server, or a directory.
_SERVERS = ("etcd", "etcd-v2")
_DIRECTORY = "/"
_HERE = "127.0.0.1"


class DoctorOptions(JobOptions):
    """The flags of `run`, and further ones."""

    path = Flag("check that PATH can be read and written on every node, as for data and\n"
                "checkpoints; repeatable", "PATH", text, "", repeats=True)  # fmt: skip
    json = JSON
    wait = Flag("time to wait for the nodes at the endpoint (default 10)", "SECONDS",
                seconds, _WAIT_S)  # fmt: skip
    help = HELP


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What to examine.

    Attributes:
        hosts: those of --hosts; empty if each node examines itself and connects to the endpoint.
        look: what is the same in the orders to all nodes.
        fewest, most: the number of nodes that the job needs, and may have.
        node_rank: this node's rank; None if it has none yet.
        meets: whether a node serves the first endpoint; otherwise that is a separate server.
        is_static: whether node 0 is at the endpoint, whatever name the endpoint has.
        token: the secret by which nodes know each other.
        surroundings: the environment that is detected around this node.
    """

    hosts: tuple[RemoteHost, ...] = ()
    rsh: tuple[str, ...] = ()
    look: LookOrder = field(default_factory=LookOrder)
    fewest: int = 1
    most: int = 1
    node_rank: int | None = None
    endpoints: tuple[tuple[str, int], ...] = ()
    meets: bool = False
    is_static: bool = False
    token: bytes = b""
    wait_s: float = _WAIT_S
    surroundings: Surroundings = NOWHERE


def read_request(
    options: DoctorOptions, command: Sequence[str], environ: Mapping[str, str]
) -> DoctorRequest:
    """Read the flags."""
    port_range = options.texts.get("--port-range", environ.get(PORT_RANGE, ""))
    read_port_range(port_range)
    look = LookOrder(
        paths=tuple(dict.fromkeys(path for path in options.path.split(",") if path)),
        script=_script(options, command),
        log_dir=options.log_dir or "",
        local_addr=options.local_addr or "",
        workers=options.texts.get("--nproc-per-node", ""),
        port_range=port_range,
    )
    token = read_token(options.token_file, environ) or b""
    common = DoctorRequest(look=look, token=token, wait_s=options.wait)
    if options.on == "ray":
        raise UsageError(
            "it cannot reach nodes through Ray (--on ray); name them with --hosts, or run the same"
            " command on each of them with --nnodes and --rdzv-endpoint."
        )
    if "--hosts" in options or "--hostfile" in options:
        return _on_hosts(options, environ, common)
    return _at_endpoint(options, environ, common)


def _script(options: DoctorOptions, command: Sequence[str]) -> str:
    """The file that the command line names, if it names one."""
    is_file = not options.module and not options.no_python
    return command[0] if command and is_file and command[0] != "-" else ""


def _on_hosts(
    options: DoctorOptions, environ: Mapping[str, str], common: DoctorRequest
) -> DoctorRequest:
    for name in _OWN_MEETING:
        if name in options:
            raise UsageError(f"--hosts already determines the machines; leave out {name}.")
    hosts, endpoints = read_hosts(options), _endpoints(options)
    theirs = forwarded(environ, FORWARDED) | named_variables(options, environ)
    if common.token:
        theirs[TOKEN] = os.fsdecode(common.token)
    return replace(
        common,
        hosts=hosts,
        rsh=options.rsh or SSH,
        look=replace(common.look, environ=theirs, directory=os.getcwd()),
        fewest=len(hosts),
        most=len(hosts),
        endpoints=endpoints,
    )


def _endpoints(options: DoctorOptions) -> tuple[tuple[str, int], ...]:
    """The endpoints that --rdzv-endpoint or --master-addr names."""
    found = read_endpoints(options.rdzv_endpoint, options.rdzv_backend)
    if not found and "--master-addr" in options:
        port = options.texts.get("--master-port", str(DEFAULT_PORTS["static"]))
        found = read_endpoints(f"{options.master_addr}:{port}", "static")
    return tuple((each.host, each.port) for each in found if not _is_directory(each.host))


def _at_endpoint(
    options: DoctorOptions, environ: Mapping[str, str], common: DoctorRequest
) -> DoctorRequest:
    surroundings = NOWHERE
    if not any(name in options for name in ("--standalone", "--rdzv-endpoint", "--master-addr")):
        found = recognized(options.on, environ)
        if found is not None:
            note = found.note if found.nodes == 1 and not found.wrong else ""
            surroundings = Surroundings(place=found.place, wrong=found.wrong, note=note)
            if found.wrong:
                return replace(common, surroundings=surroundings)
    filled, _ = fill_in(options, environ)
    fewest, most = filled.nnodes
    read = read_place(filled, common.token)
    rendezvous, nodes = read.rendezvous, read.nodes
    if most == 1 and rendezvous is None:  # no one else is to come, but its port may be taken
        own = ((_HERE, nodes.master_port),) if nodes.master_port else ()
        return replace(common, endpoints=own, surroundings=surroundings)
    if rendezvous is None:
        endpoints: tuple[tuple[str, int], ...] = ((nodes.master_addr, nodes.master_port),)
        node_rank: int | None = nodes.node_rank
    else:
        endpoints = tuple((each.host, each.port) for each in rendezvous.endpoints)
        node_rank = rendezvous.node_rank
    directories = tuple(host for host, _ in endpoints if _is_directory(host))
    meets = not directories and (rendezvous is None or rendezvous.backend not in _SERVERS)
    meets = meets and most > 1
    return replace(
        common,
        look=replace(common.look, paths=(*common.look.paths, *directories)),
        fewest=fewest,
        most=most,
        node_rank=node_rank,
        endpoints=tuple(each for each in endpoints if not _is_directory(each[0])),
        meets=meets and not is_loopback(endpoints[0][0]),
        is_static=rendezvous is None,
        surroundings=surroundings,
    )


def _is_directory(host: str) -> bool:
    return host.startswith(_DIRECTORY)
