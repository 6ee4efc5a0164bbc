"""pages.py [--check]: write the pages that follow from other files, or say which are out of date.

- docs/reference/command-line.md: the help of each command, word for word;
- docs/decisions/index.md: the decisions, with their status and date;
- docs/performance.md, charts, and the figures of README.md: performance.py;
- docs/images/{processes,ring,double_tree}.svg: diagrams.py.

Run it with the Python of an environment that has Rallypoint: `make pages`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import diagrams
import performance

from rallypoint import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OF_COMMANDS = {"script": ("script slurm", "script jobset")}  # commands that have commands
HELP = {"run": "--help-all"}  # instead of --help

_COMMAND_LINE = """\
# Command line

<!-- Written by `make pages` from `--help`; do not edit. -->

`rallyrun` is `rallypoint run`. Each text below is what the command prints with `--help`;
for `run`, with `--help-all`.
[Exit statuses](../exit-statuses.md) and [environment variables](environment.md) have their own
pages.
"""
_DECISIONS = """\
# Decisions

<!-- Written by `make pages` from the files beside it; do not edit. -->

Each choice that someone will question has a page: what was decided, why, and what it costs. When
a decision no longer holds, its status names the page that replaces it.

| | Decision | Status | Since |
|-|-|-|-|
"""


def help_of(command: str) -> str:
    """What `rallypoint COMMAND` prints as its help, with all flags."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, ["rallypoint", *command.split(), HELP.get(command, "--help")]
    try:
        with contextlib.redirect_stdout(printed):
            status = cli.main()
    finally:
        sys.argv = before
    if status != 0:
        raise SystemExit(f"rallypoint {command} --help: exit status {status}")
    return printed.getvalue()


def command_line() -> str:
    """The page of all commands."""
    overview = help_of("")
    commands = re.findall(r"^  ([a-z]+)  ", overview, re.MULTILINE)
    page = [_COMMAND_LINE, "## rallypoint\n", f"```text\n{overview.rstrip()}\n```\n"]
    for command in commands:
        page += [f"## rallypoint {command}\n", f"```text\n{help_of(command).rstrip()}\n```\n"]
        for inner in OF_COMMANDS.get(command, ()):
            page += [f"### rallypoint {inner}\n", f"```text\n{help_of(inner).rstrip()}\n```\n"]
    return "\n".join(page)


def decisions() -> str:
    """The index of decisions."""
    rows = []
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title, _, status, *_ = path.read_text(encoding="utf-8").splitlines()
        named = re.fullmatch(r"# (\d{3})\. (.+)", title)
        said = re.fullmatch(r"Status: (Accepted|Superseded by .+), (\d{4}-\d\d-\d\d)", status)
        if named is None or named[1] != path.name[:3]:
            raise SystemExit(f"{path}: its first line must be `# {path.name[:3]}. TITLE`")
        if said is None:
            raise SystemExit(
                f"{path}: its third line must be `Status: Accepted, YYYY-MM-DD`"
                " (or `Superseded by [NNN](FILE)`)"
            )
        rows.append(f"| {named[1]} | [{named[2]}]({path.name}) | {said[1]} | {said[2]} |\n")
    return _DECISIONS + "".join(rows)


PAGES = {
    "docs/reference/command-line.md": command_line,
    "docs/decisions/index.md": decisions,
    "docs/images/processes.svg": diagrams.processes,
    "docs/images/ring.svg": diagrams.ring,
    "docs/images/double_tree.svg": diagrams.double_tree,
    "docs/measurements/all_reduce.svg": performance.all_reduce_chart,
    "docs/measurements/beside_others.svg": performance.beside_others_chart,
    "docs/measurements/in_place_phases.svg": performance.recovery_chart,
    "docs/performance.md": performance.page,
    "README.md": performance.readme,
    "README.zh-CN.md": performance.readme_zh,
}


def main() -> int:
    """Write the pages, or compare them; the exit status."""
    stale = 0
    for name, content in PAGES.items():
        path, text = ROOT / name, content()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{name} is out of date: run `make pages`", file=sys.stderr)
            stale = 1
        else:
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
