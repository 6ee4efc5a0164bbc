"""`rallypoint simulate`: predicts how long collective algorithms take, on any number of ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from rallypoint.base.errors import CallerError
from rallypoint.cli.options import HELP, Flag, Options, UsageError, integer, perform, reader, text
from rallypoint.lab.quantities import doubling, size

T = TypeVar("T")
Pair: TypeAlias = tuple[int, T]

PROGRAM = "rallypoint simulate"
USAGE = """\
usage: rallypoint simulate [COLLECTIVE [FLAGS]]

Predict the time of a collective from a model of the links. It simulates the programs that the
engine runs. COLLECTIVE is all_reduce, reduce, broadcast, all_gather, gather, scatter,
reduce_scatter, all_to_all or barrier. Without any words, it prints the five fastest algorithms for
an example.

  rallypoint simulate all_reduce --ranks 24576 --ranks-per-node 6 --bytes 8 \\
      --algorithms ring,double_tree --links summit
  rallypoint simulate all_reduce --ranks 64 --sweep-bytes 8:1G --links ethernet_100g --plot a.png
  rallypoint simulate all_reduce --ranks 8 --algorithms double_tree --explain
"""

_STATUS_OK, _STATUS_FAILED = 0, 1
_count = reader(lambda text: integer(text, 1), "{name} {text} is not a number above 0.")


def _finite(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:  # false for nan, too
        raise ValueError(text)
    return number


_number = reader(_finite, "{name} {text} is not a number of at least 0.")
_whole = reader(integer, "{name} {text} is not a whole number of at least 0.")


def _words(text: str, _: str = "") -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _pairs(form: str, read: Callable[[str], T]) -> Callable[[str, str], tuple[Pair[T], ...]]:
    """A reader of ``"1:2.5,3:4"``, of the form A:B; `read` makes the second of each pair."""
    separator = ":" if ":" in form else "-"

    def pairs(text: str) -> tuple[Pair[T], ...]:
        words = [word.split(separator) for word in _words(text)]
        return tuple((integer(first), read(second)) for first, second in words)

    return reader(pairs, f"{{name}} {{text}} is not {form}, with numbers of at least 0.")


# fmt: off
class SimulationOptions(Options):
    """The flags."""

    ranks = Flag("number of ranks (default 8)", "N", _count, 8)
    ranks_per_node = Flag("number of ranks on each node (default: as in the link model)", "N",
                          _count, None)
    bytes = Flag("size of the larger buffer, as in nccl-tests (default 1M)", "SIZE", size, 1 << 20)
    algorithms = Flag("names, or files with your own algorithms, separated by commas\n"
                      "(default: all algorithms of the collective)", "A,B", _words, ())
    links = Flag("a link model, part of its name, or a .toml file (default hopper);\n"
                 "'--links help' lists them", "MODEL", text, "hopper")
    variants = Flag("variants of the link model (default: all)", "A,B", _words, ())
    sweep_bytes = Flag("several sizes, doubling: 8:1G", "A:B", doubling, None)
    sweep_ranks = Flag("several numbers of ranks, doubling: 2:4096", "A:B", doubling, None)
    noise = Flag("each operation takes longer at random, by up to this fraction", "SHARE",
                 _number, 0.0)
    late = Flag("a rank starts late by this many microseconds", "RANK:US",
                _pairs("RANK:US", _finite), ())
    slow = Flag("a rank is slower by this factor", "RANK:TIMES",
                _pairs("RANK:TIMES", _finite), ())
    failed = Flag("the link between two ranks delivers only after --retry-us", "A-B",
                  _pairs("A-B", integer), ())
    retry_us = Flag("default 1000000", "US", _number, 1e6)
    runs = Flag("with --noise: number of runs (default 20)", "N", _count, 20)
    seed = Flag("random seed of the first run (default 0)", "N", _whole, 0)
    json = Flag("write the rows to FILE", "FILE", text, None)
    plot = Flag("draw time over size or ranks to FILE.png or FILE.html (needs matplotlib)", "FILE",
                text, None)
    explain = Flag.switch("draw which rank sends to which, and the first steps (up to 16 ranks)")
    help = HELP
# fmt: on


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """One request."""

    collective: str
    ranks: list[int]
    nbytes: list[int]
    per_node: int | None
    algorithms: tuple[str, ...]
    links: str
    variants: tuple[str, ...]
    noise: float
    runs: int
    seed: int
    late_us: tuple[tuple[int, float], ...]
    slow: tuple[tuple[int, float], ...]
    failed: tuple[tuple[int, int], ...]
    retry_us: float


def request_of(collective: str, options: SimulationOptions) -> SimulationRequest:
    """Read the flags."""
    if not collective:
        raise UsageError(f"name a collective, as in: {PROGRAM} all_reduce")
    if "--sweep-ranks" in options and "--sweep-bytes" in options:
        raise UsageError("--sweep-ranks and --sweep-bytes cannot be combined.")
    fewest = min(options.sweep_ranks or [options.ranks])
    named = [rank for rank, _ in (*options.late, *options.slow)]
    for rank in (*named, *(rank for pair in options.failed for rank in pair)):
        if rank >= fewest:
            raise UsageError(f"there is no rank {rank}; ranks are 0 to {fewest - 1}.")
    return SimulationRequest(
        collective=collective,
        ranks=options.sweep_ranks or [options.ranks],
        nbytes=options.sweep_bytes or [options.bytes],
        per_node=options.ranks_per_node,
        algorithms=options.algorithms,
        links=options.links,
        variants=options.variants,
        noise=options.noise,
        runs=options.runs,
        seed=options.seed,
        late_us=options.late,
        slow=options.slow,
        failed=options.failed,
        retry_us=options.retry_us,
    )


def simulate(words: Sequence[str]) -> int:
    """Run `rallypoint simulate WORDS`; returns the exit status."""
    collective = words[0] if words and not words[0].startswith("-") else ""
    return perform(
        PROGRAM,
        words[bool(collective) :],
        SimulationOptions,
        partial(_simulate, collective) if words else _show_example,
        usage=USAGE,
        statuses=((CallerError, _STATUS_FAILED), (OSError, _STATUS_FAILED)),
    )


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


def _show_example(options: SimulationOptions, _: list[str]) -> int:
    from rallypoint.lab.simulate.rows import show_fastest

    show_fastest(request_of("all_reduce", options))
    return _STATUS_OK


def _list_models() -> int:
    from rallypoint.schedule.cost.links import known_models, read_model

    for name in known_models():
        model = read_model(name)
        print(f"{name:<16} {', '.join(filter(None, model.variants)) or '-':<20} {model.source}")
    return _STATUS_OK
