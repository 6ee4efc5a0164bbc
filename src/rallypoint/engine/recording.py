"""The flight record of this process: where it is, if a launcher provided a file, and its contents.

The engine writes it (native/engine/flight_record.h); the launcher reads it, even after this process
has ended (base/flight_record.py). No failure here may stop a program.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence

from rallypoint._native import open_flight_record, tell_long_waits
from rallypoint.base import worker_hook
from rallypoint.base.wording import rank_ranges
from rallypoint.base.worker_env import HANG_AFTER, HANG_AFTER_S, HANG_TIMES_USUAL

_MOST_MEMBERS = 200  # characters


@functools.cache
def _keep(names: str) -> None:
    location = worker_hook.flight_record or os.environ.pop(worker_hook.FLIGHT_RECORD, "")
    descriptor, _, offset = location.partition(":")
    if not (descriptor.isdecimal() and offset.isdecimal()):
        return
    try:  # a program in between may have closed it, and reused its number
        link = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - imports less
    except OSError:
        return
    is_ours = worker_hook.FLIGHT_RECORD_NAME in link
    if is_ours and open_flight_record(int(descriptor), int(offset), names):
        control = worker_hook.control
        if control is not None and control.is_open:
            tell_long_waits(control.fd, *_long_wait())


def _long_wait() -> tuple[float, float]:
    """How long a wait is to be for the launcher to learn of it: in seconds, and how many times the
    usual one; a time that the user chose counts alone.
    """
    try:
        return float(os.environ[HANG_AFTER]), 0.0
    except (KeyError, ValueError):
        return HANG_AFTER_S, HANG_TIMES_USUAL


def keep_record_of_others() -> None:
    """Make this process keep a record even though it has no group of ours yet."""
    _keep("{}")


def keep_flight_record(
    operations: Sequence[str], dtypes: Sequence[str], operators: Sequence[str]
) -> None:
    """Make this process keep a record, whose numbers mean these; once, and with a launcher."""
    names = {"operations": operations, "dtypes": dtypes, "operators": operators}
    _keep(json.dumps(names))


def describe(name: str, key: str, ranks: Sequence[int]) -> str:
    """The record's description of a group.

    Args:
        key: a text that all members share, and no other group of the job.
        ranks: the members' global ranks, in the order of their ranks in the group.
    """
    members = rank_ranges(ranks, ",")
    if len(members) > _MOST_MEMBERS:
        members = ""
    return json.dumps({"name": name[:100], "key": key[-200:], "members": members})
