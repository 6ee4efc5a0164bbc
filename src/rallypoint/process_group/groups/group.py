"""A group as its member in this process holds it, and the world that it belongs to.

The room `formation` creates groups; `default` holds the default group. Neither a group nor its
world refers to itself in a circle: once nothing refers to them they are freed, and the store with
them.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Never

from rallypoint.base.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    NotInitializedError,
    RevokedError,
)
from rallypoint.engine.communicator import BAD_BUFFER, Communicator
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.arrays import DeviceArray
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms
from rallypoint.store.store import Store, seconds_of

if TYPE_CHECKING:
    from rallypoint.process_group.delegated.library_group import LibraryGroup
    from rallypoint.process_group.groups.agreeing import Survivors

NON_GROUP_MEMBER: Final = -100
_FORMS_AGAIN = (
    "the default group has given up its communicator because its members change; it can be used "
    "again once it has been formed again"
)
_OF_EARLIER = (
    "the members of the default group have changed since the process group {} was made; make it "
    "again with new_group"
)


class FastPath(NamedTuple):
    """What native/python/short_call.cc reads of a group, by position."""

    communicator: object  # the native one
    ranks: dict[int, int]  # the members' ranks in the group by their global ranks
    variants: dict[str, int]  # the numbers of algorithms that calls have requested, by name
    has_barriers: bool  # whether barriers are the engine's


class GroupStatus(Enum):
    """Whether a group takes calls, and if not, what they raise.

    ACTIVE <--hold--> HELD               InvalidArgumentError: an elastic update is under way
    both --withdraw--> WITHDRAWN         RevokedError; `enter` makes it ACTIVE again
    all three --destroy--> DESTROYED     NotInitializedError
    any --abandon--> INHERITED           NotInitializedError; in a forked child
    """

    ACTIVE = "active"
    HELD = "held"
    WITHDRAWN = "withdrawn"
    DESTROYED = "was destroyed"
    INHERITED = "belongs to the process that forked this one"


class ProcessGroup:
    """A group of ranks that communicate, as the member in this process holds it.

    Attributes:
        status: whether it takes calls.
        ranks: the members' global ranks, in the order of their ranks in the group.
        own_rank: this process's rank in the group.
        prefix: the beginning of its members' keys at the store while it formed.
        group_name: the name by which the members found each other.
        group_desc: the caller's description of it.
        backend: what serves its calls, as returned by get_backend().
        timeout: how long an operation waits for a peer.
        deferred: the operations of an open _coalescing_manager; None if there is none.
        algorithms: the algorithms that can serve its calls; see planning.
        ends: other backends' libraries, by the kind of device whose memory they take.
        takes_arrays: whether the engine takes the caller's arrays.
        forms_again: after abort() it may be formed again, as torch's groups that are reconfigured.
        fast_path: for calls of the usual form; None while none may take it.
    """

    fast_path: FastPath | None

    def __init__(
        self,
        communicator: Communicator | None,
        algorithms: Algorithms,
        *,
        rank: int,
        world: World,
        prefix: str,
        ranks: Sequence[int],
        group_name: str,
        group_desc: str,
        backend: str,
        timeout: timedelta,
        ends: Mapping[str, LibraryGroup] | None = None,
        takes_arrays: bool = True,
    ) -> None:
        self.group_name = group_name
        self.group_desc = group_desc
        self.backend = backend
        self.timeout = timeout
        self.forms_again = False
        self.enter(
            communicator,
            algorithms,
            rank=rank,
            world=world,
            prefix=prefix,
            ranks=ranks,
            ends=ends,
            takes_arrays=takes_arrays,
        )

    def enter(
        self,
        communicator: Communicator | None,
        algorithms: Algorithms,
        *,
        rank: int,
        world: World,
        prefix: str,
        ranks: Sequence[int],
        ends: Mapping[str, LibraryGroup] | None = None,
        takes_arrays: bool = True,
    ) -> None:
        """Have these serve the group from now on, with these members."""
        self.ranks = tuple(ranks)
        self.own_rank = rank
        self.world = world
        self.prefix = prefix
        self.algorithms = algorithms
        self.ends = ends or {}
        self.takes_arrays = takes_arrays
        self.deferred: list[Any] | None = None
        self.counts = Counter[str]()  # uses of the store, each of which needs a fresh name
        self.calls_when_broken: dict[int, str] = {}  # by global rank; see call_errors
        self.status = GroupStatus.ACTIVE
        self._reason = ""  # for being held or withdrawn
        self._communicator = communicator
        self._group_ranks = {rank: index for index, rank in enumerate(self.ranks)}
        self.bind_calls()

    def bind_calls(self) -> None:
        """Have `run`, `run_apart`, `send` and `receive` be the engine's, if it takes the arrays."""
        if not self._has_members:
            return
        communicator = self._communicator
        if communicator is None or not self.takes_arrays:
            self._bind(_not_the_engines)
            return
        self.run = communicator.run
        self.run_apart = communicator.run_apart
        self.send = communicator.send
        self.receive = communicator.receive
        self.fast_path = FastPath(
            communicator.native,
            self._group_ranks,
            self.algorithms.variants,
            has_barriers=not self.ends,
        )

    def defer(self, works: list[Any]) -> None:
        """Have `calls.run` begin each call and append its work, until `bind_calls`."""
        self.deferred = works
        self.run = self.run_apart = _not_the_engines
        self.fast_path = None

    def _bind(self, call: Callable[..., int]) -> None:
        self.run = self.run_apart = self.send = self.receive = call
        self.fast_path = None

    def hold(self, why: str) -> None:
        """Refuse new calls with InvalidArgumentError; if `why` is empty, take them again."""
        if self._has_members:
            self.status, self._reason = GroupStatus.HELD if why else GroupStatus.ACTIVE, why
            communicator = self._communicator
            if communicator is not None:
                communicator.hold(why != "")

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.own_rank

    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def name(self) -> str:
        """The backend's name."""
        return self.backend

    @property
    def communicator(self) -> Communicator:
        """The group's end of the engine.

        Raises:
            NotInitializedError: the group was destroyed.
            RevokedError: it has given up its communicator.
            InvalidTypeError: another backend serves it.
        """
        self.check_member()
        if self._communicator is None:
            raise InvalidTypeError(f"a group of backend {self.backend!r} does not use the engine")
        return self._communicator

    @property
    def for_objects(self) -> ProcessGroup:
        """A group of the same members whose calls take arrays, which some backends do not."""
        if self.takes_arrays or self._communicator is None:
            return self
        group = copy.copy(self)
        group.takes_arrays, group.ends = True, {}
        group.bind_calls()
        return group

    def check_member(self) -> None:
        """Refuse a group that was left, or takes no calls at present.

        Raises:
            InvalidArgumentError: see `hold`.
            NotInitializedError: the group was destroyed.
            RevokedError: it has given up its communicator.
        """
        if self.status is not GroupStatus.ACTIVE:
            self._refuse()

    def end_of(self, array: object, operation: str) -> LibraryGroup | None:
        """The library that takes an array's memory; None for the engine.

        Raises:
            InvalidTypeError: this group does not take memory of that device.
            NotInitializedError: the group was destroyed.
        """
        self.check_member()
        device = array.device if isinstance(array, DeviceArray) else "cpu"
        if device in self.ends:
            return self.ends[device]
        if device == "cpu" and self.takes_arrays:
            return None
        if operation == "barrier":
            return next(iter(self.ends.values()))
        kinds = ["the CPU"] * self.takes_arrays + list(self.ends)
        way = ".cpu()" if kinds == ["the CPU"] else f".to({kinds[-1]!r})"
        where = "the CPU" if not isinstance(array, DeviceArray) else array.tensor.device
        raise InvalidTypeError(
            f"{operation} takes tensors on {' or '.join(kinds)}, not on {where}; move it with {way}"
        )

    @property
    def is_destroyed(self) -> bool:
        """Whether this process has left the group."""
        return not self._has_members

    @property
    def is_revoked(self) -> bool:
        """Whether it has given up its communicator, and may be formed again."""
        return self.status is GroupStatus.WITHDRAWN

    @property
    def is_world(self) -> bool:
        """Whether this is a default group."""
        return self.world.group is self

    def is_served_by(self, communicator: Communicator | None) -> bool:
        """Whether this is the communicator that serves it now."""
        return self._has_members and self._communicator is communicator

    def group_rank(self, rank: int, argument: str) -> int:
        """The rank in the group of a global rank, which the caller named `argument`."""
        found = self._group_ranks.get(rank) if type(rank) is int else None
        if found is None:
            raise InvalidArgumentError(
                f"{argument}={rank!r} is not a rank of this group; its ranks are {self.members()}"
            )
        return found

    def members(self) -> str:
        """The global ranks, as text."""
        ranks = self.ranks
        if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
            return f"{ranks[0]} to {ranks[-1]}"
        return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations that start from now on wait for a peer."""
        self.check_member()
        for service in self._services():
            service.set_timeout(seconds_of(timeout))
        self.timeout = timeout

    def revoke(self) -> None:
        """Give the group up, for all members: present and later calls raise an error everywhere.

        Only one rank need call it, and it does not wait for the others: MPI's MPIX_Comm_revoke. A
        rank that learned of a failure calls it so that no other waits for a call that this rank
        will not make. Members raise RevokedError, or the error of the first failure if there was
        one. `agree` and `shrink_group` still work.

        Raises:
            NotInitializedError: the group was destroyed.
        """
        self.check_member()
        for service in self._services():
            service.revoke()

    def agree(self, flag: int) -> int:
        """Agree with all survivors on the bitwise AND of their flags: MPI's MPIX_Comm_agree.

        All ranks that are alive call it. Each of them gets the same result, also if members have
        died or die meanwhile, and if the group was revoked. The flags of ranks that died before
        they took part are left out; those of ranks that die in the call may be.

        After a failure the ranks synchronize through the store, which must have survived: it does
        if `rallypoint run` or torchrun serves it. A rank that is alive and does not take part
        within the group's timeout counts as dead.

        Args:
            flag: an integer of 64 bits, for example 1 for success and 0 for failure.

        Raises:
            InvalidArgumentError: the flag is not such an integer.
            InvalidTypeError: the group does not use the engine.
            MismatchError: a rank called something else.
            NotInitializedError, RevokedError: the group was destroyed, or is being formed again.
            StoreConnectionError: the store has ended.
        """
        from rallypoint.process_group.groups.agreeing import agree  # used after failures

        self.counts["agree"] += 1
        return agree(survivors_of(self), f"agree/{self.counts['agree']}", flag)

    def destroy(self) -> None:
        """Leave the group and free its memory; a second call does nothing."""
        if self._has_members:
            for service in self._services():
                service.leave()
        if self.status is not GroupStatus.INHERITED:
            self._detach(GroupStatus.DESTROYED)

    def withdraw(self, why: str) -> None:
        """Give up the communicator: calls under way end with an error, and later ones say why."""
        if self._has_members:
            for service in self._services():
                service.withdraw()
        if self._has_members or self.status is GroupStatus.WITHDRAWN:
            self._detach(GroupStatus.WITHDRAWN, why)

    def interrupt(self) -> None:
        """End the waits of all members with an error; another thread may call it."""
        communicator = self._communicator  # which the other thread may take away
        if communicator is not None:
            communicator.revoke()
        for service in self.ends.values() if self._has_members else ():
            service.abort()

    def abort(self) -> None:
        """End the waits of all members with an error, and leave; nothing without the engine."""
        if self._has_members:
            for service in self._services():
                service.abort()
            if self.forms_again:
                self.world.withdraw()
            else:
                self.destroy()

    def abandon(self) -> None:
        """In a forked child: forget the group, which stays the parent's."""
        self._detach(GroupStatus.INHERITED)

    def _services(self) -> list[Communicator | LibraryGroup]:
        own = [] if self._communicator is None else [self._communicator]
        return [*self.ends.values(), *own]

    @property
    def _has_members(self) -> bool:
        """Whether this process is one of them at present."""
        return self.status in (GroupStatus.ACTIVE, GroupStatus.HELD)

    def _detach(self, status: GroupStatus, why: str = "") -> None:
        self.status, self._reason = status, why
        self._communicator = None
        self._bind(_not_the_engines)  # a caller that asks for the communicator next is refused

    def _refuse(self) -> Never:
        if self.status is GroupStatus.HELD:
            raise InvalidArgumentError(self._reason)
        if self.status is GroupStatus.WITHDRAWN:
            raise RevokedError(self._reason)
        # PyTorch calls the default group "0".
        name = self.group_name if self.group_name not in ("", "0") else "of all ranks"
        raise NotInitializedError(f"the process group {name} {self.status.value}; make a new one")

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} rank {self.own_rank} of ranks {self.members()}>"


def survivors_of(group: ProcessGroup) -> Survivors:
    """What the surviving ranks need to agree."""
    from rallypoint.process_group.groups.agreeing import Survivors

    return Survivors(
        group.communicator,
        group.world.store,
        group.prefix,
        rank=group.own_rank,
        size=group.size(),
        timeout=group.timeout,
    )


def _not_the_engines(*_: object) -> int:
    return BAD_BUFFER


class World:
    """A default group and what belongs to it: its subgroups, and the store through which they form.

    Attributes:
        prefix: the beginning of this world's keys, which no other world shares.
        options: how its groups' programs are chosen.
        on_destroy: closes the store; None if that is the caller's task.
        made: how many subgroups of each name were requested, whether this rank is in them or not;
            the same on every rank that asks, so members agree on names without communication.
        device: of this process, for libraries that take device memory; None: by LOCAL_RANK.
        title: the group's name for people.
        is_across_jobs: its members are processes of several jobs.
        has_met: all ranks have formed the default group; False: that is not known here.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        options: AlgorithmOptions,
        on_destroy: Callable[[], None] | None = None,
        *,
        device: object = None,
        title: str = DEFAULT_GROUP,
        is_across_jobs: bool = False,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.options = options
        self.on_destroy = on_destroy
        self.device = device
        self.title = title
        self.is_across_jobs = is_across_jobs
        self.has_met = False
        self.subgroups: list[ProcessGroup] = []
        self.made: Counter[str] = Counter()
        self._group: weakref.ref[ProcessGroup] | None = None  # it holds its world

    @property
    def group(self) -> ProcessGroup | None:
        """The default group, as long as it is referenced."""
        return None if self._group is None else self._group()

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)

    def destroy(self) -> None:
        """Leave all groups."""
        for subgroup in reversed(self.subgroups):
            subgroup.destroy()
        self.subgroups.clear()
        if self.group is not None:
            self.group.destroy()
        self.release_store()

    def withdraw(self) -> None:
        """Give up the communicators of all groups. The default group may be formed again."""
        for subgroup in reversed(self.subgroups):
            subgroup.withdraw(_OF_EARLIER.format(subgroup.group_name))
        self.subgroups.clear()
        if self.group is not None:
            self.group.withdraw(_FORMS_AGAIN)

    def release_store(self) -> None:
        """Close the store, if that is this world's task."""
        on_destroy, self.on_destroy = self.on_destroy, None
        if on_destroy is not None:
            on_destroy()

    def leave_to(self, successor: World) -> None:
        """Leave all groups, but not the store, which another world continues to use."""
        successor.on_destroy, self.on_destroy = self.on_destroy, None
        self.destroy()
