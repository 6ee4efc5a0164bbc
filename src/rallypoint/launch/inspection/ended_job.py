"""What is kept of each job after its end: one small file, which `rallypoint top`, `page` and `ps`
show (decision 125).

    ${XDG_STATE_HOME:-~/.local/state}/rallypoint/PID.TIME.history.jsonl    of the latest hundred

The first line tells all but what has happened: {"job": an EndedJob}. Lines {"event": a JobEvent}
and {"steps": [[seconds since 1970, step], ...]} follow. It is written once, after the end, by an
agent that imports nothing that takes milliseconds for it. An agent that was killed keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.files import open_regular
from rallypoint.base.job_so_far import JobEvent, JobSoFar
from rallypoint.base.json_records import from_json, to_json
from rallypoint.base.record import Record
from rallypoint.launch.inspection.entries import shown_name

MOST_BYTES = 256 << 10  # of a file
MOST_BYTES_IN_ALL = 20_000_000
MOST_FILES = 100
_SUFFIX, _NEW = ".history.jsonl", ".history.new"
_SAMPLES_IN_LINE = 100
# Why a file is none of ours: it is of another version, say.
_UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ControlMessageError
)  # fmt: skip
_MOST_WORDS, _MOST_WORD, _MOST_TEXT = 40, 200, 2000
_ELIDED = "..."
_ESCAPES = {code: f"\\u{code:04x}" for code in range(32)} | {34: '\\"', 92: "\\\\"}


class RankEnd(Record, kw_only=True):
    """A worker of the last round, and how it ended: ``"killed by SIGKILL"``."""

    rank: int
    pid: int
    end: str


class EndedJob(Record, kw_only=True):
    """A job that has ended, as the agent of one of its nodes saw it.

    Attributes:
        pid: its launcher's.
        command: the program, and the names of its flags: their values may be secrets.
        ended: seconds since 1970.
        uptime_s: of the launcher.
        status: the launcher's exit status.
        text: what the launcher said about the end; empty: the job succeeded.
        round: the last one; -1: there was none.
        step, total: the last step, and how many were planned; None: that is not known.
        ranks: the workers of that node.
        so_far: all but the events, which have their own lines.
    """

    run_id: str
    pid: int
    host: str
    node_rank: int
    command: tuple[str, ...]
    ended: float
    uptime_s: float
    status: int
    text: str
    round: int
    nodes: int
    world_size: int
    step: int | None
    total: int | None
    ranks: tuple[RankEnd, ...]
    so_far: JobSoFar = JobSoFar()

    @property
    def name(self) -> str:
        """The job's name as it is shown."""
        return shown_name(self.run_id, self.command)


def without_values(command: Sequence[str]) -> tuple[str, ...]:
    """A command whose arguments are shortened to the names of flags."""
    words = list(command)
    at = 2 if words[1:2] == ["-u"] else 0  # of Python
    at += {"-m": 1, "-c": 2}.get(words[at] if at < len(words) else "", 0)
    shown = words[: at + 1]
    for word in words[at + 1 :]:
        name, has_value, _ = word.partition("=")
        if word.startswith("-") and word.strip("-"):
            shown.append(f"{name}={_ELIDED}" if has_value else name)
        elif shown[-1] != _ELIDED:
            shown.append(_ELIDED)
    return tuple(word[:_MOST_WORD] for word in shown[:_MOST_WORDS])


def stem_of(pid: int, ended: float) -> str:
    """The name of the files of a job, without suffixes."""
    return f"{pid}.{int(ended)}"


def state_directory() -> str:
    """Where files stay after the end of jobs; raises OSError if there is no such place."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if not os.path.isabs(home):  # there is no home
        raise FileNotFoundError(home)
    return f"{home}/rallypoint"


def write(job: EndedJob, samples: Sequence[tuple[float, int]]) -> None:
    """Keep a job, and remove the oldest ones.

    Args:
        samples: steps, each with its time in seconds since 1970.

    Raises:
        OSError: there is no place for it.
    """
    directory = state_directory()
    os.makedirs(directory, mode=0o700, exist_ok=True)
    new = f"{directory}/{stem_of(job.pid, job.ended)}{_NEW}"
    try:
        fd = open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            data = _data(job, samples)
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        os.rename(new, f"{new.removesuffix(_NEW)}{_SUFFIX}")
    except OSError:
        _remove(new)
        raise
    room = MOST_BYTES_IN_ALL
    for at, (_, size, path) in enumerate(newest_first(directory, _SUFFIX, _NEW)):
        room -= size
        if at >= MOST_FILES or room < 0:
            _remove(path)


def ended_jobs() -> Iterator[EndedJob]:
    """This user's jobs that have ended, the latest first, without their events."""
    return (job for _, job in _read_all())


def latest_ended(word: str) -> tuple[EndedJob, list[tuple[float, int]]] | None:
    """The last one of those that `word` selects, as for running jobs (empty: of all), with its
    events, and its samples of steps.
    """
    for path, job in _read_all():
        if word in ("", str(job.pid)) or job.run_id.startswith(word) or job.name.startswith(word):
            try:
                return _read(path, only_first=False)
            except _UNREADABLE:
                return job, []
    return None


def _data(job: EndedJob, samples: Sequence[tuple[float, int]]) -> bytes:
    events = job.so_far.events
    job = job.__replace__(
        so_far=job.so_far.__replace__(events=()),
        command=without_values(job.command),
        text=job.text[:_MOST_TEXT],
    )
    while True:
        lines: list[object] = [{"job": to_json(job)}]
        lines += [{"event": to_json(each)} for each in events]
        for at in range(0, len(samples), _SAMPLES_IN_LINE):
            some = samples[at : at + _SAMPLES_IN_LINE]
            lines.append({"steps": [[round(time_s, 3), step] for time_s, step in some]})
        # Half of a surrogate pair, as in a name that is no UTF-8, becomes \udc80, as in JSON.
        data = "".join(f"{_text(each)}\n" for each in lines).encode("utf-8", "backslashreplace")
        if len(data) <= MOST_BYTES:
            return data
        if not (events or samples or job.ranks):
            return b""  # of no job that can be
        events, samples = events[(len(events) + 1) // 2 :], samples[1::2]
        job = job.__replace__(ranks=job.ranks[: len(job.ranks) // 2])


def _text(value: object) -> str:
    """JSON; importing json would cost each launch 4 ms."""
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_text(name)}:{_text(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    text = repr(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def newest_first(directory: str, *suffixes: str) -> list[tuple[float, int, str]]:
    """Files whose names end so: times, sizes and paths."""
    found = []
    for name in os.listdir(directory):
        if name.endswith(suffixes):
            path = f"{directory}/{name}"
            try:
                status = os.lstat(path)
            except OSError:  # another launcher has just removed it
                continue
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found, reverse=True)


def _read_all() -> Iterator[tuple[str, EndedJob]]:
    """Paths, and jobs without their events."""
    try:
        found = newest_first(state_directory(), _SUFFIX)
    except OSError:
        return
    for _, _, path in found:
        try:
            yield path, _read(path, only_first=True)[0]
        except _UNREADABLE:
            continue


def _read(path: str, *, only_first: bool) -> tuple[EndedJob, list[tuple[float, int]]]:
    import json

    with os.fdopen(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        lines = file.read(MOST_BYTES).splitlines()
    events, samples = [], []
    job = from_json(EndedJob, json.loads(lines[0])["job"])
    for line in [] if only_first else lines[1:]:
        told = json.loads(line)
        if "event" in told:
            events.append(from_json(JobEvent, told["event"]))
        for time_s, step in told.get("steps", ()):
            samples.append((float(time_s), int(step)))
    return job.__replace__(so_far=job.so_far.__replace__(events=tuple(events))), samples
