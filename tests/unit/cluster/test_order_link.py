"""Orders to a program at the other end of a connection, which here is a shell on this machine."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster.order_link import OrderLink


@contextmanager
def link_to(script: str, directory: Path) -> Iterator[OrderLink]:
    link = OrderLink("host1", ["sh", "-c", script], directory / "log")
    yield link
    link.close()
    link.end(time.monotonic() + 60)


def test_orders_and_answers(tmp_path: Path) -> None:
    """What a login shell prints before the greeting does not matter."""
    script = """echo welcome; echo 'we are {"port": 7}'; read order; echo "[$order]" """
    with link_to(script, tmp_path) as link:
        link.greet("we are")
        assert link.found == {"port": 7}
        link.tell({"do": "x"})
        select.select([link], [], [])
        assert link.read() == [{"do": "x"}]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo out of memory >&2; echo half | tr -d '\\n'", "the connection ended: sh -c "),
        ("exec sleep 60 </dev/null", "no answer within 0.05 s: sh -c "),
    ],
)
def test_an_answer_that_does_not_come(tmp_path: Path, script: str, message: str) -> None:
    link = OrderLink("host1", ["sh", "-c", script], tmp_path / "log")
    with pytest.raises(HostError) as raised:
        link.read(0.05 if "sleep" in script else 60.0)
    assert str(raised.value).startswith(f"host1: {message}")
    assert ("\n  | out of memory" in str(raised.value)) == ("memory" in script)
    link.tell({"do": "x"})  # nobody reads it, which the next answer would tell
    link.close()
    link.end(time.monotonic())


def test_a_program_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    link = OrderLink("host1", ["sh", "-c", "echo; exec sleep 60"], tmp_path / "log")
    select.select([link], [], [])
    link.close()
    link.end(time.monotonic())
    assert link._process.returncode == -9


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="host1: cannot run no-such-shell"):
        OrderLink("host1", ["no-such-shell"], tmp_path / "log")
