"""Counts the bytes of states that this process gets from others, and those of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.elastic import state, transfer
from rallypoint.elastic.values import Leaf
from rallypoint.process_group.groups.default import get_rank


class TransferBytes:
    """What passes through the calls by which a state is transferred, from now on.

    Attributes:
        received: in each transfer in which this process got the state: outline and arrays.
        own: the bytes of the arrays in its state.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.own = 0
        self._is_newcomer = False
        self._calls = {name: getattr(transfer, name) for name in ("broadcast", "irecv", "copy_out")}
        self._synchronize, self._exchange = transfer.synchronize, transfer._exchange
        names: dict[str, Any] = {"broadcast": self._broadcast, "irecv": self._irecv}
        names |= {"copy_out": self._copy_out, "_exchange": self._measured}
        for name, function in names.items():
            setattr(transfer, name, function)
        state.synchronize = self._begun  # type: ignore[attr-defined]

    def _begun(self, values: dict[str, Any], settlement: Any, group: Any) -> None:
        self._is_newcomer = get_rank() in settlement.newcomers
        if self._is_newcomer:
            self.received.append(0)
        self._synchronize(values, settlement, group)

    def _measured(self, leaves: Sequence[Leaf], *others: Any) -> None:
        self.own = sum(each.data.size for each in leaves)
        self._exchange(leaves, *others)

    def _broadcast(self, data: Any, source: int, group: Any) -> None:
        self._calls["broadcast"](data, source, group)
        self._count(data)

    def _irecv(self, data: Any, source: int) -> Any:
        self._count(data)
        return self._calls["irecv"](data, source)

    def _copy_out(self, arrays: Any, *others: Any) -> bool:
        for each in arrays:
            self._count(each)
        return self._calls["copy_out"](arrays, *others)  # type: ignore[no-any-return]

    def _count(self, data: Any) -> None:
        if self._is_newcomer:
            self.received[-1] += data.nbytes
