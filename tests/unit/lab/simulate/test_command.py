"""`rallypoint simulate`: the table, files, drawings and messages that people see."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rallypoint.lab.simulate import simulate

SUMMIT = ["all_reduce", "--ranks-per-node", "6", "--links", "summit", "--bytes", "8"]


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert simulate(words) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_table_names_source_and_published_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *SUMMIT, "--ranks", "96", "--algorithms", "ring,double_tree")
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:3] == ["algorithm", "variant", "ranks"]
    assert lines[1][:6] == ["ring", "LL", "96", "8", "B", "174.6"]  # 3.6 + 190 x 0.9
    assert lines[4][:6] == ["double_tree", "LL", "96", "8", "B", "49.41"]  # 4.4 + 2 (5 x .5 + 20)
    assert "double_tree takes 1/3.534 of the time of ring with LL." in text
    assert "up to 180x" in text
    assert "Predicted, not measured, with the constants of volta_summit (NCCL v2.5.6" in text


def test_bandwidths_are_those_of_nccl_tests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for collective, factor in (
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1),
    ):
        file = tmp_path / f"{collective}.json"
        words = ["--ranks", "8", "--bytes", "8M", "--links", "ethernet_100g", "--json", str(file)]
        run(capsys, collective, *words)
        rows = json.loads(file.read_text())["rows"]
        assert rows
        for row in rows:
            assert row["algbw_gb_s"] == pytest.approx(8 * 2**20 / row["time_us"] / 1e3)
            assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)


def test_size_is_that_of_the_larger_buffer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Eight blocks of 1 MiB: the ring passes seven of them over each link."""
    file = tmp_path / "rows.json"
    words = ["--ranks", "8", "--bytes", "8M", "--algorithms", "ring", "--links", "ethernet_10g"]
    run(capsys, "all_gather", *words, "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert row["busiest_link_bytes"] == pytest.approx(7 * 2**20)


@pytest.mark.parametrize("name", ["plot.png", "plot.html"])
def test_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    words = ["--ranks", "16", "--sweep-bytes", "8:1M", "--links", "ethernet_100g"]
    run(capsys, "all_reduce", *words, "--plot", str(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<!doctype html>")
    if name.endswith("html"):
        assert b"<svg" in content
        assert b"src=" not in content


def test_sweeps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--sweep-ranks", "2:12", "--algorithms", "ring", "--links", "hopper"]
    run(capsys, "all_reduce", *words, "--variants", "LL", "--json", str(file))
    assert [row["ranks"] for row in json.loads(file.read_text())["rows"]] == [2, 4, 8, 12]


def test_noise_shows_a_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["all_reduce", "--ranks", "8", "--links", "ethernet_100g", "--algorithms", "ring"]
    text = run(capsys, *words, "--noise", "0.3", "--runs", "7")
    assert "median" in text.splitlines()[0]
    assert "p95" in text.splitlines()[0]
    assert text == run(capsys, *words, "--noise", "0.3", "--runs", "7")


def test_explain_draws_the_trees(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "all_reduce", "--ranks", "8", "--algorithms", "double_tree", "--explain")
    tree = """\
    0
    +-- 4
        +-- 2
        |   +-- 1
        |   +-- 3
        +-- 6
            +-- 5
            +-- 7
"""
    assert tree in text
    assert "rank  4  send input 1 to rank 5" in text
    assert "6 steps, 2 chunks" in text


GOOD = """
from rallypoint.schedule.program import *

def star(team):
    '''All send to rank 0, which reduces and sends the result to all.'''
    others = tuple(range(1, team.ranks))
    own, out = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)

    def lanes(rank):
        if rank:
            return ((Send(own, (0,)), receive(0, out)),)
        total = Reduce((own, *(Incoming(peer) for peer in others)), (out,))
        return ((total, Send(out, others)),) if others else ((total,),)

    return Program("star", Collective.ALL_REDUCE, team.ranks, chunks=1, sends=1, lanes=lanes)
"""


def test_custom_algorithm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "star.py"
    file.write_text(GOOD)
    words = ["all_reduce", "--ranks", "6", "--links", "ethernet_100g", "--algorithms", str(file)]
    text = run(capsys, *words)
    assert "star-" in text
    assert "proved for 6 ranks" in text
    file.write_text(GOOD.replace("receive(0, out)", "copy(own, out)"))
    text = run(capsys, *words, status=1)
    assert "rank 0, lane 0, step 1 (send output 0 to ranks 1, 2, 3, 4, 5)" in text
    assert "rank 1 never takes this message" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduced"], "unknown collective 'all_reduced'"),
        (["all_reduce", "--algorithms", "rang"], "no algorithm 'rang'"),
        (["all_reduce", "--links", "moon"], "no link model 'moon'"),
        (["all_reduce", "--variants", "LM"], "no variant 'LM'"),
        (["all_reduce", "--ranks", "24576", "--algorithms", "direct_two_shot"], "too many"),
        (["all_reduce", "--ranks", "17", "--explain"], "too many to draw"),
        (["all_reduce", "--algorithms", "nothing.py"], "cannot load an algorithm from nothing.py"),
        (["all_reduce", "--json", "/nowhere/x"], "/nowhere/x: No such file or directory"),
        (["all_reduce", "--json="], ".: Is a directory"),
    ],
)
def test_what_cannot_be_done_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in run(capsys, *words, status=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduce", "--ranks", "0"], "not a number above 0"),
        (["all_reduce", "--bytes", "8X"], "not a size"),
        (["all_reduce", "--sweep-bytes", "8:4"], "is an empty range"),
        (["all_reduce", "--failed", "1:2"], "is not A-B"),
        (["all_reduce", "--rank", "2"], "did you mean --ranks"),
        (["--ranks", "2"], "name a collective"),
        (["all_reduce", "more"], "unexpected argument 'more'"),
        (["all_reduce", "--noise", "much"], "--noise much is not a number"),
        (["all_reduce", "--noise", "nan"], "--noise nan is not a number of at least 0"),
        (["all_reduce", "--retry-us", "inf"], "--retry-us inf is not a number of at least 0"),
        (["all_reduce", "--seed", "nan"], "--seed nan is not a whole number"),
        (["all_reduce", "--slow", "0:nan"], "--slow 0:nan is not RANK:TIMES"),
        (["all_reduce", "--late=-1:3"], "--late -1:3 is not RANK:US"),
        (["all_reduce", "--late", "8:3"], "there is no rank 8; ranks are 0 to 7"),
        (["all_reduce", "--ranks", "4", "--failed", "0-4"], "there is no rank 4"),
        (
            ["all_reduce", "--sweep-ranks", "2:4", "--sweep-bytes", "8:16"],
            "--sweep-ranks and --sweep-bytes cannot be combined",
        ),
    ],
)
def test_words_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in run(capsys, *words, status=2)


def test_an_algorithm_for_another_collective(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "star.py"
    file.write_text(GOOD)
    text = run(capsys, "broadcast", "--ranks", "6", "--algorithms", str(file), status=1)
    assert f"{file} is for all_reduce, not for broadcast" in text


def test_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `head`, which has read enough."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        assert simulate(SUMMIT) == 0


def test_link_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "all_reduce", "--links", "help")
    assert "volta_summit     LL, LL128, Simple    NCCL v2.5.6" in text


def test_without_words_it_shows_the_five_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    table, sentence = run(capsys).split("\n\n")
    _, *rows = table.splitlines()
    assert len({row.split()[0] for row in rows}) == len(rows) == 5
    assert sentence.startswith("The five fastest algorithms for all_reduce of 1 MiB among 8 ranks")
    assert sentence.count("\n") == 1
    every = [line.split() for line in run(capsys, "all_reduce").splitlines()[1:] if " LL" in line]
    assert {row.split()[0] for row in rows} < {words[0] for words in every}
    assert "name a collective" in run(capsys, "--ranks", "4", status=2)
