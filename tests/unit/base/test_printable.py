"""Text from elsewhere cannot move a terminal's cursor, hide a line, or fail to be printed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.wording import one_line, printable, table
from rallypoint.launch.output import terminal


@given(st.text(st.characters()))
def test_what_a_terminal_obeys_is_spelled(text: str) -> None:
    shown = printable(text)
    assert all(each.isprintable() or each in "\n\t" for each in shown)
    shown.encode()  # also lone surrogates, as in names of files that are no UTF-8
    assert one_line(text).isprintable()
    if text.isprintable():
        assert shown == one_line(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train é 漢", "train é 漢"),
        ("a\x1b]0;b\x07", r"a\x1b]0;b\x07"),
        ("a\r\nb\tc", "a\\r\nb\tc"),
        ("a\u202eb\udc80", r"a\u202eb\udc80"),
        ("\x9b2J", r"\x9b2J"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_tables_have_a_line_for_each_row() -> None:
    lines = table(("JOB", "PID"), [("a\nb\x1b[2J", "1"), ("c", "2")])
    assert lines == [r"JOB          PID", r"a\nb\x1b[2J  1", r"c            2"]


def test_the_launchers_messages_obey_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    terminal.say("node 1 (a\x1b[2J) left:\nlast\r")
    assert written.getvalue() == "rallypoint: node 1 (a\\x1b[2J) left:\nlast\\r\n"
