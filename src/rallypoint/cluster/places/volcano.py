"""A pod of a Volcano job of Kubernetes, which lists the hosts of each task: VC_WORKER_HOSTS."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.places.variables import HostFacts, Reading, numbered


def read(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """See `recognize`."""
    del host
    lists = sorted(name for name in environ if name.startswith("VC_") and name.endswith("_HOSTS"))
    if len(lists) != 1:
        raise InvalidArgumentError(
            f"only Volcano jobs with one kind of task are supported, but this one has {len(lists)}"
            f" ({', '.join(lists) or 'no VC_..._HOSTS'}); add --nnodes, --node-rank and"
            " --rdzv-endpoint, or --on here."
        )
    hosts = [each.strip() for each in environ[lists[0]].split(",")]
    return numbered("Volcano", environ, rank="VC_TASK_INDEX", hosts=hosts, hosts_by=lists[0])
