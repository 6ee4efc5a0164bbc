"""All operations of our groups, as PyTorch calls them: collectives, messages, and shutdown.

The group and the backend below it share them: both use one group of the engine, which holds all
mutable state.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.pytorch.routes import routed
from rallypoint.pytorch.torch_calls import only
from rallypoint.pytorch.torch_collectives import Collectives
from rallypoint.pytorch.untraced import untraced

_ANY = -1


@untraced
class Operations(Collectives):
    """All operations of a group; Collectives has those of all ranks together."""

    def name(self) -> str:
        """The backend's name."""
        return self.engine_group.backend

    getBackendName = name  # noqa: N815 - torch's
    _get_backend_name = name

    # Messages from one rank to another.

    @routed
    def send(self, tensors: list[Any], dst: int, tag: int = 0) -> Any:  # noqa: ANN401
        """Begin to send a tensor, which must not be changed before the work has completed."""
        return self._send(only(tensors, "send"), self._peer(dst, "send"), tag)

    @routed
    def recv(self, tensors: list[Any], src: int, tag: int = 0) -> Any:  # noqa: ANN401
        """Begin to receive a tensor."""
        tensor = only(tensors, "recv")
        return self._receive(tensor, src if src == _ANY else self._peer(src, "recv"), tag)

    @routed
    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Any:  # noqa: ANN401
        """Begin to receive a tensor from any rank."""
        return self._receive(only(tensors, "recv"), _ANY, tag)

    def _peer(self, rank: int, operation: str) -> int:
        if rank == self.engine_group.own_rank:
            raise InvalidArgumentError(f"{operation}: {rank} is this rank itself; name another one")
        return self._rank(rank, operation)

    # Its state and its end.

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has begun."""
        return self.engine_group.communicator.begun

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the engine counts by itself."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations that begin from now on may wait for a peer."""
        self.engine_group.set_timeout(timeout)
        for group in self.devices.made():
            group.set_timeout(timeout)

    def abort(self) -> None:
        """End the waits of all ranks of the group with an error, and leave it."""
        self.engine_group.abort()

    def shutdown(self) -> None:
        """Leave the group; peers that wait for this rank are told."""
        self.engine_group.destroy()
