"""`rallypoint bench`: measures this machine. So far one thing: the link model of its memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rallypoint.base.errors import RallypointError
from rallypoint.cli.options import HELP, Flag, UsageError, describe, parse

PROGRAM = "rallypoint bench"

FLAGS = (
    Flag("--calibrate", "fit a link model to the engine's all_reduce on this machine"),
    Flag("--ranks", "numbers of ranks to measure with (default 2,3,4,6,8)", "N,M"),
    Flag("--rounds", "how often each size and algorithm is measured (default 40)", "N"),
    Flag("--out", "where to write the model (default this_machine.toml)", "FILE"),
    HELP,
)  # fmt: skip

USAGE = """\
usage: rallypoint bench --calibrate [FLAGS]

Measure all_reduce with seven algorithms at 17 sizes, fit a link model to every other size, and say
how far its predictions are from the sizes left out. Takes some minutes; other work on the machine
shows. The model is for `rallypoint simulate --links FILE` and `init_process_group(links=FILE)`.

  rallypoint bench --calibrate --out my_machine.toml
"""

_STATUS_OK, _STATUS_FAILED, _STATUS_USAGE = 0, 1, 2


def bench(words: Sequence[str]) -> int:
    """Perform `rallypoint bench WORDS`; the exit status."""
    try:
        values, rest = parse(words, FLAGS, program=PROGRAM, environ={})
        if "--help" in values or not words:
            print(USAGE, describe(FLAGS), sep="\n")
            return _STATUS_OK if words else _STATUS_USAGE
        if rest:
            raise UsageError(f"{PROGRAM}: unexpected word {rest[0]!r}; it takes flags only.")
        if "--calibrate" not in values:
            raise UsageError(f"{PROGRAM}: say what to measure: --calibrate.")
        out = values.get("--out", "this_machine.toml")
        if not out.endswith(".toml"):
            raise UsageError(f"{PROGRAM}: --out {out} must end in .toml, as link models do.")
        ranks = [_count(word, "--ranks") for word in values.get("--ranks", "2,3,4,6,8").split(",")]
        rounds = _count(values.get("--rounds", "40"), "--rounds")
    except UsageError as error:
        print(error, file=sys.stderr)
        return _STATUS_USAGE
    try:
        _calibrate(sorted(set(ranks)), rounds, out)
    except (RallypointError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _STATUS_FAILED
    return _STATUS_OK


def _count(word: str, flag: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) < 2:
        raise UsageError(f"{PROGRAM}: {flag} needs whole numbers of at least 2, not {word!r}.")
    return int(word)


def _calibrate(ranks: Sequence[int], rounds: int, out: str) -> None:
    import statistics
    from pathlib import Path

    from rallypoint.cli.calibrate import calibrate, p95

    found = calibrate(ranks, name=Path(out).stem, rounds=rounds)
    Path(out).write_text(found.model)
    noise = [error.measured.noise for error in found.errors]
    print(
        f"{len(found.errors)} predictions at sizes left out of the fit: half are within "
        f"{found.median_error:.1%} of what was measured, 95% within {found.p95_error:.1%}. Two "
        f"halves of one measurement differ by {statistics.median(noise):.1%}, and 95% of them by "
        f"{p95(noise):.1%} at most."
    )
    print(f"written to {out}")
