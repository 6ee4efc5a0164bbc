"""The register of a job whose nodes are known from the start: node 0 has it as long as it lives.

    no lease    no workers are ever started in place of others, so a node that is not heard need
                not end its own: a launcher may be stopped for hours (Ctrl-Z, a debugger)
    no silence  only a connection that ended or broke indicates an end
    no heir     a node that loses node 0 gives up; node 0 never steps down

The first is implemented here; the other two follow from `Setup`: `quorum="host"`, and timeouts with
`missed_beats=NO_SILENCE`. The driver calls `closed` also for a connection that broke.
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.consensus.peer_register import PeerRegister
from rallypoint.rendezvous.consensus.rules import Rules

NO_SILENCE = float("inf")  # beats that may be missed
_TELL_END_FOR_S = 3.0


class FixedRules(Rules):
    """What node 0 and the others may do."""

    def needs_lease(self, *, is_alone: bool) -> bool:
        """Never: without this node there is no other round."""
        return False

    def must_fence(self, now: float, lease_until: float) -> bool:
        """Never."""
        return False

    def lease_s(self, now: float, quorum_heard_at: float) -> float:
        """None is needed."""
        return 0.0

    def beat_after_s(self, beat_s: float, *, unheard_s: float) -> float:
        """Less and less often, so that the kernel of a node 0 that is stopped for long can take all
        of it: otherwise the connection would break.
        """
        return max(beat_s, unheard_s / 2)

    def tell_end_for_s(self) -> float:
        """A node that is stopped reads the job's outcome later."""
        return _TELL_END_FOR_S

    def why_over(self, why: str) -> str:
        """Where to look."""
        return (
            f"node 0 at {self.setup.endpoints[0]} was lost: its launcher exited, or the network "
            "is down; check its output"
        )


class FixedRegister(PeerRegister):
    """See Register. Node 0 is the only voter, so it is granted as soon as it is claimed there."""

    def __init__(self, setup: Setup, rules: type[Rules] = FixedRules) -> None:
        super().__init__(setup, rules)
