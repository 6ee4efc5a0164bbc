"""A pod of a LeaderWorkerSet of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.variables import PORT, HostFacts, Reading, whole


def read(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """See `recognize`."""
    del host
    rank, size, leader = "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"
    return Reading(
        place="LeaderWorkerSet",
        by=rank,
        node_rank=whole(environ, rank),
        nodes=whole(environ, size, least=1),
        endpoints=(f"{environ[leader]}:{PORT}",),
        run_id=environ[leader].partition(".")[0],
        sources={"node rank": rank, "nodes": size, "meeting at": leader, "job's name": leader},
    )
