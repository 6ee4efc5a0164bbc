"""The real drivers of agents, in simulated time: Agent, ElasticRounds and what they have, with a
simulated guardian, network, etcd and workers that train (sim_worker.py).

    with SimJob(seed=7, nodes=3) as job:
        job.start_all(); job.run(5); job.nodes[1].workers()[0].kill(); job.run(5)

Control sockets, memory of records and files are real. Nothing waits: each turn of an agent's loop
is an event of the simulation, and so is what a worker hears.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import pkgutil
import select
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random
from types import ModuleType
from typing import Any, cast
from unittest import mock

from tests.simulation.sim_clock import SimLoop
from tests.simulation.sim_keeper import SimKeeper
from tests.simulation.sim_network import Process, SimNetwork
from tests.simulation.sim_rounds import (
    BREAKS_AFTER_S,
    FORGETS_AFTER_S,
    Kind,
    Readable,
    SimMeeting,
    SimPlugInRounds,
    SimRounds,
    SimSource,
    SimStaticRounds,
    place_of,
    rounds_of,
    without_network,
)
from tests.simulation.sim_worker import SimTraining, SimWorker

import rallypoint.launch.agent
import rallypoint.launch.rounds
import rallypoint.rendezvous
from rallypoint.launch.agent import loop as agent_loop
from rallypoint.launch.agent.guardian import Guardian, GuardianReport, ReportKind
from rallypoint.launch.agent.node import Phase
from rallypoint.launch.job import Job, OnHang, Verbosity
from rallypoint.launch.output import file_work
from rallypoint.rendezvous.consensus.messages import Message
from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.timeouts import Timeouts

_SOON_S = 0.0005  # until a process that has been woken runs
_FINEST_S = 0.0001


class SimTime:
    """In place of the module `time`."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now

    def time(self) -> float:
        return 1e9 + self._loop.now

    def clock_gettime(self, _: int) -> float:
        return self._loop.now

    def monotonic_ns(self) -> int:
        return int(self._loop.now * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@functools.cache
def _modules() -> list[ModuleType]:
    """All that agents have, also what they import only when they need it."""
    for package in (rallypoint.launch, rallypoint.rendezvous):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # of what PyTorch's users have
                    importlib.import_module(found.name)
    names = ("rallypoint.launch.", "rallypoint.rendezvous.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(names)]


@contextlib.contextmanager
def simulated(loop: SimLoop) -> Iterator[None]:
    """Let agents read that clock, be found by no program, and say nothing."""
    with contextlib.ExitStack() as patches:
        for module in _modules():
            if getattr(module, "time", None) is time:
                patches.enter_context(mock.patch.object(module, "time", SimTime(loop)))
        patches.enter_context(without_network())
        patches.enter_context(mock.patch.object(agent_loop, "make_entry", lambda *_: None))
        # No thread: directories are made at once.
        patches.enter_context(
            mock.patch.object(file_work, "start_new_thread", mock.Mock(side_effect=RuntimeError))
        )
        yield


class SimSelector(selectors.DefaultSelector):
    """Takes what is there, and does not wait."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0)


class SimGuardian(Readable):
    """Starts and ends simulated workers: Guardian's interface."""

    pid = 1
    has_unsent = False

    def __init__(self, node: SimNode) -> None:
        super().__init__()
        self._node = node
        self.workers: dict[int, SimWorker] = {}
        self._reports: list[GuardianReport] = []
        self._fence: tuple[float | None, bool] = (None, False)
        self._is_paused = False

    def spawn(
        self,
        worker: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        descriptors: tuple[int, int, int, int, int],
        record_slot: int = 0,
        directory: str = "",
        cpus: object = (),
    ) -> None:
        started = SimWorker(
            self._node.job.training,
            self._node,
            environ=dict(environ),
            descriptor=os.dup(descriptors[3]),
            ended=lambda code, status: self._ended(worker, code, status),
            stopped=lambda is_so: self._tell(
                ReportKind.STOPPED if is_so else ReportKind.CONTINUED, worker
            ),
        )
        self.workers[worker] = started
        self._node.listens(started)
        self._node.say(f"{started.pid} starts")
        started.is_paused = self._is_paused
        self._tell(ReportKind.STARTED, worker, pid=started.pid)

    def signal(self, worker: int, number: int) -> None:
        if (found := self.workers.get(worker)) is not None:
            found.signal(number)

    def end(self) -> None:
        self._is_paused = False
        for each in list(self.workers.values()):
            each.signal(signal.SIGKILL)
        self._tell(ReportKind.ENDED, 0, after_s=0.02)

    def fence(self, until_s: float | None, *, pauses: bool = False) -> None:
        self._fence = fence = (until_s, pauses)
        if until_s is not None:
            self._node.job.loop.at(until_s, lambda: self._enforce(fence))

    def _enforce(self, fence: tuple[float | None, bool]) -> None:
        if fence is not self._fence or not self._node.is_alive:
            return
        self._tell(ReportKind.FENCED, 0, after_s=0.0)
        self._node.say("the guardian enforces the lease")
        if fence[1]:
            self.pause()
        else:
            for each in list(self.workers.values()):
                each.signal(signal.SIGKILL)

    def pause(self) -> None:
        self._is_paused = True
        for each in self.workers.values():
            each.pause()

    def resume(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        for each in list(self.workers.values()):
            each.resume()

    def read(self, *, wait: bool = True) -> list[GuardianReport]:
        self.drain()
        reports, self._reports = self._reports, []
        return reports

    def close(self, *_: object) -> None:
        for each in list(self.workers.values()):
            each.die()
        self.workers.clear()
        super().close()

    def _ended(self, worker: int, code: int, status: int) -> None:
        found = self.workers.pop(worker, None)
        if found is not None:
            self._tell(ReportKind.EXITED, worker, pid=found.pid, code=code, status=status)

    def _tell(
        self, kind: ReportKind, worker: int, *, pid: int = 0, code: int = 0, status: int = 0,
        after_s: float | None = None,
    ) -> None:  # fmt: skip
        loop, random = self._node.job.loop, self._node.job.random

        def tell() -> None:
            if self.fileno() >= 0:
                self._reports.append(
                    GuardianReport(kind, worker, pid, code, status, 1e9 + loop.now)
                )
                self.fill()
                self._node.turn_soon()

        if after_s == 0.0:
            tell()
        else:
            loop.after(after_s or random.uniform(0.0002, 0.002), tell)


def address_of(number: int) -> str:
    """Of that node."""
    return f"10.0.0.{number + 1}"


class SimNode(Process):
    """One node: its agent's process, and what is below it."""

    def __init__(self, job: SimJob, number: int) -> None:
        self.job, self.number, self.name = job, number, f"n{number}"
        self.host, self.address = self.name, address_of(number)
        self.starts = self.stores = 0
        self.is_alive = self.is_frozen = self.is_leaving = False
        self.key, self.at = "", Endpoint(host="", port=0)
        self._alarm = math.inf
        self._is_due = False  # a turn, because something has come

    def start(self) -> None:
        """Start an agent there, unless one runs."""
        if self.is_alive:
            return
        job, self.starts = self.job, self.starts + 1
        self.key = f"{self.name}.{self.starts}"
        is_voter = job.kind is Kind.ELASTIC and not job.keeper and self.number < len(job.endpoints)
        port = 29400 if is_voter else 20000 + self.starts
        self.at = Endpoint(host=self.address, port=port)
        self.is_alive, self.is_frozen, self.is_leaving = True, False, False
        if job.kind is not Kind.PLUG_IN:
            job.network.attach(self)
        self.selector = SimSelector()
        self._spoken_to = select.epoll()  # the workers' sockets
        self._listeners: dict[int, SimWorker] = {}
        spec = Job(
            command=("train",),
            local_world_size=job.workers,
            max_restarts=job.restarts,
            run_id="job",
            host=self.name,
            environ={"TMPDIR": job.directory},
            **place_of(self),
            verbosity=Verbosity.QUIET,
            on_hang=OnHang.OFF,
            spares=job.spares,
        )
        self.rounds = rounds_of(self, spec)
        job.sources[self.key] = self.rounds
        self.guardian = SimGuardian(self)
        self.agent = agent_loop.Agent(
            spec,
            self.rounds,
            selector=self.selector,
            make_guardian=lambda **_: cast(Guardian, self.guardian),
        )
        self.say("agent starts")
        self.agent.start()
        self._go_on(self.agent._state.phase)

    def say(self, text: str) -> None:
        """A line of the story."""
        self.job.tell(f"{self.name}: {text}")

    def new_store(self) -> Endpoint:
        """An empty store for workers; no other has its address."""
        self.stores += 1
        return Endpoint(host=self.address, port=30000 + self.stores)

    def listens(self, worker: SimWorker) -> None:
        """It hears what its agent says, soon after that."""
        self._listeners[worker.fileno()] = worker
        self._spoken_to.register(worker, select.EPOLLIN | select.EPOLLET)

    def workers(self) -> list[SimWorker]:
        """Those that live."""
        return list(self.guardian.workers.values()) if self.is_alive else []

    # The agent's process.

    def turn_soon(self) -> None:
        """Something has come for the agent; a turn that is due already finds that, too."""
        if not self._is_due:
            self._is_due = True
            self.job.loop.after(self.job.random.uniform(_FINEST_S, _SOON_S), self._due)

    def _due(self) -> None:
        self._is_due = False
        self.turn()

    def turn(self) -> None:
        """One turn of its loop."""
        if not self.is_alive or self.is_frozen:
            return
        before = self.agent._state.phase
        self.agent.turn(0.0)
        self._go_on(before)

    def _go_on(self, before: Phase) -> None:
        """Workers hear what the agent has said, and it has its next turn in time."""
        goes_on = self.agent.prepare()
        if self.agent._state.phase is not before:
            self.say(f"{before.value} -> {self.agent._state.phase.value}")
        for descriptor, _ in self._spoken_to.poll(0):
            self._listeners[descriptor].hear_soon()
        if not goes_on:
            self.say(f"the job is over, status {self.agent._state.status}")
            self.job.ended[self.name] = self.agent._state.status
            if isinstance(self.rounds, SimPlugInRounds):
                self.rounds.close()
            return self._bury()
        if (wake_at := self.agent.wake_at) is not None:
            alarm = max(wake_at, self.job.loop.now + _FINEST_S)
            if not self.job.loop.now < self._alarm <= alarm:
                self._alarm = alarm
                self.job.loop.at(alarm, self.turn)
        return None

    def freeze(self, seconds: float, *, all_of_it: bool = False) -> None:
        """Stop the agent's process, or everything on the node, for so long."""
        if not self.is_alive:
            return
        self.say(f"is stopped for {seconds:.2f} s{', all of it' if all_of_it else ''}")
        self.is_frozen = True
        frozen, number = self.workers() if all_of_it else [], self.starts

        def thaw() -> None:
            for each in frozen:
                each.signal(signal.SIGCONT)
            if self.starts == number:
                self.is_frozen = False
                self.turn()

        for each in frozen:
            each.signal(signal.SIGSTOP)
        self.job.loop.after(seconds, thaw)

    def leave(self) -> None:
        """A scheduler drains the node."""
        if self.is_alive and not self.is_frozen:
            self.say("agent gets SIGTERM")
            self.job.left.add(self.name)
            self.is_leaving = True
            self.agent.signal_received(signal.SIGTERM)
            self.turn()

    def kill(self) -> None:
        """Kill everything on the node."""
        if self.is_alive:
            self.say("is killed")
            self._bury()

    def _bury(self) -> None:
        self.is_alive = False
        self.guardian.close()
        self.agent._workers.let_all_go()
        if self.agent._output is not None:
            shutil.rmtree(self.agent._output.directory.path, ignore_errors=True)
            self.agent._output.close()
        if self.rounds.board is not None:
            self.rounds.board.close()
            self.job.network.died(self)
        if self.rounds.keeper is not None:
            self.rounds.keeper.close()
        if isinstance(self.rounds, SimPlugInRounds):
            self.rounds.forget()
            self.job.loop.after(FORGETS_AFTER_S, partial(self.job.meeting.leave, self.key))
        self.selector.close()
        self._spoken_to.close()

    # Process.

    def hear(self, sender: str, message: Message) -> None:
        rounds, payload = self._linked, cast(bytes, message)
        rounds.board.came(lambda: rounds.heard(sender, payload))

    def hear_closed(self, key: str) -> None:
        rounds = self._linked
        if self.is_alive:
            rounds.board.came(lambda: rounds.gone(key, "its connection closed"))

    def hear_unreachable(self, at: Endpoint) -> None:
        rounds = self._linked
        if self.is_alive:
            rounds.board.came(lambda: rounds.unreachable(at, "connection refused"))

    @property
    def _linked(self) -> SimRounds | SimStaticRounds:
        """Its rounds: nodes of other kinds have no connections."""
        return cast(SimRounds, self.rounds)


class SimJob:
    """Nodes, their network, and a training; a context manager."""

    def __init__(
        self,
        *,
        seed: int,
        nodes: int,
        workers: int = 2,
        spares: int = 0,
        min_nodes: int = 1,
        restarts: int = 1000,
        steps: int = 1_000_000,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        keeper: type[SimKeeper] | None = None,
        kind: Kind = Kind.ELASTIC,
    ) -> None:
        self.random = Random(seed)
        self.loop = SimLoop()
        self.keeper = None if keeper is None else keeper(self.loop, self.random)
        self.network = SimNetwork(self.loop, self.random)
        self.workers, self.spares, self.min_nodes, self.restarts = (
            workers,
            spares,
            min_nodes,
            restarts,
        )
        self.timeouts, self.kind = timeouts, kind
        self.meeting = SimMeeting(min_nodes, nodes)  # of a plug-in
        if kind is Kind.STATIC:
            self.network.breaks_after_s = BREAKS_AFTER_S
        self.nodes = [SimNode(self, number) for number in range(nodes)]
        voters = range(3 if nodes > 2 else 1)
        self.endpoints = (
            keeper.places
            if keeper
            else tuple(Endpoint(host=address_of(number), port=29400) for number in voters)
        )
        self.sources: dict[str, SimSource] = {}  # of all agents, also of those that have ended
        self.story: list[str] = []
        self.ended: dict[str, int] = {}  # by node, its agent's exit status
        self.left: set[str] = set()  # nodes that were drained
        self.cuts: set[frozenset[str]] = set()  # pairs of nodes that cannot reach each other
        self.training = SimTraining(self.loop, self.random, self.tell, self.reaches, steps)
        self.seed = seed
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SimJob:
        self.directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._stack.enter_context(simulated(self.loop))
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.is_alive:
                node._bury()
        self._stack.close()

    def tell(self, text: str) -> None:
        """A line of the story."""
        self.story.append(f"{self.loop.now:9.4f} {text}")

    def reaches(self, one: str, other: str) -> bool:
        """Whether nodes of these names reach each other."""
        return not self.cuts or frozenset((one, other)) not in self.cuts

    def start_all(self) -> None:
        """Start an agent on each node."""
        for node in self.nodes:
            self.loop.after(self.random.uniform(0.0, 0.3), node.start)

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        self.loop.run(self.loop.now + seconds)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks that there can be train together."""
        return self.training.size == len(self.nodes) * self.workers

    @property
    def has_quorum(self) -> bool:
        """Whether enough agents live to decide what follows what was agreed last.

        An agent that is started again has no vote until it is in a new agreement.
        """
        cores = [each._core for each in self.sources.values() if isinstance(each, SimRounds)]
        agreed = [core.agreement for core in cores if core.agreement is not None]
        if self.keeper is not None or not agreed:
            return True
        newest = max(agreed, key=lambda each: each.number)
        living = [node.key for node in self.nodes if node.is_alive]
        return cores[0].register.rules.is_quorum(newest, living)

    def cut(self, node: SimNode, seconds: float) -> None:
        """Cut the node off for so long."""
        node.say(f"is cut off for {seconds:.2f} s")
        others = {each.name for each in self.nodes if each is not node}
        self.network.cut({node.name}, others)
        self.network.cut(others, {node.name})
        self.cuts |= {frozenset((node.name, other)) for other in others}
        if self.keeper is not None:
            self.keeper.cuts |= {node.name}
        self.loop.after(seconds, self.mend)

    def mend(self) -> None:
        """All reach each other."""
        self.tell("network: whole again")
        self.cuts.clear()
        self.network.mend()
        if self.keeper is not None:
            self.keeper.cuts, self.keeper.is_away = set(), False
