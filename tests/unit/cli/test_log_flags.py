"""From flags to where the output goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli.log_flags import read_logs, read_texts
from rallypoint.launch.log_spec import STDERR, STDOUT, Way, translate_template


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        (None, ()),
        ("apple", ("apple",)),
        ("apple,orange", ("apple", "orange")),
        ("a,,b,c", ("a,b", "c")),
        ("a,,,b", ("a,", "b")),
    ],
)
def test_filters_escape_commas_by_doubling_them(text: str | None, texts: tuple[str, ...]) -> None:
    assert read_texts(text) == texts


@given(st.lists(st.text(st.characters(exclude_characters=","), min_size=1), min_size=1))
def test_filters_without_commas_are_a_list(texts: list[str]) -> None:
    assert read_texts(",".join(texts)) == tuple(texts)


def test_torchruns_prefix_template() -> None:
    template = "[${role_name}/{x}|${rank}-${local_rank}]"
    spec = read_logs({}, {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template})
    prefix = spec.prefix_of(rank=5, local_rank=1, role="r", host="h")
    assert prefix == "[r/{x}|5-1]"
    assert translate_template("plain") == "plain"


def test_the_ways_of_all_streams() -> None:
    values = {"--redirects": "0:3,1:1", "--tee": "1:2,2:3", "--local-ranks-filter": "0,1"}
    spec = read_logs(values, {})
    ways = {(rank, stream): spec.way_of(rank, stream) for rank in range(4) for stream in (1, 2)}
    assert ways == {
        (0, STDOUT): Way.FILE,
        (0, STDERR): Way.FILE,
        (1, STDOUT): Way.FILE,
        (1, STDERR): Way.TEE,
        (2, STDOUT): Way.FILE,  # not to be shown
        (2, STDERR): Way.FILE,
        (3, STDOUT): Way.DROPPED,
        (3, STDERR): Way.DROPPED,
    }
    assert spec.are_kept


def test_without_flags_workers_write_themselves() -> None:
    spec = read_logs({}, {})
    assert {spec.way_of(0, STDOUT), spec.way_of(3, STDERR)} == {Way.INHERITED}
    assert not spec.are_kept
    assert read_logs({"--log-prefix": "{rank}: "}, {}).way_of(0, STDOUT) is Way.PREFIXED
    assert read_logs({"--log-dir": "x"}, {}).are_kept
