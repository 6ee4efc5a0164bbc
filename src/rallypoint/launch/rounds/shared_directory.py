"""Agents that find each other in a directory (--rdzv-backend c10d --rdzv-endpoint file:///PATH).

For jobs whose nodes do not know each other's names, such as the tasks of a Slurm job array. This
works as in elastic.py, but the agents find each other differently. Each writes its address to the
directory and calls the others (`AddressFiles`), and the agent that creates the first founder's file
begins the job. An agent that has not yet taken part begins the job again after calling without
success for a while, for example if the founder was lost, or too few were left: `may_found`.
"""

from __future__ import annotations

import os
import socket
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Mapping
from contextlib import suppress
from random import SystemRandom

from rallypoint.base.address import numeric_family
from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.files import open_regular
from rallypoint.base.record import Record
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.network import can_bind, choose_network
from rallypoint.launch.job import Job, Rendezvous, Verbosity
from rallypoint.launch.rounds.elastic import (
    ElasticRounds,
    listen_at_any_port,
    setup_of,
    warn_without_token,
)
from rallypoint.rendezvous.consensus.messages import Led, Message, Setup
from rallypoint.rendezvous.job.reports import Join, Outcome
from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.timeouts import read_timeouts

_AGENT, _FOUNDER, _PART = "agent", "founder", "part"
_MOST_BYTES = 512
_MOST_AGENTS = 10_000


class Listing(Record, kw_only=True):
    """The contents of the directory.

    Attributes:
        others: the agents' addresses by their keys, without our own.
        founder: the key of the latest founder, if it can be read.
        generation: how many founders there were before; -1: there is none.
        is_behind: the latest founder's file came after this was listed, and so may have others.
    """

    others: Mapping[str, Endpoint]
    founder: str = ""
    generation: int = -1
    is_behind: bool = False

    def overtaken(self) -> Listing:
        """This one, once another agent has become the founder that was to come next."""
        return self.__replace__(generation=self.generation + 1, founder="", is_behind=True)


class AddressFiles:
    """One agent's view of the directory. All methods may wait for the file system.

        agent.KEY    "HOST:PORT": where the agent of that key listens; removed when it ends normally
        founder.N    "KEY": that agent began the job, or began it again after founder.N-1; never
                     changed, and removed once the job has succeeded

    They are only addresses to call: the agent that answers must know the job's token, and have the
    key in the file's name. So files of dead agents do no harm. A file is written whole (a rename)
    or created by only one agent (O_EXCL).

    Args:
        key: this agent's own.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._key = key
        self._known: dict[str, Endpoint] = {}  # an agent's file never changes

    def leave_address(self, at: Endpoint) -> None:
        """Write where this agent listens."""
        part = self._file(_PART, self._key)
        try:
            with suppress(FileExistsError):
                # Only the last part: if the rest is missing, the path is wrong, or not shared here.
                os.mkdir(self._path)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(str(at))
            os.rename(part, self._file(_AGENT, self._key))
        except OSError as error:
            raise HostError(
                f"cannot use the directory {self._path} of --rdzv-endpoint ({error.strerror}); "
                "name one that all nodes share and can write to."
            ) from None

    def contents(self) -> Listing:
        """The current contents."""
        agents, generations = self._list()
        if generations and not agents:
            # A founder leaves its address first; a listing that began before that may lack it.
            agents, generations = self._list()
        self._known = {
            key: at for key in agents[:_MOST_AGENTS] if (at := self._address_of(key)) is not None
        }
        newest = max(generations, default=-1)
        founder = "" if newest < 0 else self._read(_FOUNDER, str(newest))
        return Listing(others=self._known, founder=founder, generation=newest)

    def _list(self) -> tuple[list[str], list[int]]:
        """The keys of other agents, and the founders' numbers."""
        agents, generations = [], []
        for name in os.listdir(self._path):
            kind, _, rest = name.partition(".")
            if kind == _AGENT and rest.isalnum() and rest != self._key:
                agents.append(rest)
            elif kind == _FOUNDER and rest.isascii() and rest.isdigit() and len(rest) < 10:
                generations.append(int(rest))
        return agents, generations

    def found(self, generation: int) -> bool:
        """Become that founder; returns whether this succeeded, and no one else did."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            fd = os.open(self._file(_FOUNDER, str(generation)), flags, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(fd, self._key.encode())
        finally:
            os.close(fd)
        return True

    def clear(self, *, is_over: bool) -> None:
        """Remove our own files; if the job `is_over`, also those of founders that have left."""
        try:
            for generation in self._list()[1] if is_over else ():
                founder = self._read(_FOUNDER, str(generation))
                # Of those that are here, one may have begun the next job.
                is_here = os.path.lexists(self._file(_AGENT, founder))
                if founder == self._key or (founder and not is_here):
                    os.unlink(self._file(_FOUNDER, str(generation)))
            os.unlink(self._file(_AGENT, self._key))
        except OSError:  # what stays does no harm
            return

    def _address_of(self, key: str) -> Endpoint | None:
        known = self._known.get(key)
        if known is not None:
            return known
        try:
            at = Endpoint.parse(self._read(_AGENT, key), None, name=key)
        except InvalidArgumentError:  # it was removed just now, or belongs to another user
            return None
        return None if numeric_family(at.host) is None else at

    def _read(self, kind: str, rest: str) -> str:
        try:
            # Others can write there, and put something else in a file's place.
            fd = open_regular(self._file(kind, rest), os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return file.read(_MOST_BYTES).decode("ascii", errors="replace").strip()
        except OSError:
            return ""

    def _file(self, kind: str, rest: str) -> str:
        return os.path.join(self._path, f"{kind}.{rest}")


_CALLED = 3  # at a time, beside the founder: there may be many, and any member will do
_LIST_EVERY_S = 5.0  # in agents that have a job; others look each time that they ask
_SILENCES = 2  # of a lease: a job whose coordinator was lost has another one by then
_CLEARING_S = 2.0
_SHOWN_LATE_S = 60.0  # NFS may show a directory as it was that long ago


def rounds_of(job: Job, rendezvous: Rendezvous) -> SharedDirectoryRounds:
    """The rounds that this job's agent takes part in."""
    timeouts = read_timeouts(rendezvous.configuration)
    warn_without_token(rendezvous)
    listener = listen_at_any_port(_choose(rendezvous))
    # The tasks of an array are requeued one by one.
    setup = setup_of(job, rendezvous, timeouts, listener, attempt=0)
    files = AddressFiles(rendezvous.endpoints[0].host, setup.me.key)
    files.leave_address(listener.endpoint)
    rounds = SharedDirectoryRounds(
        files,
        setup,
        listener.server_socket,
        rendezvous.token or b"",
        is_verbose=job.verbosity is Verbosity.VERBOSE,
        store_address=listener.store_address,
    )
    rounds.network = listener.network
    rounds.to_find_out = job.to_find_out
    return rounds


def _choose(rendezvous: Rendezvous) -> NetworkChoice:
    """Depends on the addresses that are already in the directory."""
    try:
        seen = AddressFiles(rendezvous.endpoints[0].host, "").contents()
        others = list(dict.fromkeys(each.host for each in seen.others.values()))
    except OSError:  # the first one makes the directory
        others = []
    elsewhere = [host for host in others if not can_bind(host)]
    return choose_network(elsewhere[:_CALLED], os.environ, local_addr=rendezvous.local_addr)


def may_found(seen: Listing, *, unanswered_s: float, patience_s: float) -> bool:
    """Whether to begin the job, after calling all agents in the directory without success.

    At once if no node has begun it, or all have left. Otherwise the founder may be running and only
    be unreachable; then there are two jobs of that name until they can connect (031).
    """
    if seen.is_behind:
        return unanswered_s >= max(patience_s, _SHOWN_LATE_S)
    return seen.generation < 0 or not seen.others or unanswered_s >= patience_s


class SharedDirectoryRounds(ElasticRounds):
    """One agent's part in a job whose agents find each other in a directory.

    Args:
        files: the directory, with this agent's address in it.
        setup, listener, token, is_verbose, store_address: see ElasticRounds; the endpoint is the
            directory.
    """

    def __init__(
        self,
        files: AddressFiles,
        setup: Setup,
        listener: socket.socket,
        token: bytes,
        *,
        is_verbose: bool,
        store_address: str,
    ) -> None:
        super().__init__(setup, listener, token, is_verbose=is_verbose, store_address=store_address)
        self._files = files
        self._listing = files.contents()
        self._listed_at = time.monotonic()
        self._is_listing = False
        self._unanswered_since: float | None = None  # no agent that is called knows a coordinator
        self._random = SystemRandom()
        if may_found(self._listing, unanswered_s=0.0, patience_s=self._patience_s):
            self._found()

    def close(self) -> None:
        """See RoundSource. Waits only briefly for the file system."""
        super().close()
        # The agent that gave up may be the only one that did.
        is_over = self._finish is not None and self._finish.outcome is Outcome.SUCCEEDED
        is_done = allocate_lock()
        is_done.acquire()

        def clear() -> None:
            self._files.clear(is_over=is_over)
            is_done.release()

        start_new_thread(clear, ())
        is_done.acquire(timeout=_CLEARING_S)

    # How agents find each other.

    def _received(self, key: str, message: Message) -> None:
        super()._received(key, message)
        if isinstance(message, Led) or self.is_led:
            self._unanswered_since = None

    def _call(self, at: Endpoint, message: Message) -> None:
        """Send it to some of those whose addresses are in the directory."""
        seeks = isinstance(message, Join)
        now = time.monotonic()
        if seeks or now >= self._listed_at + _LIST_EVERY_S:
            self._list_again(now)
        if seeks and not self._core.has_part:
            self._unanswered_since = self._unanswered_since or now
            unanswered_s = now - self._unanswered_since
            if may_found(self._listing, unanswered_s=unanswered_s, patience_s=self._patience_s):
                self._unanswered_since = now
                others = len(self._listing.others)
                if self._found():
                    if others:
                        self._say(f"starting the job again: {_no_answer(others)}")
                    return self._begin()
            why = _no_answer(len(self._listing.others))
            self._happened(lambda now: self._core.unreachable(at, why, now))
        for key, address in self._whom_to_call(self._listing, is_question=seeks):
            self._connections.send(key, address, self._bytes_of(message))
        return None

    def _whom_to_call(self, seen: Listing, *, is_question: bool) -> list[tuple[str, Endpoint]]:
        """The founder of the job, and a few others.

        An agent that announces the job need not call those that it is connected with.
        """
        called = [
            (key, at)
            for key, at in seen.others.items()
            if is_question or not self._connections.is_connected(key)
        ]
        first = [each for each in called if each[0] == seen.founder]
        rest = [each for each in called if each[0] != seen.founder]
        return first + self._random.sample(rest, min(len(rest), _CALLED))

    def _found(self) -> bool:
        """Begin the job, unless another agent does."""
        try:
            is_founder = self._files.found(self._listing.generation + 1)
        except OSError:
            return False
        if is_founder:
            self._setup = self._setup.__replace__(slot=0)
            self._core = self._new_core()
        else:  # the directory may show it later
            self._listing = self._listing.overtaken()
        return is_founder

    @property
    def _patience_s(self) -> float:
        return _SILENCES * self._setup.timeouts.silence_s

    def _list_again(self, now: float) -> None:
        """In a thread, because a file system may be slow. The result is used next time."""
        if self._is_listing:
            return
        self._is_listing, self._listed_at = True, now

        def list_files() -> None:
            try:
                seen = self._files.contents()
                if seen.generation >= self._listing.generation:
                    self._listing = seen
            except OSError:  # next time, maybe
                pass
            finally:
                self._is_listing = False

        try:
            start_new_thread(list_files, ())
        except RuntimeError:  # there may be no more threads
            self._is_listing = False


def _no_answer(others: int) -> str:
    if not others:
        return "no other agent has written its address there"
    return (
        f"none of the {others} agents with an address there answers; if any are running, check "
        "that they use the same --rdzv-id and RALLYPOINT_TOKEN"
    )
