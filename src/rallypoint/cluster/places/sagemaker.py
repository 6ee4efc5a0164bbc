"""A host of a SageMaker training job."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.places.variables import HostFacts, Reading, numbered

_HOSTS, _ME = "SM_HOSTS", "SM_CURRENT_HOST"


def read(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """See `recognize`."""
    import json

    del host
    try:
        hosts = json.loads(environ[_HOSTS])
    except ValueError:
        hosts = None
    are_names = isinstance(hosts, list) and all(isinstance(each, str) for each in hosts)
    if not are_names or environ[_ME] not in hosts:
        raise InvalidArgumentError(
            f"{_HOSTS} is {environ[_HOSTS][:80]!r}, which is not a JSON list of hosts with {_ME}"
            f" ({environ[_ME]}) in it; --on here ignores it."
        )
    ranked = {**environ, _ME: str(hosts.index(environ[_ME]))}
    return numbered("SageMaker", ranked, rank=_ME, hosts=hosts, hosts_by=_HOSTS)
