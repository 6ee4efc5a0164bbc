"""`rallypoint trace`: writes a running job's calls to a file for Perfetto."""

from __future__ import annotations

import gzip
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.base.wording import brief, printable
from rallypoint.cli.jobs import RunningJob, perform_on_job
from rallypoint.cli.options import HELP, Flag, Options, UsageError, reader, text
from rallypoint.lab.trace.chrome import to_lines
from rallypoint.lab.trace.slices import Drawing, draw
from rallypoint.launch.inspection.all_nodes import trace_everywhere
from rallypoint.launch.inspection.node_trace import JobTrace, NodeTrace, WorkerTrace
from rallypoint.launch.inspection.saved_job import KeptJob, latest_kept

PROGRAM = "rallypoint trace"
_SECONDS = 5.0
_MOST_SECONDS = 600.0
_VIEWER = "https://ui.perfetto.dev"
_USAGE = f"""\
usage: {PROGRAM} [JOB] -o FILE [--seconds S]

Trace a running job: record every collective, send and receive of all its ranks for some seconds,
for Perfetto. Ctrl-C ends it early. Then open the file at {_VIEWER}; it stays on your
machine.

  {PROGRAM} -o trace.json.gz                  five seconds of the only job here
  {PROGRAM} my-job -o trace.json.gz -s 0.5    half a second of one with many calls

Perfetto shows each rank as a process and each group as a track; arrows join the ranks of a
collective. Select a call to see its number, size and operator, and which rank entered it last. Our
calls take about 0.1 us longer while they are traced, and no longer before or after. For PyTorch's
other backends it shows what PyTorch's flight recorder keeps: up to some hundred collectives a
second. For a job that has failed it shows the last 32 calls in each group.

The exit status is 0 if the file was written, 1 if not, 2 if the command line is wrong, and 5 if
there is no such job.
"""


def _seconds(text: str) -> float:
    if not 0 < float(text) <= _MOST_SECONDS:
        raise ValueError(text)
    return float(text)


class _TraceOptions(Options):
    output = Flag("file to write; compressed if its name ends in .gz", "FILE",
                  text, "", short="-o")  # fmt: skip
    seconds = Flag(f"how long to trace (default: {_SECONDS:g})", "S",
                   reader(_seconds, "{name} is {text!r}; it must be a number up to "
                          f"{_MOST_SECONDS:g}."), _SECONDS, short="-s")  # fmt: skip
    help = HELP

    def check_values(self) -> None:
        super().check_values()
        if not self.output:
            raise UsageError("name the file to write, as in -o trace.json.gz.")


def trace(words: Sequence[str]) -> int:
    """Run `rallypoint trace WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _TraceOptions, _trace_running, _trace_ended)


def _trace_running(job: RunningJob, options: _TraceOptions) -> int:
    seconds = options.seconds
    with _writable(Path(options.output)) as path:
        message = f"tracing {job} for {seconds:g} s; Ctrl-C ends it earlier"
        print(printable(message), file=sys.stderr)
        with _interruptible() as is_over:
            seen = trace_everywhere(job.agents, seconds, is_over.is_set)
        if not any(node.workers for node in seen.nodes):
            raise HostError(f"{job} has no workers yet; `rallypoint status` says why.")
        traced_s = brief(max(map(_traced_s, seen.nodes)))
        _write(path, seen, f"{traced_s} of job {job.name}")
    return 0


def _trace_ended(word: str, options: _TraceOptions) -> int | None:
    """Trace the last calls of the latest failed job of that name; None if there is none."""
    job = latest_kept(word)
    if job is None:
        return None
    with _writable(Path(options.output)) as path:
        _write(path, _of_kept(job), f"the last calls of job {job.name}")
    return 0


@contextmanager
def _writable(path: Path) -> Iterator[Path]:
    """Check at once that the file can be written; leave no empty file behind."""
    existed = path.exists()
    try:
        path.open("ab").close()
        yield path
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror or error}.") from None
    finally:
        if not existed and path.is_file() and not path.stat().st_size:
            path.unlink()


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; a second Ctrl-C ends the program."""
    is_over = threading.Event()

    def end(*_: object) -> None:
        is_over.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield is_over
    finally:
        signal.signal(signal.SIGINT, before)


def _traced_s(node: NodeTrace) -> float:
    return (node.ended_ns - node.began_ns) / 1e9


def _of_kept(job: KeptJob) -> JobTrace:
    nodes = tuple(
        NodeTrace(
            node_rank=node.node_rank,
            host=node.host,
            clock="",
            began_ns=0,
            ended_ns=node.now_ns,
            wall_ns=None,
            workers=tuple(
                WorkerTrace(
                    rank=worker.rank,
                    pid=worker.process.pid if worker.process else 0,
                    groups=worker.groups,
                )
                for worker in node.workers
            ),
        )
        for node in job.facts.nodes
    )
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.ended))
    note = f"the job ended at {ended} with exit status {job.status}: showing each group's "
    return JobTrace(
        run_id=job.run_id,
        round=job.facts.round,
        nodes=nodes,
        notes=(f"{note}last 32 collectives, with times exact to within some milliseconds",),
    )


def _write(path: Path, seen: JobTrace, what: str) -> None:
    drawing = draw(seen)
    workers = [worker for node in seen.nodes for worker in node.workers]
    notes = [*seen.notes, *_notes(workers)]
    if not drawing.calls:
        notes.append("no call was seen: no rank made one during the trace, or none has a group yet")
    about = {
        "job": seen.run_id,
        "round": seen.round,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "calls": drawing.calls,
        "missed": sum(worker.missed + worker.missed_of_others for worker in workers),
        "left out": sum(worker.left_out for worker in workers),
        "notes": notes,
    }
    lines = to_lines(drawing, about)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", compresslevel=5, encoding="utf-8") as compressed:
            compressed.writelines(lines)
    else:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    for note in notes:
        print(printable(f"note: {note}"))
    print(printable(_summary(path, seen, drawing, what)))


def _notes(workers: Sequence[WorkerTrace]) -> Iterator[str]:
    by_reason: dict[str, list[int]] = {}
    for worker in workers:
        if worker.because:
            by_reason.setdefault(worker.because, []).append(worker.rank)
    for reason, ranks in by_reason.items():
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        yield f"of {name} only the last calls are shown: {reason}"
    missed = sum(worker.missed for worker in workers)
    if missed:
        yield (
            f"{missed} calls were missed, because they came faster than they could be read: leave a"
            " core free for `rallypoint trace`"
        )
    missed = sum(worker.missed_of_others for worker in workers)
    if missed:
        yield (
            f"{missed} calls of other backends were missed: at most some hundred a second can be "
            "seen"
        )
    left_out = sum(worker.left_out for worker in workers)
    if left_out:
        yield f"{left_out} calls were left out, at the end: trace for less time, as in -s 0.5"


def _summary(path: Path, seen: JobTrace, drawing: Drawing, what: str) -> str:
    ranks, nodes = len(drawing.lanes), len(seen.nodes)
    ranks_and_nodes = f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"
    size = Path(path).stat().st_size
    return (
        f"{path}: {what}, {drawing.calls} calls of {ranks_and_nodes}"
        f" ({size / 1e6:.1f} MB); open it at {_VIEWER}"
    )
