"""A node of a multi-node job of AWS Batch; the main node does not know its own address."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.variables import PORT, HostFacts, Reading, whole

_RANK, _NODES = "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"
_MAIN = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def read(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """See `recognize`."""
    name = environ.get("AWS_BATCH_JOB_ID", "")
    return Reading(
        place=f"AWS Batch job {name}".rstrip(),
        by=_RANK,
        node_rank=whole(environ, _RANK),
        nodes=whole(environ, _NODES, least=1),
        endpoints=(f"{environ.get(_MAIN) or host.name}:{PORT}",),
        sources={
            "node rank": _RANK,
            "nodes": _NODES,
            "meeting at": _MAIN if environ.get(_MAIN) else "host name",
        },
    )
