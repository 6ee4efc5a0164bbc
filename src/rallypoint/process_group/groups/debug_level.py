"""torch.distributed's debug level, for programs that set or ask for it.

It changes nothing here: that ranks agree on what they call is checked always, and what a job waits
for is told without it. RALLYPOINT_DEBUG=1 prints who is in the default group.
"""

from __future__ import annotations

import os
from enum import Enum

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(Enum):
    """How much torch.distributed would check and tell."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None  # as the environment says


def get_debug_level() -> DebugLevel:
    """What was set, or else what TORCH_DISTRIBUTED_DEBUG said when it was first asked for.

    Raises:
        InvalidArgumentError: that names no level.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set it for this process.

    Raises:
        InvalidTypeError: it is no DebugLevel.
    """
    global _level  # noqa: PLW0603 - torch's is process-wide, too
    if not isinstance(level, DebugLevel):
        raise InvalidTypeError(f"set_debug_level takes a DebugLevel, not {level!r}")
    _level = level


def set_debug_level_from_env() -> None:
    """Set it to what TORCH_DISTRIBUTED_DEBUG says: OFF, INFO or DETAIL; OFF unless it is set.

    Raises:
        InvalidArgumentError: it says something else.
    """
    text = os.environ.get(_VARIABLE, "") or "OFF"
    if text.upper() not in DebugLevel.__members__:
        names = ", ".join(DebugLevel.__members__)
        raise InvalidArgumentError(f"{_VARIABLE}={text} is not one of {names}")
    set_debug_level(DebugLevel[text.upper()])
