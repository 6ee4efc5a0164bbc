"""`rallypoint store`: a separate key-value server, which outlives every node of a job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import InvalidArgumentError, StoreConnectionError
from rallypoint.cli.options import HELP, Flag, UsageError, describe, parse
from rallypoint.cli.token_flag import TOKEN_FLAG, read_token

PROGRAM = "rallypoint store"

FLAGS = (
    Flag("--host", "address to listen on (default 127.0.0.1; :: for all addresses)", "H"),
    Flag("--port", "port to listen on (default 29500; 0 for any free one)", "P"),
    TOKEN_FLAG,
    HELP,
)  # fmt: skip

USAGE = """\
usage: rallypoint store [FLAGS]

Serve a key-value store to Rallypoint's clients and, without a token, to torch.distributed's
TCPStore. Its first line of output says where it listens. SIGUSR1 makes it print a line of status;
SIGTERM or Ctrl-C ends it.

  rallypoint store --host :: --port 29400 --token-file job.token
"""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_STATUS_OK, _STATUS_FAILED, _STATUS_USAGE = 0, 1, 2


def store(words: Sequence[str]) -> int:
    """Run `rallypoint store WORDS`; returns the exit status."""
    try:
        values, rest = parse(words, FLAGS, program=PROGRAM, environ={})
        if "--help" in values:
            print(USAGE, describe(FLAGS), sep="\n")
            return _STATUS_OK
        if rest:
            raise UsageError(f"{PROGRAM}: unexpected argument {rest[0]!r}; it takes only flags.")
        host, port = values.get("--host", "127.0.0.1"), _port(values.get("--port", "29500"))
        token = read_token(values, os.environ)
    except (UsageError, InvalidArgumentError) as error:
        print(error, file=sys.stderr)
        return _STATUS_USAGE
    try:
        _serve(host, port, token)
    except StoreConnectionError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _STATUS_FAILED
    return _STATUS_OK


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


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"{PROGRAM}: --port {text} is not a port; give one from 0 to 65535.")
    return int(text)
