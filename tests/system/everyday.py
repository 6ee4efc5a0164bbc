"""What a system test that is marked `everyday` may not do, so that a busy machine cannot fail it.

An everyday test runs beside others on two cores, and is never run again. So it

- does not sleep: it waits for an event or a state (`wait_until`);
- has no upper bound below LEAST_BOUND_S, neither for a wait nor for what something took;
- has no lease below LEAST_LEASE_S: an agent that does not run for so long counts as dead. Jobs that
  name none get one of that length;
- compares the whole output of a job only if one process writes it, and then names that process:
  `@pytest.mark.everyday(writer="the launcher")`.

`faults` reads a test's source, and that of functions of its module which it calls; a test with a
fault is not collected. Durations and short leases belong into tests of `make test-all`, or, marked
`alone`, into one that has the machine for itself.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from rallypoint.rendezvous.timeouts import Timeouts, read_timeouts

LEAST_BOUND_S = 60.0
LEAST_LEASE_S = 30.0
PATIENT = "keep_alive_interval=1.5,keep_alive_max_attempt=20"

_BOUNDS = {"timeout", "timeout_s", "within_s"}
_WAITS = {"wait", "join"}
_DURATION = re.compile(r"took|elapsed|_s$|monotonic|perf_counter")
_OUTPUTS = {"out", "err"}

is_on = False  # whether the test that runs now is an everyday one


def wait_until(
    holds: Callable[[], Any],
    *,
    within_s: float = LEAST_BOUND_S,
    tells: Callable[[], str] = str,
) -> None:
    """Until `holds()` is true.

    Raises:
        AssertionError: it is not, for that long; with what `tells()` returns, such as the output.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        is_late = time.monotonic() >= deadline
        assert not is_late, f"not within {within_s:g} s: {_text_of(holds)}\n{tells()}"
        time.sleep(0.02)


def patient(words: Sequence[str]) -> list[str]:
    """The words of a launch with a lease that an everyday test may have.

    Raises:
        AssertionError: they name a shorter one.
    """
    patient_words = list(words)
    if not is_on:
        return patient_words
    for index, word in enumerate(patient_words):
        if word == "--rdzv-conf":
            patient_words[index + 1] = _with_lease(patient_words[index + 1])
    is_elastic = "--rdzv-backend" in words and "static" not in words and "--rdzv-conf" not in words
    return [*(("--rdzv-conf", PATIENT) if is_elastic else ()), *patient_words]


def _with_lease(configuration: str) -> str:
    if "keep_alive" not in configuration:
        return f"{configuration},{PATIENT}"
    pairs = (pair.partition("=")[::2] for pair in configuration.split(","))
    named = {name: text for name, text in pairs if name.startswith("keep_alive")}
    timeouts: Timeouts = read_timeouts(named)
    assert timeouts.silence_s >= LEAST_LEASE_S, f"a lease of {timeouts.silence_s:g} s: {__doc__}"
    return configuration


def faults(test: Callable[..., Any], *, writer: str = "") -> list[str]:
    """What a test does that an everyday one may not.

    Args:
        writer: the only process that writes the output which the test compares, if there is one.
    """
    found = []
    for function in _with_helpers(test):
        lines, first = inspect.getsourcelines(function)
        for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
            for fault in _faults_of(node, is_shared=not writer):
                line = first + getattr(node, "lineno", 1) - 1
                found.append(f"{function.__name__}, line {line}: {fault}")
    return found


def _with_helpers(test: Callable[..., Any]) -> list[FunctionType]:
    """A function, and those of its module that it names, and so on."""
    found = [inspect.unwrap(test)]
    for function in found:
        assert isinstance(function, FunctionType)
        for name in function.__code__.co_names:
            named = function.__globals__.get(name)
            is_own = isinstance(named, FunctionType) and named.__module__ == test.__module__
            if is_own and named not in found:
                found.append(named)
    return found


def _faults_of(node: ast.AST, *, is_shared: bool) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
            yield "it sleeps; wait for what is to happen, with wait_until"
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in _WAITS:
            if _is_short(first):
                yield f"it waits for less than {LEAST_BOUND_S:g} s"
        case ast.keyword(arg=name, value=value) if name in _BOUNDS and _is_short(value):
            yield f"{name} is less than {LEAST_BOUND_S:g} s"
        case ast.Name(id="SOON_S"):
            yield "it has a bound of SOON_S"
        case ast.Compare():
            yield from _faults_of_comparison(node, is_shared=is_shared)


def _faults_of_comparison(node: ast.Compare, *, is_shared: bool) -> Iterator[str]:
    sides = [node.left, *node.comparators]
    names = [
        each.attr if isinstance(each, ast.Attribute) else each.id
        for side in sides
        for each in ast.walk(side)
        if isinstance(each, ast.Attribute | ast.Name)
    ]
    is_upper = any(isinstance(each, ast.Lt | ast.LtE) for each in node.ops)
    if is_upper and any(map(_DURATION.search, names)) and _is_short(sides[-1]):
        yield f"something may take less than {LEAST_BOUND_S:g} s"
    is_whole = any(
        isinstance(side, ast.Attribute)
        and side.attr in _OUTPUTS
        and isinstance(side.value, ast.Name)
        and side.value.id == "launch"
        for side in sides
    )
    if is_shared and is_whole and any(isinstance(each, ast.Eq) for each in node.ops):
        yield "it compares the whole output of a job; who alone writes it? everyday(writer=...)"


def _is_short(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return False
    return isinstance(node.value, int | float) and node.value < LEAST_BOUND_S


def _text_of(function: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(function).strip()
    except OSError:
        return repr(function)
