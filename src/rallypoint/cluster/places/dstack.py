"""A node of a dstack run."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.reading import Host, Reading, numbered


def read(environ: Mapping[str, str], host: Host) -> Reading:
    """See `recognize`."""
    del host
    return numbered(
        "dstack",
        environ,
        rank="DSTACK_NODE_RANK",
        hosts=environ["DSTACK_NODES_IPS"].split(),
        hosts_by="DSTACK_NODES_IPS",
        run_id=environ.get("DSTACK_RUN_ID", ""),
        run_id_by="DSTACK_RUN_ID",
    )
