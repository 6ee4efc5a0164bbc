"""The engine and the interpreter: Ctrl-C in a wait, and the lock while it works."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import pytest

from rallypoint.base.errors import PeerError
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.interruption import beside_handlers
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import begin, communicators_of, post, struck


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def error_of(communicator: Communicator) -> PeerError:
    """What a peer is told: it learns of it in another operation."""
    values = np.zeros(1)
    assert communicator.run(Collective.BARRIER, 0, 0, None, None) != 0
    assert communicator.run(Collective.ALL_REDUCE, 0, 0, values, values) != 0
    return communicator.error("barrier")


def test_a_handler_that_raises_when_the_operation_is_just_over() -> None:
    got = np.zeros(1)

    def complete_and_raise(*_: object) -> None:
        assert other.send(0, 0, np.ones(1)) == 0
        assert work.is_completed()
        raise KeyboardInterrupt

    with communicators_of(2, is_alone=False) as (own, other):
        work = post(own, False, 1, 0, got)
        with struck(complete_and_raise), pytest.raises(KeyboardInterrupt):
            work.wait()
        work.wait()
    assert got[0] == 1


def test_an_interrupted_wait_leaves_the_operation_alone() -> None:
    values = [np.ones(3), np.ones(3)]
    with communicators_of(2, is_alone=False) as (own, other):
        work = begin(own, Collective.ALL_REDUCE, 0, 0, values[0], values[0])
        with struck(interrupt), pytest.raises(KeyboardInterrupt):
            work.wait()
        assert other.run(Collective.ALL_REDUCE, 0, 0, values[1], values[1]) == 0
        work.wait()
    assert values[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("in_question", [False, True])
def test_an_interrupted_receive_is_told_as_what_it_is(transport: str, in_question: bool) -> None:
    """Also if Ctrl-C comes while Python is asked whether anybody else may communicate."""

    def is_alone() -> bool:
        if in_question:
            raise KeyboardInterrupt
        return False

    with communicators_of(2, transport=transport, is_alone=is_alone) as (own, other):
        strike: AbstractContextManager[None] = nullcontext() if in_question else struck(interrupt)
        with strike, pytest.raises(KeyboardInterrupt):
            own.receive(1, 7, np.zeros(2, np.float32))
        error = str(error_of(other))
    assert "rank 0 " in error, error
    assert "interrupted in recv #0 (2 x float32 from rank 1, tag 7) on rank 0" in error


def test_polls_carry_out_a_collective_by_parts_and_let_other_threads_run() -> None:
    """They do so while the progress thread is busy with another one."""
    large, copy = np.ones(8 << 20), np.zeros(8 << 20)
    turns: list[float] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            turns.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    parts = midst = 0  # polls that carried out a part, and turns in the midst of one
    try:
        with communicators_of(1) as (busy,), communicators_of(1) as (own,):
            while not (parts > 10 and midst > 0):
                works = [
                    begin(each, Collective.ALL_GATHER, 0, 0, large, copy) for each in (busy, own)
                ]
                is_over = False
                while not is_over:
                    turns.clear()
                    began = time.monotonic()
                    is_over = works[1].is_completed()
                    took = time.monotonic() - began
                    parts += not is_over and took > 1e-4
                    midst += sum(0.1 < (at - began) / took < 0.7 for at in turns)
                for work in works:
                    work.wait()
    finally:
        over.set()
        thread.join()


def test_other_threads_run_while_a_forgotten_group_goes_away() -> None:
    """It waits, for two seconds at most, until its peers have what was sent to them."""
    with communicators_of(2, transport="tcp") as communicators:
        forgotten = list(communicators)
        cast("list[Communicator]", communicators)[:] = communicators[1:]
        for _ in range(30):  # more than the other end takes in, unread
            assert forgotten[0].send(1, 0, np.ones(30_000, np.int8)) == 0
        begins, is_over = threading.Event(), threading.Event()
        steps = []

        def work() -> None:
            begins.wait()
            while not is_over.is_set():
                time.sleep(0.001)
                steps.append(time.monotonic())

        thread = threading.Thread(target=work)
        thread.start()
        begun = time.monotonic()
        begins.set()
        forgotten.clear()
        gc.collect()
        ended = time.monotonic()
        is_over.set()
        thread.join()
    assert ended - begun > 1, "nothing was waited for"
    assert len([step for step in steps if step < ended]) > 10


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "in another thread"])
def test_nothing_of_an_interrupted_function_is_left(is_here: bool) -> None:
    """Otherwise what it had half formed would still be there for other ranks. A signal that another
    thread takes wakes nobody.
    """

    class Formed:
        pass

    begun = threading.Event()
    formed: list[weakref.ref[Formed]] = []

    def form() -> None:
        mine = Formed()
        formed.append(weakref.ref(mine))
        begun.set()
        while True:
            time.sleep(0.001)

    def strike() -> None:
        begun.wait()
        thread = threading.main_thread() if is_here else threading.current_thread()
        signal.pthread_kill(thread.ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=strike)
    gc.disable()
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            beside_handlers(form)
        assert formed[0]() is None
    finally:
        gc.enable()
        signal.signal(signal.SIGUSR1, before)
        thread.join()
