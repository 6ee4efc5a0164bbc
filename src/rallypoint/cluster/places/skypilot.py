"""A node of a SkyPilot task."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.reading import Host, Reading, numbered


def read(environ: Mapping[str, str], host: Host) -> Reading:
    """See `recognize`."""
    del host
    return numbered(
        "SkyPilot",
        environ,
        rank="SKYPILOT_NODE_RANK",
        hosts=environ["SKYPILOT_NODE_IPS"].split(),
        hosts_by="SKYPILOT_NODE_IPS",
        run_id=environ.get("SKYPILOT_TASK_ID", ""),
        run_id_by="SKYPILOT_TASK_ID",
    )
