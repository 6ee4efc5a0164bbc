"""The public names, each with the module it lives in; read by type checkers and by __init__.py."""

from rallypoint.base.errors import RendezvousClosedError as RendezvousClosedError
from rallypoint.base.errors import RendezvousConnectionError as RendezvousConnectionError
from rallypoint.base.errors import RendezvousError as RendezvousError
from rallypoint.base.errors import RendezvousGracefulExitError as RendezvousGracefulExitError
from rallypoint.base.errors import RendezvousStateError as RendezvousStateError
from rallypoint.base.errors import RendezvousTimeoutError as RendezvousTimeoutError
from rallypoint.launch.api.store_handler import DynamicRendezvousHandler as DynamicRendezvousHandler
from rallypoint.launch.api.store_handler import create_handler as create_handler
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousHandler as RendezvousHandler
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousHandlerCreator as RendezvousHandlerCreator,
)
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousHandlerRegistry as RendezvousHandlerRegistry,
)
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousInfo as RendezvousInfo
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousParameters as RendezvousParameters,
)
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousStoreInfo as RendezvousStoreInfo
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousTimeout as RendezvousTimeout
from rallypoint.rendezvous.api.rendezvous_handler import (
    get_rendezvous_handler as get_rendezvous_handler,
)
from rallypoint.rendezvous.api.rendezvous_handler import register as register
from rallypoint.rendezvous.api.rendezvous_handler import (
    rendezvous_handler_registry as rendezvous_handler_registry,
)
from rallypoint.rendezvous.api.static import StaticTCPRendezvous as StaticTCPRendezvous
