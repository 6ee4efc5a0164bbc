"""A model's buffers, which forward changes before the update to which the change belongs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rallypoint.process_group.calls.collectives import broadcast
from rallypoint.process_group.groups.group import ProcessGroup


class Buffers:
    """Buffers, and a copy of them as of the last update.

    Attributes:
        has_copy: there was an update, or the beginning.
    """

    def __init__(self) -> None:
        self.has_copy = False
        self._copies: list[torch.Tensor] = []

    def make_equal(self, buffers: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        """Have all ranks of a group take over those of its first rank."""
        if not buffers:
            return
        plain = [each.detach() for each in buffers]
        together = torch.cat([each.reshape(-1).view(torch.uint8).cpu() for each in plain])
        broadcast(together, group=group, group_src=0)
        if group.rank() != 0:
            parts = together.split([each.nbytes for each in plain])
            for each, part in zip(plain, parts, strict=True):
                each.copy_(part.clone().view(each.dtype).view(each.shape))

    def keep(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy them."""
        if not self.has_copy:
            self._copies, self.has_copy = [each.detach().clone() for each in buffers], True
            return
        for copy, buffer in zip(self._copies, buffers, strict=True):
            copy.copy_(buffer.detach())

    def undo(self, buffers: Sequence[torch.Tensor]) -> None:
        """Return to the copy, if there is one."""
        for copy, buffer in zip(self._copies, buffers, strict=self.has_copy):
            buffer.detach().copy_(copy)
