"""The short way of a public call: its usual forms go to the engine without running Python code.

A call of a few bytes takes half a microsecond, most of which would be spent on looking at its
arguments here. So the native core (native/python/short_way.cc) does that for calls whose arrays the
engine can take as they are. The decorated function carries out every other form, and raises the
errors of wrong arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from functools import update_wrapper
from types import FunctionType
from typing import Any, TypeVar, cast

from numpy import ndarray

from rallypoint import _native
from rallypoint._native import ShortWay, know
from rallypoint.base.collective import Collective
from rallypoint.base.errors import RallypointError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.groups import default
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import OneWork

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Form(IntEnum):
    """What a call does with its arrays; as in native/python/short_call.h."""

    IN_PLACE = 0  # one array is input and output
    ONTO_ROOT = 1  # the same, but only the root has an output
    APART = 2  # an input and an output; if there is a root, only it has the one that is a list
    CUT = 3  # an input and an output, and the input is cut along its first dimension
    NOTHING = 4  # no arrays
    SEND = 5
    RECEIVE = 6


# Roles of parameters, with the numbers of the native core; 0 for all others.
_SOURCE, _TARGET, _SOURCES, _TARGETS = 1, 2, 3, 4
_ROLES = {
    "dst": 5,
    "src": 5,
    "group_dst": 6,
    "group_src": 6,
    "group": 7,
    "op": 8,
    "async_op": 9,
    "algorithm": 10,
    "tag": 11,
    "timeout": 12,
    "input_split_sizes": 13,
    "output_split_sizes": 14,
}


def short_way(
    collective: Collective,
    form: Form,
    *,
    source: str = "",
    target: str = "",
    default_root: int | None = None,
) -> Callable[[_Function], _Function]:
    """Give a function the short way.

    Args:
        source, target: the parameters that are its input and output: a list of arrays, one for
            each rank, if the name ends with ``_list``. One that is both is `source`.
        default_root: the root if none is given.
    """

    def decorate(function: _Function) -> _Function:
        code = cast(FunctionType, function).__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        roles = {
            source: _SOURCES if source.endswith("_list") else _SOURCE,
            target: _TARGETS if target.endswith("_list") else _TARGET,
            **_ROLES,
        }
        has_root = not {"src", "dst"}.isdisjoint(names)
        way = ShortWay(
            function,
            names,
            code.co_argcount,
            tuple(roles.get(name, 0) for name in names),
            collective,
            form,
            default_root,
            has_root and default_root is None and form is not Form.RECEIVE,
        )
        return cast(_Function, update_wrapper(cast(Any, way), function))

    return decorate


def _error(
    group: ProcessGroup, code: int, operation: str, what: object, op: int, root: int, variant: int
) -> RallypointError:
    return CallDetails(operation, what, op, root, variant).error(group, code)


def _begun(
    native: _native.Work,
    group: ProcessGroup,
    operation: str,
    what: object,
    filled: object,
    op: int,
    root: int,
    variant: int,
) -> OneWork:
    # As CallDetails(...), without the time of a call.
    called = tuple.__new__(CallDetails, (operation, what, op, root, variant, Site.of_caller(2)))
    return OneWork(native, group, called, (filled,))


know(ndarray, ProcessGroup, ReduceOp, timedelta, vars(default), _error, _begun)
