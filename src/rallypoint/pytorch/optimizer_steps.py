"""Counts the steps of a program that does not tell them: those of its first PyTorch optimizer.

This happens only in workers that have a flight record. Of several optimizers (a GAN's, or one
within another) the one that stepped first counts. A step that a GradScaler skips does not call the
optimizer, and counts as none; accumulated gradients are one step.
"""

# ruff: noqa: ANN401 - PyTorch's objects

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_OPTIMIZER = 1  # engine/step_record.py, which is not imported before the first step
_first: Callable[[], Any] = type(None)  # a weak reference to it; of nothing at first
_record: Callable[[int], None]


def install() -> None:
    """Have the optimizers' steps counted."""
    from torch.optim import optimizer

    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_has_stepped)


def _has_stepped(optimizer: Any, *_: Any) -> None:
    global _first, _record
    first = _first()
    if first is None:
        from rallypoint.engine.step_record import record_step

        _first, _record, first = weakref.ref(optimizer), record_step, optimizer
    if first is optimizer:
        _record(_OPTIMIZER)
