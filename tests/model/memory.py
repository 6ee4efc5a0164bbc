"""What memory does with the steps of programs: two kinds of machine.

- `Tso`: x86. Stores wait in a buffer of their thread, first in, first out, and are seen by others
  when they leave it; fences and read-modify-writes wait until it is empty.
- `Weak`: C++20, and so ARM. All stores to a location have one order, but each thread has its own
  opinion of how far it is in it, and may read anything from there on. Release and acquire hand
  such views on. After Kang et al., "A promising semantics for relaxed-memory concurrency" (POPL
  2017), without its promises: a store is never seen before the loads that precede it. For data
  that matter this hides nothing, as reading them counts, and who overwrites them must know of it.

A seq_cst load or store is taken for an acquire or release, a little weaker than it is. FUTEX_WAIT
and FUTEX_WAKE are full fences, as the kernel makes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, TypeAlias, TypeVar

from tests.model.code import Order, Site
from tests.model.steps import (
    Add,
    CompareExchange,
    Fence,
    Load,
    Look,
    Read,
    Scenario,
    Sleep,
    Step,
    Store,
    ViolationError,
    Wake,
    Write,
)

S = TypeVar("S")
T = TypeVar("T")
Orders: TypeAlias = Callable[[Site], Order]
View: TypeAlias = tuple[int, ...]
# Of the weak machine: a value, what is known to who acquires it, and whether it is a
# read-modify-write of the one before it.
Message: TypeAlias = tuple[int, View, bool]


def join(one: View, other: View) -> View:
    return one if one == other else tuple(map(max, one, other))


class Machine(ABC, Generic[S]):
    """What memory does with steps. Its states are values."""

    def __init__(self, scenario: Scenario, orders: Orders) -> None:
        self.atomics = {name: i for i, name in enumerate(scenario.atomics)}
        self.data = {name: i for i, name in enumerate(scenario.data)}
        self.threads = len(scenario.programs)
        self._known: dict[Site, Order] = {}
        self._orders = orders

    def order(self, step: Step) -> Order:
        if step.site is None:  # memory of the program that uses the engine
            return Order.RELAXED
        if step.site not in self._known:
            self._known[step.site] = self._orders(step.site)
        return self._known[step.site]

    @abstractmethod
    def begin(self, scenario: Scenario) -> S: ...

    @abstractmethod
    def concerns_only_itself(self, step: Step) -> bool:
        """Whether it makes no difference to others when it is done."""

    @abstractmethod
    def do(self, state: S, thread: int, step: Step) -> Iterator[tuple[int, S]]:
        """What it may read, and the state then; nothing, if it cannot be done now."""

    @abstractmethod
    def goes_on_by_itself(self, state: S) -> Iterator[tuple[str, S]]: ...

    @abstractmethod
    def learns_of_death(self, state: S, thread: int, dead: int) -> S | None: ...


TsoState: TypeAlias = tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]


class Tso(Machine[TsoState]):
    """State: what memory holds, and each thread's buffer."""

    def begin(self, scenario: Scenario) -> TsoState:
        self.places = {name: i for i, name in enumerate([*scenario.atomics, *scenario.data])}
        memory = (*scenario.atomics.values(), *(0 for _ in scenario.data))
        return memory, ((),) * self.threads

    def concerns_only_itself(self, step: Step) -> bool:
        return isinstance(step, Fence) and self.order(step) is not Order.SEQ_CST

    def do(self, state: TsoState, thread: int, step: Step) -> Iterator[tuple[int, TsoState]]:
        memory, buffers = state
        place = self.places.get(step.at, -1)
        own = buffers[thread]
        if isinstance(step, Load | Read):
            yield self._sees(state, thread, step.at), state
        elif isinstance(step, Look):
            for number, (at, _, wanted) in enumerate(step.options):
                if wanted(self._sees(state, thread, at)):
                    yield number, state
        elif isinstance(step, Store | Write):
            full = (*own, (place, step.value))
            yield 0, (memory, (*buffers[:thread], full, *buffers[thread + 1 :]))
        elif isinstance(step, Fence) and self.order(step) is not Order.SEQ_CST:
            yield 0, state
        elif not own:
            before = memory[place] if place >= 0 else 0
            after = before
            if isinstance(step, Add):
                after = before + step.value
            elif isinstance(step, CompareExchange) and before == step.expected:
                after = step.value
            yield before, (replaced(memory, place, after) if after != before else memory, buffers)

    def _sees(self, state: TsoState, thread: int, at: str) -> int:
        memory, buffers = state
        place = self.places[at]
        return next((v for p, v in reversed(buffers[thread]) if p == place), memory[place])

    def goes_on_by_itself(self, state: TsoState) -> Iterator[tuple[str, TsoState]]:
        memory, buffers = state
        for thread, buffer in enumerate(buffers):
            if buffer:
                place, value = buffer[0]
                left = (*buffers[:thread], buffer[1:], *buffers[thread + 1 :])
                yield (
                    f"{list(self.places)[place]} := {value}",
                    (replaced(memory, place, value), left),
                )

    def learns_of_death(self, state: TsoState, thread: int, dead: int) -> TsoState | None:
        return None if state[1][dead] else state


Views: TypeAlias = tuple[
    View, View, View
]  # what a thread knows, would by acquiring, and last released
WeakState: TypeAlias = tuple[
    tuple[tuple[Message, ...], ...], tuple[Views, ...], View, tuple[int, ...]
]


class Weak(Machine[WeakState]):
    """State: the messages of each location, each thread's views, the fences' view, the data.

    A view counts, for each location, messages; for data, how often they were written, and how often
    read by each thread.
    """

    def begin(self, scenario: Scenario) -> WeakState:
        width = len(self.atomics) + len(self.data) * (1 + self.threads)
        zero = (0,) * width
        messages = tuple(((value, zero, False),) for value in scenario.atomics.values())
        # For data: the value, then the counts that a view is compared with.
        data = (0,) * len(self.data) + zero
        return messages, ((zero, zero, zero),) * self.threads, zero, data

    def concerns_only_itself(self, step: Step) -> bool:
        if isinstance(step, Fence):
            return self.order(step) is not Order.SEQ_CST
        return isinstance(step, Read | Write)

    def do(self, state: WeakState, thread: int, step: Step) -> Iterator[tuple[int, WeakState]]:
        match step:
            case Load():
                yield from self._load(state, thread, step.at, self.order(step))
            case Look():
                for number, (at, site, wanted) in enumerate(step.options):
                    order = self.order(Load(site=site))
                    for value, after in self._load(state, thread, at, order):
                        if wanted(value):
                            yield number, after
            case Store():
                yield from self._store(state, thread, step)
            case Add() | CompareExchange():
                yield from self._exchange(state, thread, step)
            case Fence():
                yield 0, self._fence(state, thread, self.order(step))
            case Read() | Write():
                yield self._use(state, thread, step)
            case Sleep():
                state = self._fence(state, thread, Order.SEQ_CST)
                yield from self._load(state, thread, step.at, Order.RELAXED)
            case Wake():
                yield 0, self._fence(state, thread, Order.SEQ_CST)

    def _load(
        self, state: WeakState, thread: int, at: str, order: Order
    ) -> Iterator[tuple[int, WeakState]]:
        place = self.atomics[at]
        known = state[1][thread][0][place]
        for i in range(known, len(state[0][place])):
            value = state[0][place][i][0]
            yield value, self._has_read(state, thread, place, i, order)

    def _has_read(
        self, state: WeakState, thread: int, place: int, i: int, order: Order
    ) -> WeakState:
        messages, views, fences, data = state
        view, acquired, released = views[thread]
        view = replaced(view, place, i)
        brought = messages[place][i][1]
        acquired = join(join(acquired, view), brought)
        if order.acquires:
            view = join(view, brought)
        return messages, replaced(views, thread, (view, acquired, released)), fences, data

    def _store(self, state: WeakState, thread: int, step: Step) -> Iterator[tuple[int, WeakState]]:
        place = self.atomics[step.at]
        messages, views, _, _ = state
        for i in range(views[thread][0][place] + 1, len(messages[place]) + 1):
            if i == len(messages[place]) or not messages[place][i][2]:
                none = (0,) * len(views[thread][0])
                yield 0, self._insert(state, thread, place, i, step, none)

    def _insert(
        self, state: WeakState, thread: int, place: int, i: int, step: Step, brought: View
    ) -> WeakState:
        """A message of number i; those behind it move."""
        if i < len(state[0][place]):
            state = _renumbered(state, place, i)
            brought = _moved(brought, place, i)
        messages, views, fences, data = state
        view, acquired, released = views[thread]
        order = self.order(step)
        view = replaced(view, place, i)
        shown = join(view if order.releases else replaced(released, place, i), brought)
        is_exchange = not isinstance(step, Store)
        value = step.value
        if isinstance(step, Add):
            value += messages[place][i - 1][0]
        line = (*messages[place][:i], (value, shown, is_exchange), *messages[place][i:])
        all_views = replaced(views, thread, (view, join(acquired, view), released))
        return replaced(messages, place, line), all_views, fences, data

    def _exchange(
        self, state: WeakState, thread: int, step: Step
    ) -> Iterator[tuple[int, WeakState]]:
        place = self.atomics[step.at]
        line = state[0][place]
        for i in range(state[1][thread][0][place], len(line)):
            value = line[i][0]
            after = self._has_read(state, thread, place, i, self.order(step))
            if isinstance(step, CompareExchange) and value != step.expected:
                yield value, after
            elif i + 1 == len(line) or not line[i + 1][2]:
                yield value, self._insert(after, thread, place, i + 1, step, line[i][1])

    def _fence(self, state: WeakState, thread: int, order: Order) -> WeakState:
        messages, views, fences, data = state
        view, acquired, released = views[thread]
        if order.acquires:
            view = acquired
        if order is Order.SEQ_CST:
            view = acquired = fences = join(view, fences)
        if order.releases:
            released = view
        return messages, replaced(views, thread, (view, acquired, released)), fences, data

    def _use(self, state: WeakState, thread: int, step: Step) -> tuple[int, WeakState]:
        messages, views, fences, data = state
        view, acquired, released = views[thread]
        item = self.data[step.at]
        written = len(self.atomics) + item * (1 + self.threads)
        counts = len(self.data)
        if view[written] != data[counts + written]:
            verb = "reads" if isinstance(step, Read) else "overwrites"
            raise ViolationError(f"{verb} {step.at}, which another may still be writing")
        if isinstance(step, Read):
            mine = written + 1 + thread
            count = data[counts + mine] + 1
            data = replaced(data, counts + mine, count)
            view = replaced(view, mine, count)
        else:
            for i in range(written + 1, written + 1 + self.threads):
                if view[i] != data[counts + i]:
                    raise ViolationError(
                        f"overwrites {step.at}, which another may still be reading"
                    )
            count = data[counts + written] + 1
            data = replaced(replaced(data, counts + written, count), item, step.value)
            view = replaced(view, written, count)
        views = replaced(views, thread, (view, join(acquired, view), released))
        return data[item], (messages, views, fences, data)

    def goes_on_by_itself(self, state: WeakState) -> Iterator[tuple[str, WeakState]]:
        yield from ()

    def learns_of_death(self, state: WeakState, thread: int, dead: int) -> WeakState | None:
        """The kernel's locks lie between a death and who sees it."""
        messages, views, fences, data = state
        view, acquired, released = views[thread]
        seen = (join(view, views[dead][0]), join(acquired, views[dead][0]), released)
        return messages, replaced(views, thread, seen), fences, data


def replaced(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _moved(view: View, place: int, i: int) -> View:
    return replaced(view, place, view[place] + 1) if view[place] >= i else view


def _renumbered(state: WeakState, place: int, i: int) -> WeakState:
    messages, views, fences, data = state
    return (
        tuple(tuple((v, _moved(w, place, i), x) for v, w, x in line) for line in messages),
        tuple((_moved(a, place, i), _moved(b, place, i), _moved(c, place, i)) for a, b, c in views),
        _moved(fences, place, i),
        data,
    )
