"""What agents tell each other of workers that keep others waiting: records, bytes on their way.

    an agent -- LongWaits, TimedOut, ContactLost --> the agent that coordinates
    an agent <------------ EndRank ----------------- the agent that coordinates

They travel as inquiries (rounds/source.py), as the messages of inspection/requests.py do.
"""

from __future__ import annotations

from rallypoint.base.record import Record

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.launch.inspection.requests import Inquiry
    from rallypoint.launch.rounds.source import RoundSource


class _Sendable(Record):
    """The base of all."""

    def to_bytes(self) -> bytes:
        """As an inquiry."""
        from rallypoint.rendezvous.transport.codec import encode

        return encode(self)


class LongWaits(_Sendable):
    """A worker of the sender's node waits for long, or did.

    Attributes:
        is_stopped: it does not wait, but a signal has stopped it.
    """

    round: int
    rank: int
    seconds: float
    is_over: bool
    is_stopped: bool = False


class TimedOut(_Sendable):
    """`rank`, of the sender's node, waited for `culprit` in a call of `ranks` (empty: all) until
    its timeout.
    """

    round: int
    rank: int
    culprit: int
    ranks: tuple[int, ...] = ()


class ContactLost(_Sendable):
    """`rank`, of the sender's node, cannot reach `culprit`; as control_message.LostContact."""

    round: int
    rank: int
    culprit: int
    had_formed: bool


class EndRank(_Sendable):
    """The node that has this rank is to kill it."""

    round: int
    rank: int
    because: str


AgentMessage = LongWaits | TimedOut | ContactLost | EndRank


def read_message(payload: bytes) -> AgentMessage | Inquiry:
    """Read an inquiry."""
    from rallypoint.launch.inspection.requests import Inquiry
    from rallypoint.rendezvous.transport.codec import decode_any

    kinds = (AgentMessage | Inquiry).__args__
    message: AgentMessage | Inquiry = decode_any({kind.__name__: kind for kind in kinds}, payload)
    return message


def have_rank_ended(rounds: RoundSource, order: EndRank) -> None:
    """If this agent coordinates, tell all others, one of which has that rank."""
    roster = rounds.roster()
    if roster is None or roster.leader != roster.me:
        return
    for each in roster.members:
        if each.key != roster.me:
            rounds.inquire(each.key, order.to_bytes())
