"""`rallypoint simulate`: predicts how long collective algorithms take, on any number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rallypoint.base.errors import CallerError
from rallypoint.cli.options import HELP, Flag, UsageError, describe, parse
from rallypoint.lab.simulate.simulation_request import PROGRAM, SimulationRequest, request_of

FLAGS = (
    Flag("--ranks", "number of ranks (default 8)", "N"),
    Flag("--ranks-per-node", "number of ranks on each node (default: as in the link model)", "N"),
    Flag("--bytes", "size of the larger buffer, as in nccl-tests (default 1M)", "SIZE"),
    Flag("--algorithms", "names, or files with your own algorithms, separated by commas\n"
         "(default: all algorithms of the collective)", "A,B"),
    Flag("--links", "a link model, part of its name, or a .toml file (default hopper);\n"
         "'--links help' lists them", "MODEL"),
    Flag("--variants", "variants of the link model (default: all)", "A,B"),
    Flag("--sweep-bytes", "several sizes, doubling: 8:1G", "A:B"),
    Flag("--sweep-ranks", "several numbers of ranks, doubling: 2:4096", "A:B"),
    Flag("--noise", "each operation takes longer at random, by up to this fraction", "SHARE"),
    Flag("--late", "a rank starts late by this many microseconds", "RANK:US"),
    Flag("--slow", "a rank is slower by this factor", "RANK:TIMES"),
    Flag("--failed", "the link between two ranks delivers only after --retry-us", "A-B"),
    Flag("--retry-us", "default 1000000", "US"),
    Flag("--runs", "with --noise: number of runs (default 20)",
         "N"),
    Flag("--seed", "random seed of the first run (default 0)", "N"),
    Flag("--json", "write the rows to FILE", "FILE"),
    Flag("--plot", "draw time over size or ranks to FILE.png or FILE.html (needs matplotlib)",
         "FILE"),
    Flag("--explain", "draw which rank sends to which, and the first steps (up to 16 ranks)"),
    HELP,
)  # fmt: skip

USAGE = """\
usage: rallypoint simulate COLLECTIVE [FLAGS]

Predict the time of a collective from a model of the links. It simulates the programs that the
engine runs. COLLECTIVE is all_reduce, reduce, broadcast, all_gather, gather, scatter,
reduce_scatter, all_to_all or barrier.

  rallypoint simulate all_reduce --ranks 24576 --ranks-per-node 6 --bytes 8 \\
      --algorithms ring,double_tree --links summit
  rallypoint simulate all_reduce --ranks 64 --sweep-bytes 8:1G --links ethernet_100g --plot a.png
  rallypoint simulate all_reduce --ranks 8 --algorithms double_tree --explain
"""

_STATUS_OK, _STATUS_FAILED, _STATUS_USAGE = 0, 1, 2


def simulate(words: Sequence[str]) -> int:
    """Run `rallypoint simulate WORDS`; returns the exit status."""
    collective = words[0] if words and not words[0].startswith("-") else ""
    try:
        values, rest = parse(words[bool(collective) :], FLAGS, program=PROGRAM, environ={})
        if "--help" in values or not words:
            print(USAGE, describe(FLAGS), sep="\n")
            return _STATUS_OK if words else _STATUS_USAGE
        if rest:
            raise UsageError(f"{PROGRAM}: unexpected argument {rest[0]!r}; see {PROGRAM} --help.")
        if values.get("--links") == "help":
            return _list_models()
        request = request_of(collective, values)
    except UsageError as error:
        print(error, file=sys.stderr)
        return _STATUS_USAGE
    try:
        return _perform(request, values)
    except CallerError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _STATUS_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _STATUS_OK


def _perform(request: SimulationRequest, values: dict[str, str]) -> int:
    from rallypoint.lab.simulate.rows import rows_of, show

    if "--explain" in values:
        from rallypoint.lab.simulate.drawing import explain

        explain(request)
        return _STATUS_OK
    results = rows_of(request)
    show(request, results)
    if "--json" in values:
        from rallypoint.lab.simulate.rows import write_json

        write_json(values["--json"], request, results)
    if "--plot" in values:
        from rallypoint.lab.simulate.drawing import plot

        plot(values["--plot"], request, results)
    return _STATUS_OK


def _list_models() -> int:
    from rallypoint.schedule.cost.links import known_models, read_model

    for name in known_models():
        model = read_model(name)
        print(f"{name:<16} {', '.join(filter(None, model.variants)) or '-':<20} {model.source}")
    return _STATUS_OK
