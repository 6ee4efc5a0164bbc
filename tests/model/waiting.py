"""Waiting and waking (waiting.cc, region.h, region.cc), which the other models use as well."""

from __future__ import annotations

from collections.abc import Callable, Generator

from tests.model.code import Site
from tests.model.steps import Add, Fence, Load, Sleep, Step, Wake

ARM_BELL = Site("waiting.cc", "Waiter::sleep", "state.bell.load(")
ARM_SLEEPING = Site("waiting.cc", "Waiter::sleep", "state.sleeping.fetch_add(")
ARM_FENCE = Site("waiting.cc", "Waiter::sleep", "Region::fence()", "state.sleeping.fetch_add(")
WOKEN_BELL = Site("waiting.cc", "Waiter::sleep", "state.bell.load(", "syscall(SYS_futex")
DISARM = Site("waiting.h", "disarm", "sleeping.fetch_sub(")
WAKE_SLEEPING = Site("region.h", "wake", "state(rank).sleeping.load(")
RING = Site("region.cc", "Region::ring", "bell.fetch_add(")

Look = Callable[[], Generator[Step, int, bool]]


def atomics(*ranks: int) -> dict[str, int]:
    return {f"{name}{rank}": 0 for rank in ranks for name in ("bell", "sleeping")}


def wait(
    rank: int, look: Look, look_for_trouble: Look | None = None, timed: bool = False
) -> Generator[Step, int, bool]:
    """Waiter::pause, without spins and yields, between looks. False: there is trouble.

    Who is armed has slept, as it were: it looks for trouble from then on.
    """
    armed = False
    bell = 0
    while not (yield from look()):
        if armed and look_for_trouble is not None and (yield from look_for_trouble()):
            yield Add(f"sleeping{rank}", DISARM, -1)
            return False
        if not armed:
            armed = True
            bell = yield Load(f"bell{rank}", ARM_BELL)
            yield Add(f"sleeping{rank}", ARM_SLEEPING, 1)
            yield Fence(site=ARM_FENCE)
        else:
            yield Sleep(f"bell{rank}", value=int(timed), expected=bell)
            bell = yield Load(f"bell{rank}", WOKEN_BELL)
    if armed:
        yield Add(f"sleeping{rank}", DISARM, -1)
    return True


def wake(rank: int) -> Generator[Step, int, None]:
    """Region::wake; a fence, or not, comes before it."""
    if (yield Load(f"sleeping{rank}", WAKE_SLEEPING)) != 0:
        yield Add(f"bell{rank}", RING, 1)
        yield Wake(f"bell{rank}")
