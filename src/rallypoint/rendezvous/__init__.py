"""Which nodes take part in a job's next round: how they find each other, and their ranks.

The names that Python programs use, torch.distributed.elastic.rendezvous's, are listed in
__init__.pyi. A program's node is an agent without workers: its handlers are above this package, in
`launch`, and known here only by name.
"""

from __future__ import annotations

from rallypoint.base.public_names import names_on_first_use

__getattr__, __dir__ = names_on_first_use(globals())
