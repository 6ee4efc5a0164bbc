"""`python -m rallypoint.launch`, for scripts that call `python -m torch.distributed.launch`.

An entry point like the package's own `__main__`: the one module here that knows the command line.
"""

from __future__ import annotations

import sys

from rallypoint.cli.legacy import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
