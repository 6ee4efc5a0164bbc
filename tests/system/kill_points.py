"""Processes kill themselves at named points of an update, and of a recovery, as a plan says.

A plan is a list of cases, each of which begins at a step, or later, if the case before it is not
over then. The first death of a case is at one of POINTS; those that follow are at points of the
recovery from it, one after the other. Which process dies is told by the order in which they come to
the point, so it may be any, rank 0 as well. Each death leaves a file DIRECTORY/died-STEP-NUMBER.

The product's own functions are wrapped, in all processes, where these points are.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rallypoint import elastic
from rallypoint.elastic import membership, transfer
from rallypoint.elastic import state as state_module
from rallypoint.process_group.formation import joining, opening

POINTS = (
    "reduce",  # the gradient
    "agreement",  # before it, after `prepare`
    "in agreement",
    "update",  # the agreement has succeeded here
    "half an update",
    "after update",
)
POINTS_OF_RECOVERY = (
    "open",  # the store of the new round
    "form",
    "in form",
    "exchange",  # of reports
    "in exchange",
    "after exchange",
    "send",  # the state, as one of its sources
    "in send",
    "shown",  # where its arrays are, to a newcomer that reads them
    "receive",
    "received",  # but not yet told
    "after transfer",
)
MEMBERS = "exchange, with the state"  # for plans by hand: not all who come there have it
OF_NEWCOMERS = ("receive", "received")
OF_ONE = ("shown", *OF_NEWCOMERS)  # there may be one newcomer, with one source
IN = ("reduce", "in agreement", "in form", "in exchange")  # a moment later


class Death(NamedTuple):
    """Where, as which one of those that come there, and how long afterwards."""

    point: str
    turn: int = 0
    delay_s: float = 0.0


Plan = dict[int, list[Death]]  # in the order of steps


def draw(chance: random.Random, cases: int, *, turns: int, gap: int) -> Plan:
    """Cases that have all points, if there are enough, so many steps apart or more."""
    found: Plan = {}
    points: list[str] = []
    for _ in range(cases):
        if not points:
            points = [*POINTS, *POINTS_OF_RECOVERY]
            chance.shuffle(points)
        point = points.pop()
        deaths = [point] if point in POINTS else [chance.choice(POINTS), point]
        step = max(found, default=0) + gap + chance.randrange(gap)
        found[step] = [
            Death(
                each,
                0 if each in OF_ONE else chance.randrange(turns if number == 0 else 2),
                chance.choice((1e-5, 1e-4, 1e-3)) * chance.random() if each in IN else 0.0,
            )
            for number, each in enumerate(deaths)
        ]
    return found


def write(plan: Plan, directory: Path) -> None:
    """Where `follow` finds it."""
    (directory / "plan").write_text(json.dumps(list(plan.items())))


def deaths(directory: Path) -> dict[int, int]:
    """Of each case, how many have died."""
    steps = [int(path.name.split("-")[1]) for path in directory.glob("died-*")]
    return {step: steps.count(step) for step in sorted(set(steps))}


def follow(directory: Path, state: elastic.State) -> Callable[[str], None]:
    """Follow the plan there; returns what the program calls at its own points."""
    points = _Points(directory, state)
    points.wrap()
    return points.reach


class _Points:
    def __init__(self, directory: Path, state: elastic.State) -> None:
        self._directory, self._state = directory, state
        told = json.loads((directory / "plan").read_text())
        self._plan: Plan = {step: [Death(*each) for each in deaths] for step, deaths in told}
        self._next = min(self._plan)  # about when the next case begins
        # Small pieces, so that there are several.
        transfer._PIECE, transfer._SMALL = 4096, 1024

    def reach(self, point: str) -> None:
        """One of POINTS."""
        if self._state.step >= self._next:
            self._pass(point, is_recovery=False)

    def recover(self, point: str) -> None:
        """One of POINTS_OF_RECOVERY."""
        self._pass(point, is_recovery=True)

    def _pass(self, point: str, *, is_recovery: bool) -> None:
        died = deaths(self._directory)
        before = 0
        for step, case in self._plan.items():
            number = died.get(step, 0)
            if number == len(case):
                before = step
            else:
                # All have the state again, five steps after the last death.
                self._next = max(step, self._step_of(before) + 5)
                if number == 0 and self._state.step < self._next:
                    return
                is_begun = number > 0
                if is_recovery == is_begun and case[number].point == point:
                    self._take_turn(step, number)
                return

    def _step_of(self, case: int) -> int:
        path = self._directory / f"last-{case}"
        return int(path.read_text() or 0) if path.exists() else 0

    def _take_turn(self, step: int, number: int) -> None:
        death = self._plan[step][number]
        for turn in itertools.count():
            if self._is_first(f"came-{step}-{number}-{turn}"):
                break
        if turn == death.turn and self._is_first(f"died-{step}-{number}"):
            (self._directory / f"last-{step}").write_text(str(self._state.step))
            if death.delay_s:
                threading.Thread(target=self._die, args=(death.delay_s,)).start()
            else:
                self._die(0.0)

    def _is_first(self, name: str) -> bool:
        try:
            (self._directory / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _die(self, delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self) -> None:
        """The product's functions."""
        around(state_module, "all_reduce", self.reach, before=("agreement", "in agreement"))
        around(state_module._Update, "__exit__", self.reach, after=("after update",))
        around(membership, "open_round", self.recover, before=("open",))
        for module in (joining, opening):  # of survivors; of those that wait for a place
            around(module, "join", self.recover, before=("form", "in form"))
        around(
            membership,
            "all_gather_into_tensor",
            self.recover,
            before=("exchange", "in exchange"),
            after=("after exchange",),
        )
        around(membership, "all_gather_into_tensor", self._transfer, before=(MEMBERS,))
        around(transfer, "find_readers", self._transfer, before=("send",))
        around(transfer, "show", self._transfer, after=("shown",))
        around(transfer, "_exchange", self._transfer, before=("receive",))
        around(transfer, "_copy", self._transfer, after=("received",))
        for name in ("isend", "broadcast"):
            around(transfer, name, self._transfer, after=("in send",))
        around(transfer, "barrier", self.recover, before=("after transfer",))

    def _transfer(self, point: str) -> None:
        if self._state._is_member == (point not in OF_NEWCOMERS):
            self.recover(point)


def around(
    place: Any,
    name: str,
    reach: Callable[[str], None],
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> None:
    """Have a function of a module or a class reach points before it begins and after it returns."""
    function = getattr(place, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        for point in before:
            reach(point)
        result = function(*arguments, **named)
        for point in after:
            reach(point)
        return result

    setattr(place, name, wrapped)
