"""`rallypoint simulate`: predicts how long collective algorithms take, on any number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from rallypoint.base.errors import CallerError
from rallypoint.cli.options import UsageError, run_command
from rallypoint.lab.simulate.simulation_request import (
    PROGRAM,
    SimulationOptions,
    SimulationRequest,
    request_of,
)

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
    status = run_command(
        PROGRAM,
        words[bool(collective) :] if words else ["--help"],
        SimulationOptions,
        partial(_simulate, collective),
        usage=USAGE,
        statuses=((CallerError, _STATUS_FAILED),),
    )
    return status if words else _STATUS_USAGE


def _simulate(collective: str, options: SimulationOptions, rest: list[str]) -> int:
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; see {PROGRAM} --help.")
    if options.links == "help":
        return _list_models()
    request = request_of(collective, options)
    try:
        _show(request, options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _STATUS_OK


def _show(request: SimulationRequest, options: SimulationOptions) -> None:
    from rallypoint.lab.simulate.rows import plot, rows_of, show, write_json

    if options.explain:
        from rallypoint.lab.simulate.drawing import explain

        explain(request)
        return
    results = rows_of(request)
    show(request, results)
    if options.json is not None:
        write_json(options.json, request, results)
    if options.plot is not None:
        plot(options.plot, request, results)


def _list_models() -> int:
    from rallypoint.schedule.cost.links import known_models, read_model

    for name in known_models():
        model = read_model(name)
        print(f"{name:<16} {', '.join(filter(None, model.variants)) or '-':<20} {model.source}")
    return _STATUS_OK
