"""How often nodes joined or left recently, and how long new nodes wait because of it.

Nodes join and leave free of charge, so one that dies every second could stop all others. So after a
few such changes new nodes wait, longer each time, and are admitted together. The same holds for
workers that join others which go on in place, if they, and nobody else, are lost soon after it each
time: where others are lost, too, it is not the newcomers' fault, and places must not stay empty.
As the others may have waited for them all that time, the next ones wait for longer than they lived.
"""

from __future__ import annotations

FREE_CHANGES = 4
MEMORY_S = 300.0
_ONE_LOSS_S = 1.0  # nodes lost within so long of each other, as behind one switch, are one change
_LONGEST_PAUSE_S = 60.0
FREE_SHORT_LIVES = 2
_MOST_LIVES = 60.0  # that newcomers wait
SHORT_LIFE_S = 20.0  # longer than it takes to give one up that cannot be reached


class Flapping:
    """The changes of the last minutes.

    Attributes:
        has_told: whether the user knows that new nodes wait.
    """

    def __init__(self) -> None:
        self.has_told = False
        self._changes: list[float] = []  # when rounds ended as nodes came or went
        self._lost_at = -_ONE_LOSS_S  # when the newest of them ended as nodes went

    def count(self, now: float, *, came: bool) -> None:
        """A round ended because nodes joined or left."""
        if came or now - self._lost_at >= _ONE_LOSS_S:
            self._changes.append(now)
        if not came:
            self._lost_at = now

    def pause_s(self, now: float) -> float:
        """How long a round runs at least before new nodes end it."""
        self._changes = [at for at in self._changes if now - at < MEMORY_S]
        excess = len(self._changes) - FREE_CHANGES
        self.has_told = self.has_told and excess > 0
        return min(2.0**excess, _LONGEST_PAUSE_S) if excess > 0 else 0.0

    @property
    def text(self) -> str:
        """Why new nodes wait."""
        return (
            f"nodes came or went {len(self._changes)} times in the last {MEMORY_S / 60:.0f}"
            " minutes, so new nodes are admitted together"
        )


class ShortLives:
    """Workers that joined others and were lost soon, time after time."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._lived_s = 0.0

    def count(self, lived_s: float, *, newcomers_lost: int, others_lost: int) -> None:
        """A round is over in which workers had joined, or others were lost."""
        is_short = newcomers_lost and not others_lost and lived_s < SHORT_LIFE_S
        self._in_a_row = self._in_a_row + 1 if is_short else 0
        self._lived_s = lived_s

    @property
    def pause_s(self) -> float:
        """How long a round runs at least before others of them join."""
        excess = self._in_a_row - FREE_SHORT_LIVES
        lives = min(2.0 ** (excess - 1), _MOST_LIVES) if excess > 0 else 0.0
        return max(self._lived_s, 1.0) * lives

    @property
    def text(self) -> str:
        """Why they wait."""
        return f"workers that joined were lost soon after it {self._in_a_row} times in a row"
