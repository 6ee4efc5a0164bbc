"""The output and the files of one node's workers, round after round: performs log_spec.py's rules.

The agent calls `start_round(N)` before attempt N, and `streams_of` for each of its workers. Every
round has its own files; descriptors of an old round end with its workers' `finish`.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from rallypoint.base.errors import HostError
from rallypoint.launch.job import Job
from rallypoint.launch.log_spec import NAMES, STDERR, STDOUT, Destination
from rallypoint.launch.output.file_work import FileWork
from rallypoint.launch.output.terminal import STATUS, say
from rallypoint.rendezvous.job.round import Placement

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.launch.output.lines import LineReader, Outlet
    from rallypoint.launch.output.tee import FilteredFile

_LATEST = "latest"
_CLEAN_LOOKS = 5
_BETWEEN_LOOKS_S = 0.01


class JobDirectory:
    """A directory with torchrun's layout below it: attempt_N/LOCAL_RANK/{error.json, ...}.

    The guardian, which always outlives the job, removes it unless the user asked for logs. Its name
    is in every worker's environment: the last resort for finding processes that escaped.

    A process that takes the local rank of another one in the same round has its own files, in
    attempt_N/LOCAL_RANK.2 and so on.

    Below a directory for logs, the link `latest` leads to the newest of these directories.

    Attributes:
        path: where it is; empty if it could not be created. Without logs that does no harm: error
            files are a convenience.
        attempt: the current round's part of it.
    """

    def __init__(
        self,
        run_id: str,
        environ: Mapping[str, str],
        *,
        log_directory: str | None = None,
        is_kept: bool = False,
    ) -> None:
        # By hand, because the tempfile module costs 9 ms to import.
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in run_id[:64])
        name = f"{name}_{os.urandom(4).hex()}"
        parent = os.path.abspath(log_directory or environ.get("TMPDIR") or "/tmp")
        self.is_kept = is_kept
        self._latest: dict[int, str] = {}  # by local rank
        self.path = f"{parent}/{name if log_directory else f'rallypoint_{name}'}"
        try:
            if log_directory:
                os.makedirs(parent, exist_ok=True)
            os.mkdir(self.path, 0o700)
        except OSError as error:
            if is_kept:
                raise HostError(
                    f"cannot create a directory for logs in {parent}: {error.strerror}; give "
                    "another with --log-dir."
                ) from None
            self.path = ""
        if log_directory and is_kept:
            _link_latest(parent, name)

    @property
    def to_remove(self) -> str:
        """What to delete at the end of the job; empty: nothing."""
        return "" if self.is_kept else self.path

    def start_round(self, number: int) -> None:
        """Use the directory of this round from now on."""
        self.attempt = f"{self.path}/attempt_{number}"

    def directory_of(self, local_rank: int) -> str:
        """The directory of the latest process with this local rank."""
        return self._latest.get(local_rank, f"{self.attempt}/{local_rank}")

    def make_directory(self, local_rank: int) -> str:
        """Create the directory of a new process; empty if that is not possible."""
        if not self.make_attempt():
            return ""
        part, number = f"{self.attempt}/{local_rank}", 1
        try:
            while not _make(part):
                number += 1
                part = f"{self.attempt}/{local_rank}.{number}"
        except OSError:
            return ""
        self._latest[local_rank] = part
        return part

    def make_attempt(self) -> bool:
        """Create the directory of the current round; returns whether it exists."""
        try:
            if self.path:
                _make(self.attempt)
        except OSError:
            return False
        return bool(self.path)

    def kill_marked(self) -> list[int]:
        """Kill processes with one of these error files in their environment, which are ours.

        Only for when the guardian, which is more reliable, is dead. A process shows no environment
        during exec, so nothing counts as gone at the first look.
        """
        killed: list[int] = []
        clean = 0
        while self.path and clean < _CLEAN_LOOKS:
            found = self._kill_marked_once()
            clean = 0 if found else clean + 1
            killed += found
            time.sleep(_BETWEEN_LOOKS_S)
        return sorted(set(killed))

    def _kill_marked_once(self) -> list[int]:
        mark = os.fsencode(f"TORCHELASTIC_ERROR_FILE={self.path}/")
        killed = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_ours = any(text.startswith(mark) for text in file.read().split(b"\0"))
                if is_ours:
                    os.kill(int(name), signal.SIGKILL)
                    killed.append(int(name))
            except OSError:
                continue
        return killed


def _make(path: str) -> bool:
    """Create a directory; False if it exists."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True


def _link_latest(parent: str, name: str) -> None:
    """Let `latest` in `parent` lead to that directory, in one step; without it nothing is lost."""
    latest, new = f"{parent}/{_LATEST}", f"{parent}/.{_LATEST}.{name}"
    try:
        if os.path.lexists(latest) and not os.path.islink(latest):
            return  # it is the user's
        os.symlink(name, new)
        try:
            os.replace(new, latest)
        except OSError:
            os.unlink(new)
    except OSError:  # the disk is full, or its file system has no symbolic links
        return


NO_LOGS = "the workers wrote to this output; --log-dir DIR --redirects 3 keeps it in files"
FULL = "its file system is full, so output may be missing"


class Streams:
    """Stdout and stderr of one worker, and where it can record its error, if anywhere."""

    def __init__(
        self, error_file: str | None, files: FileWork, prefix_of: Callable[[Placement], str]
    ) -> None:
        self.error_file = error_file
        self._prefix_of = prefix_of
        self.files = files
        self.descriptors: list[int] = []
        self.readers: list[LineReader] = []
        self.to_close: list[int] = []

    def started(self) -> None:
        """Close our copies of the worker's ends, so that its death shows as an end of file."""
        for fd in self.to_close:
            os.close(fd)
        self.to_close.clear()

    def rename(self, place: Placement) -> None:
        """Give its lines the prefix of its new rank."""
        for reader in self.readers:
            reader.prefix = self._prefix_of(place)

    def finish(self) -> None:
        """After the end of everything: forward what is left, without waiting for readers."""
        self.started()
        for reader in self.readers:
            reader.finish()


class Output:
    """The output of all workers of this node."""

    def __init__(self, job: Job, selector: selectors.BaseSelector) -> None:
        self._job = job
        self._selector = selector
        self.directory = JobDirectory(
            job.run_id, job.environ, log_directory=job.logs.directory, is_kept=job.logs.are_kept
        )
        self._files = FileWork(selector)
        self._outlets: tuple[Outlet, Outlet] | None = None
        self._filtered: dict[int, FilteredFile] = {}
        self._stderr: dict[int, LineReader] = {}  # by local rank; the latest process of each
        self._has_failed = False

    @property
    def files(self) -> FileWork:
        """What works on files, which may hang."""
        return self._files

    @property
    def kept_in(self) -> str:
        """The directory of the logs; empty if there are none."""
        return self.directory.path if self.directory.is_kept else ""

    def stderr_of(self, local_rank: int) -> str:
        """The end of what a worker wrote to stderr; empty if the launcher cannot read it."""
        if local_rank in self._stderr:
            return self._stderr[local_rank].latest.decode(errors="replace")
        path = f"{self.directory.directory_of(local_rank)}/{NAMES[STDERR]}.log"
        try:
            return self._files.call(partial(_end_of, path)).decode(errors="replace")
        except OSError:
            return ""

    def hint(self, local_rank: int | None) -> str:
        """How to find the logs of the current round, in particular those of one worker."""
        if not self.directory.is_kept:
            return NO_LOGS
        found = self.directory.attempt
        if local_rank is not None:
            part = self.directory.directory_of(local_rank)
            for stream in (STDOUT, STDERR):
                path = f"{part}/{NAMES[stream]}.log"
                if self._ask(partial(os.path.exists, path)):
                    found = path
        is_full_there = self._ask(partial(_is_full, self.directory.path))
        return f"{found} ({FULL})" if is_full_there else found

    def _ask(self, question: Callable[[], bool]) -> bool:
        try:
            return self._files.call(question)
        except OSError:
            return False

    def start_round(self, number: int) -> None:
        """Prepare a round, before its workers start."""
        self._end_round()
        self.directory.start_round(number)
        if any(self._job.logs.filters.values()) and self._ask(self.directory.make_attempt):
            from rallypoint.launch.output.tee import FilteredFile

            for stream, texts in self._job.logs.filters.items():
                path = f"{self.directory.attempt}/filtered_{NAMES[stream]}.log"
                try:
                    self._filtered[stream] = FilteredFile(path, texts, self._files, self._failed)
                except OSError as error:
                    self._failed(path, error)

    def streams_of(self, place: Placement) -> Streams:
        """Where one worker of the round writes to."""
        try:
            directory = self._files.call(lambda: self.directory.make_directory(place.local_rank))
        except OSError as error:
            directory = ""
            self._failed(self.directory.attempt, error)
        error_file = f"{directory}/error.json" if directory else None
        streams = Streams(error_file, self._files, self._prefix_of)
        for stream in (STDOUT, STDERR):
            streams.descriptors.append(self._open(streams, place, stream, directory))
        return streams

    def flush(self, wait_s: float) -> bool:
        """Write the last lines; False if a reader took nothing for that long; drops the rest."""
        self._end_round()
        flushed = [outlet.flush(wait_s) for outlet in dict.fromkeys(self._outlets or ())]
        return all([*flushed, self._files.flush(wait_s)])

    def close(self) -> None:
        """Close everything."""
        self._end_round()
        for outlet in dict.fromkeys(self._outlets or ()):
            outlet.close()
        self._files.close()

    def _end_round(self) -> None:
        for filtered in self._filtered.values():
            filtered.close()
        self._filtered.clear()

    def _open(self, streams: Streams, place: Placement, stream: int, directory: str) -> int:
        destination = self._job.logs.destination_of(place.local_rank, stream)
        if destination is Destination.INHERITED:
            return stream
        path = f"{directory}/{NAMES[stream]}.log"
        try:
            if destination in (Destination.FILE, Destination.TEE) and not directory:
                raise OSError(errno.ENOENT, "its directory could not be created")
            if destination is Destination.DROPPED:
                fd = os.open(os.devnull, os.O_WRONLY)
            elif destination is Destination.FILE:
                from rallypoint.launch.output.tee import open_log

                fd = self._files.call(lambda: open_log(path))
            else:
                reader = self._reader(place, stream, path if destination is Destination.TEE else "")
                streams.readers.append(reader)
                fd = reader.worker_fd
        except OSError as error:
            self._failed(path, error)
            STATUS.give_up()
            return stream
        streams.to_close.append(fd)
        return fd

    def _reader(self, place: Placement, stream: int, path: str) -> LineReader:
        from rallypoint.launch.output.lines import LineReader, open_outlets

        if self._outlets is None:
            self._outlets = open_outlets(self._selector, self._files)
        outlet = self._outlets[stream - 1]
        prefix = self._prefix_of(place)
        if not path:
            reader = LineReader(outlet, prefix, self._selector)
        else:
            reader = self._tee(outlet, prefix, stream, path)
        if stream == STDERR:
            self._stderr[place.local_rank] = reader
        return reader

    def _tee(self, outlet: Outlet, prefix: str, stream: int, path: str) -> LineReader:
        from rallypoint.launch.output.tee import Tee

        return Tee(
            outlet,
            prefix,
            self._selector,
            path=path,
            files=self._files,
            filtered=self._filtered.get(stream),
            failed=self._failed,
        )

    def _prefix_of(self, place: Placement) -> str:
        return self._job.logs.prefix_of(
            rank=place.rank, local_rank=place.local_rank, role=self._job.role, host=self._job.host
        )

    def _failed(self, path: str, error: OSError) -> None:
        """Report the first file that cannot be written; the job matters more than its logs."""
        if not self._has_failed:
            self._has_failed = True
            say(
                f"cannot write {path}: {error.strerror}; the job continues, but output from now on "
                "may be missing in the log files."
            )


def _end_of(path: str) -> bytes:
    from rallypoint.launch.output.lines import LATEST_BYTES

    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LATEST_BYTES))
        return file.read(LATEST_BYTES)


def _is_full(path: str) -> bool:
    """Whether a file there cannot grow."""
    try:
        return os.statvfs(path).f_bavail == 0
    except OSError:
        return False
