"""The sessions in which the workers live, so that a job gets as much CPU time as under torchrun.

Where the kernel groups tasks by session (autogroups), each session has the same share of a busy
machine, and a process yields its core only to others of its session. So the workers share one
session, whose share is raised to that of one session per worker. Where the kernel does not permit
that, workers that can have a core each get a session each, and others share one.
docs/decisions/017-sessions.md
"""

from __future__ import annotations

import os
from collections.abc import Mapping

EACH, ONE = "each", "one"
_VARIABLE = "RALLYPOINT_SESSIONS"  # one of these two, for those who know better
_WEIGHT_RATIO = 1.25  # between neighbouring nice values, by the kernel's table
_LOWEST_NICE = -20


def choose_sessions(workers: int, environ: Mapping[str, str]) -> str:
    """What the guardian should do: see its main.cc."""
    wish = environ.get(_VARIABLE, "")
    if wish == EACH or workers == 1:
        return EACH
    has_cores = workers <= len(os.sched_getaffinity(0))
    otherwise = EACH if has_cores and wish != ONE else ONE
    return f"{nice_of(workers)}:{otherwise}"


def nice_of(sessions: int) -> int:
    """The nice value whose weight is closest to that of this many sessions."""
    nice, weight = 0, 1.0
    while weight * _WEIGHT_RATIO**0.5 < sessions and nice > _LOWEST_NICE:
        nice, weight = nice - 1, weight * _WEIGHT_RATIO
    return nice
