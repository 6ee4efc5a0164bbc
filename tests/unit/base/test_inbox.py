from __future__ import annotations

import os
import select
import threading

from rallypoint.base.inbox import Inbox


def is_readable(inbox: Inbox[int]) -> bool:
    return bool(select.select([inbox], [], [], 0)[0])


def test_it_is_readable_while_something_has_come() -> None:
    inbox: Inbox[int] = Inbox()
    assert not is_readable(inbox)
    assert list(inbox.take()) == []
    inbox.put(1)
    inbox.put(2)
    assert is_readable(inbox)
    assert list(inbox.take()) == [1, 2]
    assert not is_readable(inbox)
    inbox.close()


def test_nothing_is_lost_between_threads() -> None:
    inbox: Inbox[int] = Inbox()
    numbers = 2000

    def write(first: int) -> None:
        for each in range(first, 4 * numbers, 4):
            inbox.put(each)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < 4 * numbers:
        assert select.select([inbox], [], [], 30)[0]
        taken += inbox.take()
    for thread in threads:
        thread.join()
    for first in range(4):  # those of one thread come in its order
        assert [each for each in taken if each % 4 == first] == list(range(first, 4 * numbers, 4))


def test_what_is_taken_while_an_item_is_handled_keeps_its_order() -> None:
    inbox: Inbox[int] = Inbox()
    for each in (1, 2, 3):
        inbox.put(each)
    taken = []
    for each in inbox.take():
        taken.append(each)
        if each == 1:
            inbox.put(4)
            taken += inbox.take()
    assert taken == [1, 2, 3, 4]


def test_a_closed_one_touches_no_descriptor() -> None:
    inbox: Inbox[int] = Inbox()
    fd = inbox.fileno()
    inbox.close()
    reader, writer = os.pipe()
    try:
        assert fd in (reader, writer)  # the number is in use again
        inbox.put(1)
        inbox.close()
        os.write(writer, b"x")
        assert os.read(reader, 9) == b"x"
    finally:
        os.close(reader)
        os.close(writer)
