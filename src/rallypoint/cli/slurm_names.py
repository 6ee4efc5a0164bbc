"""The addresses of Slurm's nodes, for clusters whose node names no name service knows.

A node's name comes from slurm.conf, which may give it any address (NodeAddr). If this machine
cannot resolve the name, `scontrol show node` gives the address.
"""

from __future__ import annotations

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.environments import Reading
from rallypoint.cluster.names import in_thread
from rallypoint.cluster.network import UnknownHostError, addresses_of, is_own_name

_PATIENCE_S = 20.0  # the controller of a large cluster may be slow
_MEETING = "meeting at"


def with_known_names(found: Reading) -> Reading:
    """The reading of a step, with addresses in place of names that cannot be resolved."""
    places = [endpoint.rpartition(":") for endpoint in found.endpoints]
    hosts = [host for host, _, _ in places]
    unknown = _unknown(hosts)
    if not unknown:
        return found
    told = _told_by_slurm(unknown)
    others = [host for rank, host in enumerate(hosts) if rank != found.node_rank]
    source = found.sources[_MEETING]
    if others and not any(host in told or host not in unknown for host in others):
        raise InvalidArgumentError(
            f"this machine cannot resolve the hosts {', '.join(others)} ({source}), and `scontrol "
            "show node` shows no address for them, or is not installed; add them to /etc/hosts, "
            "or give the endpoint with --rdzv-endpoint."
        )
    endpoints = [
        endpoint_of(told[host], int(port)) if host in told else f"{host}:{port}"
        for host, _, port in places
    ]
    by = f"{source}, scontrol show node" if told else source
    sources = {**found.sources, _MEETING: by}
    return found.__replace__(endpoints=tuple(endpoints), sources=sources)


def _unknown(hosts: list[str]) -> list[str]:
    """The hosts that neither this machine's own names nor a name service knows."""
    found: list[str] = []

    def look_up() -> None:
        for host in hosts:
            try:
                if not is_own_name(host):
                    addresses_of(host)
            except UnknownHostError:
                found.append(host)

    in_thread(look_up)
    return found


def _told_by_slurm(hosts: list[str]) -> dict[str, str]:
    """By host, its NodeAddr, if that differs from the name."""
    import subprocess  # slow, and only for unknown names

    command = ["scontrol", "--oneliner", "show", "node", ",".join(hosts)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    told = {}
    for line in done.stdout.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        name, address = fields.get("NodeName", ""), fields.get("NodeAddr", "")
        if name in hosts and address not in ("", name) and not _unknown([address]):
            told[name] = address
    return told
