"""What each agent reserves on its node, and how many workers it starts, from the flags and the
nodes.

Ray counts the CPUs and GPUs that are reserved, not those in use, and hides from an actor the GPUs
that it has not reserved. So that all agents can be promised the same before any of them runs,
'gpu', 'cpu' and 'auto' mean one number here: that of the node with the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.record import Record
from rallypoint.cli.number_flags import whole
from rallypoint.cli.options import UsageError

PROGRAM = "rallypoint run"
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


def read_need(values: Mapping[str, str], nodes: Sequence[Mapping[str, float]]) -> Need:
    """Read the flags.

    Args:
        nodes: the resources of each live Ray node.

    Raises:
        UsageError: the flags are invalid, or impossible on these nodes.
    """
    cpus_of, gpus_of = (
        sorted(int(node[name]) for node in nodes if node.get(name, 0) >= 1)
        for name in ("CPU", "GPU")
    )
    text = values.get("--nproc-per-node", "1")
    by_gpu = text in _GPU_KINDS or (text == "auto" and bool(gpus_of))
    if by_gpu:
        workers = whole(values, "--gpus-per-node", gpus_of[0] if gpus_of else 0)
        if not workers:
            raise UsageError(
                f"{PROGRAM}: --nproc-per-node {text}: no node of this Ray cluster has GPUs now; "
                "if some will be added, say how many each has with --gpus-per-node."
            )
    elif text in ("cpu", "auto"):
        workers = whole(values, "--cpus-per-node", cpus_of[0] if cpus_of else 0)
        if not workers:
            raise UsageError(
                f"{PROGRAM}: --nproc-per-node {text}: no node of this Ray cluster has CPUs now; "
                "say how many with --cpus-per-node."
            )
    else:
        workers = whole(values, "--nproc-per-node", 1)
        if not workers:
            raise UsageError(
                f"{PROGRAM}: --nproc-per-node is {text!r}; it must be 1 or more, 'auto', 'cpu',"
                " 'gpu' or 'xpu'."
            )
    uses_gpus = bool(gpus_of) and text != "cpu"
    return Need(
        workers=workers,
        cpus=whole(values, "--cpus-per-node", workers),
        gpus=whole(values, "--gpus-per-node", workers if uses_gpus else 0),
    )
