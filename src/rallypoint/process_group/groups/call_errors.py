"""The error of a call that failed, with what each rank called and where, and which rank died first.

A call that succeeds pays nothing for this. Only after ranks have called different operations, each
reads its own stack and reports it to the others through the store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import CodeType
from typing import NamedTuple

from rallypoint.base.collective import reduces, root_argument
from rallypoint.base.errors import (
    HostError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    RallypointError,
)
from rallypoint.base.wording import name_ranks
from rallypoint.engine.communicator import BAD_BUFFER, UNUSABLE, ReduceOp
from rallypoint.process_group.arrays import describe
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.init_method import Presence, shows_deaths

_FORMING_S = 1.0  # how long the store may take to show a death
_ANSWER = timedelta(seconds=2)  # of the store, for each request
_FORMED_S = 2.0  # longer: a forming rank settles on a name at the end of its own second


def formed_key(prefix: str) -> str:
    """The counter of ranks that have formed the group; deleted once all have.

    A rank that gives up because of a death closes its connections or exits. It then looks dead
    itself to ranks that have not noticed the first death, even if they have already formed the
    group. So every rank asks the store before it raises: the store shows whose connection ended,
    and keeps the first answer for all. Once all ranks have formed the group, the engine itself
    reports the first death, and the store is no longer asked.
    """
    return f"{prefix}/formed"


def found_while_forming(
    presence: Presence, error: PeerLostError | HostError, *, is_last_to_leave: bool
) -> PeerLostError | HostError:
    """The error of a rank that cannot form the group: the first death, or else its own error.

    `is_last_to_leave`: the store may end with this rank, while the others still have to ask it.
    """
    suspect = error.rank if isinstance(error, PeerLostError) else None
    found = presence.find_lost(_FORMING_S, suspect=suspect)
    if found is not None and is_last_to_leave:
        presence.await_leaving(0)
    return found or error


def found_when_formed(group: ProcessGroup, error: PeerLostError) -> PeerLostError:
    """The same for an operation of a group that other ranks may still be forming.

    If the engine named the right rank, its error is more detailed than the store's.
    """
    if group.is_world and group.world.has_met:
        return error
    store = group.world.store
    forming = formed_key(group.prefix)
    presence = Presence(store, group.prefix, group.ranks)
    timeout = store.timeout
    try:
        store.set_timeout(_ANSWER)  # it may have been lost with the rank
        if not shows_deaths(store) or not store.check([forming]):
            return error
        found = presence.find_lost(_FORMED_S, as_long_as=forming)
        if found is not None and group.is_world and group.own_rank == 0:
            presence.await_leaving(0)
    except (HostError, OSError):
        return error  # the store is gone, together with the process that served it
    finally:
        store.set_timeout(timeout)
    return error if found is None or found.rank == error.rank else found


_PATIENCE = timedelta(seconds=0.5)  # every rank shall have its error within a second
_ASKED = 64  # beyond, only the rank at fault is asked
_NOT_THE_USERS = ("rallypoint.", "torch.")


class Site(NamedTuple):
    """A line of the user's code; looked up and formatted only if it must be reported."""

    code: CodeType
    instruction: int

    @classmethod
    def of_caller(cls, skip: int = 1) -> Site:
        """The innermost frame that belongs neither to this package nor to PyTorch's wrappers.

        The first `skip` frames are known to be this package's.
        """
        frame = sys._getframe(skip)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
            frame = frame.f_back
        return tuple.__new__(cls, (frame.f_code, frame.f_lasti))

    def __str__(self) -> str:
        here = os.getcwd() + os.sep  # noqa: PTH109 - a string is what is needed
        lines = self.code.co_lines()
        line = next((line for begin, end, line in lines if begin <= self.instruction < end), None)
        return f"{self.code.co_filename.removeprefix(here)}:{line or self.code.co_firstlineno}"


class CallDetails(NamedTuple):
    """A call's details, for the text of an error."""

    operation: str
    what: object  # its arrays
    op: int = 0
    root: int = 0  # a rank in the group
    variant: int = 0  # which algorithm was requested (planning.Algorithms)
    site: Site | None = None  # where the user's code made the call; found on the stack unless given

    def error(self, group: ProcessGroup, code: int) -> RallypointError:
        """The error for a nonzero result of the engine."""
        operation = self.operation
        what = "" if operation == "barrier" else describe(self.what)
        if code == BAD_BUFFER:
            return InvalidArgumentError(f"{operation} cannot take {what}")
        error = group.communicator.error(operation)
        message = str(error)
        if isinstance(error, MismatchError):
            details = [what]
            if reduces(operation):
                details.append(ReduceOp(self.op).name)
            if root_argument(operation):
                details.append(f"{root_argument(operation)}={group.ranks[self.root]}")
            details.append(group.algorithms.in_words(self.variant))
            site = self.site or Site.of_caller()
            call = f"{operation}({', '.join(filter(None, details))}) at {site}"
            calls = _exchange(group, call, error.rank)
            if message.startswith("ranks called different") and len(set(calls.values())) > 1:
                message = _different_calls(calls, group.ranks)
            error = MismatchError(message, rank=error.rank, operation=operation, calls=calls)
        elif isinstance(error, PeerLostError):
            error = found_when_formed(group, error)
            message = str(error)
        if not group.is_world:
            message = f"in the group of global ranks {group.members()}: {message}"
            error.args = (message,)
        return error


def _exchange(group: ProcessGroup, call: str, culprit: int | None) -> dict[int, str]:
    """What each rank that answers in time called, by global rank; a group breaks only once."""
    if not group.calls_when_broken:
        calls = {group.ranks[group.own_rank]: call}
        asked = [
            rank for rank in group.ranks if len(group.ranks) <= _ASKED or rank in (*calls, culprit)
        ]
        store = group.world.store
        keys = {rank: f"{group.world.prefix}/calls/{group.group_name}/{rank}" for rank in asked}
        try:
            store.set(keys[group.ranks[group.own_rank]], json.dumps(call))
            try:
                store.wait(list(keys.values()), _PATIENCE)
            except TimeoutError:
                keys = {rank: key for rank, key in keys.items() if store.check([key])}
            texts = store.multi_get(list(keys.values()))
            calls |= {rank: json.loads(text) for rank, text in zip(keys, texts, strict=True)}
        except (HostError, OSError):
            pass  # the store's server is gone; what the engine knows must suffice
        group.calls_when_broken = calls
    return group.calls_when_broken


def _different_calls(calls: Mapping[int, str], members: Sequence[int]) -> str:
    by_call: dict[str, list[int]] = {}
    for rank in sorted(calls):
        by_call.setdefault(calls[rank], []).append(rank)
    parts = [f"{name_ranks(ranks)} called {call}" for call, ranks in by_call.items()]
    silent = [rank for rank in members if rank not in calls]
    if silent and len(members) <= _ASKED:
        parts.append(f"{name_ranks(silent)} did not answer")
    return f"ranks called different operations: {'; '.join(parts)}{UNUSABLE}"
