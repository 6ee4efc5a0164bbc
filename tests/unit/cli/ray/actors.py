"""Actors without Ray: their methods run in threads of this process, one for each group of them.

What of Ray's interface cli/ray uses to speak with an actor; a killed one answers with an error.
"""

from __future__ import annotations

import contextlib
import types
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, Protocol


class RayError(Exception):
    pass


class Target(Protocol):
    def end(self) -> None:
        """Answer whoever waits."""


class Actor:
    """A handle of one."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._groups: dict[str, ThreadPoolExecutor] = {}
        self._answers: list[Future[Any]] = []
        self._end = ""  # how it ended

    @property
    def is_killed(self) -> bool:
        return bool(self._end)

    def kill(self, why: str) -> None:
        self._end = self._end or why
        for answer in self._answers:
            _refuse(answer, self._end)
        self._target.end()
        for group in list(self._groups.values()):
            group.shutdown()

    def __getattr__(self, method: str) -> Method:
        return Method(self, method)

    def call(self, group: str, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        self._answers.append(answer)
        if self._end:
            _refuse(answer, self._end)
        else:
            executor = self._groups.setdefault(group, ThreadPoolExecutor(1))
            with contextlib.suppress(RuntimeError):  # killed meanwhile, and answered so
                executor.submit(self._perform, answer, method, arguments)
        return answer

    def _perform(self, answer: Future[Any], method: str, arguments: tuple[object, ...]) -> None:
        try:
            result = getattr(self._target, method)(*arguments)
        except Exception as error:
            _refuse(answer, f"\n{type(error).__name__}: {error}\nand a page more")
            return
        with contextlib.suppress(InvalidStateError):
            answer.set_result(result)


class Method:
    def __init__(self, actor: Actor, method: str, group: str = "") -> None:
        self._actor, self._method, self._group = actor, method, group

    def options(self, *, concurrency_group: str) -> Method:
        return Method(self._actor, self._method, concurrency_group)

    def remote(self, *arguments: object) -> Future[Any]:
        return self._actor.call(self._group, self._method, *arguments)


def _refuse(answer: Future[Any], why: str) -> None:
    with contextlib.suppress(InvalidStateError):  # it was answered before
        answer.set_exception(RayError(why))


def ray() -> Any:
    """The module, as far as a channel uses it."""
    return types.SimpleNamespace(
        get=Future.result,
        kill=lambda actor: actor.kill("It was killed."),
        exceptions=types.SimpleNamespace(RayError=RayError),
    )
