"""torch.distributed's debug level, for programs that set or query it.

It changes nothing here: ranks' agreement on their calls is always checked, and errors always name
what a job waits for. RALLYPOINT_DEBUG=1 prints the members of the default group.
"""

from __future__ import annotations

import os
from enum import Enum

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(Enum):
    """How much torch.distributed would check and report; ignored here."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None  # as the environment says


def get_debug_level() -> DebugLevel:
    """The level that was set, or else TORCH_DISTRIBUTED_DEBUG's value at the first query.

    Raises:
        InvalidArgumentError: the variable does not name a level.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level for this process.

    Raises:
        InvalidTypeError: the argument is not a DebugLevel.
    """
    global _level  # noqa: PLW0603 - torch's is process-wide, too
    if not isinstance(level, DebugLevel):
        raise InvalidTypeError(f"set_debug_level takes a DebugLevel, not {level!r}")
    _level = level


def set_debug_level_from_env() -> None:
    """Set the level to that of TORCH_DISTRIBUTED_DEBUG: OFF, INFO or DETAIL; OFF if it is not set.

    Raises:
        InvalidArgumentError: the variable has another value.
    """
    text = os.environ.get(_VARIABLE, "") or "OFF"
    if text.upper() not in DebugLevel.__members__:
        names = ", ".join(DebugLevel.__members__)
        raise InvalidArgumentError(f"{_VARIABLE}={text} is not one of {names}")
    set_debug_level(DebugLevel[text.upper()])
