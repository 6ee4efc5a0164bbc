"""`python -m rallypoint` is `rallypoint`."""

from __future__ import annotations

import sys

from rallypoint.cli import main

sys.exit(main())
