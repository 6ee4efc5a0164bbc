"""Joins this process to a group, whatever serves its calls: the engine, other libraries, or both.

A group whose library only takes device memory also has an engine, for Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from rallypoint.engine.communicator import Communicator
from rallypoint.engine.interruption import beside_handlers
from rallypoint.process_group.delegated.backends import ENGINES, parse_backend
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.formation.connecting import form_communicator, say_formed
from rallypoint.process_group.formation.ends import form_ends
from rallypoint.process_group.groups.group import DEFAULT_GROUP
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms
from rallypoint.store.init_method import await_ranks
from rallypoint.store.store import Store

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Parts:
    """What serves a group's calls.

    Attributes:
        communicator: the engine's end; None if the group does not use the engine.
        takes_arrays: whether the engine serves the caller's arrays, and not only objects.
        ends: other libraries', by the kind of device whose memory they take.
    """

    communicator: Communicator | None
    algorithms: Algorithms
    takes_arrays: bool
    ends: dict[str, LibraryGroup]


def check_backend(backend: str) -> str:
    """A backend as get_backend() returns it: in lower case, without redundant parts.

    Raises:
        InvalidArgumentError: there is no such backend.
    """
    parts = parse_backend(backend)
    if list(parts) == [_CPU]:
        return parts[_CPU]
    return str(backend).lower()


def has_engine(backend: str) -> bool:
    """Whether the engine serves the arrays of groups of this backend."""
    return parse_backend(backend).get(_CPU) in ENGINES


def begin_early(backend: str) -> None:
    """Before ranks meet: initialize MPI, if it serves them, so that they meet through it.

    Open MPI was seen to hang at its end if PMIx had been used before its initialization.
    """
    if "mpi" in parse_backend(backend).values():
        from rallypoint.process_group.delegated import mpi_library  # most programs never need it

        mpi_library.initialize()  # what is missing is told once all ranks are there


def join(
    store: Store,
    prefix: str,
    *,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    backend: str,
    options: AlgorithmOptions,
    device: object = None,
    name: str = DEFAULT_GROUP,
    way: str = "",
    done: str = "",
    is_across_jobs: bool = False,
    connect_timeout: timedelta | None = None,
) -> Parts:
    """Form the group of `members` (global ranks); this process is the one at `rank`.

    Args:
        backend: as `check_backend` returns it.
        device: of this process, for libraries that take device memory; None: by LOCAL_RANK.
        name, way, done, is_across_jobs, connect_timeout: as in communicator.form_communicator.

    Raises as form_communicator and form_ends.
    """
    backends = parse_backend(backend)
    engine = backends.get(_CPU, ENGINES[0])
    others = [each for each in backends.values() if each not in ENGINES]
    communicator, algorithms = None, Algorithms(options)
    if engine in ENGINES:
        communicator, algorithms = beside_handlers(
            lambda: form_communicator(
                store,
                prefix,
                rank=rank,
                members=members,
                timeout=timeout,
                options=options,
                backend=engine,
                name=name,
                way=way,
                done=done,
                is_across_jobs=is_across_jobs,
                connect_timeout=connect_timeout,
            )
        )
    else:
        await_ranks(
            store, prefix, rank=rank, world_size=len(members), timeout=timeout, global_ranks=members
        )
    ends = {}
    try:
        if others:
            ends = form_ends(
                others,
                store,
                prefix,
                rank=rank,
                members=members,
                timeout=timeout,
                device=device,
                title=name,
            )
    except BaseException:
        if communicator is not None:
            communicator.leave()
        raise
    if communicator is None:
        say_formed(store, prefix, len(members), [], way=way, done=done)
    return Parts(communicator, algorithms, has_engine(backend), ends)
