"""The default group, and which group and ranks the arguments of a call mean.

Ranks in arguments and errors are global (those of the default group) unless a name begins with
`group_`, as in torch.distributed. A rank that is not in a group holds NON_GROUP_MEMBER instead;
calls on it warn and do nothing.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import Final

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, NotInitializedError
from rallypoint.process_group.groups.group import NON_GROUP_MEMBER, ProcessGroup
from rallypoint.store.store import seconds_of

default_pg_timeout = timedelta(minutes=30)  # torch.distributed's name


def check_timeout(timeout: timedelta | None, default: timedelta) -> timedelta:
    """A timeout, or the default if it is None."""
    if timeout is None:
        return default
    seconds_of(timeout)
    return timeout


_default: ProcessGroup | None = None
_LAUNCHED_NOTE = (
    ": the launcher starts the processes of a job, but they form process groups themselves"
)


class _GroupNames(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch.distributed's name
        """The default group, or None before init_process_group."""
        return _default


class group(metaclass=_GroupNames):  # noqa: N801 - torch.distributed's name
    """``group.WORLD`` is the default group."""


class GroupMember(metaclass=_GroupNames):
    """``WORLD``, and the value that a rank gets for a group that it is not in."""

    NON_GROUP_MEMBER: Final = NON_GROUP_MEMBER


# What may be passed as `group`: None is the default group, -100 a group of others.
Group = ProcessGroup | int | None


def set_default(chosen: ProcessGroup | None) -> None:
    """Set the default group; called by init_process_group and destroy_process_group."""
    global _default  # noqa: PLW0603 - the default group is process-wide state by definition
    _default = chosen


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return _default is not None


def pytorchs_group_note() -> str:
    """What to do if only torch.distributed has a default group; empty if it has none either."""
    torch = sys.modules.get("torch.distributed")  # it is not imported for this
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return ""
    return (
        "torch.distributed has a default group, but rallypoint's calls and rallypoint.elastic need"
        " rallypoint's: call rallypoint.init_process_group()"
    )


def resolve(group: Group) -> ProcessGroup:
    """The group given as argument `group`, of which this rank must be a member."""
    chosen = _default if group is None else group
    if type(chosen) is ProcessGroup:
        return chosen
    if group is None:
        raise NotInitializedError(
            pytorchs_group_note()
            or "Default process group has not been initialized, please make sure to call "
            f"init_process_group{_LAUNCHED_NOTE * ('TORCHELASTIC_RUN_ID' in os.environ)}."
        )
    if group == NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            "this rank is not in the group, which is GroupMember.NON_GROUP_MEMBER on this rank"
        )
    raise InvalidTypeError(
        f"group must be what new_group returned, or None for the default group, not {group!r}"
    )


def revoke_process_group(group: Group = None) -> None:
    """Give a group up, for all members: present and later calls raise an error everywhere.

    Only one rank need call it, and it does not wait for the others. See ProcessGroup.revoke.

    Args:
        group: the default group unless given.

    Raises:
        NotInitializedError: there is no default group, or the group was destroyed.
        InvalidArgumentError: this rank is not in the group.
    """
    resolve(group).revoke()


def joined(group: Group, operation: str) -> ProcessGroup | None:
    """The group given as argument `group`; None, with a warning, if this rank is not in it."""
    chosen = _default if group is None else group
    if type(chosen) is ProcessGroup:
        return chosen
    if group != NON_GROUP_MEMBER or isinstance(group, ProcessGroup):
        return resolve(group)
    warnings.warn(
        f"{operation} on a group that rank {get_rank() if _default else '?'} is not in: does "
        "nothing",
        stacklevel=3,
    )
    return None


def peer(
    chosen: ProcessGroup, rank: int | None, group_rank: int | None, name: str, default: int | None
) -> int:
    """The rank in the group that is given as `name` (global) or ``group_`` + `name`."""
    if group_rank is None:
        rank = default if rank is None else rank
        if rank is None:
            raise InvalidArgumentError(f"one of {name} and group_{name} must be given")
        return chosen.group_rank(rank, name)
    if rank is not None:
        raise InvalidArgumentError(f"{name} and group_{name} cannot both be given")
    if type(group_rank) is not int or not 0 <= group_rank < len(chosen.ranks):
        raise InvalidArgumentError(
            f"group_{name}={group_rank!r} is not a rank of this group; it has {chosen.size()} ranks"
        )
    return group_rank


def get_rank(group: Group = None) -> int:
    """This process's rank in the group; -1 if it is not in it.

    Raises:
        NotInitializedError: there is no default group.
    """
    return -1 if group == NON_GROUP_MEMBER else resolve(group).own_rank


def get_world_size(group: Group = None) -> int:
    """The number of ranks in the group; -1 if this process is not in it.

    Raises:
        NotInitializedError: there is no default group.
    """
    return -1 if group == NON_GROUP_MEMBER else len(resolve(group).ranks)


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The rank in the group of a global rank.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: the global rank is not in the group.
    """
    return resolve(group).group_rank(global_rank, "global_rank")


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The global rank of a rank in the group.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: the group has no such rank.
    """
    chosen = resolve(group)
    return chosen.ranks[peer(chosen, None, group_rank, "rank", None)]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The global ranks of a group, in the order of their ranks in it."""
    return list(resolve(group).ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """The name of a group's backend, in lower case."""
    return resolve(group).backend


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """The backend for each kind of device in a group, as in ``"cpu:gloo,cuda:nccl"``."""
    chosen = resolve(group)
    return (
        chosen.backend
        if ":" in chosen.backend
        else ",".join(f"{kind}:{chosen.backend}" for kind in chosen.ends or ("cpu",))
    )


def get_pg_count() -> int:
    """The number of groups that this process is in: the default one, and those created from it."""
    return 0 if _default is None else 1 + len(_default.world.subgroups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank among those of its machine (LOCAL_RANK), or else `fallback_rank`.

    Raises:
        InvalidArgumentError: LOCAL_RANK is not a number, or is not set and there is no fallback.
    """
    text = os.environ.get("LOCAL_RANK", "" if fallback_rank is None else str(fallback_rank))
    if not text.isdecimal():
        raise InvalidArgumentError(
            f"LOCAL_RANK={text!r} is not a rank; start the program with a launcher, or pass "
            "fallback_rank"
        )
    return int(text)


def is_torchelastic_launched() -> bool:
    """Whether the launcher of this process sets torchelastic's variables, as Rallypoint's does."""
    return "TORCHELASTIC_RUN_ID" in os.environ
