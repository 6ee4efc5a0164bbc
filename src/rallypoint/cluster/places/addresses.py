"""A node of a SkyPilot task or a dstack run, which list the addresses of all nodes."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.variables import HostFacts, Reading, numbered

# By kind: the name, the prefix of the variables, and the suffixes of those with the addresses and
# the run.
_PLACES = {
    "skypilot": ("SkyPilot", "SKYPILOT_", "NODE_IPS", "TASK_ID"),
    "dstack": ("dstack", "DSTACK_", "NODES_IPS", "RUN_ID"),
}


def read(environ: Mapping[str, str], host: HostFacts, kind: str) -> Reading:
    """See `recognize`."""
    del host
    name, prefix, addresses, run_id = _PLACES[kind]
    return numbered(
        name,
        environ,
        rank=f"{prefix}NODE_RANK",
        hosts=environ[prefix + addresses].split(),
        hosts_by=prefix + addresses,
        run_id=environ.get(prefix + run_id, ""),
        run_id_by=prefix + run_id,
    )
