"""What a value of a State does when it is more than what `state_dict` says of it.

A step may change its memory before the step's update: gradients, or the statistics of a BatchNorm.
The names are those of a two-phase commit.
"""

from __future__ import annotations


class UpdateParticipant:
    """A value that takes part in the updates of the State that holds it."""

    def prepare(self) -> None:
        """Make ready for an update, before the ranks agree on it; it may communicate.

        Raises:
            PeerLostError: a rank was lost.
        """

    def commit(self) -> None:
        """The ranks are of one state: they have made an update, or brought a newcomer up to date.

        It must not communicate.
        """

    def rollback(self) -> None:
        """Undo what has happened since the last `commit`: ranks were lost or have joined.

        It must not communicate.
        """
