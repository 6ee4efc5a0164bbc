"""`rallypoint run --on ray`: reads the flags, and carries out the decisions on Ray's nodes.

    starter.py  --actor--> Shell on node a --> remote_node.py --> rallypoint run --nnodes 2:4 ...
                --actor--> Shell on node b --> remote_node.py --> rallypoint run --nnodes 2:4 ...

placement.py decides which nodes get an agent, and remote/job_on_hosts.py everything else. One
thread asks Ray every second; the thread that decides never blocks.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rallypoint.base.inbox import Inbox
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.ray.cluster import Channel, Cluster, directory_on_node
from rallypoint.cli.ray.placement import (
    AgentRequest,
    Need,
    RayAgent,
    RayFacts,
    read_need,
    requests,
    shortage,
)
from rallypoint.cli.remote.job_on_hosts import JobOnHosts, Say
from rallypoint.cli.remote.plan import MEETING, Plan, make_plan, refuse
from rallypoint.cli.remote.starter import NODE, Starter
from rallypoint.launch.agent.loop import fill_standard_descriptors

_ASK_EACH_S = 0.5
_PATIENCE_S = 3.0  # before a shortage of nodes is reported: Ray needs some time for everything
_END_S = 1.0  # for threads that wait for Ray, at the end
_OTHERS = ("--hosts", "--hostfile", "--rsh")


def run_on_ray(options: RunOptions, command: Sequence[str]) -> int:
    """Run `rallypoint run --on ray ...`; returns the exit status."""
    environ = dict(os.environ)  # before Ray changes it
    # Errors that do not depend on the node are reported before Ray is asked.
    plan_on_ray(options, command, environ)
    fill_standard_descriptors()
    cluster = Cluster()
    try:
        need = read_need(options, [node.resources for node in cluster.nodes()])
        plan = plan_on_ray(options, command, environ, workers=str(need.workers))
        return RayStarter(plan, cluster, need).run()
    finally:
        cluster.close()


def plan_on_ray(
    options: RunOptions, command: Sequence[str], environ: Mapping[str, str], workers: str = ""
) -> Plan:
    """Read the flags; `workers` is the number on each node, once it is known."""
    refuse([name for name in (*MEETING, *_OTHERS) if name != "--on"], options, "--on ray")
    return make_plan(options, command, environ, hosts=(), nnodes=options.nnodes, workers=workers)


class RayStarter(Starter):
    """The starter for --on ray, which uses actors."""

    def __init__(self, plan: Plan, cluster: Cluster, need: Need) -> None:
        now = time.monotonic()
        job = JobOnHosts(
            (),
            fewest=plan.fewest,
            shutdown_timeout_s=plan.job.shutdown_timeout_s,
            now=now,
            may_grow=True,
        )
        super().__init__(plan, job)
        self._cluster = cluster
        self._need = need
        self._working_dir = cluster.working_dir()
        self._agents: list[RayAgent] = []  # by number, like the job's hosts
        self._actors: dict[int, Any] = {}
        self._channels: dict[int, Channel] = {}
        self._told = ""  # what was last reported as missing
        self._is_short_since: float | None = None
        # Not closed: Ray's threads may use it for as long as this process lives.
        self._events: Inbox[Callable[[], None]] = Inbox()
        self._is_closing = threading.Event()
        self._asker = threading.Thread(target=self._ask, daemon=True)

    def _connect(self) -> None:
        self._selector.register(self._events, selectors.EVENT_READ, self._take_events)
        self._cluster.ask_for_group(self._need, self._plan.fewest)
        self._asker.start()

    def _close(self) -> None:
        self._is_closing.set()
        super()._close()
        for actor in self._actors.values():
            self._cluster.end_actor(actor)
        until = time.monotonic() + _END_S
        for thread in (self._asker, *(each for c in self._channels.values() for each in c.threads)):
            thread.join(max(0.0, until - time.monotonic()))

    # Events from other threads, handled by this one.

    def _take_events(self) -> None:
        for event in self._events.take():
            event()

    def _ask(self) -> None:
        """Ask Ray repeatedly, in a separate thread."""
        while True:
            facts = self._cluster.facts()
            if facts is not None:
                self._events.put(partial(self._look, facts))
            if self._is_closing.wait(_ASK_EACH_S):
                return

    # Ray's facts.

    def _look(self, facts: RayFacts) -> None:
        """Start agents where they should run; report what is missing."""
        if not self._job.takes_more:
            return
        now, plan = time.monotonic(), self._plan
        for request in requests(facts, self._agents, self._need, most=plan.most, now=now):
            self._request(request)
        text = shortage(facts, self._agents, self._need, fewest=plan.fewest, now=now)
        if not text:
            self._told, self._is_short_since = "", None
        elif self._is_short_since is None:
            self._is_short_since = now
        elif text != self._told and now > self._is_short_since + _PATIENCE_S:
            self._told = text
            self._perform([Say(text)])

    def _request(self, request: AgentRequest) -> None:
        number = self._job.added(request.node.address)
        self._agents.append(RayAgent(request.node.node_id, request.bundle))
        self._actors[number] = self._cluster.start_actor(
            request,
            self._need,
            lambda answer: self._events.put(partial(self._reached, number, answer)),
        )

    def _reached(self, number: int, answer: Future[str]) -> None:
        """An actor runs, or never will."""
        if self._agents[number].ended_at is not None:
            return
        error = answer.exception()
        if error is not None:
            why = self._cluster.why_hopeless(error)
            if why:
                self.failed(number, why)
            else:
                self.ended(number, None)
            return
        channel = self._cluster.channel(self._actors[number], NODE)
        self._channels[number] = channel
        directory = directory_on_node(os.getcwd(), answer.result(), self._working_dir)
        self._open_link(number, channel, directory)

    # HostListener.

    def failed(self, host: int, why: str) -> None:
        """No launcher can be started there; tried again if only the actor was lost."""
        if host in self._channels and self._channels[host].is_lost:
            self.ended(host, None)
            return
        self._note_end(host, is_hopeless=True)
        super().failed(host, why)

    def ended(self, host: int, status: int | None) -> None:
        self._note_end(host)
        super().ended(host, status)

    def _note_end(self, number: int, *, is_hopeless: bool = False) -> None:
        agent = self._agents[number]
        if agent.ended_at is None:
            self._agents[number] = RayAgent(
                agent.node_id, agent.bundle, time.monotonic(), is_hopeless
            )
            self._cluster.end_actor(self._actors[number])

    def _drop(self, host: int) -> None:
        if host in self._links:
            super()._drop(host)
        else:
            self.ended(host, None)
