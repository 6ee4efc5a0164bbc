"""A model's buffers, which forward changes before the update to which the change belongs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.calls.collectives import broadcast
from rallypoint.process_group.groups.group import ProcessGroup


class Buffers:
    """A model's buffers as of its last update.

    Args:
        are_broadcast: each update has all ranks take over those of the first rank.
    """

    def __init__(self, *, are_broadcast: bool) -> None:
        self._are_broadcast = are_broadcast
        self._copies: list[torch.Tensor] | None = None  # None: not yet part of a state

    def prepare(self, buffers: Iterable[torch.Tensor], group: ProcessGroup) -> None:
        """Before an update: have all ranks of a group take over those of its first rank."""
        plain = [each.detach() for each in buffers]
        if not plain or not self._are_broadcast:
            return
        together = torch.cat([each.reshape(-1).view(torch.uint8).cpu() for each in plain])
        broadcast(together, group=group, group_src=0)
        if group.rank() != 0:
            parts = together.split([each.nbytes for each in plain])
            for each, part in zip(plain, parts, strict=True):
                each.copy_(part.clone().view(each.dtype).view(each.shape))

    def commit(self, buffers: Iterable[torch.Tensor]) -> None:
        """After an update: copy them."""
        if self._copies is None:
            self._copies = [each.detach().clone() for each in buffers]
            return
        for copy, buffer in zip(self._copies, buffers, strict=True):
            copy.copy_(buffer.detach())

    def rollback(self, buffers: Iterable[torch.Tensor]) -> None:
        """Return to the copy, if there is one."""
        if self._copies is not None:
            for copy, buffer in zip(self._copies, buffers, strict=True):
                buffer.detach().copy_(copy)

    def check_committed(self) -> None:
        """Refuse to train a model that is not part of a state.

        Raises:
            InvalidArgumentError: it is not.
        """
        if torch.is_grad_enabled() and self._copies is None:
            raise InvalidArgumentError(
                "this model trains before it is part of a state: pass it to elastic.State, and "
                "call it in the function that elastic.run decorates"
            )
