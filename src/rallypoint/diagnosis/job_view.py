"""What a person who follows a job sees of it, from the last updates of its nodes. Pure.

What is said of now comes from a node's latest update, rates from the last ten seconds of its round,
and who comes late from stragglers.py. Each rate is of one process, by the clock of its own machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

from rallypoint.base.job_so_far import JobEvent, JobSoFar
from rallypoint.base.recorded_steps import SOURCES
from rallypoint.base.wording import brief
from rallypoint.diagnosis.explanation import Explanation
from rallypoint.diagnosis.node_update import NodeUpdate, RankUpdate, StepsUpdate
from rallypoint.diagnosis.phrases import seconds
from rallypoint.diagnosis.stragglers import Lateness, is_open, lateness, waited_s

SILENT_S = 3.5  # without an update, which are a second apart
STALLED_S = 3.0  # without a call or a step of any rank
_MOST_SILENT = 2
_STARVED = 0.1  # of the time, which is worth a word


class RankState(Enum):
    """What a rank does."""

    RUNS = "runs"
    WAITS = "waits"  # in a call
    KERNEL = "kernel"  # cannot be interrupted there, as in a file system that does not answer
    STOPPED = "stopped"  # by a signal or a debugger
    ENDED = "ended"
    STARTS = "starts"  # there is no process yet
    SILENT = "silent"  # its node is


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """A node's last updates.

    Attributes:
        ranks: the ranks there.
        updates: the latest one last; empty: none has come yet.
        age_s: the time since the latest one came; if none has, since the first was due.
    """

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    updates: tuple[NodeUpdate, ...]
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """The last updates of all nodes.

    Attributes:
        why: the reason why other nodes are not followed; empty: they are, or there are none.
    """

    nodes: tuple[NodeHistory, ...]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """A rank.

    Attributes:
        end: how it has ended.
        group, operation, number: the call that it is in, or after which it is; the group is empty
            if there was none.
        for_s: since it began that or, if that is over, left it.
        waited: the share of the time that it was in calls that could not continue without others.
        late_s: by how much it came later than others in a step of `step_s` or, if steps are not
            known, in a call; negative: by how much earlier. None: that cannot be compared.
        late_share: of the time.
        is_slow: the others wait for it again and again.
        is_at_fault: it keeps the job from making progress.
        cpu: the cores that it uses; no_core: the share of the time in which it was ready and had
            none; None: not known.
        at: the line of its program.
    """

    rank: int
    node_rank: int
    host: str
    pid: int
    state: RankState
    end: str = ""
    group: str = ""
    operation: str = ""
    number: int | None = None
    is_in_call: bool = False
    for_s: float | None = None
    waited: float | None = None
    late_s: float | None = None
    step_s: float | None = None
    late_share: float | None = None
    is_slow: bool = False
    is_at_fault: bool = False
    cpu: float | None = None
    no_core: float | None = None
    rss_bytes: int = 0
    at: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node.

    Attributes:
        silent_s: the time since it told anything; None: it does each second.
    """

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    silent_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job.

    Attributes:
        headline: what matters most, as a sentence.
        is_undecided: some rank may turn out to be slow after more updates.
        is_stalled: no rank has begun or left a call or a step for STALLED_S.
        step, total: its last step, and how many there will be.
        source: who counts the steps, as RecordedSteps.
        left_s: how long the rest will take, without what has passed since that step.
        steps_per_s, calls_per_s, bytes_per_s: of the middle one of its ranks.
        speed: steps (if they are not known: calls) a second, in the last second.
        values: what its program tells of itself.
        age_s: the time since anything was told.
        events: the latest ones.
        losses, restarts: how often ranks were lost, and all workers started anew.
        recovery_s: how long in-place recoveries took in all.
        trained: the share of its time in which steps ended that had not been done before; None: no
            steps are known.
        status: the launcher's exit status; None: the job is running.
        ended_s: the time since it ended.
    """

    round: int
    phase: str
    world_size: int
    node_count: int
    uptime_s: float
    headline: str
    is_undecided: bool
    is_stalled: bool
    ranks: tuple[RankView, ...]
    nodes: tuple[NodeView, ...]
    age_s: float
    values: Mapping[str, str]
    step: int | None = None
    source: str = ""
    total: int | None = None
    left_s: int | None = None
    steps_per_s: float | None = None
    calls_per_s: float | None = None
    bytes_per_s: float | None = None
    speed: float | None = None
    events: tuple[JobEvent, ...] = ()
    losses: int = 0
    restarts: int = 0
    recovery_s: float = 0.0
    trained: float | None = None
    status: int | None = None
    ended_s: float | None = None

    def with_past(self, so_far: JobSoFar) -> JobView:
        """With what has happened so far."""
        return replace(
            self,
            events=so_far.events,
            losses=so_far.loss_count,
            restarts=so_far.restarts,
            recovery_s=so_far.recovery_s,
            trained=so_far.trained_share(self.uptime_s),
        )

    @property
    def percent(self) -> int | None:
        """How much of the total is done, at most 100; None: the total is not known."""
        if not self.total or self.step is None:
            return None
        return min(100, self.step * 100 // self.total)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was seen when a job that made no progress was inspected.

    Attributes:
        sites: the lines that ranks were at.
    """

    explanation: Explanation
    sites: Mapping[int, str]


def view_of(history: JobHistory, inspection: Inspection | None = None) -> JobView | None:
    """What is to be seen of a job; None: nothing was told yet.

    Args:
        inspection: the latest one, while it makes no progress.
    """
    told = [node for node in history.nodes if node.updates]
    if not told:
        return None
    latest = max((node.updates[-1] for node in told), key=lambda each: (each.round, each.uptime_ms))
    samples = {each.now.rank: each for node in told for each in _samples(node, latest.round)}
    late, names = _lateness(samples), _names(samples)
    is_stalled = _is_stalled(samples, latest)
    if not is_stalled:
        inspection = None  # it has moved since
    explanation = inspection.explanation if inspection else None
    sites = inspection.sites if inspection else {}
    at_fault = set(explanation.roots[0].ranks) if explanation and explanation.roots else set()
    ranks = tuple(
        _rank(
            rank,
            node,
            samples.get(rank),
            late.get(rank),
            names,
            site=sites.get(rank, ""),
            is_at_fault=rank in at_fault,
        )
        for node, rank in _ranks(history)
    )
    nodes = tuple(
        NodeView(
            node_rank=node.node_rank,
            host=node.host,
            ranks=node.ranks,
            silent_s=node.age_s if node.age_s > SILENT_S else None,
        )
        for node in history.nodes
    )
    now = samples.values()
    steps = max((each for each in map(_steps, told) if each), key=_knowledge, default=None)
    so_far = next((node.updates[-1].so_far for node in told if node.updates[-1].so_far), JobSoFar())
    view = JobView(
        round=latest.round,
        phase=latest.phase,
        world_size=latest.world_size,
        node_count=latest.nodes,
        uptime_s=latest.uptime_ms / 1000,
        headline=_headline(latest, ranks, nodes, explanation, is_stalled=is_stalled),
        is_undecided=is_open(late),
        is_stalled=is_stalled,
        ranks=ranks,
        nodes=nodes,
        age_s=min(node.age_s for node in told),
        step=steps.step if steps else None,
        source=steps.source if steps else "",
        total=steps.total if steps else None,
        left_s=steps.left_s if steps else None,
        steps_per_s=_median(each.steps_per_s for each in now),
        calls_per_s=_median(each.calls_per_s for each in now),
        bytes_per_s=_median(each.bytes_per_s for each in now),
        speed=_median(each.speed for each in now),
        values=steps.values if steps else {},
    )
    return view.with_past(so_far)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A rank's process, in the first and in the latest of its updates in the round; `before`: in
    the last but one.
    """

    first_of: NodeUpdate
    first: RankUpdate
    before_of: NodeUpdate
    before: RankUpdate
    now_of: NodeUpdate
    now: RankUpdate

    @property
    def call(self) -> tuple[str, int]:
        """The key of the group of its current or last call, and the call's number."""
        group = self.now.group
        return self.now_of.groups[group].key if group >= 0 else "", self.now.number

    @property
    def interval_s(self) -> float:
        return (self.now_of.now_ms - self.first_of.now_ms) / 1000

    def per_s(self, of_first: float, of_now: float) -> float | None:
        """The rate at which something grew; None: not known yet."""
        return max(0.0, of_now - of_first) / self.interval_s if self.interval_s > 0 else None

    @property
    def has_moved(self) -> bool:
        """Whether it began or left a call or a step in the last few seconds."""
        if self.now.step != self.before.step or _calls(self.now) != _calls(self.before):
            return True
        quiet_ms = self.now.for_ms if self.now.group >= 0 else self.now_of.uptime_ms
        if self.now.step is not None:
            quiet_ms = min(quiet_ms, self.now.step_ms_ago)
        return quiet_ms < STALLED_S * 1000

    @property
    def steps_per_s(self) -> float | None:
        if self.first.step is None or self.now.step is None:
            return None
        return self.per_s(self.first.step, self.now.step)

    @property
    def speed(self) -> float | None:
        past_s = (self.now_of.now_ms - self.before_of.now_ms) / 1000
        if past_s <= 0:
            return None
        if self.before.step is not None and self.now.step is not None:
            return max(0, self.now.step - self.before.step) / past_s
        return max(0, _calls(self.now) - _calls(self.before)) / past_s

    @property
    def calls_per_s(self) -> float | None:
        return self.per_s(_calls(self.first), _calls(self.now)) if self.now.counts else None

    @property
    def bytes_per_s(self) -> float | None:
        if not any(each.kib for each in self.now.counts):
            return None  # other backends do not tell
        return self.per_s(_bytes(self.first), _bytes(self.now))

    @property
    def waited(self) -> float | None:
        if any(each.calls < 0 for each in self.now.counts):
            return None
        first, now = self.first_of.reading(self.first), self.now_of.reading(self.now)
        waited = self.per_s(waited_s(first), waited_s(now))
        return None if waited is None else min(1.0, waited)


def _steps(node: NodeHistory) -> StepsUpdate | None:
    return node.updates[-1].steps


def _knowledge(steps: StepsUpdate) -> tuple[int, int]:
    """As `steps_of_job` chooses."""
    return SOURCES.index(steps.source) if steps.source in SOURCES else 0, steps.total or 0


def _calls(rank: RankUpdate) -> int:
    return sum(max(0, each.calls) + each.transfers for each in rank.counts)


def _bytes(rank: RankUpdate) -> int:
    return sum(each.kib for each in rank.counts) << 10


def _median(rates: Iterator[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def _samples(node: NodeHistory, round_number: int) -> Iterator[_Sample]:
    """The ranks of a node that tells of this round."""
    updates = [each for each in node.updates if each.round == round_number]
    if not updates or updates[-1] is not node.updates[-1] or node.age_s > SILENT_S:
        return
    by_rank = [{rank.rank: rank for rank in update.ranks} for update in updates]
    for rank, now in by_rank[-1].items():
        same = [i for i, each in enumerate(by_rank) if rank in each and each[rank].pid == now.pid]
        first, before = same[0], same[-2:][0]
        yield _Sample(
            updates[first],
            by_rank[first][rank],
            updates[before],
            by_rank[before][rank],
            updates[-1],
            now,
        )


def _lateness(samples: Mapping[int, _Sample]) -> dict[int, Lateness]:
    alive = {rank: each for rank, each in samples.items() if each.now.pid and not each.now.end}
    first = {rank: each.first_of.reading(each.first) for rank, each in alive.items()}
    now = {rank: each.now_of.reading(each.now) for rank, each in alive.items()}
    return lateness(first, now) if all(each.interval_s > 0 for each in alive.values()) else {}


def _names(samples: Mapping[int, _Sample]) -> dict[tuple[str, int], str]:
    """Of collectives, by the key of their group and their number, where all members who know agree.

    Other backends count a call before they tell its name.
    """
    names: dict[tuple[str, int], set[str]] = {}
    for each in samples.values():
        if each.now.operation not in ("", "send", "recv"):
            names.setdefault(each.call, set()).add(each.now.operation)
    return {call: told.pop() for call, told in names.items() if len(told) == 1}


def _ranks(history: JobHistory) -> Iterator[tuple[NodeHistory, int]]:
    pairs = {rank: node for node in history.nodes for rank in node.ranks}
    return ((node, rank) for rank, node in sorted(pairs.items(), key=lambda each: each[0]))


def _is_stalled(samples: Mapping[int, _Sample], latest: NodeUpdate) -> bool:
    alive = [each for each in samples.values() if each.now.pid and not each.now.end]
    return latest.phase == "running" and bool(alive) and not any(each.has_moved for each in alive)


def _state(sample: _Sample) -> RankState:
    now = sample.now
    if now.end or (now.pid and now.state == "Z"):
        return RankState.ENDED
    if not now.pid:
        return RankState.STARTS
    if now.state in "Tt":
        return RankState.STOPPED
    if now.state == "D" == sample.before.state and now.cpu_ms == sample.before.cpu_ms:
        return RankState.KERNEL
    return RankState.WAITS if now.is_running else RankState.RUNS


def _rank(
    rank: int,
    node: NodeHistory,
    sample: _Sample | None,
    late: Lateness | None,
    names: Mapping[tuple[str, int], str],
    *,
    site: str,
    is_at_fault: bool,
) -> RankView:
    view = RankView(
        rank=rank,
        node_rank=node.node_rank,
        host=node.host,
        pid=0,
        state=RankState.SILENT if node.age_s > SILENT_S else RankState.STARTS,
        is_at_fault=is_at_fault,
    )
    if sample is None:
        return view
    now = sample.now
    cpu = sample.per_s(sample.first.cpu_ms, now.cpu_ms)
    is_starved_known = min(now.starved_ms, sample.first.starved_ms) >= 0
    no_core = sample.per_s(sample.first.starved_ms, now.starved_ms) if is_starved_known else None
    return replace(
        view,
        pid=now.pid,
        state=_state(sample),
        end=now.end,
        group=sample.now_of.groups[now.group].name if now.group >= 0 else "",
        operation=now.operation or names.get(sample.call, ""),
        number=now.number if now.number >= 0 else None,
        is_in_call=now.is_running,
        for_s=now.for_ms / 1000 if now.group >= 0 else None,
        waited=sample.waited,
        late_s=None if late is None else late.late_s_per_step,
        step_s=None if late is None else late.step_s,
        late_share=None if late is None else late.share,
        is_slow=late is not None and late.is_slow,
        cpu=None if cpu is None else cpu / 1000,
        no_core=None if no_core is None else no_core / 1000,
        rss_bytes=now.rss_kb << 10,
        at=now.site or site,
        step=now.step,
    )


def _headline(
    latest: NodeUpdate,
    ranks: Sequence[RankView],
    nodes: Sequence[NodeView],
    explanation: Explanation | None,
    *,
    is_stalled: bool,
) -> str:
    if explanation is not None:
        return explanation.sentence
    silent = [
        f"node {each.node_rank} ({each.host}) has told nothing for {brief(each.silent_s)}"
        for each in nodes
        if each.silent_s is not None
    ]
    known = "; ".join(silent[:_MOST_SILENT])
    if latest.round < 0:
        waits = f": {latest.news}" if latest.news else ""
        return f"no round yet, after {seconds(latest.uptime_ms / 1000)}{waits}"
    slow = max((each for each in ranks if each.is_slow), key=_late_share, default=None)
    quiet = [each.for_s for each in ranks if each.for_s is not None and not each.end]
    if is_stalled and quiet:
        text = f"no rank has begun or left a call for {seconds(min(quiet))}"
    elif is_stalled:
        text = "no rank has made a call so far"
    elif slow is not None:
        text = f"no hang: {_slow(slow)}"
    elif ranks and all(each.state is RankState.ENDED for each in ranks):
        text = "all ranks have ended"
    else:
        text = "no hang: calls continue" if quiet else "no calls of its ranks are known"
    return f"{text}; {known}" if known else text


def _late_share(rank: RankView) -> float:
    return rank.late_share or 0.0


def _slow(rank: RankView) -> str:
    """As `explain` words it."""
    if rank.step_s is not None and rank.late_s is not None:
        when = f"{seconds(rank.late_s)} of each {seconds(rank.step_s)} step"
    else:
        when = f"{_late_share(rank) * 100:.0f} % of the time"
    text = f"slow rank {rank.rank}: others wait for it {when}"
    if rank.no_core is not None and rank.no_core >= _STARVED:
        return f"{text}; it gets no core for {rank.no_core * 100:.0f} % of the time"
    return text
