"""Which nodes take part in a job's next round: how they find each other, and their ranks.

The names that Python programs use, torch.distributed.elastic.rendezvous's, are loaded on first use,
so the launcher, which also imports this package, does not pay for them. A program's node is an
agent without workers: its handlers are above this package, in `launch`, and known here only by
name.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.base.errors import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )
    from rallypoint.launch.api.store_handler import DynamicRendezvousHandler, create_handler
    from rallypoint.rendezvous.api.rendezvous_handler import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        RendezvousTimeout,
        get_rendezvous_handler,
        register,
        rendezvous_handler_registry,
    )
    from rallypoint.rendezvous.api.static import StaticTCPRendezvous

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeout",
    "RendezvousTimeoutError",
    "StaticTCPRendezvous",
    "create_handler",
    "get_rendezvous_handler",
    "register",
    "rendezvous_handler_registry",
]

# module -> names; all others are errors
_MODULES = {
    "rendezvous.api.rendezvous_handler": (
        "RendezvousHandler RendezvousInfo RendezvousStoreInfo RendezvousParameters "
        "RendezvousTimeout RendezvousHandlerCreator RendezvousHandlerRegistry "
        "get_rendezvous_handler register rendezvous_handler_registry"
    ),
    "rendezvous.api.static": "StaticTCPRendezvous",
    "launch.api.store_handler": "DynamicRendezvousHandler create_handler",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'rallypoint.rendezvous' has no attribute {name!r}")
    import importlib

    home = _HOMES.get(name, "base.errors")
    value = getattr(importlib.import_module(f"rallypoint.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return __all__
