"""The rendezvous backends by name: those registered here, and those that packages provide.

A package provides one with an entry point of the group ``rallypoint.rendezvous``, named as the
backend: a function from RendezvousParameters to a RendezvousHandler. This package's own are entry
points too. Plug-ins for torchrun (``torchrun.handlers``: a function that returns such a function)
are found as well. Only the requested one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from rallypoint.base.errors import InvalidArgumentError, RendezvousError
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousHandler, RendezvousParameters

GROUP, TORCH_GROUP = "rallypoint.rendezvous", "torchrun.handlers"
_OWN = "rallypoint"  # the distribution's name

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register `creator` as `backend`; it takes precedence over a package's.

        Raises:
            InvalidArgumentError: the name is empty, or another creator has it.
        """
        if not backend:
            raise InvalidArgumentError("a rendezvous backend needs a name.")
        if self._creators.get(backend, creator) != creator:
            raise InvalidArgumentError(
                f"the rendezvous backend {backend!r} is already registered, with"
                f" {self._creators[backend]!r}; choose another name."
            )
        self._creators[backend] = creator

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create a handler of the backend that `params` names.

        Raises:
            InvalidArgumentError: there is no such backend.
            RendezvousError: its plug-in cannot be loaded, or creates another one.
        """
        creator = self._creators.get(params.backend) or find_plug_in(params.backend)
        if creator is None:
            raise InvalidArgumentError(
                f"there is no rendezvous backend {params.backend!r}; known backends: "
                f"{', '.join(self.names())}; register it, or install its package."
            )
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RendezvousError(
                f"the rendezvous backend {params.backend!r} created a handler whose get_backend() "
                f"returns {handler.get_backend()!r}; report this to its author."
            )
        return handler

    def names(self) -> list[str]:
        """The names of all backends."""
        return sorted({*self._creators, *plug_ins()})


def plug_ins() -> dict[str, EntryPoint]:
    """The backends of packages, by name; they cannot use this package's own names."""
    found = {each.name: each for each in entry_points(group=TORCH_GROUP)}
    own = sorted(
        entry_points(group=GROUP), key=lambda each: _brought_by(each) == _OWN
    )  # the last one takes precedence
    found.update((each.name, each) for each in own)
    return found


def find_plug_in(name: str) -> RendezvousHandlerCreator | None:
    """The creator that a package provides under that name."""
    entry = plug_ins().get(name)
    if entry is None:
        return None
    try:
        loaded = entry.load()
        creator: RendezvousHandlerCreator = loaded() if entry.group == TORCH_GROUP else loaded
    except Exception as error:
        raise RendezvousError(
            f"the rendezvous backend {name!r}, which {_brought_by(entry)} brings as {entry.value},"
            f" cannot be loaded: {error}; repair or remove that package."
        ) from error
    return creator


def _brought_by(entry: EntryPoint) -> str:
    return "a package" if entry.dist is None else entry.dist.name


rendezvous_handler_registry = RendezvousHandlerRegistry()
register = rendezvous_handler_registry.register


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler of the backend that `params` names; see `create_handler`."""
    return rendezvous_handler_registry.create_handler(params)
