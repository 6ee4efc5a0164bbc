"""From a call to the encoded program that serves it: choose, build, encode. Pure.

The options that a group got at its start apply to all of its calls, unless a call requests an
algorithm. That algorithm is part of the program's identity, so the engine finds out at the first
message if ranks requested different ones (docs/decisions/045-asked-for.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.base.record import Record
from rallypoint.schedule.catalogue import ALGORITHMS, Team, build
from rallypoint.schedule.choose import check_override, choose, is_file
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective, Program, ProgramError, widen

if TYPE_CHECKING:
    from rallypoint.schedule.cost.links import LinkModel
    from rallypoint.schedule.custom import Custom

# (collective and variant, root, bytes, whether blocks differ in length) -> this rank's encoded
# program, and whether reductions of several operands combine the inputs of all ranks.
Planner: TypeAlias = Callable[[int, int, int, bool], tuple[bytes, bool]]

VARIANT = 1 << 8  # a collective's number is below it; higher bits say which algorithm is meant
_MOST_VARIANTS = 1 << 16


class AlgorithmOptions(Record):
    """How programs are chosen instead of by default; the same on all ranks of a group."""

    override: str = ""  # an algorithm's name, or the file of the user's own
    model_text: str = ""  # a link model, as `schedule.cost.links.parse_model` reads it


class Algorithms:
    """The algorithms that can serve a rank's calls: the group's, and those that calls request.

    Attributes:
        variants: requested algorithm -> a number that is added to a collective's, so the engine
            caches separate programs for it. A plain dict, because the call path reads it. The
            numbers are local to this rank: ranks compare programs.
    """

    def __init__(self, options: AlgorithmOptions) -> None:
        self.options = options
        self.variants: dict[str, int] = {}
        self._model = _parsed(options.model_text) if options.model_text else None
        self._requested: list[str | Custom] = [_found(options.override)]

    def variant(self, name: str | None) -> int:
        """The variant of an algorithm, which is loaded at its first request; None has 0."""
        if name is None:
            return 0
        if name in self.variants:
            return self.variants[name]
        if not isinstance(name, str):
            raise InvalidTypeError(f"algorithm must be a name or the name of a file, not {name!r}")
        if not name:
            raise InvalidArgumentError("algorithm is empty; name one, or pass None")
        if len(self._requested) == _MOST_VARIANTS:
            raise InvalidArgumentError(f"a group can use at most {_MOST_VARIANTS} algorithms")
        self._requested.append(_found(name))
        self.variants[name] = (len(self._requested) - 1) * VARIANT
        return self.variants[name]

    def in_words(self, variant: int) -> str:
        """The algorithm that a call requested, for reports of ranks' calls; empty by default."""
        requested = self._requested[variant // VARIANT]
        if not isinstance(requested, str):
            return f"algorithm={requested.path} ({requested.name})"
        return f"algorithm={requested}" if variant else ""

    def planner(
        self, rank: int, ranks: int, per_host: int = 0, *, has_cores: bool = False
    ) -> Planner:
        """What builds the programs of a rank.

        The choice depends only on arguments that are the same on every rank, and is the same for
        all sizes of a class. Blocks of different lengths are served by algorithms that every rank
        can run without knowing all lengths, unless a call requests another one that can.

        Args:
            per_host: how many consecutive ranks share a host; 0 if all do.
            has_cores: each rank has its own core.
        """

        def plan(kind: int, root: int, nbytes: int, uneven: bool) -> tuple[bytes, bool]:
            variant, number = divmod(kind, VARIANT)
            requested, collective = self._requested[variant], Collective(number)
            team = Team(ranks, root, per_host or ranks)
            if variant:
                made = _requested_program(requested, collective, team, uneven)
                return encode(made, rank), made.reduces_at_once
            if not isinstance(requested, str) and not uneven:
                made = requested.build(team)
                if made.collective is collective:
                    return encode(made, rank), made.reduces_at_once
            override = requested if isinstance(requested, str) else ""
            try:
                made, copies = choose_and_build(collective, root, nbytes, uneven, override)
            except ProgramError:  # the whole group's algorithm does not support this number
                if not override:
                    raise
                made, copies = choose_and_build(collective, root, nbytes, uneven, "")
            return encode(widen(made, copies), rank), made.reduces_at_once

        def choose_and_build(
            collective: Collective, root: int, nbytes: int, uneven: bool, override: str
        ) -> tuple[Program, int]:
            choice = choose(
                collective,
                nbytes=nbytes,
                ranks=ranks,
                per_node=per_host,
                model=self._model,
                override=override,
                uneven=uneven,
                has_cores=has_cores,
            )
            per_node = per_host or 1
            made = build(collective, choice.algorithm, ranks=ranks, root=root, per_node=per_node)
            return made, choice.copies

        return plan


def _parsed(model_text: str) -> LinkModel:
    from rallypoint.schedule.cost.links import parse_model  # few groups have a model

    return parse_model(model_text)


def _found(name: str) -> str | Custom:
    if is_file(name):
        from rallypoint.schedule.custom import load  # few groups have an algorithm of their own

        return load(name)
    check_override(name)
    return name


def _requested_program(
    requested: str | Custom, collective: Collective, team: Team, uneven: bool
) -> Program:
    """The program of the algorithm that a call requested, without a fallback."""
    operation = collective.operation
    if not isinstance(requested, str):
        made = requested.build(team)
        name = requested.path
        if made.collective is not collective:
            other = made.collective.operation
            raise InvalidArgumentError(f"{name} is an algorithm for {other}, not for {operation}")
    else:
        name = requested
        if requested not in ALGORITHMS[collective]:
            raise InvalidArgumentError(
                f"{operation} has no algorithm {requested!r}; it has "
                f"{', '.join(ALGORITHMS[collective])}"
            )
        per_node = team.per_node if team.per_node < team.ranks else 1
        made = build(collective, requested, ranks=team.ranks, root=team.root, per_node=per_node)
    if uneven and (made.chunks > 1 or made.scratch_chunks > 0):
        raise InvalidArgumentError(
            f"{name} cannot handle blocks of different lengths, because it splits or relocates "
            f"blocks; choose another algorithm, or none, for this {operation}"
        )
    return replace(made, name=f"{made.name}, asked for")


def ranks_per_host(hosts: Sequence[int]) -> int:
    """How many consecutive ranks share a host; the last host may have fewer.

    0 if all ranks are on one host; 1 for any other placement, as if each rank were alone.
    """
    if len(set(hosts)) == 1:
        return 0
    size = hosts.count(hosts[0])
    regular = [rank // size for rank in range(len(hosts))]
    return size if list(hosts) == regular else 1
