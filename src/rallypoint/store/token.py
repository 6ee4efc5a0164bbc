"""The challenge by which two programs prove to each other that both know a secret: the job's token.

    client                                   server
    a greeting, 32 random bytes       ->
                                      <-     32 random bytes
    HMAC-SHA256("client", both)       ->
                                      <-     HMAC-SHA256("server", both)

The token itself is never sent. A recorded exchange cannot be replayed, because both sides add fresh
random bytes. The challenge authenticates the start of a connection; the data that follows is
neither encrypted nor signed. `prove` and `examine` are the two parts, without a socket; at the
store, native/store/gate.cc is the server. Connections between agents, between ranks and of
`rallypoint doctor` begin with it, too.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable, Generator
from contextlib import suppress

from rallypoint.base.errors import InvalidArgumentError

# What to send, and how many bytes are then to be received.
Step = tuple[bytes, int]
Steps = Generator[Step, bytes, bytes]

GREETING = b"RLYPT-1\n"
NONCE = 32
PROOF = 32


def client_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what shows the server that we know the token."""
    return hmac.digest(token, b"client" + client_nonce + server_nonce, "sha256")


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what shows the client that the server knows the token."""
    return hmac.digest(token, b"server" + client_nonce + server_nonce, "sha256")


def is_server_proof(proof: bytes, token: bytes, client_nonce: bytes, server_nonce: bytes) -> bool:
    """Tell whether the server knows the token."""
    return hmac.compare_digest(proof, server_proof(token, client_nonce, server_nonce))


class ChallengeError(Exception):
    """The other side has not proved that it knows the token."""


class RefusedTokenError(ChallengeError):
    """The other side says that ours is another token: `REFUSAL` instead of its proof."""


REFUSAL = bytes(PROOF)  # not a proof, which would help a stranger to guess the token


def prove(token: bytes, greeting: bytes) -> Steps:
    """The caller's part, from its greeting on; returns the caller's random bytes."""
    ours = os.urandom(NONCE)
    theirs = yield greeting + ours, NONCE
    proof = yield client_proof(token, ours, theirs), PROOF
    if proof == REFUSAL:
        raise RefusedTokenError
    if not is_server_proof(proof, token, ours, theirs):
        raise ChallengeError
    return ours


def examine(length: int, token_for: Callable[[bytes], bytes]) -> Steps:
    """The listener's part; returns the caller's random bytes.

    Args:
        length: of the caller's greeting.
        token_for: returns the token that a caller with that greeting is to know, or raises.
    """
    hello = yield b"", length + NONCE
    token, theirs = token_for(hello[:length]), hello[length:]
    ours = os.urandom(NONCE)
    proof = yield ours, PROOF
    if not hmac.compare_digest(proof, client_proof(token, theirs, ours)):
        raise ChallengeError
    yield server_proof(token, theirs, ours), 0
    return theirs


def read_token(path: str) -> bytes:
    """Return the token in a file, without the line's end."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - launchers of several nodes pay for pathlib
            token = file.read().strip()
            _keep_from_children(os.fstat(file.fileno()))
    except OSError as error:
        raise InvalidArgumentError(
            f"the token file {path} cannot be read ({error.strerror}); check its name and "
            "permissions"
        ) from error
    if not token:
        raise InvalidArgumentError(
            f"the token file {path} is empty; write a long random string into it"
        )
    return token


def _keep_from_children(token: os.stat_result) -> None:
    """Give no process the token's file that a shell has opened for this one, as with ``9< file``.

    Standard input, which workers get, becomes empty.
    """
    if not stat.S_ISREG(token.st_mode):
        return  # what is read from a pipe is gone, and a terminal has other uses
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            if not os.path.samestat(os.fstat(int(name)), token):
                continue
            os.set_inheritable(int(name), False)
            if int(name) == 0:
                empty = os.open(os.devnull, os.O_RDONLY)
                os.dup2(empty, 0)
                os.close(empty)
