"""`run`: calls a training function again, in the same process, when ranks have changed."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, overload

from rallypoint.base.errors import MembershipChangedError, TooFewPeersError
from rallypoint.elastic.membership import LOSSES, membership
from rallypoint.elastic.state import State

P = ParamSpec("P")
R = TypeVar("R")
Training = Callable[Concatenate[State, P], R]

_TOLD_EVERY_S = 10.0
_RETRIES = 30


@overload
def run(function: Training[P, R]) -> Training[P, R]: ...


@overload
def run(
    *, min_size: int = 1, retries: int | None = None
) -> Callable[[Training[P, R]], Training[P, R]]: ...


def run(
    function: Training[P, R] | None = None, *, min_size: int = 1, retries: int | None = None
) -> Training[P, R] | Callable[[Training[P, R]], Training[P, R]]:
    """Make a training function continue when ranks are lost or join.

        @elastic.run
        def train(state):
            while state.step < steps:
                gradient = compute(state.step, dist.get_rank(), dist.get_world_size())
                dist.all_reduce(gradient)
                with state.update():
                    state.parameters -= rate * gradient
                    state.step += 1

    When a rank is lost, calls on the default group raise. The remaining ranks keep their processes
    and memory; `run` connects them again, newcomers copy the state from them, and `run` calls the
    function again. The group stays the same object, with other ranks and another size. Groups made
    from it must be made again (`State.on_reset`). If the others are in their third call of such a
    function, a newcomer's first two calls return None at once, and it joins them in its third.

    This needs `rallypoint run`; under other launchers the function runs, and a loss is an error as
    usual.

    Args:
        min_size: with fewer ranks, wait for others to join.
        retries: how often in a row it may retry after losses without an update in between;
            None: 30 times.

    Raises (the decorated function):
        NotInitializedError: there is no default group.
        StateLostError: all ranks that had the state, or one of the shards of `Replicas`, were lost.
        TooFewPeersError: fewer ranks than min_size for as long as the group's timeout.
        PeerLostError, RevokedError, StoreError: ranks were lost, and the launcher starts no further
            round for half a minute, or it happened too often in a row.
    """

    def decorate(function: Training[P, R]) -> Training[P, R]:
        membership().enroll()

        @functools.wraps(function)
        def call(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
            attempts = _Attempts(state, min_size=min_size, retries=retries)
            return attempts.make(lambda: function(state, *args, **kwargs))

        return call

    return decorate if function is None else decorate(function)


class _Attempts:
    """Attempts at one function, until it returns."""

    def __init__(self, state: State, *, min_size: int, retries: int | None) -> None:
        self._state, self._min_size, self._retries = state, min_size, retries
        self._fruitless = 0
        self._committed = -1

    def make(self, function: Callable[[], R]) -> R:
        """Call it as often as necessary."""
        part = membership()
        is_synchronized = part.begin()
        is_first = True
        while True:
            try:
                if not is_synchronized:
                    self._state.sync()
                    part.report_state()
                is_synchronized = False
                if part.is_behind:
                    return None  # type: ignore[return-value]  # see `run`
                self._await_enough()
                if not is_first:
                    self._state._reset()
                is_first = False
                result = self._train(function)
            except MembershipChangedError as change:
                self._count(change.__cause__)
                if self._state._settlement is None:
                    self._state._go_on(None)
            except LOSSES as error:
                if not part.outlives(error) or not part.has_lost(error):
                    raise
                error.__traceback__ = None  # it would keep the memory of the caller's variables
                self._count(error)
                self._state._go_on(error)
            else:
                if part.leave():
                    return result
                self._state._go_on(None)
            self._state.restore()

    def _train(self, function: Callable[[], R]) -> R:
        if membership().is_idle:
            self._state._follow()
            return None  # type: ignore[return-value]  # see Replicas
        result = function()
        self._state._end()
        return result

    def _count(self, loss: BaseException | None) -> None:
        """Another attempt has ended, by that loss, or because ranks have joined."""
        committed = self._state._committed
        self._fruitless = self._fruitless + 1 if committed == self._committed else 0
        self._committed = committed
        most = _RETRIES if self._retries is None else self._retries
        if loss is not None and self._fruitless > most:
            raise loss

    def _await_enough(self) -> None:
        part = membership()
        size = part.group.size()
        if size >= self._min_size:
            return
        limit_s = part.group.timeout.total_seconds()
        until = time.monotonic() + limit_s
        while not part.wait_for_news(min(_TOLD_EVERY_S, until - time.monotonic())):
            here = f"{size} here, at least {self._min_size} needed"
            if time.monotonic() >= until:
                raise TooFewPeersError(f"too few ranks for {limit_s:.0f} s: {here}")
            if part.group.own_rank == 0:
                print(f"rallypoint: waiting for ranks to join: {here}", file=sys.stderr)
        raise MembershipChangedError("ranks have joined")
