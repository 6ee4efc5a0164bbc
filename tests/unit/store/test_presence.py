"""Who has come and who has gone, where keys change between two looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rallypoint.store.init_method import Presence
from rallypoint.store.local_store import HashStore


class ChangingStore(HashStore):
    """Something happens after each check."""

    def __init__(self, after_check: Callable[[HashStore], object]) -> None:
        super().__init__()
        self._after_check = after_check

    def check(self, keys: Sequence[str]) -> bool:
        found = super().check(keys)
        self._after_check(self)
        return found


def come(store: HashStore) -> None:
    store.set("meeting/0", "")
    store.set("meeting/0/came", "")


@pytest.mark.parametrize("have_come", [False, True])
def test_a_rank_that_comes_while_it_is_looked_for_is_there(have_come: bool) -> None:
    presence = Presence(ChangingStore(come), "meeting", [0])
    assert presence.look([0], have_come=have_come) is None
    assert presence.there == {0}


def test_a_rank_that_has_gone_is_told() -> None:
    store = HashStore()
    presence = Presence(store, "meeting", [0])
    assert presence.look([0]) is None
    assert not presence.there
    come(store)
    assert presence.look([0]) is None
    store.delete_key("meeting/0")
    assert presence.look([0]) == 0
    assert not presence.there
