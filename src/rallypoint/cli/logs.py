"""`rallypoint logs`: what the workers of a job have written; of a job that has ended, too, if its
launcher has left word of it (saved_job.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from rallypoint.base.errors import HostError
from rallypoint.base.files import open_regular
from rallypoint.base.wording import printable
from rallypoint.cli.jobs import RunningJob, perform_on_job, rank_flag
from rallypoint.cli.options import HELP, Flag, Options, integer, reader
from rallypoint.launch.inspection.agent_client import NoAnswerError, ask_status
from rallypoint.launch.inspection.entries import Found
from rallypoint.launch.inspection.saved_job import latest_kept

PROGRAM = "rallypoint logs"
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

Print the output of the workers on this machine in the latest round. The job must write its output
to files: rallypoint run --log-dir DIR --redirects 3, or --tee 3 to show it as well. If no such job
is running, it prints that of the job that failed last on this machine.
"""
_STREAMS = ("stdout", "stderr")
_EVERY_S = 0.2
_CHUNK = 1 << 20


class _LogsOptions(Options):
    follow = Flag.switch("keep printing what they write, until the job ends", "-f")
    rank = rank_flag("only these ranks, as in 0,3 (default: all on this machine)")
    tail = Flag("start with the last N lines of each file (default 20; 0 for all)", "LINES",
                reader(integer, "{name} is {text!r}; it must be a number of lines."), 20,
                short="-n")  # fmt: skip
    help = HELP


def logs(words: Sequence[str]) -> int:
    """Run `rallypoint logs WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _LogsOptions, _print_logs, _print_ended)


def _print_logs(job: RunningJob, options: _LogsOptions) -> int:
    ranks, lines = options.rank, options.tail
    files: dict[str, _LogFile] = {}
    agents = _find_files(job.agents, ranks, files)
    if not files:
        raise HostError(
            f"{job} writes no output to files here; start it with --log-dir DIR --redirects 3, or"
            " --tee 3."
        )
    for file in files.values():
        file.skip_to_last(lines)
    _show(files.values())
    while options.follow and agents:
        time.sleep(_EVERY_S)
        agents = _find_files(agents, ranks, files)  # a new round has new files
        _show(files.values())
    _show(files.values(), is_end=True)
    return 0


def last_lines(
    agents: Sequence[Found], ranks: frozenset[int] | None, count: int
) -> dict[str, list[bytes]]:
    """The last lines of the files of these ranks (None: all) on this machine, by path."""
    files: dict[str, _LogFile] = {}
    _find_files(agents, ranks, files)
    for file in files.values():
        file.skip_to_last(count)
    return {path: file.new_lines(is_end=True) for path, file in files.items()}


def _print_ended(word: str, options: _LogsOptions) -> int | None:
    """Print the logs of the latest failed job of that name; None if nothing is known of any."""
    job = latest_kept(word)
    if job is None:
        return None
    if not job.logs:
        raise HostError(f"job {job.name} has ended, and wrote no output to files.")
    workers = {
        worker.rank: worker.local_rank for node in job.facts.nodes for worker in node.workers
    }
    files = _files_of(job.logs, job.facts.round, workers, options.rank)
    print(printable(f"job {job.name} has ended; its logs: {job.logs}"), file=sys.stderr, flush=True)
    for file in files:
        file.skip_to_last(options.tail)
    _show(files, is_end=True)
    return 0


def _find_files(
    agents: Sequence[Found], ranks: frozenset[int] | None, files: dict[str, _LogFile]
) -> list[Found]:
    """Add the existing files to `files`, by path; returns the agents that are still running."""
    running = []
    for agent in agents:
        try:
            status = ask_status(agent)
        except NoAnswerError as error:
            if error.is_gone:
                continue
            raise
        running.append(agent)
        workers = {worker.rank: worker.local_rank for worker in status.workers}
        for file in _files_of(agent.about.get("logs", ""), status.round, workers, ranks):
            files.setdefault(file.path, file)
    return running


def _files_of(
    directory: str, round_number: int, workers: Mapping[int, int], ranks: frozenset[int] | None
) -> list[_LogFile]:
    """The existing files of workers (rank -> local rank)."""
    files = [
        _LogFile(rank, stream, f"{directory}/attempt_{round_number}/{local_rank}")
        for rank, local_rank in workers.items()
        for stream in _STREAMS
        if ranks is None or rank in ranks
    ]
    return [file for file in files if directory and os.path.isfile(file.path)]


def _show(files: Collection[_LogFile], *, is_end: bool = False) -> None:
    """Print the new lines of all files, with the rank before each line if there are several."""
    has_several = len({file.rank for file in files}) > 1
    for file in files:
        prefix = f"[{file.rank}] ".encode() if has_several else b""
        stream = sys.stdout if file.stream == "stdout" else sys.stderr
        for line in file.new_lines(is_end=is_end):
            stream.buffer.write(prefix + line + b"\n")
        stream.flush()


@dataclass(slots=True)
class _LogFile:
    """A worker's output file, and how far it has been printed."""

    rank: int
    stream: str
    directory: str
    at: int = 0

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.stream}.log"

    def _open(self) -> BinaryIO:
        return os.fdopen(open_regular(self.path), "rb")  # of another user's job, for root

    def skip_to_last(self, lines: int) -> None:
        """Begin with its last lines; 0: begin at the start."""
        if not lines:
            return
        with self._open() as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - _CHUNK))
            data = file.read(end - start)
        has_end = data.endswith(b"\n")
        kept = data.split(b"\n")[-lines - has_end :]
        self.at = end - len(b"\n".join(kept))

    def new_lines(self, *, is_end: bool) -> list[bytes]:
        """The unprinted lines; at the end of the file, an incomplete last line too."""
        with self._open() as file:
            file.seek(self.at)
            data = file.read()
        lines = data.split(b"\n")
        rest = lines.pop()
        self.at += len(data) - len(rest)
        if rest and is_end:
            lines.append(rest)
        return lines
