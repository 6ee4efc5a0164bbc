"""Workers' output is cut into whole lines, however it arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.launch.output.lines import Lines, with_prefix

PIECES = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b""]), max_size=30)


def whole_lines(data: bytes) -> list[bytes]:
    """The obvious twin: on the whole of it at once."""
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return lines if lines[-1] else lines[:-1]


@given(PIECES)
def test_cutting_does_not_depend_on_how_it_arrives(pieces: list[bytes]) -> None:
    lines = Lines()
    blocks = [lines.take(piece) for piece in pieces]
    assert all(block.endswith(b"\n") for block in blocks if block)
    found = b"".join(blocks) + lines.rest()
    expected = b"".join(line + b"\n" for line in whole_lines(b"".join(pieces)))
    # A last carriage return ends its line: there is no empty line after it.
    assert found.rstrip(b"\n") == expected.rstrip(b"\n")
    assert found.count(b"\n") <= expected.count(b"\n")


@given(PIECES)
def test_each_line_gets_the_prefix(pieces: list[bytes]) -> None:
    block = b"".join(pieces) + b"\n"
    expected = b"".join(b"[x]" + line + b"\n" for line in block[:-1].split(b"\n"))
    assert with_prefix(block, b"[x]") == expected


def test_a_line_without_end_is_broken_at_last() -> None:
    lines = Lines()
    taken = b"".join(lines.take(b"x" * 65536) for _ in range(40))
    assert taken.count(b"\n") == 2
    assert len(taken.replace(b"\n", b"") + lines.rest().rstrip()) == 40 * 65536
