"""The page that `rallypoint run --page` starts beside its launcher.

Its arguments are the launcher's process number, and where to listen.
"""

from __future__ import annotations

import sys

from rallypoint.base.errors import HostError
from rallypoint.cli.beside_launcher import answer_launcher
from rallypoint.cli.options import UsageError
from rallypoint.cli.page import serve_beside_launcher

if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    try:
        serve_beside_launcher(int(sys.argv[1]), sys.argv[2])
    except (HostError, UsageError) as error:
        answer_launcher(str(error), is_ready=False)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
