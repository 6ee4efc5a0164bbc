"""Run tests that failed once more, alone, and name those that then pass.

    python -m tests.rerun FAILURES -- PYTEST...

FAILURES is what `pytest --failures` wrote: a JSON object a line. A test that fails twice fails the
run. One that passes the second time is flaky: it is named, what its first failure left is kept in
build/flaky, and the run goes on. The following are not run again, and fail the run at once:

- what cannot fail by chance: tests marked `exact`;
- what must never happen: a crash, a sanitizer's report, a process that was left behind;
- tests that are listed in tests/flaky.toml, as they had their second chance;
- more than MOST_FLAKY tests: so many at once are no chance.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "flaky.toml"
KEPT = ROOT / "build" / "flaky"
MOST_FLAKY = 5
MOST_BYTES = 10 << 20  # of a file that a test left

# Raised where processes outlive their test.
LEFT_BEHIND = "LeftBehindError"
# In a failure's text. A test that sends such a signal itself is not run again either.
_CRASHES = re.compile(
    r"\bSIG(?:SEGV|ABRT|BUS|ILL|FPE|SYS)\b|Segmentation fault|core dumped|Fatal Python error"
    r"|crashed while running"
)
_SANITIZERS = re.compile(
    r"(?:Address|Leak|Memory|Thread|UndefinedBehavior)Sanitizer|: runtime error: "
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failed phase of a test.

    Attributes:
        test: its name; of a file that could not be read, the file's.
        when: setup, call, teardown or collect.
        error: the first line of the error.
        text: the whole report, with what was captured.
        marks: "exact", if the test has it.
        seed: what it drew from; None if it did not, or if the process that ran it is gone.
        load: of the machine, over a minute, when it failed.
        directory: the test's own; "" if it has none.
    """

    test: str
    when: str
    error: str
    text: str
    marks: tuple[str, ...] = ()
    seed: int | None = None
    load: float = 0.0
    directory: str = ""


def why_final(failure: Failure, listed: Sequence[str]) -> str:
    """The reason not to run this test again; "" if there is none."""
    reasons = {
        "listed in tests/flaky.toml": failure.test in listed,
        "could not be collected": failure.when == "collect",
        **dict.fromkeys(failure.marks, True),
        "a process was left behind": LEFT_BEHIND in failure.text,
        "a process crashed": _CRASHES.search(failure.text) is not None,
        "a sanitizer's report": _SANITIZERS.search(failure.text) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def read(path: Path) -> dict[str, list[Failure]]:
    """The failures of each test."""
    found: dict[str, list[Failure]] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        failure = Failure(**{**fields, "marks": tuple(fields.get("marks", ()))})
        found.setdefault(failure.test, []).append(failure)
    return found


def keep(test: str, failures: Sequence[Failure]) -> Path:
    """Copy what the first failure left into build/flaky; return where it is."""
    place = KEPT / re.sub(r"\W+", "_", test)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for failure in failures:
        head = f"{test} ({failure.when}; {_circumstances(failure)})\n\n"
        (place / f"{failure.when}.txt").write_text(head + failure.text)
        directory = Path(failure.directory)
        if not failure.directory or not directory.is_dir():
            continue
        for path in directory.rglob("*"):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            copy = place / "files" / path.relative_to(directory)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return place


def rerun(path: Path, pytest: Sequence[str]) -> int:
    """Do so; the exit status."""
    failed = read(path)
    if not failed:
        print("rerun: tests failed, but none is recorded", file=sys.stderr)
        return 1
    listed = [entry["test"] for entry in tomllib.loads(LISTED.read_text()).get("flaky", [])]
    lines, again = [], []
    for test, failures in failed.items():
        reasons = filter(None, (why_final(failure, listed) for failure in failures))
        if reason := next(reasons, ""):
            lines.append(f"FAILED {test} ({reason}: {failures[0].error})")
        else:
            again.append(test)
    if len(again) > MOST_FLAKY:
        lines += [f"FAILED {test} ({failed[test][0].error})" for test in again]
        lines.append(f"{len(again)} tests failed that could be run again; {MOST_FLAKY} at most are")
        again = []
    is_good = not lines
    for test in again:
        first = failed[test][0]
        kept = keep(test, failed[test]).relative_to(ROOT)
        seed = [] if first.seed is None else ["--seed", str(first.seed)]
        print(f"== once more, alone: {test}", flush=True)
        if subprocess.run([*pytest, *seed, test], check=False).returncode == 0:
            lines.append(f"FLAKY {test} ({_circumstances(first)}, {first.error}); see {kept}")
        else:
            is_good = False
            lines.append(f"FAILED {test} (twice: {first.error})")
    print("\n".join(lines))
    return 0 if is_good else 1


def _circumstances(failure: Failure) -> str:
    seed = "no seed" if failure.seed is None else f"seed {failure.seed}"
    return f"{seed}, load {failure.load:.1f}"


def main() -> int:
    """Read the command line."""
    path, dashes, *pytest = sys.argv[1:] if len(sys.argv) > 3 else ("", "", "")
    if dashes != "--":
        print(__doc__, file=sys.stderr)
        return 2
    return rerun(Path(path), pytest)


if __name__ == "__main__":
    sys.exit(main())
