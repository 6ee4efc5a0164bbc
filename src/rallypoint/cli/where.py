"""`rallypoint where`: what `rallypoint run` takes from its surroundings, and by which variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.options import HELP, Flag, UsageError, describe, parse
from rallypoint.cli.surroundings import VARIABLE, as_flags, recognized
from rallypoint.cluster.places import KINDS
from rallypoint.cluster.places.reading import Reading

PROGRAM = "rallypoint where"
ON = Flag("--on", f"look for this only: {', '.join(KINDS[:5])},\n{', '.join(KINDS[5:10])},\n"
          f"{', '.join(KINDS[10:])}; or here, for none", "PLACE")  # fmt: skip
_USAGE = f"""\
usage: {PROGRAM} [FLAGS]

Print what `rallypoint run` would take from the surroundings, a Slurm step or a pod, say: each value
with the variable that says so, and the flags that would say the same. Starts nothing.
"""


def where(words: Sequence[str]) -> int:
    """Perform `rallypoint where WORDS`; the exit status."""
    try:
        values, rest = parse(words, (ON, HELP), program=PROGRAM, environ={})
        if "--help" in values:
            print(_USAGE, describe((ON, HELP)), sep="\n")
            return 0
        if rest:
            raise UsageError(f"{PROGRAM}: {rest[0]!r} is no flag; it takes no other words.")
        found = recognized(values.get("--on", ""), os.environ)
    except (UsageError, InvalidArgumentError) as error:
        print(f"{PROGRAM}: {str(error).removeprefix(f'{PROGRAM}: ')}", file=sys.stderr)
        return 2
    print(_NOTHING if found is None else text(found))
    return 0


def text(found: Reading) -> str:
    """The reading as a table, and what follows from it."""
    nodes = "" if found.nodes is None else f" of {found.nodes}"
    by = ", ".join(found.sources[name] for name in ("node rank", "nodes") if name in found.sources)
    rows = [("recognised", found.place, found.by), ("node", f"{found.node_rank}{nodes}", by)]
    if found.endpoints:
        rows.append(("meeting at", ", ".join(found.endpoints), found.sources["meeting at"]))
    if found.run_id:
        rows.append(("job's name", found.run_id, found.sources["job's name"]))
    wide = max(len(row[1]) for row in rows)
    lines = [f"{name:<12}{value:<{wide}}  {source}".rstrip() for name, value, source in rows]
    return "\n".join([*lines, "", *_conclusion(found)])


def _conclusion(found: Reading) -> list[str]:
    if found.wrong:
        return [f"No job of several nodes can begin here: {found.wrong}"]
    if found.nodes == 1:
        return [found.note or "A job here is one machine's: nothing is taken from this."]
    flags = as_flags(found)
    if found.nodes is None:
        flags = {
            "--nnodes": "N",
            **{name: text for name, text in flags.items() if name != "--nnodes"},
        }
        flags["--rdzv-endpoint"] = ",".join(found.endpoints)
    same = " ".join(f"{name} {value}" for name, value in flags.items())
    return [
        f"The same by flags: rallypoint run {same}",
        f"To ignore it: --on here, or {VARIABLE}=none",
    ]


_NOTHING = f"""\
Nothing is recognised here: `rallypoint run` starts its workers on this machine alone.
Known are {", ".join(KINDS)}."""
