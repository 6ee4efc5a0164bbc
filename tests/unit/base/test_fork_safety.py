"""What touches a rank's variable while modules are imported; the rest needs processes of its own
(tests/system/test_preload.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rallypoint.base.fork_safety import WatchedEnviron


@pytest.fixture
def watched() -> Iterator[None]:
    WatchedEnviron.begin({"RANK"})
    yield
    WatchedEnviron.end()


@pytest.mark.usefixtures("watched")
class TestWatchedEnviron:
    def test_other_variables_are_not_noted(self) -> None:
        os.environ.get("PATH")
        os.environ["SOMETHING"] = "1"
        assert os.environ.pop("SOMETHING") == "1"
        assert list(os.environ)
        assert WatchedEnviron.touched == ""

    def test_the_first_touch_is_noted_with_its_place(self) -> None:
        os.getenv("RANK")
        os.environ.setdefault("RANK", "3")
        del os.environ["RANK"]
        file = os.path.basename(__file__)  # noqa: PTH119
        line = self.test_the_first_touch_is_noted_with_its_place.__code__.co_firstlineno + 1
        assert WatchedEnviron.touched == f"reads RANK when it is imported ({file}:{line})"

    def test_a_test_for_it_is_a_touch(self) -> None:
        assert "RANK" not in os.environ
        assert WatchedEnviron.touched.startswith("reads RANK")


def test_the_environment_is_itself_again() -> None:
    WatchedEnviron.begin(())
    WatchedEnviron.end()
    assert type(os.environ) is os._Environ
