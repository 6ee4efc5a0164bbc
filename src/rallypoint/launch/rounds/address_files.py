"""Files in a directory that machines share, by which the agents of a job find each other.

    agent.KEY    "HOST:PORT": where the agent of that key listens; removed when it ends normally
    founder.N    "KEY": that agent began the job, or began it again after founder.N-1; never
                 changed, and removed once the job has succeeded

They are only addresses to call: the agent that answers must know the job's token, and have the key
in the file's name. So files of dead agents do no harm. A file is written whole (a rename) or
created by only one agent (O_EXCL); shared_directory.py decides who may become a founder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from rallypoint.base.address import numeric_family
from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.base.regular_file import open_regular
from rallypoint.rendezvous.job.round import Endpoint

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

    Args:
        key: this agent's own.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._key = key
        self._known: dict[str, Endpoint] = {}  # an agent's file never changes

    def leave_address(self, at: Endpoint) -> None:
        """Write where this agent listens.

        Raises:
            HostError: the directory cannot be created, or written to.
        """
        part = self._file(_PART, self._key)
        try:
            self._make()
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(str(at))
            os.rename(part, self._file(_AGENT, self._key))
        except OSError as error:
            raise HostError(
                f"cannot use the directory {self._path} of --rdzv-endpoint ({error.strerror}); "
                "name one that all nodes share and can write to."
            ) from None

    def _make(self) -> None:
        """Only the last part: if the rest is missing, the path is wrong, or not shared here."""
        try:
            os.mkdir(self._path)
        except FileExistsError:
            return

    def look(self) -> Listing:
        """The current contents.

        Raises:
            OSError: it cannot be read.
        """
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
        """Become that founder; returns whether this succeeded, and nobody else did.

        Raises:
            OSError: the directory cannot be written to.
        """
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            fd = os.open(self._file(_FOUNDER, str(generation)), flags, 0o644)
        except OSError as error:
            if error.errno == errno.EEXIST:
                return False
            raise
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
                if founder == self._key or (founder and not self._is_here(founder)):
                    os.unlink(self._file(_FOUNDER, str(generation)))
            os.unlink(self._file(_AGENT, self._key))
        except OSError:  # what stays does no harm
            return

    def _is_here(self, key: str) -> bool:
        return os.path.lexists(self._file(_AGENT, key))

    def _address_of(self, key: str) -> Endpoint | None:
        known = self._known.get(key)
        if known is not None:
            return known
        try:
            at = Endpoint.parse(self._read(_AGENT, key), None, name=key)
        except InvalidArgumentError:  # it was removed just now, or is somebody else's
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
