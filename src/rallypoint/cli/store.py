"""`rallypoint store`: a separate key-value server, which outlives every node of a job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import InvalidArgumentError, StoreConnectionError
from rallypoint.cli.flags import TOKEN_FILE, read_token
from rallypoint.cli.options import HELP, Flag, Options, UsageError, integer, perform, reader, text

PROGRAM = "rallypoint store"

USAGE = """\
usage: rallypoint store [FLAGS]

Serve a key-value store to Rallypoint's clients and, without a token, to torch.distributed's
TCPStore. Its first line of output shows its address. SIGUSR1 makes it print a line of status;
SIGTERM or Ctrl-C ends it.

  rallypoint store --host :: --port 29400 --token-file job.token
"""

_read_port = reader(
    lambda text: integer(text, most=65535), "{name} {text} is not a port; give one from 0 to 65535."
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class _StoreOptions(Options):
    host = Flag("address to listen on (default 127.0.0.1; :: for all addresses)", "H",
                text, "127.0.0.1")  # fmt: skip
    port = Flag("port to listen on (default 29500; 0 for any free one)", "P", _read_port, 29500)
    token_file = TOKEN_FILE
    help = HELP


def store(words: Sequence[str]) -> int:
    """Run `rallypoint store WORDS`; returns the exit status."""
    failed = ((StoreConnectionError, 1),)
    return perform(PROGRAM, words, _StoreOptions, _store, usage=USAGE, statuses=failed)


def _store(options: _StoreOptions, rest: list[str]) -> int:
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; it takes only flags.")
    host, port = options.host, options.port
    try:
        token = read_token(options.token_file, os.environ)
    except InvalidArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    _serve(host, port, token)
    return 0


def _serve(host: str, port: int, token: bytes | None) -> None:
    from rallypoint.store.server import StoreServer

    # The signals are blocked, so that they wait for sigwait and cannot interrupt anything else.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    started = time.monotonic()
    with StoreServer(host, port, token=token) as server:
        if token is None and not is_loopback(host):
            print(
                f"{PROGRAM}: anyone who can connect to {host} can read and change this store; "
                "set a token with --token-file",
                file=sys.stderr,
            )
        endpoint = endpoint_of(server.host, server.port)
        print(f"rallypoint store listens on {endpoint}", flush=True)
        while signal.sigwait(_SIGNALS) == signal.SIGUSR1:
            connections, keys, requests = server.counters()
            uptime_s = time.monotonic() - started
            print(
                f"rallypoint store {endpoint}: {connections} connections, {keys} keys, "
                f"{requests} requests in {uptime_s:.0f} s",
                flush=True,
            )
    print("rallypoint store ended", flush=True)
