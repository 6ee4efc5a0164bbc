"""Seeds whose stories end badly when something is left out: where the search for one begins.

The table saves minutes, and decides nothing. Where changed code has a seed tell another story, the
search goes through all seeds as it did at first; then write down here what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tests.simulation.sim_witness import ViolationError

KNOWN = {
    "Hasty": 55,
    "Hasty SimRegister": 22,
    "HastyHeir": 602,
    "LastsLonger SimRegister": 349,
    "LostStandbysStayLost": 12,
    "NoComplaints": 1,
    "NoDeadlineForAnAnswer": 1,
    "NoDeadlineForTheStopped": 3,
    "NoEndOfOutage SimEtcd": 538,
    "NoEndOfOutage SimStore": 1116,
    "NoFence": 7,
    "NoLease": 20,
    "NoStepDown": 694,
    "NoWordThatAWorkerIsKept": 8,
    "NoWorkersOnStandby": 1,
    "OneMemberIsEnough SimEtcd": 538,
    "OneMemberIsEnough SimStore": 1116,
    "OneVoterIsAQuorum": 20,
    "SaysNothingOfHaste SimEtcd": 1219,
    "SaysNothingOfHaste SimStore": 138,
    "TheGuardianKnowsNoLease": 38,
    "Unbound": 91,
    "WaitTooLittle SimEtcd": 1381,
    "WaitTooLittle SimStore": 1621,
}


def is_needed(
    what: str,
    seeds: Iterable[int],
    without: Callable[[int], object],
    whole: Callable[[int], object],
) -> bool:
    """Whether a story ends badly without it; then the same story must hold with all in place."""
    for seed in _known_first(what, seeds):
        try:
            without(seed)
        except ViolationError:
            whole(seed)
            return True
    return False


def _known_first(what: str, seeds: Iterable[int]) -> Iterator[int]:
    known = KNOWN.get(what)
    if known is not None:
        yield known
    yield from (seed for seed in seeds if seed != known)
