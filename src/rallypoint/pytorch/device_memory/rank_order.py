"""Combines tensors of several ranks in the order of ranks, with the bits of the engine's loops.

As docs/decisions/042-dtypes.md says: 16-bit floats are combined as float32 and rounded once, a NaN
wins, integers wrap, booleans add as "or". What is not in `supports` is left to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rallypoint.engine.communicator import ReduceOp

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
# PyTorch cannot add these. As signed ones, they have the same bits where the sign does not matter.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_BITS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_OPERATORS: dict[torch.dtype, frozenset[ReduceOp]] = {
    **dict.fromkeys(_FLOATS, _ARITHMETIC | _ORDERED | {ReduceOp.PREMUL_SUM}),
    **dict.fromkeys(_COMPLEX, _ARITHMETIC | {ReduceOp.PREMUL_SUM}),
    **dict.fromkeys(_INTEGERS, _ARITHMETIC | _ORDERED | _BITS),
    **dict.fromkeys(_SIGNED, (_ARITHMETIC | _BITS) - {ReduceOp.AVG}),
    torch.bool: (_ARITHMETIC | _ORDERED | _BITS) - {ReduceOp.AVG},
}


def supports(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether `combine` can do it."""
    return op in _OPERATORS.get(dtype, ())


def combine(
    operands: Sequence[Tensor], target: Tensor, op: ReduceOp, factors: Sequence[float]
) -> None:
    """Set `target` to the operands combined; it may be one of them.

    Args:
        operands: flat, by rank.
        factors: for PREMUL_SUM, by rank.
    """
    dtype, ranks = target.dtype, len(operands)
    if op is ReduceOp.PREMUL_SUM:
        operands = [each * factor for each, factor in zip(operands, factors, strict=True)]
    if dtype in _COMPLEX and op is not ReduceOp.PRODUCT:  # the sum is that of the parts
        *operands, target = map(torch.view_as_real, (*operands, target))
    if dtype in _SIGNED:
        *operands, target = (each.view(_SIGNED[dtype]) for each in (*operands, target))
    divisor: Any = None
    if op is ReduceOp.AVG:  # CUDA would multiply by the reciprocal of a number, which rounds twice
        wide = torch.float32 if dtype in _HALVES else target.dtype
        divisor = torch.full((), ranks, dtype=wide, device=target.device)
    function = _function(dtype, op)
    total = operands[0].float() if dtype in _HALVES else operands[0]
    for index, each in enumerate(operands[1:], 1):
        is_last = index == ranks - 1 and dtype not in _HALVES
        # Only the last step may write: the target may be an operand that has not been read yet.
        out = target if is_last else total if total is not operands[0] else torch.empty_like(total)
        function(total, each, out)
        total = out
    if divisor is not None:
        total.div_(divisor, rounding_mode=None if total.is_floating_point() else "trunc")
    if total is not target:
        target.copy_(total)


def _function(dtype: torch.dtype, op: ReduceOp) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """What combines two operands into a third tensor, which may be one of them."""
    if dtype is torch.bool:
        if op is ReduceOp.BXOR:
            return lambda a, b, out: torch.bitwise_xor(a, b, out=out)
        is_or = op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR)
        function: Any = torch.bitwise_or if is_or else torch.bitwise_and
        return lambda a, b, out: function(a, b, out=out)
    if op in _ORDERED and (dtype in _FLOATS):
        compare = torch.lt if op is ReduceOp.MIN else torch.gt
        # Of two zeros the second wins, of two NaNs the first, as in the engine's loops.
        return lambda a, b, out: out.copy_(torch.where(compare(a, b) | torch.isnan(a), a, b))
    if op is ReduceOp.PRODUCT and dtype in _COMPLEX:
        return _multiply_complex
    named = {
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }.get(op, torch.add)
    return lambda a, b, out: named(a, b, out=out)


def _multiply_complex(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The formula, each operation rounded; PyTorch's kernels may fuse them."""
    real = a.real * b.real - a.imag * b.imag
    imaginary = a.real * b.imag + a.imag * b.real
    out.real.copy_(real)
    out.imag.copy_(imaginary)
