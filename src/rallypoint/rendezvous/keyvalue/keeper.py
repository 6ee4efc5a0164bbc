"""The keeper of a job's agreements: etcd, or any store with compare-and-set.

A job keeps there, under /rallypoint/<run id>/<attempt>/:

    vote/claim          who coordinates, by which ballot; how the job ended, if it did
    vote/heartbeat           rewritten at each heartbeat of the coordinator
    vote/closed         why no further job of this name may run, as text; only in stores
    agreement/newest    the latest agreement, which is decided as soon as it is written
    closed/<job>        how the job of that host ended, for late joiners

In etcd all of them are bound to leases, so nothing stays behind. Agents change them by few, atomic
requests: etcd carries them out directly (etcd_client.py); in a store all keys are one value
(store_client.py). Pure.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record
from rallypoint.rendezvous.consensus.messages import Ballot
from rallypoint.rendezvous.job.reports import Finish
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.transport.codec import decode_record, encode

R = TypeVar("R", bound=Record)

_PACK_FROM = 4096  # bytes; etcd takes values of up to 1.5 MB, and a list of 10,000 is larger


class JobKeys:
    """The names of the keys of one start of a job."""

    def __init__(self, run_id: str, attempt: int) -> None:
        self.root: str = f"/rallypoint/{_quoted(run_id)}/{attempt}/"
        self.vote: str = self.root + "vote/"  # the prefix of three, which are small and read often
        self.claim: str = self.vote + "claim"
        self.heartbeat: str = self.vote + "heartbeat"
        self.closed: str = self.vote + "closed"
        self.agreements: str = self.root + "agreement/"  # the prefix of one
        self.agreement: str = self.agreements + "newest"
        self.closed_jobs: str = self.root + "closed/"  # the prefix of the keys of `closed_job`

    def closed_job(self, host: str) -> str:
        """How the job that the agent with that key began has ended."""
        return self.closed_jobs + _quoted(host)


class Claim(Record, kw_only=True):
    """The coordinator.

    Attributes:
        leader: the agent.
        host: the key of the agent that began the job.
        lease: etcd's, to which the keys are bound; empty in a store.
        finish: how the job ended, if it did.
    """

    ballot: Ballot
    leader: Member
    host: str
    lease: str
    finish: Finish | None = None


def pack(record: Record) -> bytes:
    """For the keeper."""
    data = encode(record)
    return data if len(data) < _PACK_FROM else zlib.compress(data, 1)


def unpack(kind: type[R], data: bytes) -> R:
    """From the keeper."""
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


class Pair(NamedTuple):
    """A key with its value, and the keeper's revision at which it was last written."""

    key: str
    value: bytes
    revision: int


class Snapshot(NamedTuple):
    """The pairs under a prefix, as they were at one revision of the keeper."""

    pairs: tuple[Pair, ...]
    revision: int


# Requests; each is one method of KeyValueClient.


class Read(Record, kw_only=True):
    """Read all pairs under that prefix; the result is a Snapshot."""

    prefix: str


class Transact(Record, kw_only=True):
    """Write and delete, if all conditions hold; the result is the new revision, or None.

    Attributes:
        revisions: which each of these keys must still have; 0: the key must not exist.
        puts: at least one. The first value must be one that no other write ever puts.
        lease: the written keys end with it; empty: they do not end.
        leases: those of keys that are not bound to `lease`.
    """

    revisions: dict[str, int]
    puts: dict[str, bytes]
    deletes: tuple[str, ...] = ()
    lease: str = ""
    leases: Mapping[str, str] = MappingProxyType({})


class Grant(Record, kw_only=True):
    """Get a new lease; the result is its name."""

    ttl_s: int


class KeepAlive(Record, kw_only=True):
    """Keep a lease alive; the result is whether it was still valid."""

    lease: str


Request = Read | Transact | Grant | KeepAlive


class KeyValueClient(ABC):
    """One agent's connection to a keeper; it belongs to one thread."""

    @abstractmethod
    def read(self, prefix: str) -> Snapshot:
        """Return all pairs whose keys start with `prefix`."""

    @abstractmethod
    def transact(self, request: Transact) -> int | None:
        """Write, and return the keeper's revision afterwards; None: a condition did not hold."""

    @abstractmethod
    def grant(self, ttl_s: int) -> str:
        """Return a new lease's name; empty where keys do not expire."""

    @abstractmethod
    def keep_alive(self, lease: str) -> bool:
        """Restart the lease's time; False if it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def carry_out(self, request: Request) -> object:
        """Call the method that the request is for."""
        match request:
            case Read(prefix=prefix):
                return self.read(prefix)
            case Transact():
                return self.transact(request)
            case Grant(ttl_s=ttl_s):
                return self.grant(ttl_s)
            case KeepAlive(lease=lease):
                return self.keep_alive(lease)
