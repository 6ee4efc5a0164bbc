"""`rallypoint where`: what `rallypoint run`, or a program without it, reads from its environment,
and from which variables; also this machine's interfaces, and which of them a job would use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.wording import printable, table
from rallypoint.base.worker_env import ENV
from rallypoint.cli.flags import JobOptions
from rallypoint.cli.options import HELP, Flag, Options, perform, refuse_words, text
from rallypoint.cli.surroundings import as_flags, recognized
from rallypoint.cluster.environments import (
    KINDS,
    VARIABLE,
    LaunchedProcess,
    Reading,
    recognize_process,
)
from rallypoint.cluster.interface_facts import Interface, InterfaceTarget
from rallypoint.cluster.netlink import read_interfaces
from rallypoint.cluster.network import choose_network, targets_of

PROGRAM = "rallypoint where"
_USAGE = f"""\
usage: {PROGRAM} [FLAGS]

Print the values that `rallypoint run` would read from its environment, such as a Slurm step or a
pod: each with the variable that sets it, and the equivalent flags. Under mpirun, srun or flux run,
also print the values for a program without a launcher (mpirun -np 4 python train.py). Then print
this machine's network interfaces, and the one that a job of several nodes would use. It starts
nothing.
"""


class _WhereOptions(Options):
    on = Flag(f"detect only this environment: {', '.join(KINDS[:5])},\n{', '.join(KINDS[5:10])},\n"
              f"{', '.join(KINDS[10:])}; or here, for none", "PLACE", text, "",
              completes=" ".join((*KINDS, "here")))  # fmt: skip
    towards = Flag("endpoint of the job: one host name or address, or several with\n"
                   "commas between them (default: what the environment says)",
                   "HOST", text, "")  # fmt: skip
    help = HELP


def where(words: Sequence[str]) -> int:
    """Run `rallypoint where WORDS`; returns the exit status."""
    wrong = ((InvalidArgumentError, 2),)
    return perform(PROGRAM, words, _WhereOptions, _where, usage=_USAGE, statuses=wrong)


def _where(options: _WhereOptions, rest: list[str]) -> int:
    refuse_words(rest)
    if options.on == "ray":
        print(_RAY)
        return 0
    found = recognized(options.on, os.environ)
    if found is None:
        print(_NOTHING, printable(defaults_text(os.environ)), sep="\n")
    else:
        print(printable(reading_text(found)))
    if os.environ.get("RAY_ADDRESS"):
        print("", _RAY, sep="\n")
    if without := without_us(options.on, os.environ):
        print("", without, sep="\n")
    print("", network_text(_meeting(options.towards, found), os.environ), sep="\n")
    return 0


def _meeting(towards: str, found: Reading | None) -> list[str]:
    """The hosts of the rendezvous endpoints."""
    if towards:
        return [host.strip().strip("[]") for host in towards.split(",") if host.strip()]
    endpoints = () if found is None else found.endpoints
    return [endpoint.rpartition(":")[0].strip("[]") for endpoint in endpoints]


def without_us(on: str, environ: Mapping[str, str]) -> str:
    """What a program finds that `rallypoint run` did not start; empty if nothing."""
    try:
        process = recognize_process(environ, on)
    except InvalidArgumentError as error:
        return f"{_FAILS}{error}"
    if process is None:
        return ""
    if all(environ.get(name) for name in ENV):
        return f"init_process_group() takes {', '.join(ENV)}, which are set."
    return f"{_FAILS}{process.wrong}" if process.wrong else process_text(process)


def reading_text(found: Reading) -> str:
    """The reading as a table, and its consequences."""
    nodes = "" if found.nodes is None else f" of {found.nodes}"
    by = ", ".join(found.sources[name] for name in ("node rank", "nodes") if name in found.sources)
    rows = [("detected", found.place, found.by), ("node", f"{found.node_rank}{nodes}", by)]
    if found.endpoints:
        rows.append(("rendezvous", ", ".join(found.endpoints), found.sources["meeting at"]))
    if found.run_id:
        rows.append(("job's name", found.run_id, found.sources["job's name"]))
    return "\n".join([*_table(rows), "", *_conclusion(found)])


def defaults_text(environ: Mapping[str, str]) -> str:
    """The defaults of a job outside any cluster environment, and the flags that change them."""
    defaults = JobOptions()
    rows = [
        ("node", f"0 of {defaults.nnodes[1]}", "--node-rank, --nnodes"),
        ("workers", defaults.nproc_per_node, "--nproc-per-node"),
        ("store at", f"{defaults.master_addr}, any free port", "--master-addr, --master-port"),
        ("rendezvous", defaults.rdzv_backend, "--rdzv-backend"),
        ("job's name", "a new one", "--rdzv-id"),
    ]
    given = [
        f"{flag.variable}={environ[flag.variable]}"
        for flag in JobOptions.flags.values()
        if environ.get(flag.variable)
    ]
    return "\n".join([*_table(rows), *([f"except as set by {', '.join(given)}"] if given else [])])


def process_text(process: LaunchedProcess) -> str:
    """What init_process_group() finds, as a table."""
    sources = process.sources
    rows = [("rank", f"{process.rank} of {process.size}", sources["rank"])]
    if process.local_rank is not None:
        size = "" if process.local_size is None else f" of {process.local_size}"
        rows.append(("local rank", f"{process.local_rank}{size}", sources["local rank"]))
    if process.endpoints:
        rows.append(("rendezvous", ", ".join(process.endpoints[:2]) + ", ...", sources["meeting"]))
    elif process.size > 1:
        way = "a port that rank 0 chooses" if process.passes_on else "nothing; import mpi4py.MPI"
        rows.append(("rendezvous", way, sources["meeting"]))
    return "\n".join(
        [
            f"A program that {process.place} starts directly: init_process_group() takes",
            *_table(rows),
            f"To ignore it: {VARIABLE}=none",
        ]
    )


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    wide = max(len(row[1]) for row in rows)
    return [f"{name:<12}{value:<{wide}}  {source}".rstrip() for name, value, source in rows]


def _conclusion(found: Reading) -> list[str]:
    if found.wrong:
        return [f"No job of several nodes can start here: {found.wrong}"]
    if found.nodes == 1:
        return [found.note or "A job here runs on one machine: no value is taken from it."]
    flags = as_flags(found)
    if found.nodes is None:
        flags = {
            "--nnodes": "N",
            **{name: text for name, text in flags.items() if name != "--nnodes"},
        }
        flags["--rdzv-endpoint"] = ",".join(found.endpoints)
    same = " ".join(f"{name} {value}" for name, value in flags.items())
    return [
        f"The same with flags: rallypoint run {same}",
        f"To ignore it: --on here, or {VARIABLE}=none",
    ]


def network_text(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """All interfaces, the routes to `hosts`, and the one chosen for the rendezvous."""
    parts = [interface_table(read_interfaces())]
    if hosts:
        parts.append(route_table({host: _targets_of(host) for host in hosts}))
    try:
        parts.append(f"For a job of several nodes: {choose_network(hosts, environ).told}")
    except (HostError, InvalidArgumentError) as error:
        parts.append(f"No interface for a job of several nodes: {error}")
    return "\n".join(parts)


def interface_table(interfaces: Sequence[Interface]) -> str:
    """One line for each interface."""
    rows = [(each.name, _addresses(each), each.kind.value, each.rate) for each in interfaces]
    return "\n".join(table(("interface", "addresses", "kind", "speed and MTU"), rows))


def route_table(targets: Mapping[str, Sequence[InterfaceTarget]]) -> str:
    """One line for each address of each host; a host that cannot be resolved has none."""
    rows = []
    for host, routes in targets.items():
        for each in routes:
            if each.route is None:
                rows.append((host, each.address, "no route", each.why_not))
            else:
                how = "this machine's own" if each.route.is_own else each.route.source
                rows.append((host, each.address, each.route.interface or "?", how))
        if not routes:
            rows.append((host, "not known", "", ""))
    return "\n".join(table(("towards", "address", "interface", "from"), rows))


def _targets_of(host: str) -> list[InterfaceTarget]:
    try:
        return targets_of(host)
    except HostError:
        return []


def _addresses(interface: Interface) -> str:
    if not interface.is_up:
        return "down"
    return ", ".join(f"{each.text}/{each.prefix}" for each in interface.addresses) or "none"


_RAY = """\
Nodes of a Ray cluster: rallypoint run --on ray --nnodes 2 train.py
It uses the cluster at RAY_ADDRESS, or else the one that this machine belongs to."""
_FAILS = "Without `rallypoint run`, init_process_group() fails here: "
_NOTHING = f"""\
No cluster environment is detected: `rallypoint run` starts its workers on this machine alone.
Supported: {", ".join(KINDS)}.
Without flags, `rallypoint run` uses"""
