"""Training that continues, in the same processes and with the same memory, when ranks are lost.

    from rallypoint import elastic

    state = elastic.State(step=0, parameters=parameters)

    @elastic.run
    def train(state):
        while state.step < steps:
            ...

docs/guides/in-place-recovery.md explains it.
"""

from rallypoint.base.errors import MembershipChangedError, StateLostError, TooFewPeersError
from rallypoint.elastic.membership import Replicas
from rallypoint.elastic.running import run
from rallypoint.elastic.sampler import Sampler
from rallypoint.elastic.state import State

__all__ = [
    "MembershipChangedError",
    "Replicas",
    "Sampler",
    "State",
    "StateLostError",
    "TooFewPeersError",
    "run",
]


def __dir__() -> list[str]:
    """The public names; the modules of this package are not."""
    return sorted(__all__)
