"""The exporter that `rallypoint run --metrics` starts beside its launcher.

Its arguments are the descriptors of its sockets. Standard input ends with the launcher.
"""

from __future__ import annotations

import socket
import sys

from rallypoint.cli.metrics.exporter import serve

if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    sockets = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    serve(sockets[0], beside=sys.stdin.fileno())
