"""Nodes of cloud services and pods of Kubernetes, by their variables: a row for each kind.

_LISTED     the variables list all nodes, and give this one's position
_LED        they count the nodes, and give this one's number and the first one's address
_indexed    an Indexed Job of Kubernetes, also in a JobSet: they give only this pod's number
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.environments import (
    MOST_ENDPOINTS,
    PORT,
    HostFacts,
    Reading,
    numbered,
    whole,
)

# By kind: the name, and the variables with the position, the list, and the job's name. Volcano has
# a list for each kind of task.
_LISTED = {
    "skypilot": ("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID"),
    "dstack": ("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_IPS", "DSTACK_RUN_ID"),
    "sagemaker": ("SageMaker", "SM_CURRENT_HOST", "SM_HOSTS", ""),
    "volcano": ("Volcano", "VC_TASK_INDEX", "", ""),
}
# By kind: the name, and the variables with the number, the count, and the first node's address.
# The main node of AWS Batch does not know its own address.
_LED = {
    "aws_batch": (
        "AWS Batch job", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
    ),
    "leader_worker_set": (
        "LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS",
    ),
}  # fmt: skip
_INDEX = "JOB_COMPLETION_INDEX"


def read(environ: Mapping[str, str], host: HostFacts, kind: str) -> Reading:
    """See `recognize`."""
    if kind in _LED:
        return _led(environ, host, kind)
    if kind in _LISTED:
        return _listed(environ, kind)
    return _indexed(environ, host)


def _led(environ: Mapping[str, str], host: HostFacts, kind: str) -> Reading:
    place, rank, nodes, first = _LED[kind]
    address = environ.get(first) or host.name
    sources = {"node rank": rank, "nodes": nodes}
    sources["meeting at"] = first if environ.get(first) else "host name"
    run_id = ""
    if kind == "aws_batch":
        place = f"{place} {environ.get('AWS_BATCH_JOB_ID', '')}".rstrip()
    else:
        run_id, sources["job's name"] = address.partition(".")[0], first
    return Reading(
        place=place,
        by=rank,
        node_rank=whole(environ, rank),
        nodes=whole(environ, nodes, least=1),
        endpoints=(f"{address}:{PORT}",),
        run_id=run_id,
        sources=sources,
    )


def _listed(environ: Mapping[str, str], kind: str) -> Reading:
    place, rank, hosts_by, run_id_by = _LISTED[kind]
    if kind == "volcano":
        hosts_by = _volcanos_list(environ)
        hosts: Sequence[str] = [each.strip() for each in environ[hosts_by].split(",")]
    elif kind == "sagemaker":
        hosts = _sagemakers_hosts(environ[hosts_by], environ[rank])
        environ = {**environ, rank: str(hosts.index(environ[rank]))}
    else:
        hosts = environ[hosts_by].split()
    return numbered(
        place,
        environ,
        rank=rank,
        hosts=hosts,
        hosts_by=hosts_by,
        run_id=environ.get(run_id_by, ""),
        run_id_by=run_id_by,
    )


def _volcanos_list(environ: Mapping[str, str]) -> str:
    lists = sorted(name for name in environ if name.startswith("VC_") and name.endswith("_HOSTS"))
    if len(lists) != 1:
        raise InvalidArgumentError(
            f"only Volcano jobs with one kind of task are supported, but this one has {len(lists)}"
            f" ({', '.join(lists) or 'no VC_..._HOSTS'}); add --nnodes, --node-rank and"
            " --rdzv-endpoint, or --on here."
        )
    return lists[0]


def _sagemakers_hosts(text: str, me: str) -> list[str]:
    import json

    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    are_names = isinstance(hosts, list) and all(isinstance(each, str) for each in hosts)
    if not are_names or me not in hosts:
        raise InvalidArgumentError(
            f"SM_HOSTS is {text[:80]!r}, which is not a JSON list of hosts with SM_CURRENT_HOST"
            f" ({me}) in it; --on here ignores it."
        )
    return list(hosts)


def _indexed(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """With a headless Service, /etc/hosts has the pod's full name, JOB-INDEX.SERVICE...."""
    index = whole(environ, _INDEX)
    stem = host.name.removesuffix(f"-{index}")
    lines = [line.partition("#")[0].split() for line in host.table.splitlines()]
    names = [name for words in lines for name in words[1:] if name.startswith(f"{host.name}.")]
    domain = names[0].removeprefix(f"{host.name}.") if names else ""
    found = Reading(
        place="Indexed Job",
        by=_INDEX,
        node_rank=index,
        nodes=None,
        run_id=stem,
        sources={"node rank": _INDEX, "meeting at": "/etc/hosts", "job's name": "host name"},
    )
    if stem == host.name or not domain:
        return found.__replace__(
            wrong=(
                f"this pod of an Indexed Job ({_INDEX}) has no name that the others can resolve; "
                "give the Job's pods a subdomain and a headless Service of that name."
            )
        )
    pods = [f"{stem}-{number}.{domain}:{PORT}" for number in range(MOST_ENDPOINTS)]
    return found.__replace__(endpoints=tuple(pods))
