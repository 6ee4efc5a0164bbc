"""One algorithm family per file; `schedule/catalogue.py` lists them.

A family is loaded on first use: a group seldom needs more than one.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from rallypoint.schedule.algorithms import (
        binary_tree,
        binomial,
        bruck,
        direct,
        halving_doubling,
        prefix_reduction,
        ring,
        two_level,
    )

__all__ = [
    "binary_tree",
    "binomial",
    "bruck",
    "direct",
    "halving_doubling",
    "prefix_reduction",
    "ring",
    "two_level",
]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
