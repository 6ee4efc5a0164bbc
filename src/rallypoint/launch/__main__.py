"""`python -m rallypoint.launch`, for scripts that call `python -m torch.distributed.launch`.

Like the package's own `__main__`, this is an entry point: the only module here that imports the
command line.
"""

from __future__ import annotations

import sys

from rallypoint.cli.run import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
