"""Decides what the starter of `rallypoint run --hosts` does when a host answers, ends or is lost.

Events and `now` go in, actions come out: no process, descriptor or clock here. Whether the job
continues without a host is for the launchers to decide; this module only checks that enough of them
are left.

    CONNECTING --greeted--> READY --enough are--> RUNNING --ended--> ENDED
        |                     |                                        ^
        +---------------------+------------- failed -------------------+
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from signal import SIGHUP, SIGQUIT

from rallypoint.base.address import endpoint_of
from rallypoint.base.ready import earliest
from rallypoint.base.record import Record
from rallypoint.launch.agent.node import FAILED, NOTHING_RAN, SIGINT, SIGTERM, SUCCEEDED

CONNECT_S = 30.0  # limit for a host to answer
LAST_CALL_S = 5.0  # for further hosts, once the minimum has answered
OTHERS_S = 10.0  # for the others to end by themselves, once one reports why the job ends
MARGIN_S = 10.0  # beyond --shutdown-timeout, for launchers to end
FLUSH_S = 60.0  # the same after success: their output may be read slowly
AT_ONCE_S = 5.0  # after a second Ctrl-C
LEAVE_S = 3.0  # for what remains, once its input was closed
MEETING_POINTS = 3  # two of them suffice to start a job, and it survives the loss of any one
_MISUSED = 2  # exit status of a wrong command line
# The statuses of launchers that have reported the reason: a failure, `rallypoint stop`, or a signal
# that they got there. All launchers of the job then end.
_TOLD = (FAILED, *(128 + each for each in (SIGHUP, SIGINT, SIGQUIT, SIGTERM)))


class HostPhase(Enum):
    """The phases of a host."""

    CONNECTING = "connecting"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


_ALIVE = (HostPhase.CONNECTING, HostPhase.READY, HostPhase.RUNNING)


class StartLauncher(Record):
    """Start the launcher on this host, given by node rank."""

    host: int
    endpoints: tuple[str, ...]


class SendSignal(Record):
    """Send a signal to the launchers on these hosts."""

    hosts: tuple[int, ...]
    signal: int


class LetGo(Record):
    """Close the input of the programs on these hosts: they then end within a second or two."""

    hosts: tuple[int, ...]


class Drop(Record):
    """End the connections to these hosts, and report nothing more about them."""

    hosts: tuple[int, ...]


class Say(Record):
    """Tell the user; `--quiet` suppresses what is not a problem."""

    text: str
    is_trouble: bool = True


Action = StartLauncher | SendSignal | LetGo | Drop | Say


class JobOnHosts:
    """A job on hosts. Each method takes one event and returns the actions to carry out.

    Args:
        addresses: by node rank, the addresses by which the hosts know each other.
        fewest: the number of hosts that the job needs.
        shutdown_timeout_s: how long launchers give their workers to end.
        now: the time when connecting began.
        may_grow: hosts may be added, also in place of lost ones; the caller that adds them decides
            how long to wait for them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        fewest: int,
        shutdown_timeout_s: float,
        now: float,
        may_grow: bool = False,
    ) -> None:
        self.stop_signal: int | None = None
        self._addresses = list(addresses)
        self._may_grow = may_grow
        self._fewest = fewest
        self._shutdown_s = shutdown_timeout_s
        self._phases = [HostPhase.CONNECTING] * len(addresses)
        self._ports = [0] * len(addresses)
        self._endpoints: tuple[str, ...] = ()  # empty until the job has begun
        self._failure: int | None = None  # the exit status of the first launcher that failed
        self._has_succeeded = False
        self._is_ending = False
        # Deadlines: when to act if things are not over by then.
        self._give_up_at: float | None = None if may_grow else now + CONNECT_S
        self._begin_at: float | None = None
        self._stop_at: float | None = None
        self._let_go_at: float | None = None
        self._drop_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left on any host."""
        has_begun = bool(self._endpoints)
        is_last = has_begun or self._is_ending or not self._may_grow
        return is_last and all(phase is HostPhase.ENDED for phase in self._phases)

    @property
    def takes_more(self) -> bool:
        """Whether another host would still be useful."""
        is_well = self._failure is None and not self._has_succeeded
        return self._may_grow and is_well and not self._is_ending

    @property
    def wake_at(self) -> float | None:
        """When to call `tick` at the latest; None: only events matter."""
        return earliest(
            self._give_up_at, self._begin_at, self._stop_at, self._let_go_at, self._drop_at
        )

    @property
    def status(self) -> int:
        """The exit status for all: a launcher's 0 means that every worker of the job succeeded."""
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if self._has_succeeded and self._failure is None:
            return SUCCEEDED  # hosts that were lost or left on the way were not needed
        return self._failure or FAILED

    # Events.

    def added(self, address: str) -> int:
        """Another host is being connected; returns its number."""
        self._addresses.append(address)
        self._phases.append(HostPhase.CONNECTING)
        self._ports.append(0)
        return len(self._phases) - 1

    def greeted(self, host: int, port: int, now: float) -> list[Action]:
        """A host is ready; a launcher there can listen at that port."""
        if self._phases[host] is not HostPhase.CONNECTING:
            return []
        self._phases[host] = HostPhase.READY
        self._ports[host] = port
        return [] if self._is_ending else self._begin(now)

    def failed(self, host: int, why: str, now: float) -> list[Action]:
        """No launcher can be started on a host."""
        if self._phases[host] is HostPhase.ENDED:
            return []
        self._phases[host] = HostPhase.ENDED
        if self._is_ending:
            return []
        is_replaceable = self._may_grow and bool(self._endpoints)
        if self._are_enough() or self._has_succeeded or is_replaceable:
            told = Say(f"continuing without {self._addresses[host]}: {why}")
            return [told, *self._begin(now), *self._drop_waiting()]
        told = Say(f"cannot start on {self._addresses[host]}: {why}")
        return [told, *self._stop(now)]

    def ended(self, host: int, status: int | None, now: float) -> list[Action]:
        """A launcher has ended; None: the connection to it was lost before its status arrived."""
        if self._phases[host] is HostPhase.ENDED:
            return []
        self._phases[host] = HostPhase.ENDED
        actions: list[Action] = []
        if status in (SUCCEEDED, NOTHING_RAN):
            if not self._has_succeeded:
                self._has_succeeded = True
                self._stop_at = None
                self._let_go_within(self._shutdown_s + FLUSH_S, now)
        elif not self._is_ending:
            name = self._addresses[host]
            if status in (FAILED, _MISUSED):
                self._failure = self._failure or status
            if status is None:
                actions.append(Say(f"lost the connection to {name}"))
            elif status not in _TOLD:
                actions.append(Say(f"the launcher on {name} ended with status {status}"))
            is_replaceable = self._may_grow and status is None
            if (
                not (self._are_enough() or self._has_succeeded or is_replaceable)
                and self._stop_at is None
            ):
                self._stop_at = now + (OTHERS_S if status in _TOLD else 0.0)
        return [*actions, *self._drop_waiting(), *self.tick(now)]

    def signalled(self, number: int, now: float, *, stops: bool) -> list[Action]:
        """A signal arrived: pass it on to the launchers. `stops`: whether it stops the job."""
        running = self._those(HostPhase.RUNNING)
        if not stops:
            return [SendSignal(running, number)] if running else []
        is_second = self.stop_signal is not None
        self.stop_signal = self.stop_signal or number
        self._is_ending = True
        self._stop_at = self._begin_at = self._give_up_at = None
        at_once = is_second and number == SIGINT
        self._let_go_within(AT_ONCE_S if at_once else self._shutdown_s + MARGIN_S, now)
        waiting = self._those(HostPhase.CONNECTING, HostPhase.READY)
        return [*_unless_empty(Drop(waiting)), *_unless_empty(SendSignal(running, number))]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            late = self._those(HostPhase.CONNECTING)
            actions += _unless_empty(Drop(late))
            for host in late:
                actions += self.failed(host, f"it did not answer within {CONNECT_S:g} s", now)
        if self._begin_at is not None and now >= self._begin_at:
            actions += self._begin(now)
        if self._stop_at is not None and now >= self._stop_at:
            actions += self._stop(now)
        if self._let_go_at is not None and now >= self._let_go_at:
            self._let_go_at = None
            self._drop_at = now + LEAVE_S
            actions += _unless_empty(LetGo(self._those(HostPhase.RUNNING)))
        if self._drop_at is not None and now >= self._drop_at:
            self._drop_at = None
            actions += _unless_empty(Drop(self._those(*_ALIVE)))
        return actions

    # Moves.

    def _begin(self, now: float) -> list[Action]:
        """Start launchers, if there are enough hosts."""
        ready = self._those(HostPhase.READY)
        if self._endpoints:  # the job has begun: these are late
            return self._join(ready)
        if len(ready) < self._fewest:
            return []
        if self._those(HostPhase.CONNECTING):
            if self._begin_at is None:
                self._begin_at = now + LAST_CALL_S
            if now < self._begin_at:
                return []
        self._begin_at = None
        self._endpoints = self._meeting_points(ready)
        several = f"{len(ready)} hosts, rendezvous at {', '.join(self._endpoints)}"
        told = [Say(f"starting on {several}", is_trouble=False)] if len(self._addresses) > 1 else []
        return [*told, *self._start(ready)]

    def _join(self, late: Sequence[int]) -> list[Action]:
        """Start launchers that join a job in progress."""
        if not self._may_grow:
            return self._start(late)
        # All hosts where it began may be gone.
        self._endpoints = self._meeting_points(self._those(HostPhase.RUNNING)) or self._endpoints
        told = [Say(f"starting on {self._addresses[host]}, too", is_trouble=False) for host in late]
        return [*told, *self._start(late)]

    def _meeting_points(self, hosts: Sequence[int]) -> tuple[str, ...]:
        points = hosts[:MEETING_POINTS]
        return tuple(endpoint_of(self._addresses[host], self._ports[host]) for host in points)

    def _start(self, hosts: Sequence[int]) -> list[Action]:
        for host in hosts:
            self._phases[host] = HostPhase.RUNNING
        return [StartLauncher(host, self._endpoints) for host in hosts]

    def _stop(self, now: float) -> list[Action]:
        """Too few hosts are left: end the job on the others."""
        self._is_ending = True
        self._stop_at = self._begin_at = self._give_up_at = None
        self._let_go_within(self._shutdown_s + MARGIN_S, now)
        waiting = self._those(HostPhase.CONNECTING, HostPhase.READY)
        running = self._those(HostPhase.RUNNING)
        told: list[Action] = []
        if running:
            left = f"{len(running)} of the {self._fewest} required hosts are left"
            told = [Say(f"ending the job, because only {left}")]
        return [*told, *_unless_empty(Drop(waiting)), *_unless_empty(SendSignal(running, SIGTERM))]

    def _drop_waiting(self) -> list[Action]:
        """Stop waiting for hosts that have not answered, as the job has ended."""
        if not self._endpoints or self._those(HostPhase.RUNNING):
            return []
        self._is_ending = True
        return _unless_empty(Drop(self._those(HostPhase.CONNECTING, HostPhase.READY)))

    def _let_go_within(self, seconds: float, now: float) -> None:
        before = self._let_go_at
        self._let_go_at = now + seconds if before is None else min(before, now + seconds)

    def _are_enough(self) -> bool:
        return self._phases.count(HostPhase.ENDED) <= len(self._phases) - self._fewest

    def _those(self, *phases: HostPhase) -> tuple[int, ...]:
        return tuple(host for host, phase in enumerate(self._phases) if phase in phases)


def _unless_empty(action: SendSignal | LetGo | Drop) -> list[Action]:
    return [action] if action.hosts else []
