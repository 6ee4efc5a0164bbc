"""What a program waits for, with a node and a clock that do as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rallypoint.launch.api.program_node import NodeHandler, ProgramNode
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousInfo, RendezvousTimeout
from rallypoint.store.local_store import HashStore

Step = Callable[["Node"], object]


class Node(ProgramNode):
    """What it is told happens to it, one step in each wait, which takes 4 s at most."""

    waiting: Any = 0
    is_spare: Any = False
    seat: Any

    def __init__(self, steps: Iterator[Step]) -> None:
        super().__init__(SimpleNamespace(), "node")  # type: ignore[arg-type]
        self.now = 100.0
        self.asked: list[str] = []
        self._steps = steps
        self.changed.wait = self._wait  # type: ignore[method-assign]

    def _wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += min(4.0, timeout)
        next(self._steps)(self)
        return True

    def take_seat(self) -> Any:
        seat, self.seat = self.seat, None
        self.round = self.round if seat is None else seat
        return seat

    def want_round(self) -> None:
        self.asked.append("want_round")

    def withdraw(self) -> None:
        self.asked.append("withdraw")

    def end(self) -> None:
        self.asked.append("end")

    def _live(self) -> None:
        self.asked.append("live")


class Handler(NodeHandler):
    over = -1  # the round that is over before its node enters

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Step, join_s: int = 10) -> None:
        super().__init__("any", "r", RendezvousTimeout(join=timedelta(seconds=join_s)))
        self.node = Node(iter(steps))
        clock = SimpleNamespace(monotonic=lambda: self.node.now)
        monkeypatch.setattr("rallypoint.launch.api.program_node.time", clock)

    def _make_node(self) -> Node:
        return self.node

    def _enter(self, node: ProgramNode, seat: Any, deadline: float) -> RendezvousInfo | None:
        return None if seat == self.over else RendezvousInfo(HashStore(), seat, 9)

    def _raise_if_lost(self, node: ProgramNode) -> None:
        if node.error is not None:
            raise RendezvousConnectionError("lost") from node.error

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def become(**facts: object) -> Step:
    def step(node: Node) -> None:
        for name, value in facts.items():
            setattr(node, name, value)

    return step


NOTHING = become()


def test_a_seat_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    handler = Handler(
        monkeypatch,
        become(waiting=2),
        lambda _: seen.append(handler.num_nodes_waiting()),
        become(seat=3),
        become(seat=4),
        join_s=20,
    )
    assert (handler.num_nodes_waiting(), handler.is_closed()) == (0, False)
    assert handler.next_rendezvous().rank == 3
    assert seen == [0]  # it has no round that it could have to leave
    assert handler.node.asked == ["live"]
    handler.node.waiting = 5
    assert handler.num_nodes_waiting() == 5
    assert handler.next_rendezvous().rank == 4
    assert handler.node.asked == ["live", "want_round"]


def test_a_round_that_is_over_before_it_was_entered_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = Handler(monkeypatch, become(seat=3), become(seat=4))
    handler.over = 3
    assert handler.next_rendezvous().rank == 4
    assert handler.node.asked == ["live", "want_round"]


@pytest.mark.parametrize("grace_s", [0.0, 1.0])
@pytest.mark.parametrize(
    ("missing", "reason"),
    [("", "nodes of the previous round have not rejoined"), ("1 of 2 is here", "1 of 2 is here")],
)
def test_in_vain_only_as_long_as_join_timeout(
    monkeypatch: pytest.MonkeyPatch, missing: str, reason: str, grace_s: float
) -> None:
    handler = Handler(monkeypatch, become(missing=missing), NOTHING, NOTHING)
    handler._grace_s = grace_s
    with pytest.raises(RendezvousTimeoutError, match=f"'r' began within 10 s: {reason};"):
        handler.next_rendezvous()
    assert handler.node.now == 110.0 + grace_s
    assert handler.node.asked == ["live", "withdraw"]
    handler.node.closed = "by others"
    assert not handler.is_closed()  # it has nothing to do with that node any more


def test_a_spare_node_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [NOTHING] * 9
    handler = Handler(
        monkeypatch, become(is_spare=True), *waits, become(is_spare=False), *waits, join_s=6
    )
    with pytest.raises(RendezvousTimeoutError):
        handler.next_rendezvous()
    # The whole of join_timeout again, from when it was seen to be spare for the last time.
    assert handler.node.now == 100.0 + 4 * 10 + 6


@pytest.mark.parametrize(
    ("is_spare", "kind"), [(False, RendezvousClosedError), (True, RendezvousGracefulExitError)]
)
def test_closed_comes_before_all_else(
    monkeypatch: pytest.MonkeyPatch, is_spare: bool, kind: type[Exception]
) -> None:
    step = become(closed="by me", is_spare=is_spare, error=OSError(), seat=3)
    handler = Handler(monkeypatch, step)
    with pytest.raises(kind, match="'r' is closed: by me") as caught:
        handler.next_rendezvous()
    assert caught.type is kind
    assert handler.is_closed()


def test_a_lost_node_is_told_of_even_if_it_had_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler(monkeypatch, become(error=OSError(), seat=3))
    with pytest.raises(RendezvousConnectionError, match="lost"):
        handler.next_rendezvous()


def test_the_node_ends_with_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler(monkeypatch, become(seat=3))
    handler.next_rendezvous()
    node = handler.node
    monkeypatch.undo()  # the clock knows the handler
    del handler
    assert node.asked == ["live", "end"]


def test_what_ends_a_thread_is_told_to_whoever_waits() -> None:
    class Failing(Node):
        def _live(self) -> None:
            raise OSError("no way")

    node = Failing(iter(()))
    told = threading.Event()
    monitor = threading.Condition()
    node.changed = monitor
    monitor.notify_all = told.set  # type: ignore[method-assign]
    node.start()
    assert node.join(200)
    assert told.is_set()
    assert str(node.error) == "no way"
