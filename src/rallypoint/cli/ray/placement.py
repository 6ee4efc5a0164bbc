"""Which nodes of a Ray cluster get an agent, and what each reserves: facts in, requests out; pure.

The minimum number of nodes forms a placement group in Ray, with a bundle for each node. Ray
provides all of them at once, or none yet, and finds another node for a lost node's bundle. Beyond
these, up to the maximum, each free node gets its own agent.

Ray counts the CPUs and GPUs that are reserved, not those in use, and hides from an actor the GPUs
that it has not reserved. So that all agents can be promised the same before any of them runs,
'gpu', 'cpu' and 'auto' mean one number here: that of the node with the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.record import Record
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import UsageError, whole

# Ray reports a node as alive for up to 15 s after its end.
REST_S = 30.0
TRIES = 3  # for agents on one node that are lost while Ray reports the node as alive
_GPU_KINDS = ("gpu", "xpu")


class Need(Record):
    """The workers on each node, and the resources reserved for them."""

    workers: int
    cpus: int
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """The resources in Ray's form."""
        wanted = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: count for name, count in wanted.items() if count}

    def fits(self, resources: Mapping[str, float]) -> bool:
        """Whether a node with these resources, all free, would be enough."""
        return all(resources.get(name, 0.0) >= count for name, count in self.resources.items())

    def __str__(self) -> str:
        words = [
            f"{count} {noun}{'s' * (count != 1)}"
            for noun, count in (("CPU", self.cpus), ("GPU", self.gpus))
            if count
        ]
        return " and ".join(words) or "nothing reserved"


def read_need(options: RunOptions, nodes: Sequence[Mapping[str, float]]) -> Need:
    """Read the flags, where the live Ray nodes have these resources."""
    cpus_of, gpus_of = (
        sorted(int(node[name]) for node in nodes if node.get(name, 0) >= 1)
        for name in ("CPU", "GPU")
    )
    text, cpus, gpus = options.nproc_per_node, options.cpus_per_node, options.gpus_per_node
    if text in _GPU_KINDS or (text == "auto" and gpus_of):
        workers = (gpus_of[0] if gpus_of else 0) if gpus is None else gpus
        if not workers:
            raise UsageError(
                f"--nproc-per-node {text}: no node of this Ray cluster has GPUs now; if some will"
                " be added, say how many each has with --gpus-per-node."
            )
    elif text in ("cpu", "auto"):
        workers = (cpus_of[0] if cpus_of else 0) if cpus is None else cpus
        if not workers:
            raise UsageError(
                f"--nproc-per-node {text}: no node of this Ray cluster has CPUs now; say how many"
                " with --cpus-per-node."
            )
    else:
        workers = whole(text, "--nproc-per-node")
        if not workers:
            raise UsageError(
                f"--nproc-per-node is {text!r}; it must be 1 or more, 'auto', 'cpu', 'gpu' or"
                " 'xpu'."
            )
    usual_gpus = workers if gpus_of and text != "cpu" else 0
    return Need(
        workers=workers,
        cpus=workers if cpus is None else cpus,
        gpus=usual_gpus if gpus is None else gpus,
    )


class RayNode(Record):
    """A node that Ray reports as alive, with all its resources, free or not."""

    node_id: str
    address: str
    resources: Mapping[str, float]


class RayAgent(Record):
    """An agent that was requested.

    Attributes:
        bundle: its part of the placement group; None if it has none.
        ended_at: when it was lost, or ended; None if it has not.
        is_hopeless: whether it could not be started there, and no other agent could.
    """

    node_id: str
    bundle: int | None
    ended_at: float | None = None
    is_hopeless: bool = False


class AgentRequest(Record):
    """A request to start an agent on this node, in that bundle, if any."""

    node: RayNode
    bundle: int | None


class RayFacts(Record):
    """Ray's live nodes at one moment, and the node of each bundle, or empty if it has none yet."""

    nodes: Sequence[RayNode]
    bundles: Mapping[int, str]


def requests(
    facts: RayFacts, agents: Sequence[RayAgent], need: Need, *, most: int, now: float
) -> list[AgentRequest]:
    """The agents to start now, if `most` may run at once; `agents` are all ever requested."""
    living = [agent for agent in agents if agent.ended_at is None]
    taken = {agent.node_id for agent in living} | _resting(agents, now)
    room = max(0, most - len(living))
    found: list[AgentRequest] = []
    by_id = {node.node_id: node for node in facts.nodes}
    for bundle, node_id in sorted(facts.bundles.items()):
        is_held = any(agent.bundle == bundle for agent in living)
        if not is_held and node_id in by_id and node_id not in taken:
            found.append(AgentRequest(by_id[node_id], bundle))
    if _awaits_a_bundle(facts, agents, found):
        return found[:room]  # free nodes are left for Ray to give to the bundle
    with_bundle = set(facts.bundles.values())
    free = [
        AgentRequest(node, None)
        for node in sorted(facts.nodes, key=lambda node: (len(node.address), node.address))
        if node.node_id not in taken | with_bundle and need.fits(node.resources)
    ]
    return [*found, *free][:room]


def shortage(
    facts: RayFacts, agents: Sequence[RayAgent], need: Need, *, fewest: int, now: float
) -> str:
    """What is missing while too few nodes have an agent; empty if enough have one."""
    living = {agent.node_id for agent in agents if agent.ended_at is None}
    missing = fewest - len(living)
    if missing <= 0:
        return ""
    resting = _resting(agents, now)
    others = [node for node in facts.nodes if node.node_id not in living | resting]
    fitting = [node for node in others if need.fits(node.resources)]
    small = [node for node in others if node not in fitting]
    more = " more" if living else ""
    nodes = f"{missing}{more} node with" if missing == 1 else f"{missing}{more} nodes, each with"
    why = ""
    if len(fitting) >= missing:
        is_noticed = resting.isdisjoint(facts.bundles.values())
        why = ", but other jobs use them" if is_noticed else ", and has not noticed the loss yet"
    told = f"waiting for {nodes} {need}; Ray has {len(fitting)}{_addresses(fitting)}{why}"
    less = f"; {len(small)} with less{_addresses(small)}" if small else ""
    return told + less


def _awaits_a_bundle(
    facts: RayFacts, agents: Sequence[RayAgent], found: Sequence[AgentRequest]
) -> bool:
    """Whether a bundle of the placement group has no agent, and may still get one."""
    held = {agent.bundle for agent in agents if agent.ended_at is None}
    held |= {request.bundle for request in found}
    hopeless = {node_id for node_id in facts.bundles.values() if _is_hopeless(agents, node_id)}
    # An agent without a bundle may already be on the node that Ray gives to a bundle: that is just
    # as good.
    elsewhere = {agent.node_id for agent in agents if agent.ended_at is None}
    return not facts.bundles or any(
        bundle not in held and node_id not in hopeless | elsewhere
        for bundle, node_id in facts.bundles.items()
    )


def _resting(agents: Sequence[RayAgent], now: float) -> set[str]:
    """The nodes that get no agent for now, because one was lost there."""
    lost = [agent for agent in agents if agent.ended_at is not None]
    lately = {agent.node_id for agent in lost if now < (agent.ended_at or 0.0) + REST_S}
    return lately | {each.node_id for each in lost if _is_hopeless(agents, each.node_id)}


def _is_hopeless(agents: Sequence[RayAgent], node_id: str) -> bool:
    ended = [each for each in agents if each.node_id == node_id and each.ended_at is not None]
    return len(ended) >= TRIES or any(agent.is_hopeless for agent in ended)


def _addresses(nodes: Sequence[RayNode]) -> str:
    names = sorted(node.address for node in nodes)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f" ({shown})" if names else ""
