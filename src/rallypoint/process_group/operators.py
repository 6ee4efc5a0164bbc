"""How reductions combine items: ReduceOp, and a sum of inputs that are scaled first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp


@dataclass(frozen=True, slots=True)
class PremulSum:
    """ReduceOp.PREMUL_SUM with this rank's factor; torch's _make_nccl_premul_sum(factor)."""

    factor: float

    def __str__(self) -> str:
        return f"PREMUL_SUM by {self.factor:g}"


Operator = ReduceOp | PremulSum


def premul_sum(factor: float) -> PremulSum:
    """An operator that sums the inputs, each multiplied by its rank's `factor` first."""
    return PremulSum(float(factor))


def supports_complex(reduceOp: Operator) -> bool:  # noqa: N803 - torch.distributed's name
    """Whether complex numbers can be combined so; not by operators that need an order or bits."""
    return isinstance(reduceOp, PremulSum) or reduceOp in (
        ReduceOp.SUM,
        ReduceOp.AVG,
        ReduceOp.PRODUCT,
        ReduceOp.PREMUL_SUM,
    )


def check_operator(op: object, operation: str) -> Operator:
    """An operator as the caller gave it, ours or torch.distributed's."""
    op = _of_torch(op)
    if op is ReduceOp.PREMUL_SUM:
        raise InvalidArgumentError(
            f"{operation}: ReduceOp.PREMUL_SUM needs a factor; pass premul_sum(factor)"
        )
    if isinstance(op, ReduceOp | PremulSum):
        return op
    raise InvalidArgumentError(
        f"{operation}: op must be one of ReduceOp.{', ReduceOp.'.join(ReduceOp.__members__)}, "
        f"not {op!r}"
    )


def _of_torch(op: object) -> object:
    """Our operator for torch's, which is recognised without importing torch."""
    value: Any = getattr(op, "op", op)  # of a ReduceOp, the RedOpType
    if type(value).__qualname__ != "ReduceOp.RedOpType":
        return op
    if value.name == ReduceOp.PREMUL_SUM.name and hasattr(op, "factor"):
        return PremulSum(float(op.factor))
    return ReduceOp.__members__.get(value.name, op)


def code_and_factor(op: Operator | None) -> tuple[int, float | None]:
    """The engine's code for an operator; SUM if there is none."""
    if isinstance(op, PremulSum):
        return ReduceOp.PREMUL_SUM, op.factor
    return (0 if op is None else op), None
