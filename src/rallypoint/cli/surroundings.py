"""What a launch takes from its surroundings (a Slurm step, a pod) where its flags are silent.

What cluster/places recognises becomes the flags that say the same. Who says by flags (or PET_
variables) where the nodes meet, or --nnodes 1, is taken at that word, and nothing is recognised.
What the flags say otherwise than the surroundings is refused, with both sources.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.nodes import read_nnodes
from rallypoint.cli.numbers import whole
from rallypoint.cli.options import UsageError
from rallypoint.cluster.places import VARIABLE, recognize
from rallypoint.cluster.places.reading import Host, Reading

PROGRAM = "rallypoint run"
_MEETING = ("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-addr")


def fill_in(
    values: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[Mapping[str, str], list[str]]:
    """The flags with what the surroundings add, and what to say of that.

    Raises:
        UsageError, InvalidArgumentError: the two contradict each other, or make no job.
    """
    if any(name in values for name in _MEETING) or values.get("--nnodes") == "1":
        return values, []
    found = recognized(values.get("--on", ""), environ)
    if found is None:
        return values, []
    fewest, most = read_nnodes(values.get("--nnodes", "1"))
    if found.nodes is None and most == 1:
        return values, [
            f"{found.place} ({found.by}): this pod runs its own job; for one job across all pods, "
            "give their number with --nnodes"
        ]
    if found.wrong:
        raise UsageError(f"{PROGRAM}: {found.wrong}")
    added = as_flags(found, fewest, most)
    for name in ("--nnodes", "--node-rank"):
        _check(name, values, added, found)
    if found.nodes == 1:
        return values, [found.note] if found.note else []
    place = f"node {found.node_rank} of {added['--nnodes']}"
    return {**added, **values}, [
        f"{found.place} ({found.by}): {place}, meeting at"
        f" {added['--rdzv-endpoint'].replace(',', ', ')}; --on here ignores this"
    ]


def recognized(on: str, environ: Mapping[str, str]) -> Reading | None:
    """What is recognised around this machine; None: nothing.

    Args:
        on: as in --on; empty: what RALLYPOINT_CLUSTER says.

    Raises:
        InvalidArgumentError: the surroundings make no sense.
    """
    source = "--on" if on else VARIABLE
    on = on or environ.get(VARIABLE, "")
    try:
        found = recognize(environ, _this_host(), "" if on == "auto" else on)
        return found if found is None else _with_known_names(found)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{source} {on}: {error}" if on else str(error)) from None


def _with_known_names(found: Reading) -> Reading:
    """Only Slurm's names may be known to Slurm alone."""
    if not found.by.startswith("SLURM_") or found.nodes == 1 or found.wrong:
        return found
    from rallypoint.cli.slurm_names import with_known_names

    return with_known_names(found)


def as_flags(found: Reading, fewest: int = 1, most: int = 1) -> dict[str, str]:
    """What says the same; with as many nodes as a job of `fewest` to `most` has there."""
    nodes = f"{fewest}:{most}" if fewest != most else str(found.nodes or most)
    flags = {"--nnodes": nodes, "--node-rank": str(found.node_rank), "--rdzv-backend": "c10d"}
    flags["--rdzv-endpoint"] = ",".join(found.endpoints[: found.nodes or most])
    return {**flags, "--rdzv-id": found.run_id} if found.run_id else flags


def _check(name: str, values: Mapping[str, str], added: Mapping[str, str], found: Reading) -> None:
    """Refuse a flag that says otherwise."""
    if name not in values:
        return
    if name == "--nnodes":
        fewest, most = read_nnodes(values[name])
        agrees = found.nodes is None or fewest <= found.nodes <= most
        theirs, source = str(found.nodes), found.sources.get("nodes", found.by)
    else:
        agrees = whole(values, name, 0) == found.node_rank
        theirs, source = added[name], found.sources.get("node rank", found.by)
    if not agrees:
        raise UsageError(
            f"{PROGRAM}: {name} is {values[name]}, but {found.place} says {theirs} ({source});"
            " leave the flag out, or add --on here to ignore the environment."
        )


def _this_host() -> Host:
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            table = file.read()
    except OSError:
        table = ""
    return Host(os.uname().nodename, table)
