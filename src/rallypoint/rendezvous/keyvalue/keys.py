"""What a job keeps in etcd or a store: keys under /rallypoint/<run id>/<attempt>/, and their bytes.

    vote/claim          who coordinates, by which ballot; how the job ended, if it did
    vote/beat           rewritten at each heartbeat of the coordinator
    vote/closed         why no further job of this name may run, as text; only in stores
    agreement/newest    the latest agreement, which is decided as soon as it is written
    closed/<job>        how the job of that host ended, for late joiners

In etcd all of them are bound to leases, so nothing stays behind. Pure.
"""

from __future__ import annotations

import zlib

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record
from rallypoint.rendezvous.consensus.messages import Ballot
from rallypoint.rendezvous.job.reports import Finish
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.transport.codec import decode_record, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    R = TypeVar("R", bound=Record)

_PACK_FROM = 4096  # bytes; etcd takes values of up to 1.5 MB, and a list of 10,000 is larger


class JobKeys(Record):
    """The names of one attempt's keys, from their common prefix."""

    root: str

    @classmethod
    def of(cls, run_id: str, attempt: int) -> JobKeys:
        """The keys of that start of that job."""
        return cls(f"/rallypoint/{_quoted(run_id)}/{attempt}/")

    @property
    def vote(self) -> str:
        """The prefix of `claim`, `beat` and `closed`, which are small and read often."""
        return self.root + "vote/"

    @property
    def claim(self) -> str:
        """The coordinator."""
        return self.vote + "claim"

    @property
    def beat(self) -> str:
        """The coordinator's heartbeat."""
        return self.vote + "beat"

    @property
    def agreements(self) -> str:
        """The prefix of `agreement`."""
        return self.root + "agreement/"

    @property
    def agreement(self) -> str:
        """The latest one."""
        return self.agreements + "newest"

    @property
    def closed(self) -> str:
        """Why no job may begin here any more."""
        return self.vote + "closed"

    @property
    def closed_jobs(self) -> str:
        """The prefix of the keys of `closed_job`."""
        return self.root + "closed/"

    def closed_job(self, host: str) -> str:
        """How the job that the agent with that key began has ended."""
        return self.closed_jobs + _quoted(host)


class Claim(Record, kw_only=True):
    """The coordinator.

    Attributes:
        leader: the agent.
        host: the key of the agent that began the job.
        lease: etcd's, to which the keys are bound; 0 in a store.
        finish: how the job ended, if it did.
    """

    ballot: Ballot
    leader: Member
    host: str
    lease: int
    finish: Finish | None = None


def pack(record: Record) -> bytes:
    """For the keeper."""
    data = encode(record)
    return data if len(data) < _PACK_FROM else zlib.compress(data, 1)


def unpack(kind: type[R], data: bytes) -> R:
    """From the keeper.

    Raises:
        ControlMessageError: it is none of that kind, or of another version.
    """
    if data[:1] != b"[":
        try:
            data = zlib.decompress(data)
        except zlib.error:
            raise ControlMessageError(
                f"the stored value is not a job record: {data[:80]!r}; choose another --rdzv-id."
            ) from None
    return decode_record(kind, data)


def _quoted(name: str) -> str:
    """Quoted, so that no name begins with another one's keys."""
    return "".join([c if c.isalnum() or c in "-_." else f"%{ord(c):x};" for c in name])
