"""A pod of an Indexed Job of Kubernetes, also in a JobSet. It does not know the number of pods.

With a headless Service, its own entry in /etc/hosts has its full name, JOB-INDEX.SERVICE....; the
others' names differ in the index only.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.variables import MOST_ENDPOINTS, PORT, HostFacts, Reading, whole

_INDEX = "JOB_COMPLETION_INDEX"


def read(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """See `recognize`."""
    index = whole(environ, _INDEX)
    stem = host.name.removesuffix(f"-{index}")
    domain = _domain(host)
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
    names = [f"{stem}-{number}.{domain}:{PORT}" for number in range(MOST_ENDPOINTS)]
    return found.__replace__(endpoints=tuple(names))


def _domain(host: HostFacts) -> str:
    """The part of this host's full name after the host name; empty if there is none."""
    for line in host.table.splitlines():
        for name in line.partition("#")[0].split()[1:]:
            if name.startswith(f"{host.name}."):
                return name.removeprefix(f"{host.name}.")
    return ""
