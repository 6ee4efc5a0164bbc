"""Explores every execution of a few small programs that share memory.

All interleavings are tried and, at each step, everything that the machine may show. The first
execution is reported in which a program's check fails, data are read or written while another
program may write them, or somebody waits for ever. Nothing wakes a sleeper by itself, except for
the time-out of a step that has one, when nothing else can happen any more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Generic, TypeAlias, TypeVar

from tests.model.code import Site
from tests.model.memory import Machine, Orders, replaced
from tests.model.steps import (
    Add,
    CompareExchange,
    Fence,
    IsDead,
    Look,
    Scenario,
    Sleep,
    Step,
    Store,
    ViolationError,
    Wake,
    Write,
)

S = TypeVar("S")

AWAKE, ASLEEP, DEAD = range(3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`trouble` is empty if nothing bad can happen; `story` is then, too."""

    states: int
    trouble: str = ""
    story: tuple[str, ...] = ()
    sites: frozenset[Site] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return "\n".join([*self.story, self.trouble or f"no trouble in {self.states} states"])


class _Threads:
    """Where the programs are: by the lines that they stand at, and their local variables.

    So a program must keep what it reads in local variables, which are numbers or tuples of numbers.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._paths: list[tuple[int, ...]] = []  # generators cannot be copied, but played again
        self._steps: list[Step | str | None] = []  # a text: what is wrong there; None: the end
        self._known: dict[Hashable, int] = {}
        self._edges: dict[tuple[int, int], int] = {}
        self.sites: set[Site] = set()

    def start(self, thread: int) -> int:
        return self._play(thread, ())

    def after(self, thread: int, node: int, value: int) -> int:
        if (node, value) not in self._edges:
            self._edges[node, value] = self._play(thread, (*self._paths[node], value))
        return self._edges[node, value]

    def step(self, node: int) -> Step | None:
        step = self._steps[node]
        if isinstance(step, str):
            raise ViolationError(step)
        return step

    def _play(self, thread: int, path: tuple[int, ...]) -> int:
        program = self.scenario.programs[thread][1]()
        step: Step | str | None
        try:
            step = next(program)
            for value in path:
                step = program.send(value)
        except StopIteration:
            step = None
        except ViolationError as violation:
            step = str(violation)
        key = (thread, _place(program) if isinstance(step, Step) else step)
        if key not in self._known:
            self._known[key] = len(self._steps)
            self._paths.append(path)
            self._steps.append(step)
            if isinstance(step, Step) and step.site is not None:
                self.sites.add(step.site)
            if isinstance(step, Look):
                self.sites.update(site for _, site, _ in step.options)
        return self._known[key]


def _place(program: Generator[Step, int, object]) -> Hashable:
    places: list[Hashable] = []
    inner: object = program
    while isinstance(inner, GeneratorType):
        frame = inner.gi_frame
        kept = {n: v for n, v in frame.f_locals.items() if not callable(v)}
        for name, value in kept.items():
            assert isinstance(value, int | str | tuple | Site | None), f"{name} may change"
        places.append((frame.f_code, frame.f_lasti, tuple(sorted(kept.items()))))
        inner = inner.gi_yieldfrom
    return tuple(places)


State: TypeAlias = tuple[tuple[tuple[int, int], ...], S]  # by thread: where it is, and how


def explore(
    scenario: Scenario, machine_type: Callable[[Scenario, Orders], Machine[S]], orders: Orders
) -> Outcome:
    return _Exploration(scenario, machine_type(scenario, orders)).run()


class _Exploration(Generic[S]):
    def __init__(self, scenario: Scenario, machine: Machine[S]) -> None:
        self.scenario = scenario
        self.machine = machine
        self.threads = _Threads(scenario)
        self.came_from: dict[State[S], tuple[State[S] | None, str]] = {}

    def run(self) -> Outcome:
        names = range(len(self.scenario.programs))
        first: State[S] = (
            tuple((self.threads.start(thread), AWAKE) for thread in names),
            self.machine.begin(self.scenario),
        )
        self.came_from[first] = (None, "")
        leads_to: dict[State[S], list[State[S]]] = {}
        ends = []
        left = [first]
        while left:
            state = left.pop()
            try:
                follow = self.follow(state)
            except ViolationError as violation:
                return self._outcome(str(violation), self._story(state))
            for label, after in follow:
                leads_to.setdefault(after, []).append(state)
                if after not in self.came_from:
                    self.came_from[after] = (state, label)
                    left.append(after)
            if not follow:
                ends.append(state)
        return self._without_end(leads_to, ends)

    def _without_end(
        self, leads_to: dict[State[S], list[State[S]]], ends: list[State[S]]
    ) -> Outcome:
        """Whether each state leads to an end, or else programs may look and look for ever."""
        good = set(ends)
        while ends:
            for before in leads_to.get(ends.pop(), ()):
                if before not in good:
                    good.add(before)
                    ends.append(before)
        for state in self.came_from:
            if state not in good:
                return self._outcome("some look for something for ever", self._story(state))
        return self._outcome("", ())

    def _outcome(self, trouble: str, story: tuple[str, ...]) -> Outcome:
        return Outcome(len(self.came_from), trouble, story, frozenset(self.threads.sites))

    def _story(self, state: State[S] | None) -> tuple[str, ...]:
        story: list[str] = []
        while state is not None:
            state, label = self.came_from[state]
            story.append(label)
        return tuple(reversed(story[:-1]))

    def follow(self, state: State[S]) -> list[tuple[str, State[S]]]:
        """All that may come next. Raises ViolationError if nothing can, or something is wrong."""
        threads, memory = state
        steps = [self.threads.step(node) if status == AWAKE else None for node, status in threads]
        for thread, step in enumerate(steps):
            if step is not None and self.machine.concerns_only_itself(step):
                return self._do(state, thread, step)
        found: list[tuple[str, State[S]]] = []
        for thread, step in enumerate(steps):
            if step is None:
                continue
            found += self._do(state, thread, step)
            if thread in self.scenario.mortal:
                killed = replaced(threads, thread, (threads[thread][0], DEAD))
                found.append((f"{self._name(thread)} is killed", (killed, memory)))
        for label, after in self.machine.goes_on_by_itself(memory):
            found.append((label, (threads, after)))
        if not found:
            found = list(self._as_time_passes(state, steps))
        waiting = [
            self._name(thread)
            for thread, (node, status) in enumerate(threads)
            if status == ASLEEP or (status == AWAKE and self.threads.step(node) is not None)
        ]
        if not found and waiting:
            raise ViolationError(f"{' and '.join(waiting)} wait for ever")
        return found

    def _do(self, state: State[S], thread: int, step: Step) -> list[tuple[str, State[S]]]:
        threads, memory = state
        node = threads[thread][0]
        if isinstance(step, IsDead):
            dead = threads[step.value][1] == DEAD
            seen = self.machine.learns_of_death(memory, thread, step.value) if dead else memory
            if seen is None:  # its last stores are still to come
                return []
            return [self._done(threads, seen, thread, node, step, int(dead))]
        found = []
        for value, after in self.machine.do(memory, thread, step):
            if isinstance(step, Sleep) and value == step.expected:
                asleep = replaced(threads, thread, (node, ASLEEP))
                found.append((f"{self._name(thread)} sleeps", (asleep, after)))
                continue
            others = threads
            if isinstance(step, Wake):
                others = tuple(
                    (self.threads.after(i, at, 0), AWAKE)
                    if status == ASLEEP and self._sleeps_at(at) == step.at
                    else (at, status)
                    for i, (at, status) in enumerate(threads)
                )
            found.append(self._done(others, after, thread, node, step, value))
        return found

    def _done(
        self,
        threads: tuple[tuple[int, int], ...],
        memory: S,
        thread: int,
        node: int,
        step: Step,
        value: int,
    ) -> tuple[str, State[S]]:
        number = 0 if isinstance(step, Store | Write | Fence | Wake | Sleep) else value
        after = replaced(threads, thread, (self.threads.after(thread, node, number), AWAKE))
        what = type(step).__name__
        shown = step.value if isinstance(step, Store | Write | Add | CompareExchange) else ""
        got = "" if isinstance(step, Store | Write | Fence | Wake) else f" -> {value}"
        where = f"  ({step.site})" if step.site else ""
        return f"{self._name(thread)}: {what} {step.at} {shown}{got}{where}", (after, memory)

    def _as_time_passes(
        self, state: State[S], steps: list[Step | None]
    ) -> Iterator[tuple[str, State[S]]]:
        threads, memory = state
        for thread, (node, status) in enumerate(threads):
            step = steps[thread]
            if status == ASLEEP:
                asleep = self.threads.step(node)
                assert asleep is not None
                if asleep.value:
                    on = replaced(threads, thread, (self.threads.after(thread, node, 0), AWAKE))
                    yield f"{self._name(thread)} has slept long enough", (on, memory)
            elif isinstance(step, Look) and step.value:
                on = replaced(threads, thread, (self.threads.after(thread, node, -1), AWAKE))
                yield f"{self._name(thread)} gives up", (on, memory)

    def _sleeps_at(self, node: int) -> str:
        step = self.threads.step(node)
        assert step is not None
        return step.at

    def _name(self, thread: int) -> str:
        return self.scenario.programs[thread][0]
