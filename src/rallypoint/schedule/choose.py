"""Chooses the algorithm for a call, with the reason.

With a link model it chooses by predicted time, otherwise by rules measured on shared memory and
between hosts (`rallypoint bench all_reduce --algorithm NAME`, `--hosts A,B`). Both use only what
all ranks know, so that all ranks choose the same algorithm. Of a call's size they use only the
class, as the engine keeps one program for each class. The choice never depends on earlier calls.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.schedule.catalogue import ALGORITHMS, MANY_RANKS, build
from rallypoint.schedule.program import Collective, ProgramError, widen

if TYPE_CHECKING:
    from rallypoint.schedule.cost.links import LinkModel, Links
    from rallypoint.schedule.cost.simulation import Simulation

ONE_SHOT_BYTES = 16 * 1024  # above this, reducing everything on every rank costs more than waiting;
FEW_ONE_SHOT_BYTES = 64 * 1024  # the same for three and four ranks,
PAIR_ONE_SHOT_BYTES = 512 * 1024  # for two,
OWN_CORES_ONE_SHOT_BYTES = 2 * 1024  # and for more than four with a core each, which wait less
FEW_RANKS = 16  # above this, sending to all peers costs more than passing on;
OWN_CORES_FEW_RANKS = 8  # the same for ranks with a core each, which all send at once,
OWN_CORES_RING_BYTES = 256 * 1024  # from this many bytes on
WIDE_BYTES = 512 * 1024  # from here on, two halves keep a network between all ranks busy
FEW_STEPS_BYTES = 128 * 1024  # up to here, between hosts, few messages matter more than few bytes
LEVELS_BYTES = 16 * 1024  # from here on, less data between hosts is worth another step inside them;
BLOCK_LEVELS_BYTES = 64 * 1024  # the same where a buffer holds a block for each rank
FEW_NODES = 4  # above this, one rank should not send to all of them
LANES = 4  # as many as the engine has
UNEVEN = "direct"  # each rank can run it without knowing the lengths of the others' blocks
MOST_OPERATIONS = 100_000  # the largest program that is worth simulating for a choice


class Choice(Record):
    """An algorithm by name, and the reason for it.

    Attributes:
        copies: how many run side by side (see program.widen).
    """

    algorithm: str
    reason: str
    copies: int = 1


def choose(
    collective: Collective,
    *,
    nbytes: int,
    ranks: int,
    per_node: int = 0,
    model: LinkModel | None = None,
    override: str = "",
    uneven: bool = False,
    has_cores: bool = False,
) -> Choice:
    """Choose the algorithm for a call.

    Args:
        nbytes: the size of the smaller buffer of a rank that has two, or of its only one.
        per_node: how many ranks share a node; 0 if all do.
        model: link constants; if given, predicted times decide.
        override: an algorithm's name, used for each collective that has it; empty for none.
        uneven: blocks differ in length, and each rank knows only the lengths of its own.
        has_cores: each rank has its own core.
    """
    nbytes = largest_of_class(nbytes)
    if uneven and UNEVEN in ALGORITHMS[collective]:
        return Choice(UNEVEN, "each rank knows only the lengths of its own blocks")
    if override in ALGORITHMS[collective]:
        return Choice(override, "asked for")
    if model is not None and ranks > 1 and collective is not Collective.SEND:
        return _predicted(collective, nbytes, ranks, per_node or ranks, model)
    algorithm, reason = _measured(collective, nbytes, ranks, per_node or ranks, has_cores)
    is_wide = per_node == 1 and algorithm == "direct_two_shot" and nbytes >= WIDE_BYTES
    return Choice(algorithm, reason, 2 if is_wide else 1)


def largest_of_class(nbytes: int) -> int:
    """The largest size in the class of `nbytes`: a power of two (Communicator::kind)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def _measured(
    collective: Collective, nbytes: int, ranks: int, per_node: int, has_cores: bool
) -> tuple[str, str]:
    if 1 < per_node < ranks and (algorithm := _on_two_levels(collective, nbytes, ranks, per_node)):
        return algorithm, "each byte crosses between two nodes no more often than it must"
    if per_node == 1 < ranks and collective is Collective.ALL_REDUCE:
        if nbytes <= FEW_STEPS_BYTES:
            algorithm = "recursive_doubling" if ranks > 3 else "direct_one_shot"
            return algorithm, f"between hosts up to {FEW_STEPS_BYTES} bytes, few steps and messages"
        if ranks <= FEW_RANKS:
            return "direct_two_shot", "between hosts, each byte crosses once in each direction"
    is_roomy = has_cores and per_node == ranks and 4 < ranks <= FEW_RANKS
    if is_roomy and (algorithm := _on_own_cores(collective, nbytes, ranks)):
        return algorithm, "with a core for each rank, bytes cost more than waiting"
    return _on_one_level(collective, nbytes, ranks)


def _on_two_levels(collective: Collective, nbytes: int, ranks: int, per_node: int) -> str:
    """The algorithm on two levels; empty if that does not pay."""
    is_full = ranks % per_node == 0
    match collective:
        case Collective.ALL_REDUCE if nbytes > LEVELS_BYTES:
            return "two_level" if is_full else "node_ring"
        case Collective.BROADCAST | Collective.REDUCE if nbytes >= LEVELS_BYTES:
            return "two_level" if ranks <= FEW_NODES * per_node else ""
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER if nbytes >= BLOCK_LEVELS_BYTES:
            return "two_level" if is_full and ranks <= FEW_RANKS * per_node else ""
    return ""


def _on_own_cores(collective: Collective, nbytes: int, ranks: int) -> str:
    """What is better where the ranks of a host all run at once; empty if that is the usual one."""
    passes_on = ranks > OWN_CORES_FEW_RANKS
    match collective:
        case Collective.ALL_REDUCE if OWN_CORES_ONE_SHOT_BYTES < nbytes <= ONE_SHOT_BYTES:
            return "direct_two_shot"
        case Collective.ALL_REDUCE if passes_on and nbytes >= OWN_CORES_RING_BYTES:
            return "ring"
        case Collective.REDUCE_SCATTER if passes_on and nbytes * ranks >= OWN_CORES_RING_BYTES:
            return "ring"
    return ""


def _on_one_level(collective: Collective, nbytes: int, ranks: int) -> tuple[str, str]:
    if ranks > FEW_RANKS and collective in MANY_RANKS:
        small, large = MANY_RANKS[collective]
        if nbytes <= ONE_SHOT_BYTES:
            return small, f"beyond {FEW_RANKS} ranks, few steps for few bytes"
        return large, f"beyond {FEW_RANKS} ranks, few neighbours matter more than few steps"
    if collective is not Collective.ALL_REDUCE:
        return "direct", f"up to {FEW_RANKS} ranks, one step to all ranks"
    one_shot_bytes = ONE_SHOT_BYTES
    if ranks <= 4:
        one_shot_bytes = FEW_ONE_SHOT_BYTES if ranks > 2 else PAIR_ONE_SHOT_BYTES
    if nbytes <= one_shot_bytes:
        return "direct_one_shot", f"up to {one_shot_bytes} bytes, waiting costs the most"
    if ranks == 2:
        return "direct_two_phase", "each byte is reduced once, and fetched when most are"
    return "direct_two_shot", "each byte is reduced once, by one rank"


def _predicted(
    collective: Collective, nbytes: int, ranks: int, per_node: int, model: LinkModel
) -> Choice:
    times: list[tuple[float, str, int]] = []
    for variant in model.variants:
        for name in ALGORITHMS[collective]:
            for copies in (1, 2):
                links = model.links(variant, name).on(per_node)
                simulation = _simulation(collective, name, ranks, per_node, copies, links)
                if simulation is not None:
                    times.append((simulation.run(nbytes).time_us, name, copies))
    if not times:
        raise InvalidArgumentError(f"no algorithm for {ranks} ranks is small enough to simulate")
    # Times are rounded, so that no rank's last digit decides; of equal ones the simpler comes
    # first.
    times.sort(key=lambda each: round(math.log(max(each[0], 1e-9)) * 200))
    (time_us, name, copies), *others = times
    second = next(((t, n) for t, n, _ in others if n != name), None)
    reason = f"predicted to take {time_us:.4g} us by {model.name}"
    if second is not None:
        reason += f"; {second[1]} would take {second[0]:.4g} us"
    return Choice(name, reason, copies)


@lru_cache(maxsize=1024)
def _simulation(
    collective: Collective, name: str, ranks: int, per_node: int, copies: int, links: Links
) -> Simulation | None:
    """The simulation of a candidate, kept for other sizes; None if it is not a candidate."""
    from rallypoint.schedule.cost.simulation import Simulation  # slow to import, and rarely needed

    try:
        layout = per_node if per_node < ranks else 1  # levels exist only with several nodes
        program = build(collective, name, ranks=ranks, per_node=layout)
        if sum(len(lane) for lane in program.lanes(0)) * ranks > MOST_OPERATIONS:
            return None
        if copies > 1 and (links.shares_core or copies * len(program.lanes(0)) > LANES):
            return None
        return Simulation(widen(program, copies), links)
    except (ProgramError, InvalidArgumentError):
        return None  # the algorithm does not support this number of ranks, or cannot be widened


def is_file(spec: str) -> bool:
    """Whether the name of an algorithm means a file: ``FILE.py`` or ``FILE.py:FUNCTION``."""
    return spec.partition(":")[0].endswith(".py")


def check_override(name: str) -> None:
    """Raise InvalidArgumentError if no collective has an algorithm of this name."""
    known = sorted({name for algorithms in ALGORITHMS.values() for name in algorithms})
    if name and name not in known and not is_file(name):
        raise InvalidArgumentError(
            f"there is no algorithm {name!r}; name one of {', '.join(known)}, or a file of your "
            "own: my_algorithm.py"
        )
