"""The agent: starts the workers of this machine, watches them, and ends everything it started.

For Python programs the package has the names of torch.distributed.run, .launcher and the commonly
used parts of .elastic.agent, which __init__.pyi lists. Those of the command line are above this
package, and known here only by name.
"""

from __future__ import annotations

from rallypoint.base.public_names import names_on_first_use

__getattr__, __dir__ = names_on_first_use(globals())
