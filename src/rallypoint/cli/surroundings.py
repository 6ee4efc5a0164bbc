"""What a launch reads from its environment (a Slurm step, a pod) where no flag is given.

What cluster/environments recognises is turned into the corresponding flags. If flags (or PET_
variables) give the endpoint, or --nnodes 1, they are followed, and no environment is detected. Any
other flag that contradicts the surroundings is refused, naming both sources.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.files import read_text
from rallypoint.cli.flags import JobOptions
from rallypoint.cli.options import UsageError
from rallypoint.cluster.environments import VARIABLE, HostFacts, Reading, recognize

_MEETING = ("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-addr")


def fill_in(options: JobOptions, environ: Mapping[str, str]) -> tuple[JobOptions, list[str]]:
    """The flags with those that the environment adds, and a note on these."""
    if any(name in options for name in _MEETING) or options.texts.get("--nnodes") == "1":
        return options, []
    found = recognized(options.on, environ)
    if found is None:
        return options, []
    fewest, most = options.nnodes
    if found.nodes is None and most == 1:
        return options, [
            f"{found.place} ({found.by}): this pod runs its own job; for one job across all pods, "
            "give their number with --nnodes"
        ]
    if found.wrong:
        raise UsageError(found.wrong)
    for name, agrees, theirs, fact in (
        ("--nnodes", found.nodes is None or fewest <= found.nodes <= most, found.nodes, "nodes"),
        ("--node-rank", options.node_rank == found.node_rank, found.node_rank, "node rank"),
    ):
        if name in options and not agrees:
            raise UsageError(
                f"{name} is {options.texts[name]}, but {found.place} says {theirs}"
                f" ({found.sources.get(fact, found.by)}); leave the flag out, or add --on here to"
                " ignore the environment."
            )
    if found.nodes == 1:
        return options, [found.note] if found.note else []
    added = as_flags(found, fewest, most)
    place = f"node {found.node_rank} of {added['--nnodes']}"
    return options.__replace__(texts={**added, **options.texts}), [
        f"{found.place} ({found.by}): {place}, rendezvous at"
        f" {added['--rdzv-endpoint'].replace(',', ', ')}; --on here ignores this"
    ]


def recognized(on: str, environ: Mapping[str, str]) -> Reading | None:
    """What is recognised around this machine; None if nothing is.

    Args:
        on: the value of --on; if empty, that of RALLYPOINT_CLUSTER.
    """
    source = "--on" if on else VARIABLE
    on = on or environ.get(VARIABLE, "")
    try:
        found = recognize(environ, _this_host(), "" if on == "auto" else on)
        return found if found is None else _with_known_names(found)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{source} {on}: {error}" if on else str(error)) from None


def _with_known_names(found: Reading) -> Reading:
    """Only Slurm's node names may be unknown to every other service."""
    if not found.by.startswith("SLURM_") or found.nodes == 1 or found.wrong:
        return found
    from rallypoint.cli.slurm_names import with_known_names

    return with_known_names(found)


def as_flags(found: Reading, fewest: int = 1, most: int = 1) -> dict[str, str]:
    """The corresponding flags, for as many nodes as a job of `fewest` to `most` has there."""
    nodes = f"{fewest}:{most}" if fewest != most else str(found.nodes or most)
    flags = {"--nnodes": nodes, "--node-rank": str(found.node_rank), "--rdzv-backend": "c10d"}
    flags["--rdzv-endpoint"] = ",".join(found.endpoints[: found.nodes or most])
    return {**flags, "--rdzv-id": found.run_id} if found.run_id else flags


def _this_host() -> HostFacts:
    return HostFacts(os.uname().nodename, read_text("/etc/hosts"))
