"""Reads from the flags the nodes of the job: their number, how they meet, and the job's name.

As in torchrun, --standalone overrides all --rdzv flags, and a static job of one machine needs none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.cli.number_flags import is_whole, whole
from rallypoint.cli.options import UsageError
from rallypoint.launch.job import Nodes, Rendezvous
from rallypoint.rendezvous.job.round import Endpoint

PROGRAM = "rallypoint run"
STATIC = "static"
BACKENDS = (STATIC, "c10d", "etcd", "etcd-v2")
DEFAULT_PORTS = {STATIC: 29500, "c10d": 29400, "etcd": 2379, "etcd-v2": 2379}


class LaunchPlace(Record):
    """Where a job runs; `notes` names the flags that have no effect there."""

    nodes: Nodes
    rendezvous: Rendezvous | None
    run_id: str
    notes: tuple[str, ...] = ()


def read_place(values: Mapping[str, str], token: bytes | None = None) -> LaunchPlace:
    """Read the flags. `token` is the secret that all machines must know.

    Raises:
        UsageError: the flags are malformed, or contradict each other.
    """
    fewest, most = read_nnodes(values.get("--nnodes", "1"))
    backend = values.get("--rdzv-backend", STATIC)
    if backend not in BACKENDS:
        _check_plug_in(backend)
    configuration = read_configuration(values.get("--rdzv-conf", ""))
    endpoints = read_endpoints(values.get("--rdzv-endpoint", ""), backend)
    run_id = values.get("--rdzv-id")
    if "--standalone" in values:
        if most != 1:
            raise UsageError(
                f"{PROGRAM}: --standalone means one machine; leave out --nnodes {most}."
            )
        # No other node has to know the name, and torchrun generates a new one here too.
        return LaunchPlace(Nodes(token=token), None, new_run_id(), _standalone_notes(values))
    if backend == STATIC:
        if len(endpoints) > 1:
            raise UsageError(
                f"{PROGRAM}: --rdzv-endpoint names {len(endpoints)} endpoints; static machines "
                "meet at one."
            )
        return _static(values, most, fewest, endpoints, configuration, token)
    if most == 1 and backend == "c10d":
        # A single machine has nobody to find: only the endpoint's port matters.
        port = next((each.port for each in endpoints if _is_here(each.host)), 0)
        return LaunchPlace(
            Nodes(master_port=port, token=token), None, run_id or "none", _unused(values)
        )
    rendezvous = Rendezvous(
        backend=backend,
        endpoints=endpoints,
        run_id=run_id or "none",
        min_nodes=fewest,
        max_nodes=most,
        configuration=MappingProxyType(configuration),
        node_rank=whole(values, "--node-rank", 0) if "--node-rank" in values else None,
        local_addr=values.get("--local-addr"),
        token=token,
    )
    return LaunchPlace(Nodes(token=token), rendezvous, rendezvous.run_id, _unused(values))


def _check_plug_in(backend: str) -> None:
    """Refuse a backend that neither this package nor another one provides."""
    from rallypoint.rendezvous.api.registry import plug_ins  # slow, and only for others' names

    names = dict.fromkeys([*BACKENDS, *sorted(plug_ins())])
    if backend not in names:
        raise UsageError(
            f"{PROGRAM}: --rdzv-backend is {backend!r}; it must be one of {', '.join(names)}."
        )


def _static(
    values: Mapping[str, str],
    most: int,
    fewest: int,
    endpoints: Sequence[Endpoint],
    configuration: Mapping[str, str],
    token: bytes | None,
) -> LaunchPlace:
    if fewest != most:
        raise UsageError(
            f"{PROGRAM}: --nnodes {fewest}:{most}: the number of static machines cannot change;"
            " give one number, or another --rdzv-backend."
        )
    host, port = (endpoints[0].host, endpoints[0].port) if endpoints else ("", 0)
    free = 0 if most == 1 and not host else DEFAULT_PORTS[STATIC]
    nodes = Nodes(
        count=most,
        node_rank=whole(values, "--node-rank", 0),
        master_addr=host or values.get("--master-addr", "127.0.0.1").strip("[]"),
        master_port=port if host else whole(values, "--master-port", free),
        join_timeout_s=_timeout_s(configuration),
        local_addr=values.get("--local-addr") if most > 1 else None,
        token=token,
    )
    # As in torchrun: machines that are started one by one cannot agree on a random name.
    default = new_run_id() if most == 1 and not nodes.master_port else "none"
    return LaunchPlace(nodes, None, values.get("--rdzv-id", default))


def read_nnodes(text: str) -> tuple[int, int]:
    """Parse ``"2"`` or ``"2:4"``: the minimum and the maximum number of nodes."""
    fewest, colon, most = text.partition(":")
    most = most if colon else fewest
    if not (is_whole(fewest) and is_whole(most) and 0 < int(fewest) <= int(most)):
        raise UsageError(
            f"{PROGRAM}: --nnodes is {text!r}; it must be a number of at least 1, or a minimum "
            "and a maximum, as in 2:4."
        )
    return int(fewest), int(most)


def read_endpoints(text: str, backend: str) -> tuple[Endpoint, ...]:
    """Parse ``"HOST:PORT"``, or several with commas between them; a port may be left out.

    ``"file:///PATH"`` is a directory that all machines share.
    """
    if text.startswith("file:"):
        return (_read_directory(text, backend),)
    try:
        return Endpoint.parse_all(text, DEFAULT_PORTS.get(backend, 29400), name="--rdzv-endpoint")
    except InvalidArgumentError as error:
        raise UsageError(f"{PROGRAM}: {error}") from None


def _read_directory(text: str, backend: str) -> Endpoint:
    path = os.path.normpath(text.removeprefix("file://"))
    if not text.startswith("file:///") or "," in text:
        raise UsageError(
            f"{PROGRAM}: --rdzv-endpoint is {text!r}; a directory that all machines share is one "
            "absolute path, as in file:///shared/run."
        )
    if backend != "c10d":
        raise UsageError(
            f"{PROGRAM}: --rdzv-endpoint {text}: machines can meet in a directory only with "
            "--rdzv-backend c10d; add that."
        )
    return Endpoint(host=path, port=0)


def read_configuration(text: str) -> dict[str, str]:
    """Parse ``"key=value,..."`` into a dictionary."""
    found: dict[str, str] = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = item.partition("=")
        if not key.strip() or not value.strip():
            raise UsageError(
                f"{PROGRAM}: --rdzv-conf: {item.strip()!r} is not KEY=VALUE; separate several "
                "with commas."
            )
        found[key.strip()] = value.strip()
    return found


def _timeout_s(configuration: Mapping[str, str]) -> float:
    text = configuration.get("timeout", "600")
    if not is_whole(text):
        raise UsageError(
            f"{PROGRAM}: --rdzv-conf: timeout is {text!r}; it must be a number of seconds."
        )
    return float(text)


def _is_here(host: str) -> bool:
    return host in ("", "localhost", "127.0.0.1", "::1", os.uname().nodename)


def _standalone_notes(values: Mapping[str, str]) -> tuple[str, ...]:
    given = [name for name in _OTHERS if name in values]
    return (f"--standalone overrides {', '.join(given)}",) if given else ()


def _unused(values: Mapping[str, str]) -> tuple[str, ...]:
    given = [name for name in ("--master-addr", "--master-port") if name in values]
    backend = values.get("--rdzv-backend")
    return (f"--rdzv-backend {backend} does not use {', '.join(given)}",) if given else ()


_OTHERS = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--node-rank",
    "--master-addr",
    "--master-port",
)


def new_run_id() -> str:
    """A random UUID, generated by hand because importing the uuid module costs 8 ms."""
    digits = bytearray(os.urandom(16))
    digits[6] = digits[6] & 0x0F | 0x40
    digits[8] = digits[8] & 0x3F | 0x80
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
